"""Compare CPU time and digests of one-group replays of two builds, in interleaved runs.

    python benchmarks/one_group_cost.py --base OTHER/.venv/bin/python --trace TRACE [--rounds 11]

Each run is a process of its own; only the replay is timed, in CPU seconds. Compared are the columns of the timeline
that both builds have: the digest in the report also covers columns that were added since.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

from harness.publish import add_json_flag, publish

CODE = """
import hashlib, json, sys, time
import numpy as np
import understudy as us
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload import read_mooncake
load = read_mooncake(sys.argv[1])
engine = us.VllmConfig(block_size=64, num_gpu_blocks=8192, max_num_batched_tokens=8192)
begin = time.process_time()
run = run_offline(RunPlan(load, engine, workers=4, routing="round_robin"))
seconds = time.process_time() - begin
columns = {name: getattr(run.timeline, name) for name in run.timeline.__slots__}
hashes = {name: hashlib.sha256(np.ascontiguousarray(column)).hexdigest() for name, column in columns.items()
          if isinstance(column, np.ndarray)}
print(json.dumps([seconds, hashes]))
"""


def measure(python: str, trace: str) -> tuple[float, dict[str, str]]:
    """Return CPU seconds and digests by column of one replay."""
    done = subprocess.run([python, "-c", CODE, trace], check=True, capture_output=True, text=True)
    seconds, digests = json.loads(done.stdout.splitlines()[-1])
    return seconds, digests


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", required=True, metavar="PYTHON", help="interpreter of the other build")
    parser.add_argument("--base-name", default="927d32a, without groups", help="what the other build is")
    parser.add_argument("--trace", required=True, help="Mooncake trace")
    add_json_flag(parser)
    parser.add_argument("--rounds", type=int, default=11, metavar="N")
    args = parser.parse_args()
    base: list[tuple[float, dict[str, str]]] = []
    ours: list[tuple[float, dict[str, str]]] = []
    for number in range(args.rounds):
        order = (base, ours) if number % 2 == 0 else (ours, base)
        for side in order:
            side.append(measure(args.base if side is base else sys.executable, args.trace))
    runs = (*base, *ours)
    common = set.intersection(*(set(digests) for _, digests in runs))
    different = sorted(name for name in common if len({digests[name] for _, digests in runs}) > 1)
    medians = [statistics.median(seconds for seconds, _ in side) for side in (base, ours)]
    least = [min(seconds for seconds, _ in side) for side in (base, ours)]
    print(f"{len(common)} columns compared; different: {', '.join(different) or 'none'}")
    numbers = {"base, median": medians[0], "groups, median": medians[1], "ratio": medians[1] / medians[0]}
    numbers |= {"base, least": least[0], "groups, least": least[1]}
    publish("one_group_cost", {args.base_name: numbers}, args.json)
    return 1 if different or not common else 0


if __name__ == "__main__":
    sys.exit(main())
