"""`ReportData`: the metrics of a run and the timeline they are computed from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from understudy.errors import InvalidArgument
from understudy.report.counts import KvUsage, PrefixHitRatio, RequestCounts, Throughput, TokenCounts
from understudy.report.fault_report import FaultReport
from understudy.report.fleet_use import FleetUse
from understudy.report.goodput import Goodput, ratio
from understudy.report.groups import Groups
from understudy.report.handoff import HandOffReport
from understudy.report.latency import NS_PER_MS, NS_PER_S, Latencies, present
from understudy.report.statistics import Statistics
from understudy.report.tiers import TiersReport
from understudy.report.worst_hour import WorstHour
from understudy.run.admissions import HitBounds, LastTokens
from understudy.run.facts import RunFacts

if TYPE_CHECKING:
    from typing import Self

    from understudy.explain.saved_run import SavedRun
    from understudy.report.goodput import Slo
    from understudy.router.choices import Choices
    from understudy.router.kv import Decisions
    from understudy.run.timeline import Timeline
    from understudy.workload.reuse import HitCurve
    from understudy.workload.workload import Workload


@dataclass(frozen=True, eq=False, kw_only=True)
class ReportData:
    """Metrics of a run, and bounds on its hits. Rules and charts read them; `Report` adds verdicts and outputs."""

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
    fleet_use: FleetUse | None = None
    """Cost of a fleet whose workers join and leave, and its scaler's changes; None for a fixed fleet."""
    fault_report: FaultReport | None = None
    """Faults, and the requests that lost their worker; None for a run without."""
    without_tiers: Self | None = None
    """Report of the workload without tiers, if it was requested."""
    workload: Workload | None = None
    """Requests of an offline run, from which `unlimited_hit_ratio`, `routed_hit_ratio` and `hit_curve` are computed."""
    decisions: Decisions | Choices | None = None
    """Decisions of a KV-aware or a user-defined router, for the page."""
    saved: SavedRun | None = None
    """The run with every step, if it was recorded, for the page."""

    @classmethod
    def build(cls, timeline: Timeline, run: RunFacts | None = None, slo: Slo | None = None) -> Self:
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
        goodput = Goodput.of(timeline, slo, duration_s) if slo is not None else None
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
            goodput=goodput,
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
            fleet_use=FleetUse.of(timeline, run, goodput),
            fault_report=FaultReport.of(timeline, run),
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
        """Compute bounds on this run's hits; with KV cache groups those of full attention alone."""
        if self.workload is None:
            return None
        return HitBounds(self.workload, self.columns, LastTokens.of(self.run))

    @cached_property
    def _unlimited_hit_ratios(self) -> tuple[float | None, float | None]:
        bounds = self._bound_hits() if self.kv.evictions else None
        if bounds is None:
            return None, None
        is_one = self.columns.num_workers == 1 or self.handoff is not None
        return bounds.hit_ratio(), None if is_one else bounds.hit_ratio(per_worker=True)

    @cached_property
    def unlimited_hit_ratio(self) -> float | None:
        """Hit ratio of one unlimited cache; None without evictions or if unknown."""
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
        bounds = None if self.run.has_kv_groups else self._bound_hits()
        return None if bounds is None else bounds.curve()
