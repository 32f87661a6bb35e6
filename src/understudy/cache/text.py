"""A cache study as plain text tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.cache.curves import POLICIES
from understudy.text import NONE, compact, significant, visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from understudy.cache.study import CacheStudy

NAMES = {name: name for name in POLICIES} | {"optimal_pinned": "optimal, pinned"}
"""Names of policies in tables and plots."""
GAP_PARTS = ("+ order", "+ running", "+ steps")
"""Columns of the parts of a difference between a replay and the curve."""
GAP_WORDS = (
    "hit ratio = curve + points: order: this replay admits and routes in an order of its own; running: the blocks of "
    "running requests cannot be evicted; steps: blocks are stored as steps compute them, so that outputs take places "
    "later, prompts that arrive together compute the same blocks, and preempted requests lose theirs"
)


def percent(ratio: float, digits: int = 2) -> str:
    """Format a ratio as percent; a dash for the share of nothing (NaN)."""
    return NONE if ratio != ratio else f"{100 * ratio:.{digits}f} %"


def points(ratio: float) -> str:
    """Format a difference of two ratios in percentage points."""
    return f"{100 * ratio:+.2f}".replace("-", "−")


def format_size(blocks: int, gib: float | None) -> str:
    """Format a cache size in GiB, or in blocks where the bytes are unknown."""
    return f"{compact(blocks)} blocks" if gib is None else f"{significant(gib)} GiB"


def size_rows(study: CacheStudy) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the curve's table."""
    has_gib = study.kv_bytes_per_token is not None
    head = ["blocks", *(["GiB"] if has_gib else []), *(NAMES[policy] for policy in study.policies)]
    rows = []
    for point in study.sizes:
        ratios = [percent(point.hit_ratio[policy]) for policy in study.policies]
        rows.append(
            [f"{point.blocks:,}", *([significant(point.gib)] if point.gib is not None else []), *ratios]
        )
    return head, rows


def replay_rows(study: CacheStudy) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the replays' table, with the parts of each difference from the curve."""
    has_gap = any(one.gap is not None for one in study.replays)
    head = ["size", "policy", "hit ratio", *(["curve", *GAP_PARTS] if has_gap else [])]
    head += ["TTFT mean ms", "p50 ms", "p99 ms", "rejected"]
    rows = []
    for one in study.replays:
        latencies = (one.ttft_mean_ms, one.ttft_p50_ms, one.ttft_p99_ms)
        times = [NONE if value != value else f"{value:,.1f}" for value in latencies]
        size = format_size(one.blocks, one.gib)
        gap = [NONE] * (1 + len(GAP_PARTS)) if has_gap else []
        if one.gap is not None:
            gap = [
                percent(one.gap.curve_hit_ratio),
                *map(points, (one.gap.order, one.gap.running, one.gap.steps)),
            ]
        rows.append([size, NAMES[one.policy], percent(one.hit_ratio), *gap, *times, f"{one.rejected:,}"])
    return head, rows


TIERS_WORDS = (
    "host: of each worker; disk: shared by all workers; evict: a tier takes blocks that are evicted above it; "
    "write_through, the default of a replay: it keeps copies of all blocks above it; without times of transfers"
)
TIERS_HEAD = f"Tiers below the device, LRU ({TIERS_WORDS})"


def tier_rows(study: CacheStudy) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the tiers' table."""
    head = ["tier", "GiB", "blocks", "evict: hit ratio", "adds", "write_through: hit ratio", "adds"]
    rows = [
        [
            tier.tier,
            significant(tier.gib),
            f"{tier.blocks:,}",
            percent(tier.hit_ratio),
            points(tier.added),
            percent(tier.hit_ratio_if_copies),
            points(tier.added_if_copies),
        ]
        for tier in study.tiers
    ]
    return head, rows


def prefix_rows(study: CacheStudy) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the prefixes' table."""
    workers = study.fleet is not None and study.fleet.workers > 1
    head = [*(["worker"] if workers else []), "tokens", "first request", "requests", "read tokens"]
    head += ["recomputed", "working set"]
    rows = [
        [
            *([str(one.worker)] if workers else []),
            f"{one.first_token:,}–{one.last_token:,}",
            visible(one.request),
            f"{one.requests:,}",
            compact(one.read_tokens),
            compact(one.recomputed_tokens),
            f"{one.working_set_blocks:,}",
        ]
        for one in study.prefixes
    ]
    return head, rows


def summary_lines(study: CacheStudy) -> Iterator[str]:
    """Yield the findings, one sentence each."""
    routed = study.routed_hit_ratio
    yield (
        f"unlimited cache: {percent(study.unlimited_hit_ratio)} of {study.prompt_tokens:,} prompt tokens hit"
        + ("" if routed is None else f"; with a cache per worker and this routing: {percent(routed)}")
    )
    if (knee := study.knee) is not None:
        yield (
            f"knee: {format_size(knee.blocks, knee.gib)} ({knee.blocks:,} blocks) hit {percent(knee.hit_ratio)}; "
            f"from there on 1 GiB more adds less than {knee.points_per_gib:g} points"
        )
    else:
        yield "knee: unknown, because it is defined by GiB; give --model, or --kv-bytes-per-token"
    if (fleet := study.fleet) is not None:
        size = format_size(fleet.blocks, fleet.gib)
        workers = f"{fleet.workers} workers with {size} each ({fleet.routing})" if fleet.workers > 1 else size
        yield (
            f"fleet: {workers}: replayed "
            f"{percent(fleet.replayed_hit_ratio)}, LRU curve {percent(fleet.lru_hit_ratio)}, optimal with running "
            f"blocks pinned {percent(fleet.optimal_pinned_hit_ratio)}"
        )
        if (gap := fleet.gap) is not None:
            yield (
                f"the replay differs from the LRU curve by {points(gap.running + gap.steps)} points: "
                f"{points(gap.running)} because running requests hold their blocks and by the pool's own order, "
                f"{points(gap.steps)} because blocks are stored step by step"
            )
    sessions = study.sessions
    yield (
        f"sessions: {sessions.sessions:,}; blocks of a session: median {sessions.blocks_p50:,}, 90 % "
        f"{sessions.blocks_p90:,}, largest {sessions.blocks_max:,}; {percent(sessions.own_share, 1)} of all blocks "
        f"belong to one session; sessions open at one time need at most {sessions.open_blocks_max:,} blocks"
    )


def format_study(study: CacheStudy) -> str:
    """Return the whole study as text."""
    rule = "prompts only" if study.prompts_only else "prompts and outputs, as vLLM caches them"
    order = (
        "one request at a time, in the order of time"
        if study.order == "time"
        else "in the order of the replay"
    )
    counted = f", after a warm-up of {percent(study.warm_up, 0)} of the requests" if study.warm_up else ""
    parts = [
        f"Prefix cache of {visible(study.workload)}: {study.requests:,} requests, blocks of {study.block_size} tokens",
        f"({rule}; {order}{counted})",
        "",
        *summary_lines(study),
        "",
        "Hit ratio by size of a worker's cache",
        *format_table(*size_rows(study)),
    ]
    if study.tiers:
        parts += ["", TIERS_HEAD, *format_table(*tier_rows(study), 1)]
    if study.replays:
        parts += ["", f"Replayed (times from {study.times})", *format_table(*replay_rows(study), 2)]
        if any(one.gap is not None for one in study.replays):
            parts.append(f"({GAP_WORDS})")
    if study.prefixes:
        parts += [
            "",
            f"Prefixes that cost most: reads × length (recomputed: by an LRU cache of {study.studied_blocks:,} blocks)",
            *format_table(*prefix_rows(study), 0),
        ]
    parts += [f"note: {note}" for note in study.notes]
    return "\n".join(parts)


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 0) -> list[str]:
    """Align columns to the right; the first `text_columns` to the left."""
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if at < text_columns else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]
