"""Find and read recordings of the real scheduler."""

from __future__ import annotations

import fnmatch
import gzip
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from understudy.errors import InvalidArgument
from understudy.workload.scenario import read_file_as

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Kind = Literal["steps", "speculation", "clock", "offload", "handoff"]


@dataclass(frozen=True, slots=True)
class Recording:
    """A scenario and the real scheduler's recorded steps.

    `steps`: scenarios/NAME.json and golden/NAME.jsonl.gz, whose header names the version. `speculation` and `clock`:
    one NAME.json.gz with both, of the revision that is called recorded. `offload`: the same, with a header. `handoff`:
    NAME.jsonl.gz, whose first lines are the scenario and the header.
    """

    kind: Kind
    folder: Path
    name: str
    scenario: Path
    golden: Path


def find_recordings(directory: Path, only: str = "*") -> list[Recording]:
    """List the recordings under `directory` whose names match `only`, by folder and name.

    Raises InvalidArgument when there is none, or when a file is not a recording.
    """
    found = [r for folder in _folders(directory) for r in _in_folder(folder) if fnmatch.fnmatch(r.name, only)]
    if not found:
        raise InvalidArgument(
            f"{directory}: no scenarios/*.json and no recordings (*.json.gz) that match {only!r}"
        )
    return found


def read_json_lines(path: Path) -> list[Any]:
    """Read gzipped JSON lines. InvalidArgument names a malformed file."""
    try:
        return msgspec.json.Decoder().decode_lines(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, zlib.error, msgspec.MsgspecError) as error:
        raise InvalidArgument(f"{path}: {error}") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a golden file, its header first. InvalidArgument names a malformed file."""
    lines = read_json_lines(path)
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, dict):
            raise InvalidArgument(f"{path}: line {number} must be an object")
    if not lines or not isinstance(lines[0].get("header"), dict):
        raise InvalidArgument(f"{path}: the first line must be the header")
    return lines


def read_pair(path: Path) -> dict[str, Any]:
    """Read a file with `scenario`, `recorded` and optionally `vllm`. InvalidArgument names a malformed file."""
    pair = read_file_as(object, path)
    if not isinstance(pair, dict) or set(pair) - {"vllm"} != {"scenario", "recorded"}:
        raise InvalidArgument(f"{path}: must have the keys scenario and recorded")
    return pair


def read_spec_events(path: Path) -> list[list[dict[str, Any]]] | None:
    """Read the KV events of a scenario with speculation, a list per step; None when there are none."""
    events = path.parents[1] / "spec-events" / path.name.replace(".json.gz", ".jsonl.gz")
    return read_json_lines(events) if events.exists() else None


def _folders(directory: Path) -> Iterator[Path]:
    """Yield the directory and its subdirectories by name."""
    yield directory
    for path in sorted(directory.glob("*/")):
        other = path.name in ("scenarios", "golden") or path.name.startswith(("sglang", "trtllm"))
        if path.is_dir() and not other:
            yield from _folders(path)


def _in_folder(folder: Path) -> Iterator[Recording]:
    for path in sorted((folder / "scenarios").glob("*.json")):
        yield Recording("steps", folder, path.stem, path, folder / "golden" / f"{path.stem}.jsonl.gz")
    for path in sorted(folder.glob("*.json.gz")):
        yield Recording(_kind_of(read_pair(path)), folder, path.name.removesuffix(".json.gz"), path, path)
    for path in sorted(folder.glob("*.jsonl.gz")):
        if _has_scenario(path):
            yield Recording("handoff", folder, path.name.removesuffix(".jsonl.gz"), path, path)


def _has_scenario(path: Path) -> bool:
    """Whether the first line of a file is a scenario; other lines, such as events, belong to another recording."""
    try:
        with gzip.open(path, "rb") as file:
            return file.read(11) == b'{"scenario"'
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidArgument(f"{path}: {error}") from error


def _kind_of(pair: dict[str, Any]) -> Kind:
    """Return the kind: recordings on a clock have times per request; the others have a line per step."""
    if not isinstance(pair["recorded"], list):
        return "clock"
    return (
        "offload" if isinstance(pair["scenario"], dict) and "offload" in pair["scenario"] else "speculation"
    )
