"""Verdicts: problems found in a report, each with its numbers and a remedy.

A rule is a function from a report to a `Verdict`, or to None if it does not apply.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from understudy.report.agent_verdicts import sessions_return_cold, tools_dominate
from understudy.report.engine_terms import flags_of, kind_of_run, terms_of
from understudy.report.general_advice import (
    advise_on_scattering,
    name_balancing_routing,
    name_more_memory,
    name_more_tiers,
)
from understudy.report.group_verdicts import group_tail_gone
from understudy.report.handoff_verdicts import handoff_bottleneck, handoff_failures, handoff_link
from understudy.report.late_machine import machine_late
from understudy.report.latency_verdicts import goal_missed, overloaded, steps_too_long
from understudy.report.scaler_verdicts import scaler_drains_in_queue, scaler_flaps, scaler_late
from understudy.report.tier_verdicts import has_shared_tier, link_at_its_limit, tier_hurts, tier_never_read
from understudy.report.verdict import Verdict, list_pools
from understudy.router.kv import KvRouting
from understudy.text import quantity
from understudy.workload.arrivals import ClosedLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.report.data import ReportData
    from understudy.run.timeline import Timeline


def find_verdicts(report: ReportData) -> tuple[Verdict, ...]:
    """Apply all rules; return the verdicts, the most important first."""
    rules = RULES if report.handoff is None else HANDOFF_RULES
    if report.fleet_use is not None:
        rules = ELASTIC_RULES
    return tuple(verdict for rule in rules if (verdict := rule(report)) is not None)


def nothing_completed(report: ReportData) -> Verdict | None:
    """Report that no request received its whole output."""
    requests = report.requests
    if requests.completed or not requests.total:
        return None
    return Verdict(
        "nothing_completed", f"No request completed: {_count_failures(report)}.", _first_reason(report)
    )


def rejected(report: ReportData) -> Verdict | None:
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


def cache_too_small(report: ReportData) -> Verdict | None:
    """Report that blocks were evicted and an unlimited cache would hit much more."""
    best, reference = report.unlimited_hit_ratio, "an unlimited cache would hit"
    if report.routed_hit_ratio is not None and not has_shared_tier(report):
        best, reference = report.routed_hit_ratio, "unlimited caches with the same routing would hit"
    groups = report.run.kv_groups
    # Hits that the tails of windows and states cut are those of `group_tail_gone`.
    found = report.prefix_hit_ratio.first_admission if groups is None else groups.full_attention_hit_ratio
    if (
        best is None
        or found is None
        or not report.kv.evictions
        or not best - found >= 0.05
        or found >= 0.8 * best
    ):
        return None
    more = name_more_tiers(report)
    tiers = f" or {more}" if more else ""
    alone = "" if groups is None else " in full attention alone"
    terms = terms_of(report)
    size = report.columns.blocks_per_worker
    if kind_of_run(report).sizes_pool_in_tokens:
        size *= int(list_pools(report)[0].engine["block_size"])
    return Verdict(
        "cache_too_small",
        f"The cache is too small: {quantity(found, 'ratio')} of the prompt tokens hit{alone}, {reference} "
        f"{quantity(best, 'ratio')}; {report.kv.evictions:,} {terms.block}s were evicted.",
        f"Use {name_more_memory(report)} ({flags_of(report, 'memory')}, now {size:,} per worker){tiers}.",
    )


def scattered_prefixes(report: ReportData) -> Verdict | None:
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


def hot_worker(report: ReportData) -> Verdict | None:
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


def preemption_storm(report: ReportData) -> Verdict | None:
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


def limit_never_reached(report: ReportData) -> Verdict | None:
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


RULES: tuple[Callable[[ReportData], Verdict | None], ...] = (
    machine_late,
    nothing_completed,
    rejected,
    overloaded,
    goal_missed,
    cache_too_small,
    group_tail_gone,
    sessions_return_cold,
    scattered_prefixes,
    tier_hurts,
    hot_worker,
    preemption_storm,
    link_at_its_limit,
    steps_too_long,
    tier_never_read,
    limit_never_reached,
    tools_dominate,
)


HANDOFF_RULES: tuple[Callable[[ReportData], Verdict | None], ...] = (
    machine_late,
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

ELASTIC_RULES: tuple[Callable[[ReportData], Verdict | None], ...] = (
    machine_late,
    nothing_completed,
    rejected,
    scaler_late,
    scaler_drains_in_queue,
    scaler_flaps,
    preemption_storm,
)
"""Rules for fleets whose workers join and leave: the others advise on a fixed number of workers."""


def _count_failures(report: ReportData) -> str:
    requests = report.requests
    named = {
        "rejected": requests.rejected,
        "cancelled": requests.cancelled,
        "failed": requests.failed,
        "unfinished": requests.unfinished,
    }
    return ", ".join(f"{count:,} {name}" for name, count in named.items() if count)


def _first_reason(report: ReportData) -> str:
    for row, reason in report.columns.reject_reasons.items():
        return f"The first one, request {row}: {reason}."
    return "Inspect the requests (--requests-jsonl)."
