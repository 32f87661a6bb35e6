"""Record random scenarios with TensorRT-LLM's sources and compare our engine with them (`make exact-trtllm`).

    TRTLLM_SOURCES=DIR python tests/release/trtllm_drill.py ENV --first 0 --count 40

ENV is an environment that `make exact-trtllm` makes. A scenario that differs is written to
build/release/trtllm-VERSION/FAMILY, where `understudy conformance trtllm` reads it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from release.process import Recorder, RecorderProcess, RecordingFailed
from release.report import FamilyResult
from release.trtllm_families import TRTLLM_FAMILIES
from understudy.conformance.outcome import Difference
from understudy.conformance.trtllm import TrtRecording, compare_trtllm
from understudy.errors import UnderstudyError

if TYPE_CHECKING:
    from release.trtllm_families import Scenario

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "exact" / "trtllm_record.py"
SITUATIONS = (
    "several groups of pools",
    "copies from or to disk",
    "per_request with windows",
    "suspended",
    "recompute",
    "recompute of the batch before",
    "deadlock",
)


def write_trtllm(folder: Path, name: str, scenario: Scenario, recorded: list[Any]) -> TrtRecording:
    """Write a recording as `understudy conformance trtllm` reads it."""
    source, golden = folder / "scenarios" / f"{name}.json", folder / "golden" / f"{name}.jsonl.gz"
    for path in (source, golden):
        path.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(json.dumps(scenario), encoding="utf-8")
    with gzip.open(golden, "wt", encoding="utf-8", compresslevel=1) as file:
        file.writelines(json.dumps(line) + "\n" for line in recorded)
    return TrtRecording(folder, name, source, golden)


def find_difference(name: str, scenario: Scenario, recorded: list[Any]) -> Difference | None:
    """Return the first difference of our engine from a recording; None when every pass is identical."""
    with tempfile.TemporaryDirectory() as folder:
        recording = write_trtllm(Path(folder), name, scenario, recorded)
        try:
            return compare_trtllm(recording, check=True).difference
        except UnderstudyError as error:
            return Difference("", reason=f"{type(error).__name__}: {error}")


def find_situations(recorded: list[Any]) -> list[str]:
    """Name the rare situations that a recording has."""
    header, *passes, end = recorded
    found = {
        "several groups of pools": len(header["pools"][0]) > 1,
        "copies from or to disk": any("disk" in copy[0] for line in passes for copy in line["copies"]),
        "per_request with windows": header["config"].get("reuse_policy") == "per_request"
        and bool(header["config"].get("windows")),
        "suspended": any(line["suspended"] for line in passes),
        "recompute": any(line["recompute"] for line in passes),
        "recompute of the batch before": any(
            set(line["recompute"]) & {*before["gen"], *(index for index, *_ in before["ctx"])}
            for before, line in pairwise(passes)
        ),
        "deadlock": "deadlock" in end["end"],
    }
    return [name for name in SITUATIONS if found[name]]


def run_trtllm_family(family: str, seeds: range, recorder: Recorder, out: Path) -> FamilyResult:
    """Record and compare a family; keep what differs."""
    result = FamilyResult(family)
    for seed in seeds:
        name = f"{family}_{seed}"
        scenario = {"name": name, **TRTLLM_FAMILIES[family](seed)}
        try:
            recorded = recorder.record("passes", scenario)["recorded"]
        except RecordingFailed as error:
            result.failed[str(error)] = result.failed.get(str(error), 0) + 1
            continue
        result.recorded += 1
        for situation in find_situations(recorded):
            result.keys[situation] = result.keys.get(situation, 0) + 1
        difference = find_difference(name, scenario, recorded)
        if difference is not None:
            result.differ += 1
            write_trtllm(out / family, name, scenario, recorded)
            print(f"{name}: {difference}", flush=True)
    print(f"{family}: {result.recorded} of {len(seeds)} recorded, {result.differ} differ", flush=True)
    return result


def main() -> int:
    """Run the drill; return 1 when a schedule differs, or a family has no recording.

    Scenarios in which the real classes raise are named, and count as not recorded.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("env", type=Path, help="environment that `make exact-trtllm` makes")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--count", type=int, default=40, help="seeds of each family (%(default)s)")
    parser.add_argument(
        "--families", nargs="+", choices=[*TRTLLM_FAMILIES], default=[*TRTLLM_FAMILIES], metavar="NAME"
    )
    args = parser.parse_args()
    logs = ROOT / "build" / "release"
    logs.mkdir(parents=True, exist_ok=True)
    seeds = range(args.first, args.first + args.count)
    with RecorderProcess(args.env / "bin" / "python", logs / f"{args.env.name}.log", RECORD) as recorder:
        version = recorder.facts()["trtllm"]
        out = logs / f"trtllm-{version}"
        results = [run_trtllm_family(name, seeds, recorder, out) for name in args.families]
    recorded = sum(result.recorded for result in results)
    differ = sum(result.differ for result in results)
    print(f"TensorRT-LLM {version}: {recorded - differ} of {recorded} schedules are identical")
    counts = {name: sum(result.keys.get(name, 0) for result in results) for name in SITUATIONS}
    print("scenarios with", ", ".join(f"{name}: {count}" for name, count in counts.items()))
    for result in results:
        for text, count in result.failed.items():
            print(f"{result.family}: {count} not recorded: {text[:300]}")
    return int(any(result.differ or not result.recorded for result in results))


if __name__ == "__main__":
    sys.exit(main())
