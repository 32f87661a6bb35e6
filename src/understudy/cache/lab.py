"""Run a cache study: replay the fleet, compute the curves, and replay other sizes and policies."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from understudy.cache.curves import DEFAULT_POLICIES, PINNED, CacheCurves
from understudy.cache.study import (
    CacheStudy,
    Replayed,
    Scale,
    add_tiers,
    choose_sizes,
    describe_fleet,
    find_knee,
    measure_gap,
    measure_sessions,
    measure_sizes,
    rank_prefixes,
    sample_curve,
)
from understudy.defaults import BLOCK_SIZE
from understudy.errors import ConfigError
from understudy.kv.policy import BUILT_IN_POLICIES
from understudy.run.admissions import LastTokens
from understudy.run.times import format_times
from understudy.workload.reuse import largest_request_blocks
from understudy.workload.time_order import describe_time_order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from understudy.report import Report
    from understudy.run.settings import ReplaySettings
    from understudy.run.timeline import Timeline
    from understudy.workload import Workload

ENGINE_POLICIES: dict[str, str | None] = {name: name for name in BUILT_IN_POLICIES} | {"lru": None}
"""Policies that an engine can run, with the engine's setting; vLLM's own order (None) is LRU."""
DEFAULT_POOL_POLICY = "vllm"
"""Name of vLLM's own order."""

_OTHER_TOKENS = (
    "replays count outputs and all requests: their hit ratios are not comparable with curves of prompts only, or after "
    "a warm-up"
)
_NOT_REPLAYED = (
    "insertion and optimal are not replayed: engines order blocks by release, and no engine knows the future"
)


class StudyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a cache study."""

    block_size: int = BLOCK_SIZE
    policies: tuple[str, ...] = DEFAULT_POLICIES
    sizes: tuple[tuple[float, str], ...] = ()
    """Cache sizes of a worker as (number, unit), unit GiB or blocks; empty: doubling sizes."""
    tiers: tuple[tuple[str, float], ...] = ()
    """Tiers below the device, top first: (name, GiB of a worker)."""
    kv_bytes_per_token: int | None = None
    """KV bytes of one token on all GPUs of a worker."""
    prompts_only: bool = False
    warm_up: float = 0.0
    knee_points: float = 0.1
    """Percentage points that one GiB more must add below the knee."""
    replays: bool = True
    """Whether to replay the fleet with the given sizes and policies."""


def study_cache(
    workload: Workload,
    name: str,
    request: StudyRequest,
    settings: ReplaySettings | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> CacheStudy:
    """Compute the curves of `workload` and, with the `settings` of a fleet, its point and its latencies.

    Errors: ConfigError names the flag that is wrong or missing.
    """
    scale = Scale(request.block_size, request.kv_bytes_per_token)
    sizes = _read_sizes(request, scale)
    if request.tiers and settings is None:
        raise ConfigError(
            f"--{request.tiers[0][0]}-gib: the size of the device's cache is not known; give --gpu, or --num-gpu-blocks"
        )
    if request.tiers and scale.block_bytes is None:
        raise ConfigError(
            f"--{request.tiers[0][0]}-gib: the KV bytes per token are not known; give --model, or --kv-bytes-per-token"
        )
    notes = list(workload.notes)
    report = None
    if settings is not None:
        progress("replaying the fleet")
        report = _replay(workload, settings)
        notes += settings.notes
    progress("computing the curves")
    last = LastTokens() if report is None or request.prompts_only else LastTokens.of(report.run)
    curves = CacheCurves(
        workload,
        request.block_size,
        prompts_only=request.prompts_only,
        warm_up=request.warm_up,
        run=None if report is None else report.columns,
        last=last,
    )
    if report is None:
        notes += describe_time_order(workload)
    is_comparable = not request.prompts_only and not request.warm_up
    smallest = largest_request_blocks(workload, request.block_size)
    device = None if settings is None else settings.engine.num_gpu_blocks
    knee = find_knee(curves, scale, request.knee_points)
    # A cache that is smaller than a request serves nothing.
    usable_knee = knee.blocks if knee is not None and knee.blocks >= smallest else None
    if not sizes:
        sizes = choose_sizes(curves, scale, smallest, () if device is None else (device,))
        replayed_sizes = sorted({blocks for blocks in (device, usable_knee) if blocks is not None})
    else:
        replayed_sizes = sizes
    columns = [*request.policies, *((PINNED,) if "optimal" in request.policies else ())]
    studied = device or usable_knee or sizes[len(sizes) // 2]
    shown = [*sizes, studied]
    replays: list[Replayed] = []
    if report is not None and settings is not None and request.replays:
        for blocks in replayed_sizes:
            for policy in request.policies:
                if policy in ENGINE_POLICIES:
                    progress(f"replaying {policy} with {blocks:,} blocks")
                    replayed, own = _replay_with(workload, settings, scale, policy, blocks)
                    if is_comparable:
                        ordered = CacheCurves(
                            workload, request.block_size, run=own, visits=curves.visits, last=last
                        )
                        pinned = ENGINE_POLICIES[policy] or DEFAULT_POOL_POLICY
                        gap = measure_gap(curves, ordered, policy, pinned, blocks, replayed.hit_ratio)
                        replayed = msgspec.structs.replace(replayed, gap=gap)
                    replays.append(replayed)
        if replays and not is_comparable:
            notes.append(_OTHER_TOKENS)
        notes += _name_equal(replays)
        if not set(request.policies) <= ENGINE_POLICIES.keys():
            notes.append(_NOT_REPLAYED)
    return CacheStudy(
        workload=name,
        workload_digest=workload.digest,
        requests=len(workload),
        prompt_tokens=curves.prompt_tokens,
        block_size=request.block_size,
        kv_bytes_per_token=request.kv_bytes_per_token,
        prompts_only=request.prompts_only,
        warm_up=request.warm_up,
        order="time" if report is None else "replay",
        block_visits=curves.visits.visits,
        distinct_blocks=curves.visits.distinct,
        largest_request_blocks=smallest,
        unlimited_hit_ratio=curves.unlimited_hit_ratio,
        routed_hit_ratio=curves.routed_hit_ratio if len(curves.parts) > 1 else None,
        policies=columns,
        sizes=measure_sizes(curves, scale, columns, sizes),
        lru_curve=sample_curve(curves, scale, min(shown), max(*shown, len(curves.lru_hit_tokens))),
        knee=knee,
        fleet=None
        if report is None or device is None or settings is None
        else describe_fleet(
            curves,
            scale,
            report,
            device,
            settings.routing,
            _pool_policy(settings) if is_comparable else None,
        ),
        tiers=[] if device is None else add_tiers(curves, scale, device, request.tiers),
        sessions=measure_sessions(workload, curves),
        studied_blocks=studied,
        prefixes=rank_prefixes(workload, curves, studied),
        replays=replays,
        times=None if report is None else format_times(report.run.times),
        notes=notes,
    )


def read_size(text: str) -> tuple[float, str]:
    """Read a size: a number of GiB, or of blocks such as `4096blocks`. ConfigError for anything else."""
    number = text.strip()
    is_blocks = number.endswith("blocks")
    try:
        size = float(int(number.removesuffix("blocks"))) if is_blocks else float(number)
    except ValueError:
        size = -1.0
    if not 0 < size < 2**40:
        raise ConfigError(
            f"--sizes: {text!r} is not a size; write GiB such as 16, or blocks such as 4096blocks"
        )
    return size, "blocks" if is_blocks else "GiB"


def _read_sizes(request: StudyRequest, scale: Scale) -> list[int]:
    if scale.block_bytes is None and any(unit == "GiB" for _, unit in request.sizes):
        raise ConfigError(
            "--sizes: GiB need the KV bytes per token; give --model, --kv-bytes-per-token, or sizes such as 4096blocks"
        )
    sizes = {scale.blocks(size) if unit == "GiB" else int(size) for size, unit in request.sizes}
    if 0 in sizes:
        raise ConfigError("--sizes: one size is smaller than a block; choose larger ones")
    if sizes and max(sizes) >= 2**32:
        raise ConfigError(f"--sizes: {max(sizes):,} blocks exceed the limit of 2^32; choose smaller ones")
    return sorted(sizes)


def _replay(workload: Workload, settings: ReplaySettings) -> Report:
    from understudy.api import replay

    return replay(
        workload,
        settings.engine,
        workers=settings.workers,
        routing=settings.policy,
        seed=settings.seed,
        load=settings.load,
        ranks=settings.ranks,
    )


def _pool_policy(settings: ReplaySettings) -> str | None:
    """Return the policy of the engine's pool; None if it is user-defined."""
    policy = getattr(settings.engine, "eviction_policy", None)
    if policy is None:
        return DEFAULT_POOL_POLICY
    return policy if isinstance(policy, str) and policy in BUILT_IN_POLICIES else None


def _name_equal(replays: Sequence[Replayed]) -> list[str]:
    """Name the policies that evicted alike in all replays."""
    found: dict[tuple[tuple[float, ...], ...], list[str]] = {}
    for policy in dict.fromkeys(one.policy for one in replays):
        own = [one for one in replays if one.policy == policy]
        if any(math.isnan(one.hit_ratio) for one in own):
            continue  # no request was admitted
        rows = tuple((one.blocks, one.hit_ratio, one.ttft_mean_ms, one.ttft_p99_ms) for one in own)
        found.setdefault(rows, []).append(policy)
    return [
        f"{', '.join(names[:-1])} and {names[-1]} are one policy in these replays: every figure is equal, because an "
        "engine releases the blocks of a request last first"
        for names in found.values()
        if len(names) > 1
    ]


def _replay_with(
    workload: Workload, settings: ReplaySettings, scale: Scale, policy: str, blocks: int
) -> tuple[Replayed, Timeline]:
    engine = msgspec.structs.replace(
        settings.engine, num_gpu_blocks=blocks, eviction_policy=ENGINE_POLICIES[policy]
    )
    report = _replay(workload, msgspec.structs.replace(settings, engine=engine))
    ttft = report.ttft_ms
    replayed = Replayed(
        policy=policy,
        blocks=blocks,
        gib=scale.gib(blocks),
        hit_ratio=report.prefix_hit_ratio.first_admission,
        ttft_mean_ms=ttft.mean,
        ttft_p50_ms=ttft.p50,
        ttft_p99_ms=ttft.p99,
        rejected=report.requests.rejected,
    )
    return replayed, report.columns
