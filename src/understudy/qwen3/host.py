"""Host memory below the device: whole pages go down as they are sealed, and come back before a prompt is computed."""

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
    from understudy.qwen3.pages import Carrier
    from understudy.tiers.policy import OffloadPolicy
    from understudy.tiers.settings import TiersConfig
    from understudy.tokens import Identities

_SIMULATED = {
    "latency_ms": "real memory has its own; leave it out",
    "link": "the real link carries what it can; leave its settings out",
}
_ELSEWHERE = {
    "mode": "the real engine copies pages as they are sealed: write_through alone",
    "min_reuse": "a page that has just been sealed has had no hits; say what is worth a copy in a filter",
    "demand_first": "pages come up and go down on streams of their own; leave it out",
    "onboard_failure_rate": "real copies do not fail by chance; leave it out",
}
"""Settings of the simulator that the real engine does not have, and why."""


@dataclass(slots=True)
class Copy:
    """Bytes on their way. It holds the blocks that it reads and those that it writes until they have come."""

    source: RegisteredBlocks
    target: MutableBlocks
    identities: Identities
    down: bool
    after: object
    """What the device had been given when the copy was asked for."""
    done: Callable[[], bool] = lambda: False


class HostTier:
    """A pool of host pages, and the copies between it and the device. One thread at a time.

    `offer` and `onboard` take the blocks of a copy; `set_off` begins it, at a moment when the device computes, because
    that is work for the host. A copy cannot be called back: who loses interest leaves it, and `note_ended` cleans up
    behind it.
    """

    def __init__(
        self,
        manager: KvCacheManager,
        carrier: Carrier,
        *,
        policy: str | EvictionPolicy = "lru",
        worth: OffloadPolicy | None = None,
        copy_blocks: int | None = None,
    ) -> None:
        self.manager = manager
        self.carrier = carrier
        self.worth = worth
        """Says which sealed pages are worth a copy; without it all are."""
        self.copy_blocks = copy_blocks
        """Pages of one copy down, at most."""
        self.blocks = BlockManager(
            carrier.num_blocks,
            block_size=manager.layout.page_size,
            policy=policy,  # type: ignore[arg-type]
            duplicates="reject",
            tier=Tier.G2,
        )
        self.on_copy: Callable[[Copy], None] | None = None
        """Told of every copy as it begins."""
        self._asked: list[Copy] = []
        self._leaving: deque[Copy] = deque()
        self._abandoned: list[Copy] = []
        self.offloaded_blocks = 0
        self.onboarded_blocks = 0
        self.refused_blocks = 0

    @classmethod
    def from_config(cls, config: TiersConfig, manager: KvCacheManager, buffer: KvBuffer) -> HostTier | None:
        """The host tier of a simulator's settings, or None where it has none. What this engine lacks is refused."""
        below = {tier.tier: tier for tier in config.tiers}
        if not below:
            return None
        if lower := sorted(below.keys() - {"g2"}):
            raise ConfigError(f"{lower[0]}: the real engine has host memory (g2) alone below the device")
        host, offload, page_bytes = below["g2"], config.offload, manager.layout.page_bytes
        if host.blocks == "unlimited":
            raise ConfigError("g2: blocks: unlimited cannot be had of real memory; give a number, or bytes")
        for name, why in _SIMULATED.items():
            if getattr(host, name) != getattr(TierSettings(tier="g2", blocks=1), name):
                raise ConfigError(f"g2: {name}: {why}")
        for name, why in _ELSEWHERE.items():
            if getattr(offload, name) != getattr(OffloadSettings(), name):
                raise ConfigError(f"offload: {name}: {why}")
        num_blocks = host.blocks if host.blocks is not None else int(str(host.bytes)) // page_bytes
        if num_blocks < 1:
            raise ConfigError(f"g2: {host.bytes} bytes hold no page of {page_bytes} bytes")
        return cls(
            manager,
            PinnedPages(num_blocks, buffer),
            policy=host.eviction if isinstance(host.eviction, str) else host.eviction(),
            worth=None if offload.filter is None else offload.filter(),
            copy_blocks=offload.offload_batch_size,
        )

    # ── Down ──

    def offer(self, sealed: Identities) -> int:
        """Have those copied that the host lacks and that are worth it; returns how many.

        What finds no room is left out and counted. PolicyError when the policy does not answer for each.
        """
        missing = np.flatnonzero(~self.blocks.has_blocks(sealed))
        on_their_way = {h for copy in self._leaving for h in copy.identities.lineage_hashes}
        wanted = [i for i in missing.tolist() if sealed[i].lineage_hash not in on_their_way]
        if self.worth is not None and wanted:
            wanted = self._chosen(self.worth, sealed, wanted)
        most = self.copy_blocks or max(1, len(wanted))
        return sum(self._copy_down(sealed, wanted[at : at + most]) for at in range(0, len(wanted), most))

    def _chosen(self, worth: OffloadPolicy, sealed: Identities, wanted: list[int]) -> list[int]:
        names = [sealed[index].lineage_hash for index in wanted]
        kept = list(worth.select(names, np.zeros(len(names), np.uint32)))  # just sealed: nobody has hit them
        if len(kept) != len(names):
            raise PolicyError(f"the offload policy answered {len(kept)} times for {len(names)} blocks")
        return [index for index, keep in zip(wanted, kept, strict=True) if keep]

    def _copy_down(self, sealed: Identities, wanted: list[int]) -> int:
        names = sealed[wanted[0] : wanted[-1] + 1]
        if len(names) != len(wanted):  # some between them are there
            names = sealed[wanted[0] : wanted[0] + 1]
            for index in wanted[1:]:
                names = names + sealed[index : index + 1]
        source, found = self.manager.blocks.match_scattered(names)
        if not found.all():  # gone again: nothing to copy
            source.release()
            return 0
        try:
            target = self.blocks.allocate(len(names))
        except CapacityExhausted:
            source.release()
            self.refused_blocks += len(names)
            return 0
        self._leaving.append(self._ask(source, target, names, down=True))
        return len(names)

    # ── Up ──

    def onboard(self, identities: Identities) -> Copy | None:
        """Have the longest run of these brought back that the host has. None when it has none, or no slot is free."""
        source = self.blocks.match_prefix(identities)
        if len(source) == 0:
            source.release()
            return None
        try:
            target = self.manager.blocks.allocate(len(source))
        except CapacityExhausted:
            source.release()
            return None
        return self._ask(source, target, identities[: len(source)], down=False)

    def commit(self, copy: Copy) -> RegisteredBlocks:
        """The bytes have come: the blocks can be found from now on. The caller holds them until it has matched them."""
        copy.source.release()
        self.onboarded_blocks += len(copy.identities)
        return copy.target.register(copy.identities)

    def abandon(self, copy: Copy) -> None:
        """Nobody waits for it any more; its blocks come back once it has ended."""
        self._abandoned.append(copy)

    # ── Both ──

    def set_off(self) -> None:
        """Begin every copy that was asked for, in that order."""
        while self._asked:
            copy = self._asked[0]
            copy.done = self.carrier.carry(_ids(copy.target), _ids(copy.source), copy.after, down=copy.down)
            self._asked.pop(0)
            if self.on_copy is not None:
                self.on_copy(copy)

    def note_ended(self) -> None:
        """Take note of what has ended."""
        while self._leaving and self._leaving[0].done():
            copy = self._leaving.popleft()
            copy.source.release()
            copy.target.register(copy.identities).release()
            self.offloaded_blocks += len(copy.identities)
        for copy in [copy for copy in self._abandoned if copy.done()]:
            self._abandoned.remove(copy)
            copy.source.release()
            copy.target.release()

    @property
    def leaving(self) -> int:
        """Copies on their way down."""
        return len(self._leaving)

    def close(self) -> None:
        """Wait for every copy, and give all blocks back. Idempotent."""
        self.set_off()
        self.carrier.wait()
        self.note_ended()

    def _ask(self, source: RegisteredBlocks, target: MutableBlocks, names: Identities, *, down: bool) -> Copy:
        copy = Copy(source, target, names, down, self.carrier.mark())
        self._asked.append(copy)
        return copy


def _ids(guard: BlockGuard) -> list[int]:
    ids: list[int] = guard.ids.tolist()
    return ids
