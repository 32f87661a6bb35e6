"""Compare saved reports: differences in their configuration and in their metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from understudy.engines.kv_groups import KvCacheGroup
from understudy.errors import InvalidArgument
from understudy.report.conclusion import conclude, find_objectives, find_other_workload
from understudy.report.html.compare_page import compare_page
from understudy.report.measured import REMEDY, find_unmeasured, list_engines
from understudy.report.metrics import BY_KEY
from understudy.report.report import Report
from understudy.report.saved import read_report
from understudy.report.worst_hour import WORST_HOUR_METRICS
from understudy.router.kv import KvRouting
from understudy.run.facts import TimeFacts
from understudy.run.times import format_times
from understudy.text import NONE, quantity, size
from understudy.tiers.settings import OffloadSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType

COMPARED = (
    "ttft_ms.mean",
    "ttft_ms.p50",
    "ttft_ms.p99",
    "itl_ms.mean",
    "itl_ms.p99",
    "e2e_ms.mean",
    "e2e_ms.p99",
    "queue_ms.mean",
    "throughput.requests_per_s",
    "throughput.output_tokens_per_s",
    "goodput.ratio",
    "worst_hour.attainment",
    "worst_hour.ttft_p99_ms",
    "worst_hour.requests_per_s",
    "prefix_hit_ratio.first_admission",
    "prefix_hit_ratio.total",
    "kv.usage_mean",
    "kv.evictions",
    "preemptions",
    "requests.completed",
    "requests.rejected",
    "duration_s",
)
"""Paths of the compared metrics, in the order of the table."""

_BY_KEY = {**BY_KEY, **{metric.key: metric for metric in WORST_HOUR_METRICS}}

_NOT_SETTINGS = (
    *("digest", "digests", "wall_time_s", "notes", "unlimited_hit_ratio", "routed_hit_ratio"),
    *("lateness_ms", "played_s", "decisions", "raw_stream"),
    "router",  # statistics of its choices
    "kv_groups",  # hits and held blocks; engine.kv_cache_groups has the settings
)
_TIMING_PARAMETERS = ("engine.timing.coefficients.", "engine.timing.origin.", "engine.timing.domain.")
"""Parameters of a timing model; `times.from` already names their source."""
_DEFAULTS = {
    "routing.": msgspec.to_builtins(KvRouting()),
    "tiers.offload.": msgspec.to_builtins(OffloadSettings()),
}
"""Defaults of optional groups of settings; hidden if one run has the group and another has not."""
_GROUP_DEFAULTS = msgspec.to_builtins(KvCacheGroup(kind="full", block_size=1))


_BINARY = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Reports with their names; the others are compared with the first."""

    names: tuple[str, ...]
    """Titles of the reports."""
    reports: tuple[dict[str, Any], ...]
    """Reports as `Report.to_dict` returns them."""

    def print(self, console: Console | None = None) -> None:
        """Print the table to `console` (default: standard output)."""
        from rich.console import Console

        (console or Console(highlight=False)).print(self.table())

    def settings(self) -> list[tuple[str, list[Any]]]:
        """List the settings that differ between the runs, by dotted name."""
        flat = [
            _flatten(report["run"]) | _flatten({"slo": find_objectives(report) or {}})
            for report in self.reports
        ]
        names = dict.fromkeys(name for one in flat for name in one)
        rows = [(name, [one.get(name) for one in flat]) for name in names]
        rows = [(name, values) for name, values in rows if any(value != values[0] for value in values)]
        brief = [(name, values) for name, values in rows if not _is_redundant(name, values)]
        return brief or rows

    def metrics(self) -> list[tuple[str, str, list[float]]]:
        """List label, unit and one value per report (NaN without one); metrics without any value are left out."""
        return [(label, unit, values) for _, label, unit, values in self.rows()]

    def rows(self) -> list[tuple[str, str, str, list[float]]]:
        """List the path in a report, label, unit and values of each metric."""
        rows = []
        for path in COMPARED:
            values = [_value(report, path) for report in self.reports]
            if all(math.isnan(value) for value in values):
                continue
            metric = _BY_KEY.get(path) or _BY_KEY[path.rpartition(".")[0]]
            statistic = "" if path in _BY_KEY else f", {path.rpartition('.')[2]}"
            rows.append((path, f"{metric.name}{statistic}", metric.unit, values))
        return rows

    def times(self) -> list[str]:
        """Name the source of each report's times, one line per source."""
        sources: dict[str, list[str]] = {}
        for name, report in zip(self.names, self.reports, strict=True):
            times = msgspec.convert(report["run"].get("times"), TimeFacts | None)
            sources.setdefault(format_times(times), []).append(name)
        if len(sources) == 1:
            return [f"Times from {words}" for words in sources]
        return [f"Times of {', '.join(names)} from {words}" for words, names in sources.items()]

    def notes(self) -> list[str]:
        """List the reports' notes; those that not all reports have are named after theirs."""
        owners: dict[str, list[str]] = {}
        for name, report in zip(self.names, self.reports, strict=True):
            for note in dict.fromkeys(report["run"].get("notes", ())):
                owners.setdefault(note, []).append(name)
        everyone = list(self.names)
        return [
            note if names == everyone else f"{', '.join(names)}: {note}" for note, names in owners.items()
        ]

    def table(self) -> RenderableType:
        """Build the table of differing settings and of metrics with their change from the first report."""
        settings = self._create_table("Configuration")
        for name, values in self.settings():
            settings.add_row(name, *(Text(_format(value, name)) for value in values))
        metrics = self._create_table("Metric")
        for label, unit, values in self.metrics():
            shown = label if unit == "ratio" else f"{label} ({unit})"
            metrics.add_row(shown, *(Text(text) for text in _cells(values, unit)))
        same = Text(" the runs have the same configuration", style="dim")
        times = [Text(f" {line}", style="dim") for line in self.times()]
        notes = [Text(f" {note}", style="dim") for note in self.notes()]
        verdicts = [
            Text.assemble((f" {', '.join(names)}: ", "bold"), " ".join(filter(None, (finding, remedy))))
            for names, finding, remedy in self.verdicts()
        ]
        conclusion = Text(f" {self.conclusion()}", style="bold")
        return Group(conclusion, settings if settings.row_count else same, metrics, *times, *notes, *verdicts)

    def conclusion(self) -> str:
        """Return what the comparison shows, in one sentence; a second one if an engine was not measured."""
        said = conclude(self.names, self.reports)
        unmeasured = find_unmeasured(map(list_engines, self.reports))
        return said if unmeasured is None else f"{said} Not measured: {unmeasured}."

    def verdicts(self) -> list[tuple[tuple[str, ...], str, str]]:
        """List the verdicts as names of runs, finding and remedy, by rule; equal verdicts of several runs once."""
        found: dict[str, dict[tuple[str, str], list[str]]] = {}
        for name, report in zip(self.names, self.reports, strict=True):
            for one in report.get("verdicts", ()):
                rule = str(one.get("rule", one["finding"]))
                found.setdefault(rule, {}).setdefault((one["finding"], one["remedy"]), []).append(name)
        return [
            (tuple(names), finding, remedy)
            for verdicts in found.values()
            for (finding, remedy), names in verdicts.items()
        ]

    def to_html(self) -> str:
        """Build one self-contained HTML page of the comparison."""
        settings = [(name, [_format(value, name) for value in values]) for name, values in self.settings()]
        return compare_page(self, settings)

    def _create_table(self, title: str) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, header_style="bold")
        table.add_column(title, style="cyan", overflow="fold")
        for name in self.names:
            table.add_column(Text(name), justify="right", overflow="fold")
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


def _flatten(facts: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if not prefix and name in _NOT_SETTINGS:
            continue
        if prefix == "routing." and name == "kind":  # a routing without settings is its name alone
            flat["routing"] = value
        elif isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            for place, one in enumerate(value):  # such as tiers, each with a name
                flat |= _flatten(one, f"{prefix}{name}.{one.get('tier', one.get('name', place))}.")
        else:
            flat[prefix + name] = value
    return flat


def _is_redundant(name: str, values: list[Any]) -> bool:
    if name.startswith(_TIMING_PARAMETERS) or all(value in (None, []) for value in values):
        return True
    for prefix, defaults in _DEFAULTS.items():
        if name.startswith(prefix):
            default = defaults.get(name.removeprefix(prefix), values)
            return _are_defaults(values, default)
    if "kv_cache_groups." in name:  # such as engine.kv_cache_groups.0.window
        field = name.rpartition(".")[2]
        return field not in ("kind", "block_size") and _are_defaults(values, _GROUP_DEFAULTS.get(field))
    return False


def _are_defaults(values: list[Any], default: Any) -> bool:
    """Whether a run lacks the setting and the others have its default."""
    return None in values and all(value in (None, default) for value in values)


def _value(report: dict[str, Any], path: str) -> float:
    value: Any = report
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) else math.nan


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
