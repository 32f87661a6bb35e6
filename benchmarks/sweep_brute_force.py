"""Compare the answers of a sweep's searches with brute force over 500 combinations.

    python benchmarks/sweep_brute_force.py TRACE [--requests 3000] [--jobs 2] [--ttft-ms 10000] [--itl-ms 80]

Brute force is `--search grid`. Bisection and halving read its outcomes from the store, so only halving computes more,
its replays of parts of the trace. Equal means: the same answer, and the same next smaller fleet.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.publish import add_json_flag, publish

if TYPE_CHECKING:
    from harness.result import Number

VARY = (
    "workers=1..25",
    "tensor-parallel-size=2,4",
    "max-num-seqs=32,64,128,256,512",
    "routing=round_robin,kv",
)
"""500 combinations."""
GOALS = ("0.5", "0.8", "0.9", "0.95", "0.98", "0.99", "0.995", "0.9999")


def sweep(trace: Path, folder: Path, args: argparse.Namespace, search: str, goal: str) -> dict[str, Any]:
    """Run a search with the shared store; return its result."""
    out = folder / "sweep.json"
    command = [sys.executable, "-m", "understudy", "sweep", str(trace), "--vary", *VARY, "--quiet"]
    command += ["--model", "Qwen3-32B", "--gpu", "H200", "--block-size", "64", *args.slo]
    command += ["--max-num-batched-tokens", "8192"]
    command += ["--search", search, "--goal", goal, "--jobs", args.jobs]
    subprocess.run([*command, "--store", str(folder / "store.jsonl"), "--json", str(out)], check=True)
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def describe(trial: dict[str, Any] | None) -> str:
    """Return the flags of a fleet and its share of requests in time."""
    if trial is None:
        return "none"
    return f"{' '.join(f'{name}={value}' for name, value in trial['flags'].items())} ({trial['good']:.2%})"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=3000, help="first requests of the trace to replay")
    parser.add_argument("--jobs", default="2")
    parser.add_argument("--ttft-ms", default="10000")
    parser.add_argument("--itl-ms", default="80")
    add_json_flag(parser)
    args = parser.parse_args()
    args.slo = ["--slo-ttft-ms", args.ttft_ms, "--slo-itl-ms", args.itl_ms]
    searches: dict[str, list[tuple[bool, int]]] = {"bisect": [], "halving": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        part = folder / "part.jsonl"
        part.write_text("".join(args.trace.read_text().splitlines(keepends=True)[: args.requests]))
        grid = sweep(part, folder, args, "grid", GOALS[0])
        print(f"grid: {grid['ran']} combinations, {grid['requests']:,} requests, {grid['cpu_s']:.1f} CPU s")
        for goal in GOALS:
            expected = sweep(part, folder, args, "grid", goal)["answers"][0]
            print(f"goal {goal}: {describe(expected['best'])}; smaller: {describe(expected['smaller'])}")
            for search, outcomes in searches.items():
                result = sweep(part, folder, args, search, goal)
                found = result["answers"][0]
                parts = ("best", "smaller") if expected["best"] else ("best",)
                same = {part: found[part] == expected[part] for part in parts}
                outcomes.append((all(same.values()), len(result["trials"])))
                words = [
                    f"{part} {'equal' if is_same else describe(found[part])}"
                    for part, is_same in same.items()
                ]
                print(f"  {search}: {', '.join(words)}; {len(result['trials'])} whole replays", flush=True)
    measured: dict[str, dict[str, Number]] = {}
    for search, outcomes in searches.items():
        replays = [count for _, count in outcomes]
        times = f"TTFT {float(args.ttft_ms) / 1e3:g} s, ITL {args.itl_ms} ms"
        measured[f"{times}, {'bisection' if search == 'bisect' else search}"] = {
            "goals with brute force's answer": sum(is_same for is_same, _ in outcomes),
            "goals": len(outcomes),
            "whole replays, least and most": (min(replays), max(replays)),
        }
    publish("sweep_brute_force", measured, args.json)
    return int(not all(is_same for outcomes in searches.values() for is_same, _ in outcomes))


if __name__ == "__main__":
    sys.exit(main())
