"""Count the recordings in the repository by release and family."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from understudy.conformance.recordings import find_recordings, read_pair
from understudy.engines.profiles import REVISION

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.conformance.recordings import Recording


def count_recordings(folder: Path) -> list[tuple[str, str, int]]:
    """Return release, family and number of the vLLM recordings under a folder, newest release first."""
    found = [r for one in sorted(folder.glob("vllm*/")) for r in find_recordings(one)]
    counts = Counter((_release(recording), _family(recording, folder)) for recording in found)
    ordered = sorted(counts.items(), key=lambda item: item[0][1])
    ordered.sort(key=lambda item: _order(item[0][0]), reverse=True)
    return [(release, family, count) for (release, family), count in ordered]


def _release(recording: Recording) -> str:
    if recording.kind == "steps":
        version = str(_read_line(recording.golden, 0)["header"].get("vllm", "vllm-src"))
    elif recording.kind == "handoff":
        version = str(_read_line(recording.golden, 1)["header"]["vllm"])
    else:
        pair = read_pair(recording.golden)
        version = pair.get("vllm", "vllm-src")
        if recording.kind == "offload":
            version = pair["recorded"][0]["header"]["vllm"]
    version = version.removeprefix("v")
    return f"revision {REVISION}" if version == "llm-src" or version.startswith(REVISION) else version


def _read_line(path: Path, number: int) -> dict[str, Any]:
    """Read one of the first lines; the rest is long."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        line: dict[str, Any] = json.loads(next(itertools.islice(file, number, None)))
    return line


def _family(recording: Recording, folder: Path) -> str:
    parts = recording.folder.relative_to(folder).parts
    if parts[0] in ("vllm-versions", "vllm"):
        return "versions"
    return (parts[-1] if parts[0].startswith("vllm-0.") else parts[0]).removeprefix("vllm-")


def _order(release: str) -> list[int]:
    return [int(part) for part in release.split(".")] if release[0].isdigit() else [0, 28, -1]
