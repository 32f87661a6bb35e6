"""Verdicts: what a reader should conclude, each with its number and a remedy; none when all is well.

A rule is a function from a report to a `Verdict` or None. It speaks only where its evidence is plain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.report.latency import NS_PER_S
from understudy.report.series import StepFunction
from understudy.report.text import duration, quantity
from understudy.report.tier_table import arrow

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.report.report import Report


_TO_SPARE = 1.2
"""Of workers that hold a rate: at the very rate that they serve, queues grow, and a cache that is split hits less."""


_FEW = 20
"""Requests of which nothing can be said in shares."""

_COUNTED = {
    "ttft_ms": ("queue", "prefill"),
    "itl_ms": ("decode",),
    "e2e_ms": ("queue", "prefill", "decode"),
}
"""What a goal counts of the time of a request."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One conclusion: which `rule` found it, the `finding` with its numbers, and a `remedy`."""

    rule: str
    finding: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.finding} {self.remedy}"


def verdicts(report: Report) -> tuple[Verdict, ...]:
    """All that the rules find, the most pressing first."""
    return tuple(verdict for rule in RULES if (verdict := rule(report)) is not None)


def nothing_completed(report: Report) -> Verdict | None:
    """Not one request got its whole output."""
    requests = report.requests
    if requests.completed or not requests.total:
        return None
    return Verdict("nothing_completed", f"Nothing completed: {_fates(report)}.", _reason(report))


def rejected(report: Report) -> Verdict | None:
    """More than 1 % of the requests were refused."""
    requests = report.requests
    if not requests.completed or requests.rejected <= 0.01 * requests.total:
        return None
    share = quantity(requests.rejected / requests.total, "ratio")
    return Verdict(
        "rejected",
        f"{requests.rejected:,} of {requests.total:,} requests ({share}) were rejected, and latencies leave them out.",
        _reason(report),
    )


def overloaded(report: Report) -> Verdict | None:
    """With arrivals that do not wait, the queue grew nearly all the time and was long when the last one came, or
    requests spent more time in it than with the engine (turns that wait for the one before keep it from growing).
    """
    timeline = report.columns
    if report.run.get("load", {}).get("kind", "open_loop") != "open_loop" or not len(timeline.sample_time_ns):
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
        return _mostly_queued(report)
    served = int(((timeline.finish_ns >= 0) & (timeline.finish_ns <= last)).sum())
    enough = math.ceil(_TO_SPARE * timeline.num_workers * len(arrived) / max(served, 1))
    each = duration((last - start) / minutes / NS_PER_S)
    return Verdict(
        "overloaded",
        f"Overloaded: the queue grew in {grew} of {minutes} parts of {each}, to {backlog:,.0f} waiting requests; "
        f"{served:,} of {len(arrived):,} were served while they came.",
        f"At this rate about {max(enough, timeline.num_workers + 1):,} workers would hold it, with a fifth to spare "
        f"(now {timeline.num_workers:,}).",
    )


def _mostly_queued(report: Report) -> Verdict | None:
    timeline = report.columns
    done = timeline.completed & (timeline.first_admit_ns >= 0)
    if done.sum() < _FEW:
        return None
    waited_ns = float((timeline.first_admit_ns - timeline.arrival_ns)[done].mean())
    share = waited_ns / max(float((timeline.served_ns - timeline.arrival_ns)[done].mean()), 1.0)
    if share < 0.5:
        return None
    return Verdict(
        "overloaded",
        f"Overloaded: requests waited {duration(waited_ns / NS_PER_S)} to be scheduled, "
        f"{quantity(share, 'ratio')} of the time that they took.",
        _shorter_queue(report),
    )


def goal_missed(report: Report) -> Verdict | None:
    """The goal that most requests miss, and what they spend the time on that it counts."""
    timeline = report.columns
    completed = timeline.completed
    if report.goodput is None or completed.sum() < _FEW:
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
    counted = _COUNTED[worst]
    mean_s = {part: float(spans[part][late].mean()) / NS_PER_S for part in counted}
    most = max(counted, key=lambda part: mean_s[part])
    of = f"{duration(mean_s[most])} of {duration(sum(mean_s.values()))}"
    gaps = timeline.output_tokens[late] - 1.0
    told = {
        "queue": f"they waited {of} to be scheduled",
        "prefill": f"their prompts took {of}",
        "decode": f"their tokens took {of}"
        if worst == "e2e_ms"
        else f"theirs is {1e3 * mean_s[most] / float(gaps.mean()):.1f} ms",
    }[most]
    return Verdict(
        "goal_missed",
        f"{quantity(share, 'ratio')} of the requests miss the goal of {getattr(slo, worst):g} ms for "
        f"{worst.removesuffix('_ms').upper()}: {told}, on average.",
        {"queue": _shorter_queue, "prefill": _shorter_prefill, "decode": _shorter_steps}[most](report),
    )


def _shorter_queue(report: Report) -> str:
    remedies = [f"More workers (now {report.columns.num_workers:,})"]
    if report.run.get("load", {}).get("kind") == "closed_loop":
        remedies.append("fewer sessions at a time (--concurrency)")
    if report.kv.usage_max >= 0.95:
        used = quantity(report.kv.usage_mean, "ratio")
        remedies.append(f"more blocks (num_gpu_blocks: {used} of them were in use, and at times all)")
    return f"{' or '.join(remedies)} would shorten the queue."


def _shorter_prefill(report: Report) -> str:
    found = quantity(report.prefix_hit_ratio.first_admission, "ratio")
    return (
        f"Prompts that find more of their prefix (now {found}; --routing kv, more blocks), or GPUs that compute more "
        "together (--tensor-parallel-size), would shorten it."
    )


def _shorter_steps(report: Report) -> str:
    batches = {pool.get("engine", {}).get("max_num_seqs") for pool in _pools(report)} - {None}
    now = f" (max_num_seqs, now {batches.pop():,})" if len(batches) == 1 else " (max_num_seqs)"
    return f"Fewer requests in a batch{now}, more workers or faster GPUs would shorten the steps."


def cache_too_small(report: Report) -> Verdict | None:
    """Blocks were evicted, and a cache that forgets nothing would find much more."""
    best, alone = report.unlimited_hit_ratio, "one without limits gives"
    if report.routed_hit_ratio is not None and not _shares_a_tier(report):
        best, alone = report.routed_hit_ratio, "caches without limits, with the same routing, give"
    found = report.prefix_hit_ratio.first_admission
    if best is None or not report.kv.evictions or not best - found >= 0.05 or found >= 0.8 * best:
        return None
    tiers = "or host memory below it (--g2)" if report.tiers is None else "or larger tiers"
    return Verdict(
        "cache_too_small",
        f"The cache is too small: hits are {quantity(found, 'ratio')} where {alone} "
        f"{quantity(best, 'ratio')}, and {report.kv.evictions:,} blocks were evicted.",
        f"More blocks (num_gpu_blocks, now {report.columns.blocks_per_worker:,} a worker), {tiers}, keep them.",
    )


def scattered_prefixes(report: Report) -> Verdict | None:
    """Requests that share a prefix went to different workers, where no cache of one can serve the others."""
    routed, best = report.routed_hit_ratio, report.unlimited_hit_ratio
    if routed is None or best is None or not best - routed >= 0.05 or routed >= 0.8 * best:
        return None
    if _shares_a_tier(report) or isinstance(report.run.get("routing"), dict):  # the KV-aware router knows
        return None
    return Verdict(
        "scattered_prefixes",
        f"Equal prefixes meet different workers: with this routing even caches without limits hit "
        f"{quantity(routed, 'ratio')}, where one for all would hit {quantity(best, 'ratio')}.",
        "Routing by what workers hold (--routing kv), or by session (session_affinity), brings them together.",
    )


def tier_hurts(report: Report) -> Verdict | None:
    """Requests waited for bytes to leave, or the run without tiers was faster."""
    tiers, without = report.tiers, report.without_tiers
    if tiers is None:
        return None
    working_s = report.duration_s * report.columns.num_workers
    remedy = "Try write_through (--offload-mode), more bandwidth to the host, or min_reuse."
    modes = {pool.get("tiers", {}).get("offload", {}).get("mode") for pool in _pools(report)}
    if modes - {None} == {"write_through"}:
        remedy = (
            "More bandwidth to the host, or copies of reused blocks only (offload.min_reuse), would help."
        )
    if without is not None and report.ttft_ms.mean > 1.05 * without.ttft_ms.mean:
        return Verdict(
            "tier_hurts",
            f"The tiers hurt: TTFT is {100 * (report.ttft_ms.mean / without.ttft_ms.mean - 1):+.0f} % against none; "
            f"requests waited {duration(tiers.room_wait_s)} for room.",
            remedy,
        )
    if tiers.room_wait_s < 0.05 * working_s or not working_s:
        return None
    return Verdict(
        "tier_hurts",
        f"Copies are in the way: requests waited {duration(tiers.room_wait_s)} for slots whose bytes were leaving "
        f"({quantity(tiers.room_wait_s / working_s, 'ratio')} of the workers' time).",
        remedy,
    )


def hot_worker(report: Report) -> Verdict | None:
    """One worker got far more than its share."""
    timeline = report.columns
    served = timeline.worker >= 0
    if timeline.num_workers < 2 or served.sum() < 20 * timeline.num_workers:
        return None
    tokens = timeline.prompt_tokens.astype(np.int64) - timeline.cached_tokens_first + timeline.output_tokens
    by_worker = np.bincount(timeline.worker[served], tokens[served], timeline.num_workers)
    hottest = int(by_worker.argmax())
    if by_worker.mean() == 0 or by_worker[hottest] < 1.5 * by_worker.mean():
        return None
    return Verdict(
        "hot_worker",
        f"Worker {hottest} is hot: it computed {by_worker[hottest] / by_worker.mean():.1f}× the tokens of the mean "
        "worker.",
        "Another routing (--routing least_loaded) would spread them.",
    )


def preemption_storm(report: Report) -> Verdict | None:
    """Preemptions are no exception."""
    requests = report.requests.completed
    if report.preemptions <= max(10, 0.1 * requests):
        return None
    return Verdict(
        "preemption_storm",
        f"{report.preemptions:,} preemptions for {requests:,} requests: each one's tokens are computed again.",
        "More blocks (num_gpu_blocks), fewer requests at a time (max_num_seqs) or a watermark would calm them.",
    )


def link_at_its_limit(report: Report) -> Verdict | None:
    """A link had no room to spare for a fifth of the run or more."""
    if report.tiers is None:
        return None
    for link in report.tiers.links:
        full = sum(share >= 0.95 for share in link.window_utilisation) / max(len(link.window_utilisation), 1)
        if full >= 0.2:
            return Verdict(
                "link_at_its_limit",
                f"The link {arrow(link)} is at its limit of {link.bandwidth_gbps:g} GB/s for {quantity(full, 'ratio')} "
                "of the time.",
                "More bandwidth, or fewer copies (offload.min_reuse), would free it.",
            )
    return None


def steps_too_long(report: Report) -> Verdict | None:
    """Most gaps meet the ITL goal, but steps that also prefill do not."""
    goal = None if report.goodput is None else report.goodput.slo.itl_ms
    timeline = report.columns
    if goal is None or not len(timeline.itl_ns) or report.itl_ms.p50 > goal:
        return None
    late = int(timeline.itl_count[timeline.itl_ns > goal * 1e6].sum()) / int(timeline.itl_count.sum())
    if late < 0.01:
        return None
    budgets = {pool.get("engine", {}).get("max_num_batched_tokens") for pool in _pools(report)}
    budget = budgets.pop() if len(budgets) == 1 else None
    now = "" if budget is None else f" (now {budget:,})"
    return Verdict(
        "steps_too_long",
        f"{quantity(late, 'ratio')} of the gaps are longer than the goal of {goal:g} ms, though half are within "
        f"{report.itl_ms.p50:.1f} ms: prefills share the steps.",
        f"A smaller budget of tokens a step (max_num_batched_tokens{now}) would shorten them.",
    )


RULES: tuple[Callable[[Report], Verdict | None], ...] = (
    nothing_completed,
    rejected,
    overloaded,
    goal_missed,
    cache_too_small,
    scattered_prefixes,
    tier_hurts,
    hot_worker,
    preemption_storm,
    link_at_its_limit,
    steps_too_long,
)


def _shares_a_tier(report: Report) -> bool:
    """Whether what one worker stored can serve another."""
    tiers = [tier for pool in _pools(report) for tier in pool.get("tiers", {}).get("tiers", [])]
    return any(tier.get("tier") in ("g3", "g4") for tier in tiers)


def _pools(report: Report) -> list[dict[str, Any]]:
    """The settings of each pool; those of the run where it has one."""
    pools: list[dict[str, Any]] = report.run.get("pools") or [report.run]
    return pools


def _fates(report: Report) -> str:
    requests = report.requests
    named = {
        "rejected": requests.rejected,
        "cancelled": requests.cancelled,
        "unfinished": requests.unfinished,
    }
    return ", ".join(f"{count:,} {name}" for name, count in named.items() if count)


def _reason(report: Report) -> str:
    for row, reason in report.columns.reject_reasons.items():
        return f"The first, request {row}: {reason}."
    return "Look at the requests (--requests-jsonl)."
