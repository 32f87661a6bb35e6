"""CPU time of a sweep per candidate, and that of AISimulate's `recommend` where it is installed.

    python benchmarks/sweep_vs_recommend.py TRACE [--vary FLAG=VALUES …] [--jobs 2]
    python benchmarks/sweep_vs_recommend.py TRACE --recommend 'aisimulate recommend …' --candidates 12

`recommend` is any command line that evaluates `--candidates` candidates of the same requests; its CPU time counts with
that of its children. The bar is 200 candidates of the conversation trace in 90 s on two idle cores, 0.8 CPU s each.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VARY = (
    "workers=4..12+2",
    "tensor-parallel-size=2,4",
    "max-num-batched-tokens=2048,8192",
    "max-num-seqs=64,128,256,512,1024",
    "routing=round_robin,kv",
)
"""200 combinations."""


def measure(command: list[str]) -> tuple[float, float]:
    """Run a command; return its wall and CPU time in s, children included."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall_s = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--vary", nargs="+", default=list(VARY))
    parser.add_argument("--jobs", default="2")
    parser.add_argument("--model", default="Qwen3-32B")
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--search", default="grid")
    parser.add_argument("--recommend", metavar="COMMAND")
    parser.add_argument("--candidates", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "sweep.json"
        flags = ["--model", args.model, "--gpu", args.gpu, "--jobs", args.jobs, "--search", args.search]
        goal = ["--slo-ttft-ms", "2000", "--slo-itl-ms", "50", "--quiet", "--json", str(out)]
        sweep = [sys.executable, "-m", "understudy", "sweep", str(args.trace), "--vary", *args.vary]
        wall_s, cpu_s = measure([*sweep, *flags, *goal])
        result = json.loads(out.read_text())
    ran = result["ran"]
    ours = cpu_s / ran
    print(f"sweep: {ran} candidates of {result['requests']:,} requests, {wall_s:.1f} s, {cpu_s:.1f} CPU s")
    print(f"  {ours:.3f} CPU s a candidate, start-up included; {wall_s / ran:.3f} s")
    best = result["answers"][0]["best"]
    print(f"  answer: {None if best is None else best['flags']}")
    if args.recommend is None:
        print("recommend: no command given (--recommend); no ratio")
        return 0
    wall_s, cpu_s = measure(shlex.split(args.recommend))
    theirs = cpu_s / args.candidates
    print(
        f"recommend: {args.candidates} candidates, {wall_s:.1f} s, {cpu_s:.1f} CPU s, {theirs:.3f} a candidate"
    )
    print(f"ratio: {theirs / ours:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
