"""State in one sentence what a comparison of saved reports shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.report.groups import Groups
from understudy.report.noise import ATTAINMENT, COMPLETED, MEASURES, Measure, estimate_interval
from understudy.run.bootstrap import CONFIDENCE
from understudy.text import quantity

if TYPE_CHECKING:
    from collections.abc import Sequence

_TIERS = {"g2": "host memory", "g3": "the disk tier", "g4": "the remote tier"}
_LEAST = 0.01
"""Relative difference, or difference of shares, below which runs do not differ."""
_LEAST_UNKNOWN = 0.1
"""The same where the noise is not known."""
_NO_DIFFERENCE = ("No difference above", "No difference of")
_LOAD = ("load", "max_tokens", "speedup")
"""Facts of a run that set its load."""


def conclude(names: Sequence[str], reports: Sequence[dict[str, Any]]) -> str:
    """Return the conclusion: equal runs, no common ground, tiers without use, or the best run and by how much."""
    runs = [report["run"] for report in reports]
    digests = {run.get("digest") for run in runs}
    if len(digests) == 1 and None not in digests:
        return "The runs are equal, request by request."
    if find_other_workload(reports) is not None:
        return "The runs served different workloads, so none is called best; the table shows their values."
    late = [name for name, report in zip(names, reports, strict=True) if _was_late(report)]
    if late:
        return f"The machine was late in {_join(late)}, so none is called best: those numbers are not the fleet's."
    unused = _find_unused_tiers(reports)
    compared = _compare_judged(names, reports)
    if not unused:
        return compared
    return unused if compared.startswith(_NO_DIFFERENCE) else f"{unused} {compared}"


def _compare_judged(names: Sequence[str], reports: Sequence[dict[str, Any]]) -> str:
    """Return which run is best under one load, by attainment only where objectives are the same."""
    runs = [report["run"] for report in reports]
    if any(run.get(name) != runs[0].get(name) for run in runs for name in _LOAD):
        return "The runs differ in their load, so none is called best; the table shows their values."
    objectives = [find_objectives(report) for report in reports]
    if any(one != objectives[0] for one in objectives):
        measures = [measure for measure in MEASURES if measure is not ATTAINMENT]
        return (
            f"{_name_best(names, reports, measures)} The objectives differ, so SLO attainment does not count."
        )
    return _name_best(names, reports, MEASURES)


def find_objectives(report: dict[str, Any]) -> dict[str, Any] | None:
    """Return the objectives by which a run's requests were judged; None without any."""
    slo: dict[str, Any] | None = (report.get("goodput") or {}).get("slo")
    return slo


def find_other_workload(reports: Sequence[dict[str, Any]]) -> int | None:
    """Return the place of the first report that served another workload than the first one; None if none did."""
    for place, report in enumerate(reports):
        pairs = (
            (reports[0]["run"].get("workload_digest"), report["run"].get("workload_digest")),
            tuple((one.get("requests") or {}).get("total") for one in (reports[0], report)),
        )
        if any(None not in pair and pair[0] != pair[1] for pair in pairs):
            return place
    return None


def _was_late(report: dict[str, Any]) -> bool:
    return any(verdict.get("rule") == "machine_late" for verdict in report.get("verdicts", ()))


def _name_best(names: Sequence[str], reports: Sequence[dict[str, Any]], measures: Sequence[Measure]) -> str:
    """Name the runs that no other surpasses by the first measure in which runs differ."""
    groups = [Groups.read(report["groups"]) if report.get("groups") else None for report in reports]
    every = range(len(reports))
    by_measure = {measure: [_read(report, measure) for report in reports] for measure in measures}
    known = [measure for measure, values in by_measure.items() if None not in values]
    comparisons = max(len(known) * (len(reports) - 1), 1)
    unknown = False
    for measure in known:
        values = [value for value in by_measure[measure] if value is not None]
        best = (max if measure.more_is_better else min)(every, key=values.__getitem__)
        tied = [best]
        for place in every:
            if place == best:
                continue
            interval = estimate_interval(groups[place], groups[best], measure, comparisons)
            change = _compute_change(values[place], values[best], measure)
            if interval is None:
                unknown = True
            if not _is_clear(change, interval):
                tied.append(place)
        if len(tied) == len(reports):
            continue
        rest = next(place for place in every if place not in tied)
        if 0 in tied:  # the others are behind: name the one that is furthest
            rest = (min if measure.more_is_better else max)(every, key=values.__getitem__)
        gain = _format_change(values[rest], values[best], measure)
        interval = estimate_interval(groups[rest], groups[best], measure, comparisons)
        noise = _format_interval(interval, values[rest], measure)
        if len(tied) == 1:
            return f"{names[best]} is best: {measure.words} {gain}{noise}, against {names[rest]}."
        equal = _join([names[place] for place in sorted(tied)])
        others = _join([names[place] for place in every if place not in tied])
        return (
            f"No difference between {equal} in {measure.words}; others are behind ({others}): {gain}{noise}, "
            f"against {names[rest]}."
        )
    if unknown:
        return (
            f"No difference of {100 * _LEAST_UNKNOWN:g} % or more in {_list(known)}; the noise is not known, so a "
            "smaller one names no winner (it needs reports of this version with 20 sessions or more)."
        )
    return f"No difference above the noise ({100 * CONFIDENCE:g} % confidence) in {_list(known)}."


def _read(report: dict[str, Any], measure: Measure) -> float | None:
    group, _, name = measure.key.partition(".")
    value = (report.get(group) or {}).get(name)
    if measure is COMPLETED and value is not None:
        value = value / report["requests"]["total"] if report["requests"].get("total") else None
    return float(value) if isinstance(value, int | float) else None


def _compute_change(before: float, after: float, measure: Measure) -> float:
    """Return the size of a change: of shares the difference, else relative to the larger value."""
    size = abs(after - before)
    return size if measure.is_share else size / max(abs(before), abs(after), 1e-9)


def _is_clear(change: float, interval: tuple[float, float] | None) -> bool:
    """Whether a change is worth naming and above the noise."""
    if interval is None:
        return change >= _LEAST_UNKNOWN
    return change >= _LEAST and not interval[0] <= 0 <= interval[1]


def _find_unused_tiers(reports: Sequence[dict[str, Any]]) -> str:
    """Return a sentence on tiers that only some runs have and that no request read from; else an empty text."""
    tiers = [
        [tier for tier in (report.get("tiers") or {}).get("tiers", ()) if _level(tier) in _TIERS]
        for report in reports
    ]
    every = [tier for levels in tiers for tier in levels]
    if not every or all(tiers) or any(tier.get("hit_tokens_total") for tier in every):
        return ""
    what = " and ".join(dict.fromkeys(_TIERS[_level(tier)] for tier in every))
    return f"{what[0].upper()}{what[1:]} bought nothing: no block was read back."


def _level(tier: dict[str, Any]) -> str:
    return str(tier.get("tier", "")).rpartition(" ")[2].lower()


def _format_change(before: float, after: float, measure: Measure) -> str:
    if measure.is_share:
        return f"{quantity(before, 'ratio')} → {quantity(after, 'ratio')}"
    change = f" ({after / before - 1:+.0%})".replace("%", " %") if before else ""
    digits = 0 if max(before, after) >= 100 else 1
    return f"{before:,.{digits}f} → {after:,.{digits}f} ms{change}"


def _format_interval(interval: tuple[float, float] | None, before: float, measure: Measure) -> str:
    if interval is None or not (measure.is_share or before):
        return "" if interval is not None else ", noise not known"
    scale = 1.0 if measure.is_share else before
    low, high = interval
    if measure.is_share:
        low, high = max(low, -before), min(high, 1 - before)
    low, high = 100 * low / scale, 100 * high / scale
    unit = "points" if measure.is_share else "%"
    return f" [{low:+.1f} to {high:+.1f} {unit} at {100 * CONFIDENCE:g} % confidence]"


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _list(measures: Sequence[Measure]) -> str:
    return _join([measure.words for measure in measures])
