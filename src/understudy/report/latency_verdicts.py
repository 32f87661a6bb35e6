"""Verdicts on queues and on objectives that requests miss."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from understudy.defaults import GOAL
from understudy.report.engine_terms import flags_of, terms_of
from understudy.report.general_advice import allows_kv_routing, name_more_memory
from understudy.report.latency import NS_PER_S
from understudy.report.series import StepFunction
from understudy.report.thresholds import KV_FULL, LONG_QUEUE, MIN_REQUESTS
from understudy.report.verdict import Verdict, compute_queue_share, list_pools
from understudy.run.fleet_size import describe_engines
from understudy.text import duration, quantity
from understudy.workload.arrivals import ClosedLoop, OpenLoop

if TYPE_CHECKING:
    from understudy.report.data import ReportData
    from understudy.run.timeline import Timeline


_HEADROOM = 1.2
"""Extra workers to recommend: at full load queues grow, and more workers split the cache."""

_PHASES_OF_OBJECTIVE = {
    "ttft_ms": ("queue", "prefill"),
    "itl_ms": ("decode",),
    "e2e_ms": ("queue", "prefill", "decode"),
}
"""Phases of a request that count towards an objective."""


def overloaded(report: ReportData) -> Verdict | None:
    """Report an open-loop run whose queue grew, or requests that spent 10 % of their time in queues.

    Later turns, which wait for the turn before, and the clients of a closed loop keep a queue from growing.
    """
    return _find_growing_queue(report) or _find_long_waits(report) or _find_waits(report)


def _find_growing_queue(report: ReportData) -> Verdict | None:
    """Report an open-loop run whose queue grew most of the time and was long at the last arrival."""
    timeline = report.columns
    if not isinstance(report.run.load, OpenLoop | None) or not len(timeline.sample_time_ns):
        return None
    arrived = np.sort(timeline.arrival_ns[timeline.arrival_ns >= 0])
    if len(arrived) < 2 or arrived[-1] - arrived[0] < NS_PER_S:
        return None
    start, last = int(arrived[0]), int(arrived[-1])
    minutes = max(4, min(60, round((last - start) / 60e9)))
    waiting = StepFunction.fleet(timeline, timeline.sample_waiting).means(
        np.linspace(start, last, minutes + 1)
    )
    grew = int((np.diff(waiting, prepend=0.0) > 0).sum())
    backlog = float(waiting[-1])
    running = StepFunction.fleet(timeline, timeline.sample_running).means(
        np.array([start, last], np.float64)
    )[0]
    if (
        grew < 0.6 * minutes
        or backlog < max(10.0, float(running))
        or backlog < 2 * float(waiting[minutes // 2 - 1])
    ):
        return None
    served = int(((timeline.finish_ns >= 0) & (timeline.finish_ns <= last)).sum())
    enough = math.ceil(_HEADROOM * timeline.num_workers * len(arrived) / max(served, 1))
    interval = duration((last - start) / minutes / NS_PER_S)
    return Verdict(
        "overloaded",
        f"Overloaded: the queue grew in {grew} of {minutes} intervals of {interval}, to {backlog:,.0f} waiting "
        f"requests; {served:,} of {len(arrived):,} were served by the last arrival.",
        f"Use about {_name_fleet(report, max(enough, timeline.num_workers + 1))}, which includes 20 % headroom.",
    )


def _name_fleet(report: ReportData, workers: int) -> str:
    """Return a number of workers and the present one; of engines, where each is several data-parallel ranks."""
    now = report.columns.num_workers
    if (ranks := report.run.data_parallel_size) is None:
        return f"{workers:,} workers (now {now:,})"
    return f"{describe_engines(math.ceil(workers / ranks), ranks)} (now {now // ranks:,})"


def _find_long_waits(report: ReportData) -> Verdict | None:
    """Report an open-loop run whose requests spent more time in the queue than in the engine."""
    timeline = report.columns
    if not isinstance(report.run.load, OpenLoop | None):
        return None
    done = timeline.completed & (timeline.first_admit_ns >= 0)
    if done.sum() < MIN_REQUESTS:
        return None
    waited_ns = float((timeline.first_admit_ns - timeline.arrival_ns)[done].mean())
    share = waited_ns / max(float((timeline.served_ns - timeline.arrival_ns)[done].mean()), 1.0)
    if share < 0.5:
        return None
    return Verdict(
        "overloaded",
        f"Overloaded: requests waited {duration(waited_ns / NS_PER_S)} to be scheduled, "
        f"{quantity(share, 'ratio')} of their total time.",
        _advise_on_queue(report),
    )


def _find_waits(report: ReportData) -> Verdict | None:
    """Report queues that take a tenth of the time and their reason, unless a missed goal is reported.

    Prefill and decode workers have rules of their own for each queue.
    """
    share = compute_queue_share(report)
    if report.handoff is not None or report.requests.completed < MIN_REQUESTS or share < LONG_QUEUE:
        return None
    if goal_missed(report) is not None:
        return None
    return Verdict(
        "overloaded",
        f"Requests spend {quantity(share, 'ratio')} of their time in queues (mean "
        f"{duration(report.queue_ms.mean / 1e3)}): {_describe_wait(report)}.",
        _advise_on_queue(report),
    )


def _describe_wait(report: ReportData) -> str:
    """Name what requests in queues wait for, with its numbers."""
    terms, tiers, timeline = terms_of(report), report.tiers, report.columns
    queued_s = report.queue_ms.mean / 1e3 * report.requests.completed
    if tiers is not None and tiers.parked_s >= 0.5 * queued_s:
        return f"they wait for loads from tiers ({duration(tiers.parked_ms.mean / 1e3)} each)"
    reasons = []
    if report.kv.usage_max >= KV_FULL or report.preemptions:
        used = quantity(report.kv.usage_max, "ratio")
        reasons.append(
            f"for the KV cache ({terms.usage} at most {used}, {report.preemptions:,} {terms.requeued})"
        )
    limits = {pool.engine.get(terms.requests_setting) for pool in list_pools(report)}
    limit = limits.pop() if len(limits) == 1 else None
    if limit is not None and timeline.sample_running.max(initial=0) >= limit:
        reasons.append(f"for one of the {limit:,} running requests to end ({flags_of(report, 'requests')})")
    return f"they wait {' and '.join(reasons)}" if reasons else "they wait while other prompts are computed"


def goal_missed(report: ReportData) -> Verdict | None:
    """Report the objective that most requests miss, and the phase that takes most of the time."""
    timeline = report.columns
    completed = timeline.completed
    if report.goodput is None or completed.sum() < MIN_REQUESTS:
        return None
    slo = report.goodput.slo
    missed = {name: completed & ~within for name, within in slo.within(timeline).items()}
    worst = max(missed, key=lambda name: int(missed[name].sum()))
    late = missed[worst] & (timeline.output_tokens > 0)
    share = int(missed[worst].sum()) / int(completed.sum())
    if report.goodput.requests >= GOAL * int(completed.sum()) or not late.any():
        return None
    spans = {
        "queue": timeline.first_admit_ns - timeline.arrival_ns,
        "prefill": timeline.first_token_ns - timeline.first_admit_ns,
        "decode": timeline.last_token_ns - timeline.first_token_ns,
    }
    phases = _PHASES_OF_OBJECTIVE[worst]
    mean_s = {phase: float(spans[phase][late].mean()) / NS_PER_S for phase in phases}
    longest = max(phases, key=lambda phase: mean_s[phase])
    share_of_time = f"{duration(mean_s[longest])} of {duration(sum(mean_s.values()))}"
    if worst == "itl_ms":
        gaps = float((timeline.output_tokens[late] - 1).mean())
        cause = f"theirs is {1e3 * mean_s[longest] / gaps:.1f} ms"
    else:
        cause = {
            "queue": f"they waited {share_of_time} to be scheduled",
            "prefill": f"their prefill took {share_of_time}",
            "decode": f"their decode took {share_of_time}",
        }[longest]
    advise = {"queue": _advise_on_queue, "prefill": _advise_on_prefill, "decode": _advise_on_decode}[longest]
    return Verdict(
        "goal_missed",
        f"{quantity(share, 'ratio')} of the requests miss the objective of {getattr(slo, worst):g} ms for "
        f"{worst.removesuffix('_ms').upper()}: {cause}, on average.",
        advise(report),
    )


def _advise_on_queue(report: ReportData) -> str:
    ranks = report.run.data_parallel_size
    now = report.columns.num_workers // (ranks or 1)
    remedies = [f"Use more {'workers' if ranks is None else 'engines'} (now {now:,})"]
    if isinstance(report.run.load, ClosedLoop):
        remedies.append("fewer concurrent sessions (--concurrency)")
    if report.kv.usage_max >= KV_FULL:
        used = quantity(report.kv.usage_mean, "ratio")
        more = name_more_memory(report)
        remedies.append(f"{more} ({flags_of(report, 'memory')}; {used} were in use on average, at times all)")
    return f"{' or '.join(remedies)} to shorten the queue."


def _advise_on_prefill(report: ReportData) -> str:
    found = quantity(report.prefix_hit_ratio.first_admission, "ratio")
    routing = "--routing kv or " if allows_kv_routing(report) else ""
    return (
        f"Raise the prefix hit ratio (now {found}) with {routing}{name_more_memory(report)}, or use more GPUs "
        "per worker (--tensor-parallel-size)."
    )


def _advise_on_decode(report: ReportData) -> str:
    batches = {pool.engine.get("max_num_seqs") for pool in list_pools(report)} - {None}
    now = f" (now {batches.pop():,})" if len(batches) == 1 else ""
    return f"Lower {flags_of(report, 'requests')}{now}, or use more workers or faster GPUs, to shorten the steps."


def steps_too_long(report: ReportData) -> Verdict | None:
    """Report that most gaps meet the ITL objective, but steps that also prefill do not; none if each request does."""
    goal = None if report.goodput is None else report.goodput.slo.itl_ms
    timeline = report.columns
    if goal is None or not len(timeline.itl_ns) or report.itl_ms.p50 > goal:
        return None
    if report.goodput is not None and report.goodput.slo.within(timeline)["itl_ms"][timeline.completed].all():
        return None
    late = compute_late_gaps(timeline, goal)
    if late < 0.01:
        return None
    terms = terms_of(report)
    budgets = {pool.engine.get(terms.step_setting) for pool in list_pools(report)}
    budget = budgets.pop() if len(budgets) == 1 else None
    now = "" if budget is None else f" (now {budget:,})"
    return Verdict(
        "steps_too_long",
        f"{quantity(late, 'ratio')} of the gaps exceed the ITL objective of {goal:g} ms, although half are within "
        f"{report.itl_ms.p50:.1f} ms: {terms.step_cause}.",
        f"Lower {flags_of(report, 'step')}{now}; TTFT will rise. Or use more workers, whose steps have fewer requests.",
    )


def compute_late_gaps(timeline: Timeline, goal_ms: float) -> float:
    """Return the share of gaps between tokens that exceed a goal in ms; 0 without gaps."""
    gaps = int(timeline.itl_count.sum())
    return int(timeline.itl_count[timeline.itl_ns > goal_ms * 1e6].sum()) / gaps if gaps else 0.0
