"""Verdicts: problems found in a report, each with its numbers and a remedy.

A rule is a function from a report to a `Verdict`, or to None if it does not apply.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from understudy.report.engine_terms import SGLANG_TERMS, flags_of, terms_of
from understudy.report.general_advice import (
    advise_on_scattering,
    allows_kv_routing,
    name_balancing_routing,
    name_more_tiers,
)
from understudy.report.group_verdicts import group_tail_gone
from understudy.report.handoff_verdicts import handoff_bottleneck, handoff_failures, handoff_link
from understudy.report.latency import NS_PER_S
from understudy.report.series import StepFunction
from understudy.report.text import duration, quantity
from understudy.report.tier_verdicts import has_shared_tier, link_at_its_limit, tier_hurts, tier_never_read
from understudy.report.verdict import LONG_QUEUE, MIN_REQUESTS, Verdict, compute_queue_share, list_pools
from understudy.router.kv import KvRouting
from understudy.workload.arrivals import ClosedLoop, OpenLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.report.report import Report
    from understudy.run.timeline import Timeline


_HEADROOM = 1.2
"""Extra workers to recommend: at full load queues grow, and more workers split the cache."""

_KV_FULL = 0.95
"""KV usage from which requests may wait for blocks."""

_PHASES_OF_OBJECTIVE = {
    "ttft_ms": ("queue", "prefill"),
    "itl_ms": ("decode",),
    "e2e_ms": ("queue", "prefill", "decode"),
}
"""Phases of a request that count towards an objective."""


def find_verdicts(report: Report) -> tuple[Verdict, ...]:
    """Apply all rules; return the verdicts, the most important first."""
    rules = RULES if report.handoff is None else HANDOFF_RULES
    return tuple(verdict for rule in rules if (verdict := rule(report)) is not None)


def nothing_completed(report: Report) -> Verdict | None:
    """Report that no request received its whole output."""
    requests = report.requests
    if requests.completed or not requests.total:
        return None
    return Verdict(
        "nothing_completed", f"No request completed: {_count_failures(report)}.", _first_reason(report)
    )


def rejected(report: Report) -> Verdict | None:
    """Report that more than 1 % of the requests were rejected."""
    requests = report.requests
    if not requests.completed or requests.rejected <= 0.01 * requests.total:
        return None
    share = quantity(requests.rejected / requests.total, "ratio")
    return Verdict(
        "rejected",
        f"{requests.rejected:,} of {requests.total:,} requests ({share}) were rejected; latencies exclude them.",
        _first_reason(report),
    )


def overloaded(report: Report) -> Verdict | None:
    """Report an open-loop run whose queue grew, or requests that spent 10 % of their time in queues.

    Later turns, which wait for the turn before, and the clients of a closed loop keep a queue from growing.
    """
    return _find_growing_queue(report) or _find_long_waits(report) or _find_waits(report)


def _find_growing_queue(report: Report) -> Verdict | None:
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
        f"Use about {max(enough, timeline.num_workers + 1):,} workers (now {timeline.num_workers:,}), which includes "
        "20 % headroom.",
    )


def _find_long_waits(report: Report) -> Verdict | None:
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


def _find_waits(report: Report) -> Verdict | None:
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


def _describe_wait(report: Report) -> str:
    """Name what requests in queues wait for, with its numbers."""
    terms, tiers, timeline = terms_of(report), report.tiers, report.columns
    queued_s = report.queue_ms.mean / 1e3 * report.requests.completed
    if tiers is not None and tiers.parked_s >= 0.5 * queued_s:
        return f"they wait for loads from tiers ({duration(tiers.parked_ms.mean / 1e3)} each)"
    reasons = []
    if report.kv.usage_max >= _KV_FULL or report.preemptions:
        used = quantity(report.kv.usage_max, "ratio")
        reasons.append(
            f"for the KV cache ({terms.usage} at most {used}, {report.preemptions:,} {terms.requeued})"
        )
    limits = {pool.engine.get(terms.requests_setting) for pool in list_pools(report)}
    limit = limits.pop() if len(limits) == 1 else None
    if limit is not None and timeline.sample_running.max(initial=0) >= limit:
        reasons.append(f"for one of the {limit:,} running requests to end ({flags_of(report, 'requests')})")
    return f"they wait {' and '.join(reasons)}" if reasons else "they wait while other prompts are computed"


def goal_missed(report: Report) -> Verdict | None:
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
    if share < 0.05 or not late.any():
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
    gaps = timeline.output_tokens[late] - 1.0
    cause = {
        "queue": f"they waited {share_of_time} to be scheduled",
        "prefill": f"their prefill took {share_of_time}",
        "decode": f"their decode took {share_of_time}"
        if worst == "e2e_ms"
        else f"theirs is {1e3 * mean_s[longest] / float(gaps.mean()):.1f} ms",
    }[longest]
    advise = {"queue": _advise_on_queue, "prefill": _advise_on_prefill, "decode": _advise_on_decode}[longest]
    return Verdict(
        "goal_missed",
        f"{quantity(share, 'ratio')} of the requests miss the objective of {getattr(slo, worst):g} ms for "
        f"{worst.removesuffix('_ms').upper()}: {cause}, on average.",
        advise(report),
    )


def _advise_on_queue(report: Report) -> str:
    remedies = [f"Use more workers (now {report.columns.num_workers:,})"]
    if isinstance(report.run.load, ClosedLoop):
        remedies.append("fewer concurrent sessions (--concurrency)")
    if report.kv.usage_max >= _KV_FULL:
        used = quantity(report.kv.usage_mean, "ratio")
        more = _name_more_memory(report)
        remedies.append(f"{more} ({flags_of(report, 'memory')}; {used} were in use on average, at times all)")
    return f"{' or '.join(remedies)} to shorten the queue."


def _advise_on_prefill(report: Report) -> str:
    found = quantity(report.prefix_hit_ratio.first_admission, "ratio")
    routing = "--routing kv or " if allows_kv_routing(report) else ""
    return (
        f"Raise the prefix hit ratio (now {found}) with {routing}{_name_more_memory(report)}, or use more GPUs "
        "per worker (--tensor-parallel-size)."
    )


def _advise_on_decode(report: Report) -> str:
    batches = {pool.engine.get("max_num_seqs") for pool in list_pools(report)} - {None}
    now = f" (now {batches.pop():,})" if len(batches) == 1 else ""
    return f"Lower {flags_of(report, 'requests')}{now}, or use more workers or faster GPUs, to shorten the steps."


def cache_too_small(report: Report) -> Verdict | None:
    """Report that blocks were evicted and an unlimited cache would hit much more."""
    best, reference = report.unlimited_hit_ratio, "an unlimited cache would hit"
    if report.routed_hit_ratio is not None and not has_shared_tier(report):
        best, reference = report.routed_hit_ratio, "unlimited caches with the same routing would hit"
    found = report.prefix_hit_ratio.first_admission
    if best is None or not report.kv.evictions or not best - found >= 0.05 or found >= 0.8 * best:
        return None
    more = name_more_tiers(report)
    tiers = f" or {more}" if more else ""
    terms = terms_of(report)
    size = report.columns.blocks_per_worker
    if terms is SGLANG_TERMS:
        size *= int(list_pools(report)[0].engine["block_size"])
    return Verdict(
        "cache_too_small",
        f"The cache is too small: {quantity(found, 'ratio')} of the prompt tokens hit, {reference} "
        f"{quantity(best, 'ratio')}; {report.kv.evictions:,} {terms.block}s were evicted.",
        f"Use {_name_more_memory(report)} ({flags_of(report, 'memory')}, now {size:,} per worker){tiers}.",
    )


def _name_more_memory(report: Report) -> str:
    return "a larger KV pool" if terms_of(report) is SGLANG_TERMS else "more blocks"


def scattered_prefixes(report: Report) -> Verdict | None:
    """Report that requests with a shared prefix went to different workers, whose caches are separate."""
    routed, best = report.routed_hit_ratio, report.unlimited_hit_ratio
    if routed is None or best is None or not best - routed >= 0.05 or routed >= 0.8 * best:
        return None
    # The KV-aware router already considers prefixes.
    if has_shared_tier(report) or isinstance(report.run.routing, KvRouting):
        return None
    return Verdict(
        "scattered_prefixes",
        f"Requests with the same prefix go to different workers: even unlimited caches would hit "
        f"{quantity(routed, 'ratio')} with this routing; one shared cache would hit {quantity(best, 'ratio')}.",
        advise_on_scattering(report),
    )


def hot_worker(report: Report) -> Verdict | None:
    """Report a worker that computed at least 1.5 times the mean tokens."""
    timeline = report.columns
    served = timeline.worker >= 0
    if timeline.num_workers < 2 or served.sum() < 20 * timeline.num_workers:
        return None
    hottest, times_mean = compute_balance(timeline)
    if times_mean < 1.5:
        return None
    return Verdict(
        "hot_worker",
        f"Worker {hottest} is overloaded: it computed {times_mean:.1f}× the mean tokens of a worker.",
        f"Balance the load with another routing (--routing {name_balancing_routing(report)}).",
    )


def compute_balance(timeline: Timeline) -> tuple[int, float]:
    """Return the worker that computed most tokens, and its tokens divided by the mean of workers; 0 without tokens."""
    served = timeline.worker >= 0
    tokens = timeline.prompt_tokens.astype(np.int64) - timeline.cached_tokens_first + timeline.output_tokens
    by_worker = np.bincount(timeline.worker[served], tokens[served], timeline.num_workers)
    hottest, mean = int(by_worker.argmax()), float(by_worker.mean())
    return hottest, float(by_worker[hottest]) / mean if mean else 0.0


def preemption_storm(report: Report) -> Verdict | None:
    """Report more than one preemption (SGLang: retraction) per ten requests."""
    requests = report.requests.completed
    if report.preemptions <= max(10, 0.1 * requests):
        return None
    terms = terms_of(report)
    done = terms.requeued.replace("ions", "ed")
    return Verdict(
        "preemption_storm",
        f"{report.preemptions:,} {terms.requeued} for {requests:,} requests; {done} requests recompute their tokens.",
        terms.storm_remedy,
    )


def steps_too_long(report: Report) -> Verdict | None:
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
        f"Lower {flags_of(report, 'step')}{now}; TTFT will rise.",
    )


def compute_late_gaps(timeline: Timeline, goal_ms: float) -> float:
    """Return the share of gaps between tokens that exceed a goal in ms; 0 without gaps."""
    gaps = int(timeline.itl_count.sum())
    return int(timeline.itl_count[timeline.itl_ns > goal_ms * 1e6].sum()) / gaps if gaps else 0.0


def limit_never_reached(report: Report) -> Verdict | None:
    """Report a concurrency that the run never reached."""
    timeline, load = report.columns, report.run.load
    if not isinstance(load, ClosedLoop) or not len(timeline.arrival_ns) or load.concurrency < 2:
        return None
    started = timeline.arrival_ns[timeline.arrival_ns >= 0]
    ended = timeline.finish_ns[timeline.finish_ns >= 0]
    times = np.concatenate([started, ended])
    changes = np.concatenate([np.ones(len(started), np.int64), -np.ones(len(ended), np.int64)])
    order = np.lexsort((-changes, times))
    most = int(np.cumsum(changes[order]).max(initial=0))
    if most >= load.concurrency:
        return None
    return Verdict(
        "limit_never_reached",
        f"The concurrency of {load.concurrency:,} was never reached: at most {most:,} requests were in flight.",
        "Give a longer trace, or a lower --concurrency; the result stays the same.",
    )


RULES: tuple[Callable[[Report], Verdict | None], ...] = (
    nothing_completed,
    rejected,
    overloaded,
    goal_missed,
    cache_too_small,
    group_tail_gone,
    scattered_prefixes,
    tier_hurts,
    hot_worker,
    preemption_storm,
    link_at_its_limit,
    steps_too_long,
    tier_never_read,
    limit_never_reached,
)


HANDOFF_RULES: tuple[Callable[[Report], Verdict | None], ...] = (
    nothing_completed,
    rejected,
    overloaded,
    goal_missed,
    handoff_failures,
    handoff_bottleneck,
    handoff_link,
    preemption_storm,
)
"""Rules for prefill and decode workers: the others compare workers that all do the same."""


def _count_failures(report: Report) -> str:
    requests = report.requests
    named = {
        "rejected": requests.rejected,
        "cancelled": requests.cancelled,
        "failed": requests.failed,
        "unfinished": requests.unfinished,
    }
    return ", ".join(f"{count:,} {name}" for name, count in named.items() if count)


def _first_reason(report: Report) -> str:
    for row, reason in report.columns.reject_reasons.items():
        return f"The first one, request {row}: {reason}."
    return "Inspect the requests (--requests-jsonl)."
