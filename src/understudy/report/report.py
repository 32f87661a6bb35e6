"""`Report`: the metrics of a run as users read, print and write them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, overload

import msgspec

from understudy.errors import InvalidArgument
from understudy.outputs import create
from understudy.report.fault_metrics import FAULT_METRICS
from understudy.report.fleet_metrics import FLEET_METRICS
from understudy.report.handoff_metrics import HANDOFF_METRICS
from understudy.report.judged import JudgedReport
from understudy.report.metrics import METRICS
from understudy.report.statistics import PERCENTILE_METHOD
from understudy.report.tier_metrics import TIER_METRICS
from understudy.report.worst_hour import WORST_HOUR_METRICS
from understudy.run.times import format_times
from understudy.text import plural

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.console import Console, RenderableType

SCHEMA = "understudy.report/1"


@dataclass(frozen=True, eq=False, kw_only=True)
class Report(JudgedReport):
    """Metrics of a run. Numbers without a value (a mean of nothing) are NaN, null in JSON.

    `replay` returns it; docs/metrics.md defines every number.

    Example:
        report = us.replay("trace.jsonl", workers=2)
        print(report.ttft_ms.p99, report.throughput.output_tokens_per_s, report.requests.completed)
        report.to_json("report.json")
        report.to_html("report.html")
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the report without its columns as plain JSON values, with definitions; NaN becomes None."""
        metrics: dict[str, Any] = {}
        for metric in METRICS:
            root = metric.key.partition(".")[0]
            if root not in metrics:
                value = getattr(self, root)
                metrics[root] = value if value is None or isinstance(value, (int, float)) else asdict(value)
        if self.worst_hour is not None:
            metrics["worst_hour"] = asdict(self.worst_hour)
        if self.tiers is not None:
            metrics["tiers"] = asdict(self.tiers)
        if self.handoff is not None:
            metrics["handoff"] = asdict(self.handoff)
        if self.fleet_use is not None:
            metrics["fleet_use"] = asdict(self.fleet_use)
        if self.fault_report is not None:
            metrics["fault_report"] = asdict(self.fault_report)
        metrics["groups"] = msgspec.structs.asdict(self.groups)
        metrics["verdicts"] = [asdict(verdict) for verdict in self.verdicts]
        if self.advice is not None:
            metrics["advice"] = {key: one for key, one in asdict(self.advice).items() if key != "verdicts"}
        if self.without_tiers is not None:
            without = self.without_tiers.to_dict()
            metrics["without_tiers"] = {key: without[key] for key in without if key != "definitions"}
        definitions = {
            metric.key: {"name": metric.name, "unit": metric.unit, "definition": metric.definition}
            for metric in METRICS
            + (WORST_HOUR_METRICS if self.worst_hour is not None else ())
            + (TIER_METRICS if self.tiers is not None else ())
            + (HANDOFF_METRICS if self.handoff is not None else ())
            + (FLEET_METRICS if self.fleet_use is not None else ())
            + (FAULT_METRICS if self.fault_report is not None else ())
        }
        run = replace(
            self.run, unlimited_hit_ratio=self.unlimited_hit_ratio, routed_hit_ratio=self.routed_hit_ratio
        ).to_dict()
        result: dict[str, Any] = _replace_nan(
            {"schema": SCHEMA, "run": run, "percentile_method": PERCENTILE_METHOD, **metrics}
        )
        return {**result, "definitions": definitions}

    @overload
    def to_json(self) -> str: ...
    @overload
    def to_json(self, path: str | PathLike[str]) -> None: ...
    def to_json(self, path: str | PathLike[str] | None = None) -> str | None:
        """Write the report to `path` as indented JSON, without its columns; return the text if `path` is left out.

        docs/schema/report.json is its schema. Errors: InvalidArgument if the file cannot be written.
        """
        text = msgspec.json.format(msgspec.json.encode(self.to_dict()), indent=2) + b"\n"
        return _write(path, text)

    def requests_jsonl(self, path: str | PathLike[str]) -> None:
        """Write one JSON line per request, in workload order, with the workload's ids."""
        from understudy.report.requests import write_requests

        write_requests(self, path)

    def table(self) -> RenderableType:
        """Return the metrics as a rich renderable that adapts to the console's width."""
        from understudy.report.table import ReportTable

        return ReportTable(self)

    def print(self, console: Console | None = None) -> None:
        """Print the metrics to `console` (default: standard output)."""
        from rich.console import Console

        (console or Console(highlight=False)).print(self.table())

    def to_pandas(self) -> DataFrame:
        """Return one row per request, with the columns of `requests_jsonl`. ConfigError if pandas is not installed."""
        from understudy.report.requests import request_frame

        return request_frame(self)

    def __repr__(self) -> str:
        """Return one line with the main numbers and the source of the times."""
        return (
            f"<Report {self.run.workload or ''}: {self.requests.completed:,} of {self.requests.total:,} requests "
            f"in {self.duration_s:,.1f} s, TTFT p50 {self.ttft_ms.p50:,.0f} ms, p99 {self.ttft_ms.p99:,.0f} ms, "
            f"{self.throughput.output_tokens_per_s:,.0f} output tokens/s, {plural(len(self.verdicts), 'verdict')}; "
            f"times from {format_times(self.run.times)}>"
        )

    def _repr_html_(self) -> str:
        """Return a small HTML table, for notebooks."""
        from understudy.report.html.notebook import summary

        return summary(self)

    @overload
    def to_html(self, path: None = None, baseline: Report | None = None) -> str: ...
    @overload
    def to_html(self, path: str | PathLike[str], baseline: Report | None = None) -> None: ...
    def to_html(self, path: str | PathLike[str] | None = None, baseline: Report | None = None) -> str | None:
        """Write one self-contained page with plots to `path`; return its text if `path` is left out.

        `baseline` is a report to compare with (default: `without_tiers`). Errors: InvalidArgument if the file cannot be
        written.
        """
        from understudy.report.html import page

        if not isinstance(baseline, Report | None):
            raise InvalidArgument(f"baseline must be a Report, got {baseline!r}")
        return _write(path, page(self, baseline or self.without_tiers).encode())


def _write(path: str | PathLike[str] | None, text: bytes) -> str | None:
    """Write `text` to `path`; return it if `path` is None."""
    if path is None:
        return text.decode()
    if not isinstance(path, str | PathLike):
        raise InvalidArgument(f"path must be the path of a file to write, got {path!r}")
    with create(path) as file:
        file.write(text)
    return None


def _replace_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
