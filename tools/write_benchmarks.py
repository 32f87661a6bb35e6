"""Write docs/benchmarks.md, the numbers of all benchmarks, from benchmarks/results/*.json."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
from harness.cells import format_heads, format_row, has_units, shown_columns
from harness.result import BenchmarkResult, Group, Machine, read_results

if TYPE_CHECKING:
    from collections.abc import Iterable

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Every measured number, with its machine and command. `python tools/write_benchmarks.py` writes this page from
`benchmarks/results`, where a benchmark with `--json` writes its file. Only current numbers are listed.

A bound in brackets is the goal of a number, and **bold** misses it. A *stretch goal* is what a part was meant to
approach. × is times as fast, or times as slow. A range has the least and the most of several runs. A column that was
recorded elsewhere, and not measured in that run, says so.
"""


def render(results: Iterable[BenchmarkResult]) -> str:
    """Return the text of the page."""
    results = sorted(results, key=lambda result: (result.question, result.name))
    parts = [HEAD]
    for group in get_args(Group):
        parts += [f"## {group}\n", *(describe(result) for result in results if result.group == group)]
    return "\n".join(parts)


def describe(result: BenchmarkResult) -> str:
    """Return the section of one result."""
    facts = [*describe_origin(result), f"[{result.name}.json](../benchmarks/results/{result.name}.json)"]
    lines = [f"### {result.question}", "", " · ".join(facts), "", result.method]
    if result.peers:
        lines += ["", f"Peer: {', '.join(result.peers)}."]
    if result.commands:
        lines += ["", f"Run: {'; '.join(f'`{command}`' for command in result.commands)}"]
    lines += ["", *tabulate(result)]
    for paragraph in (*describe_goals(result), *result.explanation, *result.notes):
        lines += ["", paragraph]
    return "\n".join(lines) + "\n"


def describe_origin(result: BenchmarkResult) -> list[str]:
    """Return when and where the numbers were measured, as far as that was recorded."""
    machine = result.machine or Machine()
    facts: list[str | None] = [result.date.isoformat() if result.date else "date not recorded"]
    facts += [f"commit {result.commit}" if result.commit else None]
    facts += ["machine not recorded"] if result.machine is None else []
    facts += [machine.system, machine.processor, machine.gpu]
    facts += [f"{machine.cores} cores" if machine.cores else None]
    facts += [f"CPython {machine.python}" if machine.python else None]
    if machine.state is not None or machine.load_average is not None:
        facts.append(describe_load(machine))
    facts += ["recorded elsewhere" if result.origin == "recorded elsewhere" else None]
    return [fact for fact in facts if fact is not None]


def describe_load(machine: Machine) -> str:
    """Return how busy the machine was."""
    load = machine.load_average
    if load is None:
        return machine.state or ""
    shown = f"{load[0]:g} to {load[1]:g}" if isinstance(load, tuple) else f"{load:g}"
    return ", ".join(part for part in (machine.state, f"load average {shown}") if part)


def tabulate(result: BenchmarkResult) -> list[str]:
    """Return the table; columns of numbers are aligned to the right."""
    left = 1 + has_units(result)
    rows = [format_heads(result), ["---"] * left + ["---:"] * len(shown_columns(result))]
    rows += [format_row(result, row) for row in result.rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def describe_goals(result: BenchmarkResult) -> list[str]:
    """Say which bounds are stretch goals."""
    goals = [goal for row in result.rows for goal in row.goals.values()]
    stretch = [goal for goal in goals if goal.stretch]
    if not stretch:
        return []
    return [
        "The goals are stretch goals."
        if len(stretch) == len(goals)
        else "Some of the goals are stretch goals."
    ]


def main() -> int:
    """Write the page."""
    PAGE.write_text(render(read_results().values()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
