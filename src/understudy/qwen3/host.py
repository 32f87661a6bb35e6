"""Host memory below the device: pages are offloaded when sealed, and loaded before a prompt is computed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from understudy.errors import CapacityExhausted, ConfigError, PolicyError
from understudy.kv import BlockManager, Tier
from understudy.qwen3.pages import PinnedPages
from understudy.tiers.settings import OffloadSettings, TierSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.kv import BlockGuard, EvictionPolicy, KvCacheManager, MutableBlocks, RegisteredBlocks
    from understudy.qwen3.buffer import KvBuffer
    from understudy.qwen3.pages import PageCopier
    from understudy.tiers.policy import OffloadPolicy
    from understudy.tiers.settings import TiersConfig
    from understudy.tokens import Identities

_SIMULATED = {
    "latency_ms": "real memory has its own latency; leave it out",
    "link": "the real link has its own speed; leave its settings out",
}
_ELSEWHERE = {
    "mode": "the real engine copies pages when they are sealed; choose write_through",
    "min_reuse": "a page that was just sealed has no hits; give a filter instead",
    "demand_first": "both directions have their own streams; leave it out",
    "onboard_failure_rate": "real copies do not fail by chance; leave it out",
}
"""Settings of the simulator that the real engine does not have, and why."""


@dataclass(slots=True)
class Copy:
    """A transfer in progress. It references the blocks that it reads and writes until it has ended."""

    source: RegisteredBlocks
    target: MutableBlocks
    identities: Identities
    down: bool
    after: object
    """Mark of the device's queue when the copy was requested."""
    done: Callable[[], bool] = lambda: False


class HostTier:
    """A pool of host pages, and the copies between it and the device. One thread at a time.

    `offload` and `onboard` allocate the blocks of a copy; `begin_copies` starts it while the device computes, because
    starting takes host time. A copy cannot be cancelled: the caller abandons it, and `collect_ended` frees its blocks.
    """

    def __init__(
        self,
        manager: KvCacheManager,
        copier: PageCopier,
        *,
        policy: str | EvictionPolicy = "lru",
        filter: OffloadPolicy | None = None,  # noqa: A002
        copy_blocks: int | None = None,
    ) -> None:
        self.manager = manager
        self.copier = copier
        self.filter = filter
        """Policy that selects the sealed pages to copy; None: all."""
        self.copy_blocks = copy_blocks
        """Maximum pages of one offload copy."""
        self.blocks = BlockManager(
            copier.num_blocks,
            block_size=manager.layout.page_size,
            policy=policy,  # type: ignore[arg-type]
            duplicates="reject",
            tier=Tier.G2,
        )
        self.on_copy: Callable[[Copy], None] | None = None
        """Callback for every copy when it begins."""
        self._pending: list[Copy] = []
        self._offloads: deque[Copy] = deque()
        self._abandoned: list[Copy] = []
        self.offloaded_blocks = 0
        self.onboarded_blocks = 0
        self.refused_blocks = 0

    @classmethod
    def from_config(cls, config: TiersConfig, manager: KvCacheManager, buffer: KvBuffer) -> HostTier | None:
        """Build the host tier of a simulator's settings, or None without tiers. ConfigError for unsupported ones."""
        below = {tier.tier: tier for tier in config.tiers}
        if not below:
            return None
        if lower := sorted(below.keys() - {"g2"}):
            raise ConfigError(
                f"{lower[0]}: the real engine has only host memory (g2) below the device; leave it out"
            )
        host, offload, page_bytes = below["g2"], config.offload, manager.layout.page_bytes
        if host.blocks == "unlimited":
            raise ConfigError("g2: blocks: real memory is not unlimited; give a number, or bytes")
        for name, why in _SIMULATED.items():
            if getattr(host, name) != getattr(TierSettings(tier="g2", blocks=1), name):
                raise ConfigError(f"g2: {name}: {why}")
        for name, why in _ELSEWHERE.items():
            if getattr(offload, name) != getattr(OffloadSettings(), name):
                raise ConfigError(f"offload: {name}: {why}")
        num_blocks = host.blocks if host.blocks is not None else int(str(host.bytes)) // page_bytes
        if num_blocks < 1:
            raise ConfigError(f"g2: bytes: {host.bytes} is less than a page of {page_bytes} bytes; give more")
        return cls(
            manager,
            PinnedPages(num_blocks, buffer),
            policy=host.eviction if isinstance(host.eviction, str) else host.eviction(),
            filter=None if offload.filter is None else offload.filter(),
            copy_blocks=offload.offload_batch_size,
        )

    # ── Down ──

    def offload(self, sealed: Identities) -> int:
        """Enqueue copies of sealed pages that the host does not have and the policy selects; return their number.

        Pages without room are counted and skipped. PolicyError when the policy does not answer for each.
        """
        missing = np.flatnonzero(~self.blocks.has_blocks(sealed))
        in_flight = {h for copy in self._offloads for h in copy.identities.lineage_hashes}
        wanted = [i for i in missing.tolist() if sealed[i].lineage_hash not in in_flight]
        if self.filter is not None and wanted:
            wanted = self._select(self.filter, sealed, wanted)
        most = self.copy_blocks or max(1, len(wanted))
        return sum(self._copy_down(sealed, wanted[at : at + most]) for at in range(0, len(wanted), most))

    def _select(self, policy: OffloadPolicy, sealed: Identities, wanted: list[int]) -> list[int]:
        names = [sealed[index].lineage_hash for index in wanted]
        kept = list(policy.select(names, np.zeros(len(names), np.uint32)))  # just sealed: no hits yet
        if len(kept) != len(names):
            raise PolicyError(f"the offload policy answered {len(kept)} times for {len(names)} blocks")
        return [index for index, keep in zip(wanted, kept, strict=True) if keep]

    def _copy_down(self, sealed: Identities, wanted: list[int]) -> int:
        names = sealed[wanted[0] : wanted[-1] + 1]
        if len(names) != len(wanted):  # the host has some in between
            names = sealed[wanted[0] : wanted[0] + 1]
            for index in wanted[1:]:
                names = names + sealed[index : index + 1]
        source, found = self.manager.blocks.match_scattered(names)
        if not found.all():  # evicted meanwhile
            source.release()
            return 0
        try:
            target = self.blocks.allocate(len(names))
        except CapacityExhausted:
            source.release()
            self.refused_blocks += len(names)
            return 0
        self._offloads.append(self._enqueue(source, target, names, down=True))
        return len(names)

    # ── Up ──

    def onboard(self, identities: Identities) -> Copy | None:
        """Enqueue a copy of the longest prefix that the host has. None when it has none, or no slot is free."""
        source = self.blocks.match_prefix(identities)
        if len(source) == 0:
            source.release()
            return None
        try:
            target = self.manager.blocks.allocate(len(source))
        except CapacityExhausted:
            source.release()
            return None
        return self._enqueue(source, target, identities[: len(source)], down=False)

    def commit(self, copy: Copy) -> RegisteredBlocks:
        """Register the blocks of an ended copy so that they can be matched; the caller releases them afterwards."""
        copy.source.release()
        self.onboarded_blocks += len(copy.identities)
        return copy.target.register(copy.identities)

    def abandon(self, copy: Copy) -> None:
        """Give up a copy; its blocks are freed once it has ended."""
        self._abandoned.append(copy)

    # ── Both ──

    def begin_copies(self) -> None:
        """Begin every enqueued copy in order."""
        while self._pending:
            copy = self._pending[0]
            copy.done = self.copier.begin_copy(
                _ids(copy.target), _ids(copy.source), copy.after, down=copy.down
            )
            self._pending.pop(0)
            if self.on_copy is not None:
                self.on_copy(copy)

    def collect_ended(self) -> None:
        """Register or free the blocks of ended copies."""
        while self._offloads and self._offloads[0].done():
            copy = self._offloads.popleft()
            copy.source.release()
            copy.target.register(copy.identities).release()
            self.offloaded_blocks += len(copy.identities)
        for copy in [copy for copy in self._abandoned if copy.done()]:
            self._abandoned.remove(copy)
            copy.source.release()
            copy.target.release()

    @property
    def offloads_in_flight(self) -> int:
        """Number of offload copies in progress."""
        return len(self._offloads)

    def close(self) -> None:
        """Wait for every copy and release all blocks. Idempotent."""
        self.begin_copies()
        self.copier.wait()
        self.collect_ended()

    def _enqueue(
        self, source: RegisteredBlocks, target: MutableBlocks, names: Identities, *, down: bool
    ) -> Copy:
        copy = Copy(source, target, names, down, self.copier.mark())
        self._pending.append(copy)
        return copy


def _ids(guard: BlockGuard) -> list[int]:
    ids: list[int] = guard.ids.tolist()
    return ids
