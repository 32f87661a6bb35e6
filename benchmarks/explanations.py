"""Check waterfalls of random runs, and time Perfetto traces of a million slices.

python benchmarks/explanations.py waterfalls --runs 1000
python benchmarks/explanations.py perfetto --slices 1000000
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from harness.publish import add_json_flag, publish

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))


def check_waterfalls(runs: int, first: int) -> dict[str, dict[str, float]]:
    """Check that parts add up for every request of `runs` random runs; AssertionError names one that does not."""
    from explain.random_runs import choose_arguments, record
    from explain.test_waterfall import require_exact
    from understudy.errors import UnderstudyError
    from understudy.explain import Waterfalls
    from understudy.run.offline import run_offline
    from understudy.run.run_plan import RunPlan

    requests = checked = refused = 0
    parts: Counter[str] = Counter()
    seed = first
    while checked < runs:
        workload, how = choose_arguments(random.Random(seed).choice)
        seed += 1
        try:
            run = record(workload, **how)
        except UnderstudyError:
            refused += 1
            continue
        checked += 1
        requests += require_exact(run)
        waterfalls = Waterfalls(run)
        for row in range(len(run)):
            waterfall = waterfalls.of(row)
            parts.update({} if waterfall is None else waterfall.parts.keys())
        if checked % 20 == 0:
            assert run_offline(RunPlan(workload, **how)).facts.digest == run.run["digest"], f"seed {seed - 1}"
    print(f"{refused} settings refused; requests with each part:", dict(parts.most_common()))
    return {f"from {first}": {"runs": checked, "requests that add up": requests, "requests": requests}}


def time_perfetto(slices: int) -> dict[str, dict[str, float]]:
    """Time the trace of one worker with so many steps and requests."""
    from understudy.explain.perfetto import write_trace
    from understudy.explain.saved_run import REQUEST_COLUMNS, SavedRun
    from understudy.run.step_columns import StepColumns

    steps = slices * 9 // 10
    requests = slices - steps
    begins = np.arange(steps, dtype=np.int64) * 10_000_000
    per_batch = 9
    batches = np.arange(steps) // per_batch
    batch_of = np.arange(requests) * batches[-1] // requests
    first = np.searchsorted(batches, batch_of)
    none, nothing = np.zeros(steps, np.int64), np.zeros(requests, np.int64)
    columns = StepColumns(
        step_worker=none.astype(np.int32),
        step_begin_ns=begins,
        step_end_ns=begins + 9_000_000,
        step_compute_ns=none,
        step_decodes_ns=none,
        step_batch=batches,
        step_running=np.arange(steps, dtype=np.int32) % 64,
        step_waiting=np.arange(steps, dtype=np.int32) % 7,
        step_active_blocks=np.arange(steps) % 5000,
        step_stop=none.astype(np.uint8),
        step_head=none - 1,
        entry_batch=batch_of,
        entry_request=np.arange(requests),
        entry_tokens=np.full(requests, 100, np.int32),
        entry_before=nothing.astype(np.int32),
        entry_decodes=nothing.astype(np.uint8),
        entry_own_ns=nothing,
        loading_step=none[:0],
        loading_request=none[:0],
        event_ns=begins[first],
        event_worker=nothing.astype(np.int32),
        event_kind=np.ones(requests, np.uint8),
        event_request=np.arange(requests),
        event_other=nothing - 1,
        event_cached=nothing,
    )
    served = begins[first] + 90_000_000
    run = SavedRun(
        run={},
        steps=columns,
        requests=dict.fromkeys(REQUEST_COLUMNS, served) | {"output_tokens": nothing + 1},
        request_ids=None,
        worker_blocks=(5000,),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.pftrace"
        started = time.process_time()
        write_trace(run, path)
        taken = time.process_time() - started
        size_mb = path.stat().st_size / 1e6
    return {f"{slices:,} slices": {"time": taken, "size": round(size_mb)}}


def main() -> int:
    """Run the chosen part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("waterfalls", "perfetto"))
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slices", type=int, default=1_000_000)
    add_json_flag(parser)
    args = parser.parse_args()
    if args.part == "waterfalls":
        publish("waterfalls", check_waterfalls(args.runs, args.seed), args.json)
    else:
        publish("perfetto", time_perfetto(args.slices), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
