"""`ComparedReports`: what differs between saved reports, in their configuration and in their metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec

from understudy.engines.kv_groups import KvCacheGroup
from understudy.report.conclusion import conclude, find_objectives
from understudy.report.measured import find_unmeasured, list_engines
from understudy.report.metrics import BY_KEY
from understudy.report.worst_hour import WORST_HOUR_METRICS
from understudy.router.kv import KvRouting
from understudy.run.facts import TimeFacts
from understudy.run.times import format_times
from understudy.tiers.settings import OffloadSettings

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


@dataclass(frozen=True, slots=True)
class ComparedReports:
    """Reports with their names; the others are compared with the first."""

    names: tuple[str, ...]
    """Titles of the reports."""
    reports: tuple[dict[str, Any], ...]
    """Reports as `Report.to_dict` returns them."""

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
