"""`TierPlan`: tier settings resolved to blocks, bytes and links."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from understudy._core import Tier
from understudy.errors import ConfigError
from understudy.tiers.model_shape import ModelShape
from understudy.tiers.settings import OffloadSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.kv import EvictionPolicy
    from understudy.tiers.settings import TiersConfig, TierSettings

_WORKER_GBPS = {"g2": 14.0, "g3": math.inf, "g4": math.inf}
_BACKEND_GBPS = {"g3": 7.0, "g4": 4.0}
_MAX_BLOCKS = 2**30
_MAX_BLOCK_BYTES = 2**38
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PlannedLink:
    """One link of a path; each worker has its own, unless all workers share it (`shared`)."""

    name: str
    bandwidth_gbps: float
    fixed_ns: int
    shared: bool
    duplex: str | None
    """Name of the limit on both directions together; None without one."""
    duplex_gbps: float | None


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """A tier: its capacity in blocks (None: unlimited) and the paths, of one or two links, down to it and up."""

    tier: Tier
    blocks: int | None
    eviction: str | Callable[[], EvictionPolicy]
    shared: bool
    down: tuple[PlannedLink, ...]
    up: tuple[PlannedLink, ...]
    offload_concurrency: int | None


@dataclass(frozen=True, slots=True)
class TierPlan:
    """The tiers below the GPU, nearest first."""

    bytes_per_token: int
    block_bytes: int
    tiers: tuple[PlannedTier, ...]
    offload: OffloadSettings

    @classmethod
    def of(cls, config: TiersConfig, block_size: int) -> TierPlan | None:
        """Resolve settings for blocks of `block_size` tokens; None without tiers. ConfigError names the setting."""
        if not config.tiers:
            if config.offload != OffloadSettings():
                raise ConfigError("offload needs a tier; add a g2 tier (--g2)")
            return None
        per_token = _bytes_per_token(config)
        block_bytes = per_token * block_size
        if block_bytes > _MAX_BLOCK_BYTES:
            raise ConfigError(
                f"kv_bytes_per_token is too large: a block of {block_size} tokens of {per_token:,} bytes has more than "
                f"{_MAX_BLOCK_BYTES:,} bytes; check the value"
            )
        tiers = sorted(config.tiers, key=lambda tier: tier.tier)
        offload = _convert_chunks_to_blocks(config.offload, block_size)
        chunk = offload.blocks_per_chunk if offload.mode == "vllm" else None
        planned = tuple(_plan_tier(tier, block_bytes, chunk) for tier in tiers)
        return cls(per_token, block_bytes, planned, offload)

    def host_blocks(self, max_blocks: int) -> int:
        """Return the blocks of a worker's host tier, in whole chunks; `max_blocks` if it is unlimited."""
        host = next(tier for tier in self.tiers if tier.tier is Tier.G2)
        chunk = self.offload.blocks_per_chunk
        return max(-(-max_blocks // chunk), 1) * chunk if host.blocks is None else host.blocks


def _convert_chunks_to_blocks(offload: OffloadSettings, block_size: int) -> OffloadSettings:
    """Replace `chunk_tokens` by `blocks_per_chunk`."""
    tokens = offload.chunk_tokens
    if tokens is None:
        return offload
    if tokens < block_size or tokens % block_size:
        raise ConfigError(
            f"offload: blocks of {block_size} tokens (block_size) do not divide chunks of {tokens} (chunk_tokens; "
            "block_size of vLLM's connector); give a multiple"
        )
    return msgspec.structs.replace(offload, blocks_per_chunk=tokens // block_size, chunk_tokens=None)


def _bytes_per_token(config: TiersConfig) -> int:
    if config.kv_bytes_per_token is not None:
        return config.kv_bytes_per_token
    if config.model is None:
        raise ConfigError(
            f"{config.tiers[0].tier} needs the KV bytes per token; give kv_bytes_per_token (--kv-bytes-per-token), or "
            "model (--model): a known name or the path of a config.json"
        )
    return ModelShape.find(config.model).bytes_per_token(kv_dtype=config.kv_dtype)


def _plan_tier(settings: TierSettings, block_bytes: int, chunk: int | None) -> PlannedTier:
    shared = settings.tier != "g2"
    return PlannedTier(
        tier=Tier[settings.tier.upper()],
        blocks=_count_blocks(settings, block_bytes)
        if chunk is None
        else _count_chunked_blocks(settings, block_bytes, chunk),
        eviction=settings.eviction,
        shared=shared,
        down=_plan_path(settings, "down"),
        up=_plan_path(settings, "up"),
        offload_concurrency=settings.link.offload_concurrency,
    )


def _count_blocks(settings: TierSettings, block_bytes: int) -> int | None:
    if settings.blocks == "unlimited":
        return None
    if settings.blocks is not None:
        blocks = settings.blocks
    else:
        assert isinstance(settings.bytes, int)
        blocks = settings.bytes // block_bytes
        if blocks < 1:
            raise ConfigError(
                f"{settings.tier}: bytes={settings.bytes} is less than a block of {block_bytes} bytes; make it larger"
            )
    if blocks > _MAX_BLOCKS:
        raise ConfigError(
            f"{settings.tier}: {blocks} blocks exceed {_MAX_BLOCKS}; for no limit give blocks: unlimited"
        )
    return blocks


def _count_chunked_blocks(settings: TierSettings, block_bytes: int, chunk: int) -> int | None:
    """Return the blocks of a host that stores chunks of `chunk` blocks, each starting on a memory page."""
    if isinstance(settings.bytes, int):
        page = -(-block_bytes * chunk // PAGE_BYTES) * PAGE_BYTES
        if settings.bytes < page:
            raise ConfigError(
                f"g2: bytes={settings.bytes} is smaller than a chunk: {chunk} blocks of {block_bytes:,} bytes take "
                f"{page:,}; make it larger"
            )
        settings = msgspec.structs.replace(settings, blocks=settings.bytes // page * chunk, bytes=None)
    blocks = _count_blocks(settings, block_bytes)
    if blocks is not None and blocks < chunk:
        raise ConfigError(
            f"g2: {blocks} blocks are fewer than a chunk of {chunk} (blocks_per_chunk); make it larger"
        )
    if blocks is not None and blocks % chunk:
        raise ConfigError(
            f"g2: chunks of {chunk} blocks (blocks_per_chunk) do not divide {blocks} blocks; give a multiple"
        )
    return blocks


def _plan_path(settings: TierSettings, direction: str) -> tuple[PlannedLink, ...]:
    """Return the worker's link, the backend's, or both; fixed costs and latency are charged once."""
    above, tier = ("g1" if settings.tier == "g2" else "g2"), settings.tier
    ends = (above, tier) if direction == "down" else (tier, above)
    name = "_to_".join(ends)
    link = settings.link
    fixed_ns = round(link.fixed_us * 1e3) + round(settings.latency_ms * 1e6)
    given = getattr(link, f"{direction}_gbps")
    worker = PlannedLink(
        name=name,
        bandwidth_gbps=_WORKER_GBPS[tier] if given is None else given,
        fixed_ns=fixed_ns,
        shared=False,
        duplex=None if link.duplex_gbps is None else f"{above}_{tier}",
        duplex_gbps=None if link.duplex_gbps is None else float(link.duplex_gbps),
    )
    if tier == "g2":
        return (worker,)
    given = getattr(link, f"backend_{direction}_gbps")
    is_limited = not math.isinf(worker.bandwidth_gbps) or worker.duplex is not None
    backend = PlannedLink(
        name=f"{name}_backend",
        bandwidth_gbps=_BACKEND_GBPS[tier] if given is None else given,
        fixed_ns=0 if is_limited else fixed_ns,
        shared=True,
        duplex=None if link.backend_duplex_gbps is None else f"{above}_{tier}_backend",
        duplex_gbps=None if link.backend_duplex_gbps is None else float(link.backend_duplex_gbps),
    )
    return (worker, backend) if is_limited else (backend,)
