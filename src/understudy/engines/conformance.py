"""Comparing the engine with recordings of the real scheduler."""

from __future__ import annotations

import fnmatch
import gzip
import itertools
import json
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from understudy.engines.recorder import run_scenario
from understudy.engines.scenario import DEFAULT_PROFILE, read_scenario
from understudy.errors import InvalidArgument, UnderstudyError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from understudy.engines.profiles import VersionProfile


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one scenario compared. `difference` is None when every step was identical."""

    name: str
    steps: int
    difference: str | None


def compare_all(
    directory: Path, profile: VersionProfile = DEFAULT_PROFILE, *, only: str = "*", check: bool = False
) -> Iterator[Outcome]:
    """Compare every scenario of `directory` whose name matches `only`, in name order.

    Raises InvalidArgument when there is none, or when a file is missing or malformed.
    """
    paths = [p for p in sorted((directory / "scenarios").glob("*.json")) if fnmatch.fnmatch(p.stem, only)]
    if not paths:
        raise InvalidArgument(f"{directory}: no scenarios/*.json that match {only!r}")
    for path in paths:
        golden = directory / "golden" / f"{path.stem}.jsonl.gz"
        yield compare(path, golden, profile, check=check)


def compare(
    scenario: Path, golden: Path, profile: VersionProfile = DEFAULT_PROFILE, *, check: bool = False
) -> Outcome:
    """Run one scenario against its recording and stop at the first difference.

    Raises InvalidArgument when a file is missing or malformed.
    """
    expected = _read_golden(golden)
    ours = run_scenario(read_scenario(scenario), profile, check=check)
    steps = 0
    try:
        for mine, theirs in itertools.zip_longest(ours, expected):
            if mine != theirs or json.dumps(mine) != json.dumps(theirs):  # key order counts
                return Outcome(scenario.stem, steps, describe_difference(mine, theirs))
            steps += "step" in mine
    except UnderstudyError as error:
        return Outcome(scenario.stem, steps, f"step {steps}: {type(error).__name__}: {error}")
    return Outcome(scenario.stem, steps, None)


def describe_difference(ours: dict[str, Any] | None, theirs: dict[str, Any] | None) -> str:
    """Say where two lines differ first, in a line."""
    if ours is None or theirs is None:
        return "the recording goes on" if ours is None else "the recording ends earlier"
    where = f"step {theirs['step']}" if "step" in theirs else "at the end"
    if ("step" in ours) != ("step" in theirs):
        return f"{where}: one run has ended, the other has not"
    for key, value in theirs.items():
        mine = ours.get(key)
        if mine != value or json.dumps(mine) != json.dumps(value):
            return f"{where}: {key} is {json.dumps(mine)}, recorded {json.dumps(value)}"
    return f"{where}: unexpected {sorted(set(ours) - set(theirs))}"


def _read_golden(path: Path) -> list[dict[str, Any]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise InvalidArgument(f"{path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, dict):
            raise InvalidArgument(f"{path}: line {number} must be an object")
    if not lines or "header" not in lines[0]:
        raise InvalidArgument(f"{path}: the first line must be the header")
    return lines[1:]
