"""Record random scenarios with an installed SGLang and compare our engine with them (`make exact-sglang`).

    python tests/release/sglang_drill.py ENV --first 0 --count 150

ENV is an environment with SGLang. A scenario that differs is written to build/release/sglang-VERSION/FAMILY, where
`understudy conformance sglang` reads it; `--shrink` also writes the smallest one of each family that differs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from release.process import Recorder, RecorderProcess, RecordingFailed
from release.report import FamilyResult
from release.sglang_families import SGLANG_FAMILIES
from release.shrink import shrink
from understudy.conformance.outcome import Difference
from understudy.conformance.sglang import SglangRecording, compare_sglang
from understudy.errors import UnderstudyError

if TYPE_CHECKING:
    from release.sglang_families import Scenario

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "exact" / "sglang_record.py"


def write_sglang(folder: Path, kind: str, name: str, scenario: Scenario, recorded: Any) -> SglangRecording:
    """Write a recording as `understudy conformance sglang` reads it."""
    if kind == "clock":
        folder.mkdir(parents=True, exist_ok=True)
        golden = folder / f"{name}.json.gz"
        with gzip.open(golden, "wt", encoding="utf-8", compresslevel=1) as file:
            json.dump({"scenario": scenario, "recorded": recorded}, file)
        return SglangRecording(folder, name, golden, golden)
    source, golden = folder / "scenarios" / f"{name}.json", folder / "golden" / f"{name}.jsonl.gz"
    for path in (source, golden):
        path.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(json.dumps(scenario), encoding="utf-8")
    with gzip.open(golden, "wt", encoding="utf-8", compresslevel=1) as file:
        file.writelines(json.dumps(line) + "\n" for line in recorded)
    return SglangRecording(folder, name, source, golden)


def find_difference(kind: str, name: str, scenario: Scenario, recorded: Any) -> Difference | None:
    """Return the first difference of our engine from a recording; None when every step is identical."""
    with tempfile.TemporaryDirectory() as folder:
        recording = write_sglang(Path(folder), kind, name, scenario, recorded)
        try:
            return compare_sglang(recording, check=True).difference
        except UnderstudyError as error:
            return Difference("", reason=f"{type(error).__name__}: {error}")


def run_sglang_family(
    family: str, seeds: range, recorder: Recorder, out: Path, *, calls: int = 0
) -> FamilyResult:
    """Record and compare a family; keep what differs. `calls` limits the recordings that shrinking takes."""
    kind, draw = SGLANG_FAMILIES[family]
    result = FamilyResult(family)
    smallest: tuple[str, Scenario] | None = None
    for seed in seeds:
        name = f"{family}_{seed}"
        scenario = {"name": name, **draw(seed)}
        try:
            recorded = recorder.record(kind, scenario)["recorded"]
        except RecordingFailed as error:
            result.failed[str(error)] = result.failed.get(str(error), 0) + 1
            continue
        result.recorded += 1
        difference = find_difference(kind, name, scenario, recorded)
        if difference is not None:
            result.differ += 1
            write_sglang(out / family, kind, name, scenario, recorded)
            print(f"{name}: {difference}", flush=True)
            if smallest is None or len(scenario["requests"]) < len(smallest[1]["requests"]):
                smallest = (name, scenario)
    print(f"{family}: {result.recorded} of {len(seeds)} recorded, {result.differ} differ", flush=True)
    if smallest is not None and calls:
        _write_smallest(kind, *smallest, recorder, out / "smallest" / family, calls)
    return result


def _write_smallest(
    kind: str, name: str, scenario: Scenario, recorder: Recorder, folder: Path, calls: int
) -> None:
    def differs(candidate: Scenario) -> bool:
        try:
            recorded = recorder.record(kind, candidate)["recorded"]
        except RecordingFailed:
            return False
        return find_difference(kind, name, candidate, recorded) is not None

    small = shrink(scenario, differs, calls)
    recorded = recorder.record(kind, small)["recorded"]
    write_sglang(folder, kind, name, small, recorded)
    print(f"{name}: smallest has {len(small['requests'])} requests: {json.dumps(small)}", flush=True)
    print(find_difference(kind, name, small, recorded), flush=True)


def main() -> int:
    """Run the drill; return 1 when a schedule differs or was not recorded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("env", type=Path, help="environment with SGLang")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--count", type=int, default=20, help="seeds of each family (%(default)s)")
    parser.add_argument(
        "--families", nargs="+", choices=[*SGLANG_FAMILIES], default=[*SGLANG_FAMILIES], metavar="NAME"
    )
    parser.add_argument("--shrink", type=int, default=0, metavar="CALLS", help="recordings per shrinking")
    args = parser.parse_args()
    logs = ROOT / "build" / "release"
    logs.mkdir(parents=True, exist_ok=True)
    seeds = range(args.first, args.first + args.count)
    log = logs / f"{args.env.name}.log"
    with RecorderProcess(args.env / "bin" / "python", log, RECORD) as recorder:
        version = recorder.facts()["sglang"]
        out = logs / f"sglang-{version}"
        results = [run_sglang_family(name, seeds, recorder, out, calls=args.shrink) for name in args.families]
    recorded = sum(result.recorded for result in results)
    differ = sum(result.differ for result in results)
    print(f"SGLang {version}: {recorded - differ} of {recorded} schedules are identical")
    for result in results:
        for text, count in result.failed.items():
            print(f"{result.family}: {count} not recorded: {text[:300]}")
    return int(any(result.differ or result.failed for result in results))


if __name__ == "__main__":
    sys.exit(main())
