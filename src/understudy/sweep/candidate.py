"""A candidate of a sweep: its settings, the key of its result, and the function that replays it."""

from __future__ import annotations

import hashlib
import math
import time
import traceback
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from understudy.api import replay
from understudy.errors import ConfigError, UnderstudyError
from understudy.outputs import files_named
from understudy.report.noise import ATTAINMENT, estimate_share
from understudy.report.thresholds import MIN_REQUESTS
from understudy.report.worst_hour import WorstHour, format_length
from understudy.run.fleet_size import count_gpus, count_workers
from understudy.run.options import Execution
from understudy.text import duration
from understudy.tiers.plan import TierPlan
from understudy.user_code import locate_user_failure
from understudy.version import __version__
from understudy.workload.users import scale_users

if TYPE_CHECKING:
    from understudy.report import Report
    from understudy.report.goodput import Slo
    from understudy.report.statistics import Statistics
    from understudy.run.settings import ReplaySettings
    from understudy.sweep.space import Value
    from understudy.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Settings of one replay."""

    flags: dict[str, Any]
    """Varied flags."""
    settings: ReplaySettings
    slo: Slo
    max_tokens: int | None = None
    model: str | None = None
    """Model and type of its KV cache as given, for the engine's command; the settings contain their effects."""
    kv_dtype: str | None = None
    requests: int | None = None
    """Only the first requests of the workload; None for all."""
    goal_window_s: float | None = None
    """Length of the windows in each of which the goal must hold; None for the whole alone."""

    @property
    def judged_window_s(self) -> float | None:
        """Length of the windows of the goal; None on a part of the workload, which may be too short for them."""
        return self.goal_window_s if self.requests is None else None

    @property
    def gpus(self) -> int:
        """GPUs of the fleet; a rank without a named GPU counts as one."""
        return count_gpus(self.settings)

    @property
    def host_bytes(self) -> float:
        """Host memory of all workers for KV blocks, in bytes; infinite if it is unlimited."""
        settings = self.settings
        groups = [(pool.workers, pool.engine, pool.resolve_tiers()) for pool in settings.pools]
        total = 0.0
        for workers, engine, tiers in groups or [(count_workers(settings), settings.engine, settings.tiers)]:
            plan = TierPlan.of(tiers, engine.block_size)
            if plan is not None:  # g2 is the nearest tier
                blocks = plan.tiers[0].blocks
                total += math.inf if blocks is None else workers * blocks * plan.block_bytes
        return total

    def key(self, workload_digest: str) -> str:
        """Return the key of the result: a digest of the settings, the files that they name, workload and version."""
        settings = msgspec.to_builtins(msgspec.structs.replace(self.settings, notes=()), enc_hook=repr)
        files = {name: _hash(path.read_bytes()) for name, path in files_named(self.settings).items()}
        slo = {"ttft_ms": self.slo.ttft_ms, "itl_ms": self.slo.itl_ms, "e2e_ms": self.slo.e2e_ms}
        parts = [
            __version__,
            "worst hour",
            self.goal_window_s,
            workload_digest,
            self.requests,
            self.max_tokens,
            slo,
            files,
            settings,
        ]
        return _hash(msgspec.json.encode(parts, order="deterministic"))


class Tail(msgspec.Struct, frozen=True):
    """Percentiles of a latency over all requests, ms; None if no request has it."""

    p50: float | None
    p90: float | None
    p99: float | None


class Hour(msgspec.Struct, frozen=True):
    """The worst window of a run: `understudy.report.worst_hour.WorstHour` with objectives."""

    start_s: float
    length_s: float
    requests: int
    requests_per_s: float
    attainment: float
    ttft_p99_ms: float | None
    e2e_p99_ms: float | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one replay that a sweep compares."""

    requests: int
    good: float
    """Share of requests within all objectives."""
    within: dict[str, float]
    """Share of requests within each objective."""
    goodput_per_s: float | None
    """Requests per s within all objectives."""
    ttft_ms: Tail
    itl_ms: Tail
    """Mean time between the tokens of a request."""
    e2e_ms: Tail
    output_tokens_per_s: float | None
    input_tokens_per_s: float | None = None
    prefix_hit_ratio: float | None
    rejected: int
    preemptions: int
    duration_s: float
    digest: str
    worst_hour: Hour | None = None
    """The hour, or window of the goal, in which fewest requests were good; None for less than two of them."""
    goal_window_s: float | None = None
    """Length of the windows in each of which the goal must hold."""
    good_range: tuple[float, float] | None = None
    """Confidence interval (95 %) of `good` for other sessions of the same kind; None for few sessions."""

    @property
    def judged(self) -> float:
        """Share of good requests that the goal judges: of the whole, or of the worst window if it is smaller."""
        if self.goal_window_s is None or self.worst_hour is None:
            return self.good
        return min(self.good, self.worst_hour.attainment)


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of a candidate: its summary, or why it could not be replayed."""

    key: str
    flags: dict[str, Any]
    requests: int | None = None
    summary: Summary | None = None
    error: str | None = None
    cpu_s: float = 0.0
    lost: bool = False
    """Whether its process ended without a result; such an outcome is not stored."""


def evaluate(workload: Workload, candidate: Candidate, key: str) -> Outcome:
    """Replay a candidate and summarise it; an invalid setting becomes the outcome's error."""
    started = time.process_time()
    try:
        summary = summarise(replay_candidate(workload, candidate), candidate.judged_window_s)
    except Exception as error:  # user-defined code may raise anything, and other candidates are not affected
        text = str(error) if isinstance(error, UnderstudyError) else _describe_failure(error)
        return Outcome(key=key, flags=candidate.flags, requests=candidate.requests, error=text)
    cpu_s = time.process_time() - started
    return Outcome(
        key=key, flags=candidate.flags, requests=candidate.requests, summary=summary, cpu_s=round(cpu_s, 4)
    )


def replay_candidate(workload: Workload, candidate: Candidate) -> Report:
    """Replay a candidate on one thread and return its report. Errors as `understudy.replay`."""
    settings = candidate.settings
    workload = _scale_users(workload, settings.users, settings.seed)
    return replay(
        workload if candidate.requests is None else workload.head(candidate.requests),
        None if settings.pools else settings.engine,
        workers=settings.workers,
        pools=settings.pools,
        disaggregation=settings.disaggregation,
        routing=settings.policy,
        seed=settings.seed,
        load=settings.load,
        max_tokens=candidate.max_tokens,
        tiers=None if settings.pools else settings.tiers,
        slo=candidate.slo,
        ranks=settings.ranks,
        execution=Execution(threads=1),
    )


@lru_cache(maxsize=1)
def _scale_users(workload: Workload, users: float, seed: int) -> Workload:
    """Scale the users; neighbouring candidates of a process usually have the same ones."""
    return scale_users(workload, users, seed=seed)


def summarise(report: Report, goal_window_s: float | None = None) -> Summary:
    """Return the numbers of a report that a sweep compares. The report must have objectives.

    ConfigError if its arrivals do not hold two windows of the goal.
    """
    goodput = report.goodput
    assert goodput is not None
    done = report.columns.completed
    hour = report.worst_hour
    if goal_window_s is not None:
        hour = WorstHour.of(report.columns, goodput.slo, goal_window_s)
        if hour is None:
            raise ConfigError(describe_short_trace(report, goal_window_s))
    within = {
        name: float((column & done).mean()) for name, column in goodput.slo.within(report.columns).items()
    }
    return Summary(
        requests=report.requests.total,
        good=goodput.ratio,
        within=within,
        goodput_per_s=_number(goodput.requests_per_s),
        ttft_ms=_tail(report.ttft_ms),
        itl_ms=_tail(report.tpot_ms),
        e2e_ms=_tail(report.e2e_ms),
        output_tokens_per_s=_number(report.throughput.output_tokens_per_s),
        input_tokens_per_s=_number(report.throughput.input_tokens_per_s),
        prefix_hit_ratio=_number(report.prefix_hit_ratio.first_admission),
        rejected=report.requests.rejected,
        preemptions=report.preemptions,
        duration_s=report.duration_s,
        digest=report.run.digest or "",
        worst_hour=None if hour is None else _read_hour(hour),
        goal_window_s=goal_window_s,
        good_range=estimate_share(report.groups, ATTAINMENT),
    )


def describe_short_trace(report: Report, window_s: float) -> str:
    """Return why a run has no windows of the goal."""
    arrived = report.columns.arrival_ns[report.columns.arrival_ns >= 0]
    spans = duration(float(np.ptp(arrived)) / 1e9 if len(arrived) else 0.0)
    return (
        f"--goal-window {format_length(window_s)}: the trace spans {spans}, and a window of the goal needs twice its "
        f"length and {MIN_REQUESTS} requests; give a shorter window or leave it out"
    )


def _read_hour(hour: WorstHour) -> Hour:
    return Hour(
        start_s=hour.start_s,
        length_s=hour.length_s,
        requests=hour.requests,
        requests_per_s=hour.requests_per_s,
        attainment=hour.attainment,
        ttft_p99_ms=_number(hour.ttft_p99_ms),
        e2e_p99_ms=_number(hour.e2e_p99_ms),
    )


def format_flags(flags: dict[str, Value]) -> str:
    """Return the varied flags as one line, such as `workers=4 routing=kv`."""
    return " ".join(f"{name}={'none' if value is None else value}" for name, value in flags.items())


def _describe_failure(error: Exception) -> str:
    failure = locate_user_failure(error)
    if failure is not None:
        return str(failure)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"unhandled {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"


def _tail(statistics: Statistics) -> Tail:
    return Tail(_number(statistics.p50), _number(statistics.p90), _number(statistics.p99))


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
