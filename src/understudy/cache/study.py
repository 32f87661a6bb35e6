"""Study of a workload's prefix cache: the curve, its knee, tiers, working sets, and replays."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from understudy.cache.curves import PINNED, CacheCurves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.report import Report
    from understudy.workload import Workload
    from understudy.workload.columns import Int64Column

SCHEMA = "understudy-cache/1"
GIB = 2**30
MOST_PREFIXES = 10
LADDER_SIZES = 9
CURVE_POINTS = 160
SHARED_TIER = "disk"
"""Tier that all workers share, as a replay's G3."""


class Point(msgspec.Struct, frozen=True):
    """Caches of one size: hit ratio by policy."""

    blocks: int
    """Blocks of each worker's cache."""
    gib: float | None
    hit_ratio: dict[str, float]


class Knee(msgspec.Struct, frozen=True):
    """Smallest LRU cache from which on every further GiB adds less than `points_per_gib` to the hit ratio."""

    blocks: int
    gib: float
    hit_ratio: float
    points_per_gib: float
    """In percentage points."""


class Gap(msgspec.Struct, frozen=True):
    """Difference of a replay's hit ratio from the curve's, at one size and policy; the parts add up to it."""

    curve_hit_ratio: float
    """Hit ratio of the curve, in the order and with the routing of the fleet's own replay."""
    order: float
    """Added by the order and the routing of this replay, which another size or policy changes."""
    running: float
    """Added because running requests hold their blocks, which cannot be evicted."""
    steps: float
    """Added because a replay stores blocks step by step: prompts that arrive together compute the same blocks, outputs
    and partly filled blocks need places, and preempted requests lose theirs."""


class Fleet(msgspec.Struct, frozen=True):
    """Caches of the configured fleet: blocks of a worker, and hit ratios of the curve and of the replay."""

    workers: int
    routing: str
    blocks: int
    gib: float | None
    lru_hit_ratio: float
    optimal_pinned_hit_ratio: float
    replayed_hit_ratio: float
    gap: Gap | None = None
    """Difference of the replay's hit ratio from the LRU curve's; None if they count different tokens, or if no request
    was admitted."""


class TierGain(msgspec.Struct, frozen=True):
    """Hit ratio with a tier below the device, in the same order of requests."""

    tier: str
    """host: of each worker; disk: shared by all workers."""
    gib: float
    blocks: int
    hit_ratio: float
    """Hit ratio of the device and all tiers down to this one, if no tier keeps copies of blocks above it, as in a
    replay with offload.mode evict."""
    added: float
    """Hit ratio added to that of the tiers above."""
    hit_ratio_if_copies: float
    """The same if each tier keeps copies of all blocks above it, as in a replay with offload.mode write_through."""
    added_if_copies: float
    """Hit ratio that the tier adds then."""


class Sessions(msgspec.Struct, frozen=True):
    """Blocks that sessions use; a request without a session counts as one."""

    sessions: int
    blocks_p50: int
    blocks_p90: int
    blocks_max: int
    own_share: float
    """Share of blocks, over all sessions, that no other session uses."""
    open_blocks_max: int
    """Most blocks of sessions that are between their first and last request at one time, and all shared blocks."""


class Prefix(msgspec.Struct, frozen=True):
    """A run of tokens that several requests begin with, and its cost."""

    worker: int
    request: str
    """First request with it."""
    first_token: int
    last_token: int
    requests: int
    read_tokens: int
    """Tokens that a cache must supply, or the engine computes again: (requests − 1) × length."""
    recomputed_tokens: int
    """Read tokens that an LRU cache of the studied size has evicted."""
    working_set_blocks: int
    """Distinct blocks of all requests with this prefix, from it on."""


class Replayed(msgspec.Struct, frozen=True):
    """One replay of the fleet with another cache size or policy."""

    policy: str
    blocks: int
    gib: float | None
    hit_ratio: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    rejected: int
    gap: Gap | None = None
    """Difference from the curve; None if they count different tokens, or if no request was admitted."""


class CacheStudy(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `understudy cache`; docs/schema/cache.json is its schema."""

    schema: str = SCHEMA
    """Name and version of the schema."""
    workload: str
    """Name of the workload."""
    workload_digest: str
    """Digest of its content."""
    requests: int
    """Requests, counted ones and those of the warm-up."""
    prompt_tokens: int
    """Prompt tokens of the counted requests."""
    block_size: int
    """Tokens per block."""
    kv_bytes_per_token: int | None
    """KV bytes per token of a worker; None: sizes are in blocks only."""
    prompts_only: bool
    """Whether prompts alone are counted, with their partly filled last block."""
    warm_up: float
    """Share of requests that fill the cache without being counted."""
    order: str
    """time: one request at a time, as they are sent; replay: as the fleet's replay served them, with their overlap."""
    block_visits: int
    """Blocks of all requests, repeated ones each time."""
    distinct_blocks: int
    """Blocks with different content."""
    largest_request_blocks: int
    """Blocks of the largest request."""
    unlimited_hit_ratio: float
    """Hit ratio of one unlimited cache of all requests: no run in this order hits more."""
    routed_hit_ratio: float | None
    """Hit ratio of unlimited caches, one per worker, with the fleet's routing; None for one cache."""
    policies: list[str]
    """Policies of the curves."""
    sizes: list[Point]
    """Hit ratios of all policies at the chosen sizes."""
    lru_curve: list[Point]
    """The LRU curve at evenly spaced sizes on a logarithmic scale, for plots."""
    knee: Knee | None
    """Size from which more memory adds little; None if GiB are unknown."""
    fleet: Fleet | None
    """The configured fleet's point; None if no fleet is known."""
    tiers: list[TierGain]
    """Hits that each tier below the device adds."""
    sessions: Sessions
    """Blocks that sessions use."""
    studied_blocks: int
    """Cache size to which the prefixes' recomputed tokens refer."""
    prefixes: list[Prefix]
    """Shared prefixes that cost most if they are not cached."""
    replays: list[Replayed]
    """Replays of the fleet with other sizes and policies."""
    times: str | None
    """Source of the replays' step times."""
    notes: list[str]
    """Remarks on the workload and the replays."""


class Scale:
    """Converts between blocks and GiB; without KV bytes per token, GiB are unknown."""

    def __init__(self, block_size: int, kv_bytes_per_token: int | None) -> None:
        self.block_bytes = None if kv_bytes_per_token is None else block_size * kv_bytes_per_token

    def gib(self, blocks: int) -> float | None:
        """Return the size of `blocks` in GiB."""
        return None if self.block_bytes is None else blocks * self.block_bytes / GIB

    def blocks(self, gib: float) -> int:
        """Return the whole blocks that fit in `gib`; the block's bytes must be known."""
        assert self.block_bytes is not None
        return int(gib * GIB) // self.block_bytes


def choose_sizes(curves: CacheCurves, scale: Scale, smallest: int, also: Sequence[int] = ()) -> list[int]:
    """Return doubling sizes up to one that hits all reused blocks, and those in `also`."""
    limit = max(len(curves.lru_hit_tokens) - 1, smallest, 1)
    # Without GiB the smallest cache is one request's; with GiB the doubling passes through 1 GiB.
    step = max(smallest, 1) if scale.block_bytes is None else max(scale.blocks(1.0), 1)
    while scale.block_bytes is not None and step >= 2 * max(smallest, 1):
        step //= 2
    sizes = [step]
    while sizes[-1] < limit:
        sizes.append(2 * sizes[-1])
    return sorted({*sizes[-LADDER_SIZES:], *also})


def measure_sizes(
    curves: CacheCurves, scale: Scale, policies: Sequence[str], sizes: Sequence[int]
) -> list[Point]:
    """Return the hit ratios of all policies at these sizes."""
    ratios = {policy: curves.hit_ratio(policy, sizes).tolist() for policy in policies}
    return [
        Point(blocks, scale.gib(blocks), {policy: values[at] for policy, values in ratios.items()})
        for at, blocks in enumerate(sizes)
    ]


def sample_curve(curves: CacheCurves, scale: Scale, low: int, high: int) -> list[Point]:
    """Return the LRU curve at sizes from `low` to `high`, evenly spaced on a logarithmic scale."""
    spaced = np.geomspace(max(low, 1), max(high, low + 1, 2), CURVE_POINTS)
    sizes = np.unique(spaced.round().astype(np.int64))
    return measure_sizes(curves, scale, ["lru"], sizes.tolist())


def find_knee(curves: CacheCurves, scale: Scale, points_per_gib: float = 0.1) -> Knee | None:
    """Return the knee of the LRU curve; None if GiB are unknown."""
    if scale.block_bytes is None:
        return None
    ratios = curves.lru_hit_tokens / max(curves.prompt_tokens, 1)
    step = max(scale.blocks(1.0), 1)
    larger = np.minimum(np.arange(len(ratios)) + step, len(ratios) - 1)
    rising = np.flatnonzero(ratios[larger] - ratios >= points_per_gib / 100)
    blocks = int(rising[-1]) + 1 if len(rising) else 0
    gib = scale.gib(blocks)
    assert gib is not None
    return Knee(blocks, gib, float(ratios[min(blocks, len(ratios) - 1)]), points_per_gib)


def add_tiers(
    curves: CacheCurves, scale: Scale, device_blocks: int, tiers: Sequence[tuple[str, float]]
) -> list[TierGain]:
    """Return what each tier (name, GiB) adds below a device of `device_blocks`.

    A disk is shared by all workers, as in a replay; any other tier belongs to one worker.
    """
    gains = []
    own = own_if_copies = device_blocks  # blocks of a worker in one cache
    before = before_if_copies = float(curves.hit_ratio("lru", [device_blocks])[0])
    for name, gib in tiers:
        blocks = scale.blocks(gib)
        if name == SHARED_TIER:
            together = curves.shared_below_hit_ratio(own, blocks, copies=False)
            copied = curves.shared_below_hit_ratio(own_if_copies, blocks, copies=True)
        else:
            own, own_if_copies = own + blocks, max(own_if_copies, blocks)
            together, copied = curves.hit_ratio("lru", [own, own_if_copies]).tolist()
        gains.append(
            TierGain(name, gib, blocks, together, together - before, copied, copied - before_if_copies)
        )
        before, before_if_copies = together, copied
    return gains


def measure_sessions(workload: Workload, curves: CacheCurves) -> Sessions:
    """Count the blocks of sessions, and of those that are open at one time."""
    distinct, own = curves.visits.session_blocks(workload.session)
    if not len(curves.rows):
        return Sessions(0, 0, 0, 0, 0.0, 0)
    served = np.unique(workload.session[curves.rows])
    ordered = np.sort(distinct[served])
    return Sessions(
        sessions=len(served),
        blocks_p50=int(ordered[(len(ordered) - 1) // 2]),
        blocks_p90=int(ordered[(len(ordered) - 1) * 9 // 10]),
        blocks_max=int(ordered[-1]),
        own_share=int(own.sum()) / max(curves.visits.distinct, 1),
        open_blocks_max=curves.visits.open_blocks(curves.events, workload.session),
    )


def rank_prefixes(workload: Workload, curves: CacheCurves, blocks: int) -> list[Prefix]:
    """Return the prefixes that cost most if they are not cached: reads times length."""
    found: list[Prefix] = []
    size = curves.block_size
    for part in curves.parts:
        row, position, length, requests, recomputed, below = curves.visits.prefix_runs(part.rows, blocks)
        read: Int64Column = (requests - 1) * length * size
        for at in np.argsort(-read, kind="stable")[:MOST_PREFIXES].tolist():
            names = workload.request_ids
            found.append(
                Prefix(
                    worker=part.worker,
                    request=str(row[at]) if names is None else names[int(row[at])],
                    first_token=int(position[at]) * size,
                    last_token=int(position[at] + length[at]) * size - 1,
                    requests=int(requests[at]),
                    read_tokens=int(read[at]),
                    recomputed_tokens=int(recomputed[at]) * size,
                    working_set_blocks=int(below[at]),
                )
            )
    return sorted(found, key=lambda prefix: -prefix.read_tokens)[:MOST_PREFIXES]


def measure_gap(
    curves: CacheCurves, own: CacheCurves, policy: str, pinned: str, blocks: int, replayed: float
) -> Gap | None:
    """Divide the difference of a replay from the curve of `policy`; None if the replay admitted no request.

    `own` has the order of that replay; `pinned` is the policy of the engine's pool.
    """
    if math.isnan(replayed):
        return None
    curve = float(curves.hit_ratio(policy, [blocks])[0])
    ordered = float(own.hit_ratio(policy, [blocks])[0])
    running = own.pinned_hit_ratio(pinned, blocks)
    return Gap(curve, ordered - curve, running - ordered, replayed - running)


def describe_fleet(
    curves: CacheCurves, scale: Scale, report: Report, blocks: int, routing: str, pinned: str | None
) -> Fleet:
    """Return the fleet's point: its size, and the hit ratios of the curve and of its replay.

    `pinned` is the policy of the engine's pool; None if the curve counts other tokens than the replay.
    """
    replayed = report.prefix_hit_ratio.first_admission
    return Fleet(
        workers=report.columns.num_workers,
        routing=routing,
        blocks=blocks,
        gib=scale.gib(blocks),
        lru_hit_ratio=float(curves.hit_ratio("lru", [blocks])[0]),
        optimal_pinned_hit_ratio=float(curves.hit_ratio(PINNED, [blocks])[0]),
        replayed_hit_ratio=replayed,
        gap=None if pinned is None else measure_gap(curves, curves, "lru", pinned, blocks, replayed),
    )
