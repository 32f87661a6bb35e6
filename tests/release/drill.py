"""Record a vLLM release, compare it with a profile, and write a report (`make release`, `make exact`).

    python tests/release/drill.py ENV --old OLD_ENV --profile 0.32 --report docs/releases
    python tests/release/drill.py ENV --exact --count 100

ENV is an environment with the release. `--exact` only compares, under the profile of the release itself, and fails
when a schedule differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from release.comparing import compare_with, write_recording
from release.families import FAMILIES
from release.golden import count_recordings
from release.process import Recorder, RecorderProcess, RecordingFailed
from release.report import (
    FamilyResult,
    Smallest,
    compare_facts,
    update_results,
    write_page,
    write_report,
)
from release.shrink import CALLS, shrink
from release.sources import compare_sources
from understudy.engines.profiles import NEWEST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from release.families import Family, Scenario
    from understudy.conformance.outcome import Difference

ROOT = Path(__file__).parents[2]


def run_family(
    family: Family, seeds: range, recorder: Recorder, profile: str, out: Path
) -> tuple[FamilyResult, list[tuple[str, Scenario]]]:
    """Record and compare a family; return the counts and the scenarios that differ, smallest first."""
    result = FamilyResult(family.name)
    differing: list[tuple[str, Scenario]] = []
    for seed in seeds:
        name, scenario = family.scenario(seed)
        try:
            answer = recorder.record(family.kind, scenario)
        except RecordingFailed as error:
            text = str(error)
            result.failed[text] = result.failed.get(text, 0) + 1
            continue
        result.recorded += 1
        write_recording(out / family.name, family.kind, name, scenario, answer)
        difference = compare_with(profile, family.kind, name, scenario, answer)
        if difference is not None:
            result.differ += 1
            key = _first_key(difference)
            result.keys[key] = result.keys.get(key, 0) + 1
            differing.append((name, scenario))
        _show(f"{family.name}: {result.recorded} of {len(seeds)}, {result.differ} differ")
    print(f"\r{family.name}: {result.recorded} of {len(seeds)} recorded, {result.differ} differ", flush=True)
    return result, sorted(differing, key=lambda one: len(one[1]["requests"]))


def _first_key(difference: Difference | None) -> str:
    if difference is None:
        return ""
    return difference.values[0][0] if difference.values else difference.reason


def find_smallest(
    family: Family, name: str, scenario: Scenario, recorder: Recorder, profile: str, out: Path, calls: int
) -> Smallest:
    """Shrink a scenario that differs, recording every candidate anew, and keep its recording."""

    def difference_of(candidate: Scenario) -> tuple[Difference | None, dict[str, Any]]:
        answer = recorder.record(family.kind, candidate)
        return compare_with(profile, family.kind, name, candidate, answer), answer

    first, _ = difference_of(scenario)
    sought = _first_key(first)

    def differs(candidate: Scenario) -> bool:
        # A difference in another key, or a scenario that our engine refuses, is another finding.
        try:
            difference, _ = difference_of(candidate)
        except RecordingFailed:
            return False
        return difference is not None and _first_key(difference) == sought

    small = shrink(scenario, differs, calls)
    difference, answer = difference_of(small)
    write_recording(out / "smallest" / family.name, family.kind, name, small, answer)
    recorded = answer["recorded"]
    steps = recorded["steps"] if isinstance(recorded, dict) else sum("step" in line for line in recorded)
    print(f"{family.name}: smallest has {len(small['requests'])} requests, {steps} steps", flush=True)
    return Smallest(family.name, name, small, steps, str(difference))


def run(args: argparse.Namespace) -> int:
    """Run the drill and return 1 when `--exact` found a difference."""
    seeds = range(args.first, args.first + args.count)
    families = [FAMILIES[name] for name in args.families]
    logs = ROOT / "build" / "release"
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        recorder = stack.enter_context(
            RecorderProcess(args.env / "bin" / "python", logs / f"{args.env.name}.log")
        )
        new = recorder.facts()
        release = new["vllm"]
        profile = ".".join(release.split(".")[:2]) if args.exact else args.profile
        out = logs / release
        out.mkdir(parents=True, exist_ok=True)
        print(f"vLLM {release} against the {profile} profile", flush=True)
        results: list[FamilyResult] = []
        smallest: list[Smallest] = []
        for family in families:
            result, differing = run_family(family, seeds, recorder, profile, out)
            results.append(result)
            if differing and not args.exact:
                name, scenario = differing[0]
                smallest.append(find_smallest(family, name, scenario, recorder, profile, out, args.calls))
        changes = facts = None
        if args.old is not None and not args.exact:
            old = stack.enter_context(
                RecorderProcess(args.old / "bin" / "python", logs / f"{args.old.name}-facts.log")
            ).facts()
            changes = compare_sources(Path(old["folder"]), Path(new["folder"]), out / "source.diff")
            facts = compare_facts(old, new)
            (out / "facts.json").write_text(json.dumps({"old": old, "new": new}, indent=1), encoding="utf-8")
    _print_summary(results)
    if args.report is not None:
        entries = update_results(args.report / "results.json", release, profile, seeds, results)
        page = write_page(entries, count_recordings(ROOT / "tests" / "golden"))
        args.report.with_suffix(".md").write_text(page, encoding="utf-8")
        if not args.exact:
            report = write_report(release, profile, seeds, results, smallest, changes, facts)
            path = args.report / f"{'.'.join(release.split('.')[:2])}.md"
            path.write_text(report, encoding="utf-8")
            print(f"wrote {path}")
    return int(args.exact and any(result.differ or result.failed for result in results))


def _print_summary(results: Sequence[FamilyResult]) -> None:
    recorded = sum(result.recorded for result in results)
    differ = sum(result.differ for result in results)
    print(f"{recorded - differ} of {recorded} schedules are identical")
    for result in results:
        for text, count in result.failed.items():
            print(f"{result.family}: {count} not recorded: {text[:200]}")


def _show(text: str) -> None:
    if sys.stdout.isatty():
        print(f"\r{text}", end="", flush=True)


def main() -> int:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("env", type=Path, help="environment with the release")
    parser.add_argument("--old", type=Path, help="environment with the release of the profile")
    parser.add_argument(
        "--profile", default=NEWEST, help="release whose profile to compare with (%(default)s)"
    )
    parser.add_argument("--exact", action="store_true", help="compare with the release's own profile only")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--count", type=int, default=60, help="seeds of each family (%(default)s)")
    parser.add_argument("--families", nargs="+", choices=[*FAMILIES], default=[*FAMILIES])
    parser.add_argument("--calls", type=int, default=CALLS, help="recordings per shrinking (%(default)s)")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="write the report here, and FOLDER.md")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
