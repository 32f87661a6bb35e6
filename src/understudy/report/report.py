"""`Report`: the metrics of a run and the timeline they are computed from."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any, overload

import msgspec
import numpy as np

from understudy.errors import InvalidArgument
from understudy.outputs import create
from understudy.report.counts import KvUsage, PrefixHitRatio, RequestCounts, Throughput, TokenCounts
from understudy.report.goodput import Goodput, ratio
from understudy.report.groups import Groups
from understudy.report.handoff import HandOffReport
from understudy.report.handoff_metrics import HANDOFF_METRICS
from understudy.report.latency import NS_PER_MS, NS_PER_S, Latencies, present
from understudy.report.metrics import METRICS
from understudy.report.statistics import PERCENTILE_METHOD, Statistics
from understudy.report.tier_metrics import TIER_METRICS
from understudy.report.tiers import TiersReport
from understudy.report.verdict import has_kv_groups
from understudy.report.worst_hour import WORST_HOUR_METRICS, WorstHour
from understudy.run.admissions import HitBounds, LastTokens
from understudy.run.facts import RunFacts
from understudy.run.times import format_times
from understudy.text import plural

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.console import Console, RenderableType

    from understudy.explain.saved_run import SavedRun
    from understudy.report.advice import Advice
    from understudy.report.goodput import Slo
    from understudy.report.verdict import Verdict
    from understudy.router.choices import Choices
    from understudy.router.kv import Decisions
    from understudy.run.timeline import Timeline
    from understudy.workload.reuse import HitCurve
    from understudy.workload.workload import Workload

SCHEMA = "understudy.report/1"


@dataclass(frozen=True, eq=False, kw_only=True)
class Report:
    """Metrics of a run. Numbers without a value (a mean of nothing) are NaN, null in JSON.

    `replay` returns it; docs/metrics.md defines every number.

    Example:
        report = us.replay("trace.jsonl", workers=2)
        print(report.ttft_ms.p99, report.throughput.output_tokens_per_s, report.requests.completed)
        report.to_json("report.json")
        report.to_html("report.html")
    """

    columns: Timeline
    """Columns of the run, one row per request: times in ns, tokens, worker, status."""
    run: RunFacts
    """Facts about the run: workload, settings, digest, wall time."""

    ttft_ms: Statistics
    ttft_queued_ms: Statistics
    ttst_ms: Statistics
    itl_ms: Statistics
    tpot_ms: Statistics
    e2e_ms: Statistics
    queue_ms: Statistics
    output_tokens_per_s_per_user: Statistics
    prompt_tokens: Statistics
    output_tokens: Statistics

    duration_s: float
    requests: RequestCounts
    tokens: TokenCounts
    throughput: Throughput
    goodput: Goodput | None
    """Requests and tokens within the latency objectives, per s; None without objectives."""
    prefix_hit_ratio: PrefixHitRatio
    kv: KvUsage
    preemptions: int
    accept_length: float
    drafted_tokens: int
    wasted_drafts: int
    steps: int
    worst_hour: WorstHour | None = None
    """The hour in which fewest requests were good; None for arrivals that span less than two hours."""
    tiers: TiersReport | None = None
    """Hits, usage and traffic of the tiers; None if there were none."""
    handoff: HandOffReport | None = None
    """Hand-offs between prefill and decode workers; None if there were none."""
    without_tiers: Report | None = None
    """Report of the workload without tiers, if it was requested."""
    workload: Workload | None = None
    """Requests of an offline run, from which `unlimited_hit_ratio`, `routed_hit_ratio` and `hit_curve` are computed."""
    decisions: Decisions | Choices | None = None
    """Decisions of a KV-aware or a user-defined router, for the page."""
    saved: SavedRun | None = None
    """The run with every step, if it was recorded, for the page."""
    advice: Advice | None = None
    """Replayed remedies (`understudy.report.advice.advise`); None if none was replayed."""

    @classmethod
    def build(cls, timeline: Timeline, run: RunFacts | None = None, slo: Slo | None = None) -> Report:
        """Compute all metrics of `timeline`.

        `run` becomes part of the report. Errors: InvalidArgument if it is not JSON-serialisable.
        """
        run = RunFacts() if run is None else run
        if not isinstance(run, RunFacts):
            raise InvalidArgument(f"run must be RunFacts, got {run!r}")
        run.to_dict()  # raises for a setting that does not fit JSON
        latencies = Latencies.of(timeline)
        done = timeline.completed
        duration_s = (timeline.end_ns - timeline.start_ns) / NS_PER_S
        requests = RequestCounts.of(timeline)
        tokens = TokenCounts.of(timeline)
        tpot_ms = present(latencies.tpot_ms)
        return cls(
            columns=timeline,
            run=run,
            ttft_ms=Statistics.of(present(latencies.ttft_ms)),
            ttft_queued_ms=Statistics.of(present(latencies.ttft_queued_ms)),
            ttst_ms=Statistics.of(present(latencies.ttst_ms)),
            itl_ms=Statistics.of(timeline.itl_ns / NS_PER_MS, timeline.itl_count),
            tpot_ms=Statistics.of(tpot_ms),
            e2e_ms=Statistics.of(present(latencies.e2e_ms)),
            queue_ms=Statistics.of(present(latencies.queue_ms)),
            output_tokens_per_s_per_user=Statistics.of(NS_PER_S / NS_PER_MS / tpot_ms[tpot_ms > 0]),
            prompt_tokens=Statistics.of(timeline.prompt_tokens[done].astype(np.float64)),
            output_tokens=Statistics.of(timeline.output_tokens[done].astype(np.float64)),
            duration_s=duration_s,
            requests=requests,
            tokens=tokens,
            throughput=Throughput.of(requests, tokens, duration_s),
            goodput=Goodput.of(timeline, slo, duration_s) if slo is not None else None,
            prefix_hit_ratio=PrefixHitRatio.of(timeline),
            kv=KvUsage.of(timeline),
            preemptions=int(timeline.preemptions.sum(dtype=np.int64)),
            accept_length=ratio(
                timeline.burst_tokens + timeline.draft_rounds + timeline.accepted_tokens,
                timeline.burst_steps + timeline.draft_rounds,
            ),
            drafted_tokens=timeline.drafted_tokens,
            wasted_drafts=timeline.drafted_tokens - timeline.accepted_tokens,
            steps=timeline.steps,
            worst_hour=WorstHour.of(timeline, slo),
            tiers=TiersReport.of(timeline, run),
            handoff=HandOffReport.of(timeline, run.disaggregation),
        )

    @cached_property
    def latencies(self) -> Latencies:
        """Latencies of each request."""
        return Latencies.of(self.columns)

    @cached_property
    def groups(self) -> Groups:
        """Sums over groups of sessions, from which the noise of a difference between runs follows."""
        return Groups.of(self.columns, None if self.goodput is None else self.goodput.slo)

    def _bound_hits(self) -> HitBounds | None:
        """Compute bounds on this run's hits; None with KV cache groups, whose windows and states lower even those."""
        return (
            None
            if has_kv_groups(self) or self.workload is None
            else HitBounds(self.workload, self.columns, LastTokens.of(self.run))
        )

    @cached_property
    def _unlimited_hit_ratios(self) -> tuple[float | None, float | None]:
        bounds = self._bound_hits() if self.kv.evictions else None
        if bounds is None:
            return None, None
        is_one = self.columns.num_workers == 1 or self.handoff is not None
        return bounds.hit_ratio(), None if is_one else bounds.hit_ratio(per_worker=True)

    @cached_property
    def unlimited_hit_ratio(self) -> float | None:
        """Hit ratio of one unlimited cache; None with KV cache groups, without evictions or if unknown."""
        known = self.run.unlimited_hit_ratio
        return self._unlimited_hit_ratios[0] if known is None else known

    @cached_property
    def routed_hit_ratio(self) -> float | None:
        """Hit ratio of unlimited caches, one per worker, with this run's routing; None for one worker or if unknown."""
        known = self.run.routed_hit_ratio
        return self._unlimited_hit_ratios[1] if known is None else known

    @cached_property
    def hit_curve(self) -> HitCurve | None:
        """Hit ratio by size of a worker's cache, in this run's order; None with KV cache groups or if unknown."""
        bounds = self._bound_hits()
        return None if bounds is None else bounds.curve()

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Findings with remedies, the most important first; empty if no rule applies."""
        from understudy.report.verdicts import find_verdicts

        return find_verdicts(self) if self.advice is None else self.advice.verdicts

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
