"""Compare saved reports: check them, print their differences, write them as a page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from understudy.errors import InvalidArgument
from understudy.report.comparison import COMPARED, ComparedReports
from understudy.report.conclusion import find_other_workload
from understudy.report.html.compare_page import compare_page
from understudy.report.measured import REMEDY, find_unmeasured, list_engines
from understudy.report.report import Report
from understudy.report.saved import read_report
from understudy.text import NONE, quantity, size, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType

_BINARY = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20}


@dataclass(frozen=True, slots=True)
class Comparison(ComparedReports):
    """Reports with their names; the others are compared with the first."""

    def print(self, console: Console | None = None) -> None:
        """Print the table to `console` (default: standard output)."""
        from rich.console import Console

        (console or Console(highlight=False)).print(self.table())

    def table(self) -> RenderableType:
        """Build the table of differing settings and of metrics with their change from the first report."""
        settings = self._create_table("Configuration")
        for name, values in self.settings():
            settings.add_row(visible(name), *(Text(visible(_format(value, name))) for value in values))
        metrics = self._create_table("Metric")
        for label, unit, values in self.metrics():
            shown = label if unit == "ratio" else f"{label} ({unit})"
            metrics.add_row(shown, *(Text(text) for text in _cells(values, unit)))
        same = Text(" the runs have the same configuration", style="dim")
        times = [Text(visible(f" {line}"), style="dim") for line in self.times()]
        notes = [Text(visible(f" {note}"), style="dim") for note in self.notes()]
        verdicts = [
            Text.assemble(
                (visible(f" {', '.join(names)}: "), "bold"),
                visible(" ".join(filter(None, (finding, remedy)))),
            )
            for names, finding, remedy in self.verdicts()
        ]
        conclusion = Text(visible(f" {self.conclusion()}"), style="bold")
        return Group(conclusion, settings if settings.row_count else same, metrics, *times, *notes, *verdicts)

    def to_html(self) -> str:
        """Build one self-contained HTML page of the comparison."""
        settings = [(name, [_format(value, name) for value in values]) for name, values in self.settings()]
        return compare_page(self, settings)

    def _create_table(self, title: str) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, header_style="bold")
        table.add_column(title, style="cyan", overflow="fold")
        for name in self.names:
            table.add_column(Text(visible(name)), justify="right", overflow="fold")
        return table


def compare(
    *reports: Report | str | PathLike[str],
    names: Sequence[str] = (),
    accept_different_workloads: bool = False,
    accept_unmeasured: bool = False,
) -> Comparison:
    """Compare reports, or files that `to_json` wrote, with the first of them.

    Parameters:
        reports: two or more reports, or paths of saved ones.
        names: titles of the columns (default: file names, and "report 1" and so on for reports).
        accept_different_workloads: compare runs of different workloads; none is called best then.
        accept_unmeasured: compare engines by step times that were measured on one of them; the conclusion says so.

    Errors: InvalidArgument for fewer than two reports, an invalid file, another number of names, different workloads,
    or engines of which one was not measured.

    Example:
        one, two = (us.replay("trace.jsonl", workers=workers) for workers in (1, 2))
        us.compare(one, two, names=["one worker", "two workers"]).print()
    """
    if len(reports) < 2:
        raise InvalidArgument("compare needs at least two reports")
    if isinstance(names, str) or (names and len(names) != len(reports)):
        raise InvalidArgument(f"names: {len(reports)} reports need as many names, got {names!r}")
    titles, contents = [], []
    for number, report in enumerate(reports, 1):
        if isinstance(report, Report):
            titles.append(f"report {number}")
            contents.append(report.to_dict())
        elif not isinstance(report, str | PathLike):
            raise InvalidArgument(f"reports must be Reports or paths of saved ones, got {report!r}")
        else:
            titles.append(Path(report).stem)
            contents.append(read_report(report, COMPARED))
    if len(set(titles)) < len(titles):
        titles = [
            title if isinstance(report, Report) else str(report)
            for title, report in zip(titles, reports, strict=True)
        ]
    titles = list(names or titles)
    other = find_other_workload(contents)
    if other is not None and not accept_different_workloads:
        accept = "--accept-different-workloads (in Python accept_different_workloads=True)"
        theirs, ours = (contents[place]["run"].get("users") for place in (other, 0))
        if theirs != ours:
            raise InvalidArgument(
                f"users: {titles[other]} replayed {_describe_users(theirs)}, {titles[0]} {_describe_users(ours)}, so "
                "a difference says nothing about the fleets; give all replays the same --users, or to see what growth "
                f"changes add {accept}"
            )
        raise InvalidArgument(
            f"workload: {titles[other]} served {_describe_workload(contents[other])}, {titles[0]} "
            f"{_describe_workload(contents[0])}, so a difference says nothing about the fleets; replay one trace with "
            f"both, or accept it with {accept}"
        )
    unmeasured = find_unmeasured(map(list_engines, contents))
    if unmeasured is not None and not accept_unmeasured:
        raise InvalidArgument(f"engine: {unmeasured}, so a difference says nothing about engines; {REMEDY}")
    return Comparison(tuple(titles), tuple(contents))


def _describe_users(users: object) -> str:
    return (
        f"{users:g} times the users of its trace"
        if isinstance(users, int | float)
        else "the users of its trace"
    )


def _describe_workload(report: dict[str, Any]) -> str:
    run = report["run"]
    total = (report.get("requests") or {}).get("total")
    count = f"{total:,} requests" if isinstance(total, int) else "requests"
    users = run.get("users")
    growth = f" with {users:g} times its users" if isinstance(users, int | float) else ""
    return f"{count} of {run.get('workload', 'a workload')}{growth} (digest {run.get('workload_digest')})"


def _cells(values: list[float], unit: str) -> list[str]:
    first = values[0]
    return [
        quantity(value, unit) + ("" if at == 0 else f"  {_change(value, first, unit)}")
        for at, value in enumerate(values)
    ]


def _change(now: float, before: float, unit: str) -> str:
    if math.isnan(now) or math.isnan(before):
        return NONE
    if unit == "ratio":
        return f"{100 * (now - before):+.1f} points"
    if now == before:
        return "="
    return f"{now / before - 1:+.1%}".replace("%", " %") if before else f"+{now:,.0f}"


def _format(value: Any, name: str) -> str:
    if name.endswith("bytes") and isinstance(value, int | float):
        unit = next((unit for unit in _BINARY if value >= _BINARY[unit] and not value % _BINARY[unit]), None)
        return size(value) if unit is None else f"{value / _BINARY[unit]:,.0f} {unit}"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or NONE
    return NONE if value is None else str(value)
