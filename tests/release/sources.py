"""Compare the sources of two installed releases: files, functions and lines that changed."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WATCHED = (
    "v1/core/**/*.py",
    "v1/request.py",
    "v1/engine/core.py",
    "v1/kv_offload/**/*.py",
    "v1/kv_cache_interface.py",
    "distributed/kv_events.py",
    "distributed/kv_transfer/kv_connector/v1/offloading/*.py",
    "distributed/kv_transfer/kv_connector/v1/offloading_connector.py",
    "config/scheduler.py",
    "config/cache.py",
    "config/speculative.py",
    "config/kv_events.py",
    "config/kv_transfer.py",
)
"""Sources that decide schedules, keys and events, relative to the package's folder."""

Range = tuple[int, int]


@dataclass(frozen=True)
class Change:
    """A source file that differs. `places`: changed lines of the newer release by function; empty if it is new."""

    path: str
    status: str
    """`new`, `gone` or `changed`."""
    places: dict[str, list[Range]]

    @property
    def lines(self) -> int:
        """Number of changed lines in the newer release."""
        return sum(last - first + 1 for ranges in self.places.values() for first, last in ranges)


def compare_sources(old: Path, new: Path, diff: Path) -> list[Change]:
    """Return the watched files that differ, and write the unified diff to a file."""
    changes: list[Change] = []
    text: list[str] = []
    for name in sorted({*_watched(old), *_watched(new)}):
        before, after = _read(old / name), _read(new / name)
        if before == after:
            continue
        text += difflib.unified_diff(before or [], after or [], f"old/{name}", f"new/{name}", lineterm="")
        if before is None or after is None:
            changes.append(Change(name, "new" if before is None else "gone", {}))
        else:
            changes.append(Change(name, "changed", _places(before, after)))
    diff.parent.mkdir(parents=True, exist_ok=True)
    diff.write_text("\n".join(text) + "\n", encoding="utf-8")
    return changes


def _watched(folder: Path) -> Iterator[str]:
    for pattern in WATCHED:
        yield from (path.relative_to(folder).as_posix() for path in folder.glob(pattern))


def _read(path: Path) -> list[str] | None:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else None


def _places(before: list[str], after: list[str]) -> dict[str, list[Range]]:
    """Group changed lines of the newer file by function; a removal is at the line that follows it."""
    functions = _functions("\n".join(after))
    places: dict[str, list[Range]] = {}
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for tag, _, _, start, end in matcher.get_opcodes():
        if tag == "equal":
            continue
        first = start + 1
        places.setdefault(_function_at(functions, first), []).append((first, max(first, end)))
    return places


def _functions(text: str) -> list[tuple[Range, str]]:
    """Return ranges of lines with the qualified names of classes and functions, outer ones first."""
    found: list[tuple[Range, str]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                found.append(((child.lineno, child.end_lineno or child.lineno), name))
                visit(child, f"{name}.")

    visit(ast.parse(text), "")
    return found


def _function_at(functions: list[tuple[Range, str]], line: int) -> str:
    inner = [name for (first, last), name in functions if first <= line <= last]
    return inner[-1] if inner else "module"
