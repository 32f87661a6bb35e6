"""Counters, gauges and histograms, and a fast renderer of Prometheus text."""

from __future__ import annotations

import re
import time
from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
OLD_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def label_text(labels: dict[str, str]) -> str:
    """Render labels, sorted by name; "" for none."""
    if not labels:
        return ""
    parts = (f'{name}="{_escape(value)}"' for name, value in sorted(labels.items()))
    return "{" + ",".join(parts) + "}"


def number_text(value: float) -> str:
    """Format a number as Prometheus clients do."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    text = repr(float(value))
    whole, dot, rest = text.partition(".")
    if dot and "e" not in rest and len(whole.lstrip("-")) > 6:
        sign = "-" if whole.startswith("-") else ""
        digits = whole.lstrip("-")
        mantissa = f"{digits[0]}.{digits[1:]}{rest}".rstrip("0.")
        return f"{sign}{mantissa}e+{len(digits) - 1:02d}"
    return text


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class Counter:
    """A monotonic count."""

    __slots__ = ("created", "labels", "value")

    def __init__(self, labels: dict[str, str]) -> None:
        self.labels = label_text(labels)
        self.value = 0.0
        self.created = time.time()

    def add(self, amount: float = 1.0) -> None:
        """Increase the count."""
        self.value += amount


class Gauge:
    """A value that is read when the page is rendered."""

    __slots__ = ("labels", "read")

    def __init__(self, labels: dict[str, str], read: Callable[[], float]) -> None:
        self.labels = label_text(labels)
        self.read = read


class Histogram:
    """Counts by bucket; a value belongs to the first bound that is not below it.

    `finer`: further bounds for quantiles, which the page does not show.
    """

    __slots__ = ("bounds", "count", "counts", "created", "labels", "lines", "sum")

    def __init__(self, labels: dict[str, str], bounds: Sequence[float], finer: Sequence[float] = ()) -> None:
        shown = frozenset(bounds)
        self.bounds = tuple(sorted(shown.union(finer)))
        self.counts = array("q", bytes(8 * (len(self.bounds) + 1)))
        self.count = 0
        self.sum = 0.0
        self.created = time.time()
        self.labels = label_text(labels)
        edges = [number_text(bound) if bound in shown else None for bound in self.bounds] + ["+Inf"]
        self.lines = [None if edge is None else label_text({**labels, "le": edge}) for edge in edges]
        """Labels of each bucket on the page; None for a bound that is not shown."""

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.count += times
        self.sum += value * times


class Summary:
    """A count and a sum."""

    __slots__ = ("count", "created", "labels", "sum")

    def __init__(self, labels: dict[str, str]) -> None:
        self.labels = label_text(labels)
        self.count = 0
        self.sum = 0.0
        self.created = time.time()

    def observe(self, value: float) -> None:
        """Count a value."""
        self.count += 1
        self.sum += value


Metric = Counter | Gauge | Histogram | Summary
Family = tuple[str, str, list[Metric]]
"""Kind, help text and series of a family."""
M = TypeVar("M", Counter, Gauge, Histogram, Summary)


class Registry:
    """The metric families of one page, in the order of registration."""

    def __init__(self) -> None:
        self.families: dict[str, Family] = {}
        self._refresh: list[Callable[[], None]] = []

    def before_page(self, refresh: Callable[[], None]) -> None:
        """Call `refresh` before each rendering of the page."""
        self._refresh.append(refresh)

    def counter(self, name: str, help_text: str, **labels: str) -> Counter:
        """Add a counter; the page appends `_total`."""
        return self._add(name, "counter", help_text, Counter(labels))

    def gauge(self, name: str, help_text: str, read: Callable[[], float], **labels: str) -> Gauge:
        """Add a gauge, read when the page is rendered."""
        return self._add(name, "gauge", help_text, Gauge(labels, read))

    def histogram(
        self,
        name: str,
        help_text: str,
        bounds: Sequence[float],
        finer: Sequence[float] = (),
        /,
        **labels: str,
    ) -> Histogram:
        """Add a histogram with these bounds, and `finer` ones that the page does not show."""
        return self._add(name, "histogram", help_text, Histogram(labels, bounds, finer))

    def summary(self, name: str, help_text: str, **labels: str) -> Summary:
        """Add a count and a sum."""
        return self._add(name, "summary", help_text, Summary(labels))

    def _add(self, name: str, kind: str, help_text: str, metric: M) -> M:
        self.families.setdefault(name, (kind, help_text, []))[2].append(metric)
        return metric

    def remove(self, name: str) -> None:
        """Remove a family."""
        self.families.pop(name, None)

    def refresh(self) -> None:
        """Update the values that are only counted when the page is read."""
        for refresh in self._refresh:
            refresh()

    def render(self) -> bytes:
        """Render the page."""
        self.refresh()
        out: list[str] = []
        for name, (kind, help_text, metrics) in self.families.items():
            wire = f"{name}_total" if kind == "counter" else name
            out.append(f"# HELP {wire} {help_text}\n# TYPE {wire} {kind}\n")
            for metric in metrics:
                _render(out, wire, metric)
            if kind != "gauge" and not name.startswith(("python_", "process_")):
                out.append(f"# HELP {name}_created {help_text}\n# TYPE {name}_created gauge\n")
                out += [
                    f"{name}_created{metric.labels} {number_text(metric.created)}\n"
                    for metric in metrics
                    if not isinstance(metric, Gauge)
                ]
        return "".join(out).encode()


def only(page: bytes, names: set[str]) -> bytes:
    """Filter a page to the samples of these names, with their HELP and TYPE lines."""
    kept: list[str] = []
    said: list[str] = []
    for line in page.decode().splitlines(keepends=True):
        if line.startswith("#"):
            said = [line] if line.startswith("# HELP") else [*said, line]
        elif re.split(r"[{ ]", line, maxsplit=1)[0] in names:
            kept += [*said, line]
            said = []
    return "".join(kept).encode()


def _render(out: list[str], wire: str, metric: Metric) -> None:
    if isinstance(metric, Counter):
        out.append(f"{wire}{metric.labels} {number_text(metric.value)}\n")
    elif isinstance(metric, Gauge):
        out.append(f"{wire}{metric.labels} {number_text(metric.read())}\n")
    else:
        if isinstance(metric, Histogram):
            total = 0
            for count, labels in zip(metric.counts, metric.lines, strict=True):
                total += count
                if labels is not None:
                    out.append(f"{wire}_bucket{labels} {number_text(total)}\n")
        out.append(f"{wire}_count{metric.labels} {number_text(metric.count)}\n")
        out.append(f"{wire}_sum{metric.labels} {number_text(metric.sum)}\n")
