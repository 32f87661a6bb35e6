"""Metrics of a fleet: the families of its workers, merged into one page with the labels of one server."""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from understudy.server.metrics.families import Counter, Gauge, Histogram, Registry, Summary
from understudy.server.quantiles import sum_counts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from understudy.server.metrics.families import Family, Metric

PREFIXES = ("vllm:", "sglang:", "trtllm_")
MEANS = (
    "_perc",
    "_utilization",
    "_hit_rate",
    "token_usage",
    ":cache_hit_rate",
    ":new_token_ratio",
    ":utilization",
)
"""Gauges with these endings are shares: a fleet shows the mean over its workers."""
FACTS = ("_info", ":page_size", ":context_len")
"""Gauges with these endings are equal for all workers or the last one counts: a fleet shows the greatest."""


class MergedGauge(Gauge):
    """A gauge of `members` workers."""

    __slots__ = ("members",)

    def __init__(self, labels: str, value: float, members: int) -> None:
        super().__init__({}, lambda: value)
        self.labels = labels
        self.members = members


def merge(registries: Iterable[Registry]) -> Registry:
    """Merge the engines' families: counters, histograms and numbers of requests are summed, shares averaged.

    Series of equal labels become one. Histograms with different bounds keep the bounds that they share.
    """
    groups: dict[str, tuple[str, str, dict[str, list[Metric]]]] = {}
    for registry in registries:
        registry.refresh()
        for name, (kind, help_text, metrics) in registry.families.items():
            if not name.startswith(PREFIXES):
                continue
            group = groups.get(name)
            if group is None:
                group = groups[name] = (kind, help_text, {})
            series = group[2]
            for metric in metrics:
                same = series.get(metric.labels)
                if same is None:
                    series[metric.labels] = [metric]
                else:
                    same.append(metric)
    merged = Registry()
    for name, (kind, help_text, series) in groups.items():
        merged.families[name] = (kind, help_text, [_combine(name, same) for same in series.values()])
    return merged


def _combine(name: str, same: Sequence[Any]) -> Metric:
    first = same[0]
    if isinstance(first, Gauge):
        return _combine_gauges(name, same)
    total: Any
    if isinstance(first, Counter):
        total = Counter({})
        total.value = sum(one.value for one in same)
    else:
        total = _sum_buckets(same) if isinstance(first, Histogram) else Summary({})
        total.count = sum(one.count for one in same)
        total.sum = sum(one.sum for one in same)
    total.labels = first.labels
    total.created = min(one.created for one in same)
    return total  # type: ignore[no-any-return]


def _combine_gauges(name: str, same: Sequence[Gauge]) -> MergedGauge:
    values = [one.read() for one in same]
    members = [one.members if isinstance(one, MergedGauge) else 1 for one in same]
    if name.endswith(FACTS):
        value = max(values)
    elif name.endswith(MEANS):
        value = sum(one * weight for one, weight in zip(values, members, strict=True)) / sum(members)
    else:
        value = sum(values)
    return MergedGauge(same[0].labels, value, sum(members))


def _sum_buckets(same: Sequence[Histogram]) -> Histogram:
    """Add histograms up, at the bounds that all of them have."""
    first, total = same[0], Histogram({}, ())
    total.bounds, total.lines = first.bounds, first.lines
    if all(one.bounds == first.bounds for one in same):
        total.counts = array("q", sum_counts([one.counts for one in same]))
        return total
    shared = frozenset(first.bounds).intersection(*(one.bounds for one in same))
    total.bounds = tuple(sorted(shared))
    total.lines = [
        line
        for edge, line in zip((*first.bounds, None), first.lines, strict=True)
        if edge is None or edge in shared
    ]
    below = [0] * (len(total.bounds) + 1)
    for one in same:
        cumulative = dict(zip((*one.bounds, None), accumulate(one.counts), strict=True))
        for index, edge in enumerate((*total.bounds, None)):
            below[index] += cumulative[edge]
    steps = zip([0, *below], below, strict=False)
    total.counts = array("q", [now - before for before, now in steps])
    return total


# ── Between processes ──


def to_rows(registry: Registry) -> dict[str, Any]:
    """Describe a merged registry in plain values, for another process."""
    return {
        name: (kind, help_text, [_to_row(metric) for metric in metrics])
        for name, (kind, help_text, metrics) in registry.families.items()
    }


def from_rows(rows: dict[str, Any]) -> Registry:
    """Build a registry from the values of `to_rows`."""
    registry = Registry()
    for name, (kind, help_text, metrics) in rows.items():
        family: Family = (kind, help_text, [_from_row(kind, row) for row in metrics])
        registry.families[name] = family
    return registry


def _to_row(metric: Any) -> dict[str, Any]:
    if isinstance(metric, MergedGauge):
        return {"labels": metric.labels, "value": metric.read(), "members": metric.members}
    names = ("labels", "created", "value", "count", "sum", "bounds", "counts", "lines")
    row = {name: getattr(metric, name) for name in names if hasattr(metric, name)}
    return row | {"counts": list(row["counts"])} if "counts" in row else row


def _from_row(kind: str, row: dict[str, Any]) -> Metric:
    if kind == "gauge":
        return MergedGauge(**row)
    metric: Any = (
        {"counter": Counter, "summary": Summary}[kind]({}) if kind != "histogram" else Histogram({}, ())
    )
    for name, value in row.items():
        setattr(metric, name, value)
    if kind == "histogram":
        metric.bounds, metric.counts = tuple(row["bounds"]), array("q", row["counts"])
    return metric  # type: ignore[no-any-return]
