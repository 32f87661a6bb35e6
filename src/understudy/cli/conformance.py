"""`understudy conformance ENGINE DIR`: compare the simulated scheduler with recorded schedules, step by step."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from rich.console import Console

    from understudy.cli.verbs import Verbs
    from understudy.conformance.outcome import Outcome
    from understudy.conformance.planner import PlannerRecording
    from understudy.conformance.recordings import Recording
    from understudy.conformance.sglang import SglangRecording
    from understudy.conformance.trtllm import TrtRecording

    AnyRecording = Recording | SglangRecording | PlannerRecording | TrtRecording

EXAMPLES = """\
examples:
  understudy conformance vllm tests/golden
  understudy conformance vllm recordings --only 'async_*' --vllm-version 0.27.0
  understudy conformance sglang tests/golden/sglang
  understudy conformance trtllm tests/golden/trtllm
  understudy conformance planner tests/golden/planner

A folder anywhere under DIR contains scenarios/NAME.json and golden/NAME.jsonl.gz for every NAME, or NAME.json.gz with
scenario and recording in one file. The recording names its version of vLLM.
"""

MAX_SHOWN_CHARS = 120
"""Length at which a differing value is cut."""


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy conformance`."""
    verb = verbs.add_parser(
        "conformance",
        help="compare the engine with recorded schedules, step by step",
        description="Run every scenario under a directory and compare each step with what the real scheduler did.",
        epilog=EXAMPLES,
    )
    verb.add_argument(
        "engine",
        choices=["vllm", "sglang", "trtllm", "planner"],
        metavar="ENGINE",
        help="vllm, sglang or trtllm: engine whose scheduler was recorded; planner: ticks of Dynamo's planner",
    )
    verb.add_argument("directory", type=Path, metavar="DIR", help="folder of recordings, at any depth")
    verb.add_argument(
        "--only", default="*", metavar="GLOB", help="scenarios whose name matches (default: all)"
    )
    verb.add_argument(
        "--vllm-version", metavar="VERSION", help="compare with this version (default: the one recorded)"
    )
    verb.add_argument(
        "--check", action="store_true", help="also verify the engine's invariants after every step"
    )


def run(args: argparse.Namespace) -> int:
    """Print one row per folder and version, and each scenario's first difference; return 1 if any differs."""
    from rich.console import Console
    from rich.markup import escape

    from understudy.conformance.compare import compare_recording
    from understudy.conformance.planner import PlannerRecording, compare_planner, find_planner_recordings
    from understudy.conformance.recordings import find_recordings
    from understudy.conformance.sglang import SglangRecording, compare_sglang, find_sglang_recordings
    from understudy.conformance.trtllm import TrtRecording, compare_trtllm, find_trtllm_recordings
    from understudy.engines.profiles import find_profile
    from understudy.errors import ConfigError

    console = Console(highlight=False, soft_wrap=True)
    if not args.directory.is_dir():
        problem = "is a file" if args.directory.exists() else "does not exist"
        raise ConfigError(f"DIR: {args.directory} {problem}; name a folder of recordings")
    if args.engine != "vllm" and args.vllm_version is not None:
        raise ConfigError("--vllm-version is for recordings of vLLM; leave it out")
    recordings: list[AnyRecording]
    if args.engine == "planner":
        recordings = [*find_planner_recordings(args.directory, args.only)]
    elif args.engine == "trtllm":
        recordings = [*find_trtllm_recordings(args.directory, args.only)]
    elif args.engine == "sglang":
        recordings = [one for one in find_sglang_recordings(args.directory) if fnmatch(one.name, args.only)]
    else:
        recordings = [*find_recordings(args.directory, args.only)]
    profile = None if args.vllm_version is None else find_profile(args.vllm_version)
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for recording in _with_progress(recordings):
        if isinstance(recording, PlannerRecording):
            outcome = compare_planner(recording)
        elif isinstance(recording, TrtRecording):
            outcome = compare_trtllm(recording, check=args.check)
        elif isinstance(recording, SglangRecording):
            outcome = compare_sglang(recording, check=args.check)
        else:
            outcome = compare_recording(recording, profile, check=args.check)
        folder = str(recording.folder.relative_to(args.directory))
        groups.setdefault((folder, outcome.version, outcome.profile), []).append(outcome)
        if outcome.difference is not None:
            _show_difference(console, folder, outcome)
        elif outcome.note:
            console.print(f"[yellow]identical[/] {escape(folder)}/{outcome.name}: {escape(outcome.note)}")
    outcomes = [outcome for group in groups.values() for outcome in group]
    same = sum(outcome.difference is None for outcome in outcomes)
    _show_groups(console, groups)
    console.print(
        f"{same} of {len(outcomes)} scenarios identical, {sum(o.steps for o in outcomes)} steps compared"
    )
    return 0 if same == len(outcomes) else 1


def _with_progress(recordings: list[AnyRecording]) -> Iterator[AnyRecording]:
    """Yield the recordings and show a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    stderr = Console(stderr=True)
    yield from track(recordings, "comparing", console=stderr, transient=True, disable=not stderr.is_terminal)


def _show_groups(console: Console, groups: dict[tuple[str, str, str], list[Outcome]]) -> None:
    from rich.table import Table

    table = Table("folder", "recorded", "profile", header_style="bold")
    for name in ("scenarios", "identical", "steps"):
        table.add_column(name, justify="right")
    for (folder, version, profile), outcomes in groups.items():
        same = sum(outcome.difference is None for outcome in outcomes)
        colour = "green" if same == len(outcomes) else "red"
        steps = sum(outcome.steps for outcome in outcomes)
        numbers = (f"{len(outcomes):,}", f"[{colour}]{same:,}[/]", f"{steps:,}")
        table.add_row(folder, version[:12], profile, *numbers)
    console.print(table)


def _show_difference(console: Console, folder: str, outcome: Outcome) -> None:
    """Print the first step that differs and every differing value in it."""
    from rich.markup import escape

    assert outcome.difference is not None
    difference = outcome.difference
    console.print(
        f"[red]differs[/] {escape(folder)}/{outcome.name}, {escape(difference.where or 'at the end')}"
    )
    if difference.reason:
        console.print(f"  {escape(difference.reason)}")
    for key, ours, recorded in difference.values:
        console.print(f"  {key}")
        console.print(f"    here      {escape(_shorten(ours))}")
        console.print(f"    recorded  {escape(_shorten(recorded))}")


def _shorten(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]} … ({len(text)} characters)"
