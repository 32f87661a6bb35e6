"""Measure every replay that has a floor against Dynamo 1.6.1: CPU seconds, medians of interleaved runs.

    python benchmarks/floors.py --trace PATH [--repeat 5] [--json [FOLDER]]

Runs of both sides take turns, each in a process of its own, so that a busy machine affects both. CPU time is taken
from opening the file to the finished report, all threads together; the run on two threads is compared by wall time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from statistics import median

import replay_vs_dynamo
import router_vs_dynamo
import tiers_vs_dynamo
from harness.publish import publish
from replay_vs_dynamo import ours, peer_python, read_arguments


@dataclass
class Floor:
    """One comparison: commands of both sides."""

    name: str
    ours: list[str]
    theirs: list[str]


def floors(trace: str, peer: str) -> list[Floor]:
    """The comparisons; their floors are the goals in results/floors.json."""
    theirs = [peer, "-c", replay_vs_dynamo.THEIRS, trace, "64", "4"]
    rows = [
        Floor("round robin, 4 workers", in_cpu(ours(trace, 64, 16384, 4)), in_cpu([*theirs, "0"])),
        Floor("the same on 2 threads, wall", ours(trace, 64, 16384, 4, threads=2), [*theirs, "0"]),
        Floor(
            "closed loop, 64 at a time",
            in_cpu(ours(trace, 64, 16384, 4, concurrency=64)),
            in_cpu([*theirs, "64"]),
        ),
    ]
    for workers in (4, 16, 64):
        ask = [trace, str(workers)]
        our_replay = [sys.executable, "-c", router_vs_dynamo.OUR_REPLAY, *ask]
        rows.append(
            Floor(
                f"KV router, {workers} workers",
                our_replay,
                [peer, "-c", router_vs_dynamo.THEIR_REPLAY, *ask],
            )
        )
    mode = [trace, "write_through"]
    rows.append(
        Floor(
            "host tier, 8 workers",
            in_cpu([sys.executable, "-c", tiers_vs_dynamo.OURS, *mode]),
            in_cpu([peer, "-c", tiers_vs_dynamo.THEIRS, *mode]),
        )
    )
    return rows


def in_cpu(command: list[str]) -> list[str]:
    """The same program with CPU time instead of wall time."""
    return [part.replace("time.perf_counter()", "time.process_time()") for part in command]


def seconds_of(command: list[str]) -> float:
    """Run once; the seconds that the program prints."""
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    printed = json.loads(output.strip().splitlines()[-1])
    return float(printed["cpu_s"] if "cpu_s" in printed else printed["seconds"])


def main() -> int:
    args = read_arguments(__doc__)
    measured: dict[str, dict[str, float]] = {}
    for row in floors(str(args.trace), str(peer_python(args.peer_venv))):
        pairs = [(seconds_of(row.ours), seconds_of(row.theirs)) for _ in range(args.repeat)]
        us, them = (median(side) for side in zip(*pairs, strict=True))
        measured[row.name] = {"Understudy": us, "Dynamo": them, "ratio": them / us}
        print(f"{row.name}: {them / us:.1f} ×", flush=True)
    publish("floors", measured, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
