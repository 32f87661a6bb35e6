"""Engines with tiers, small and slow enough to follow by hand.

A block is 4 tokens and 1 MB, every link 1 GB/s unless told: one block takes a millisecond on a hop.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from understudy import _core
from understudy.tokens import Identities

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

MS = 1_000_000
BLOCK = 4
INF = math.inf
EVENT_COLUMNS = ("kinds", "tiers", "sequence_hashes", "positions", "sole")


def way(down_gbps: float = 1.0, up_gbps: float | None = None, **fixed: Any) -> _core.LinkPairConfig:
    """Links down and up, alike unless told."""
    return _core.LinkPairConfig(
        down_gbps=down_gbps, up_gbps=down_gbps if up_gbps is None else up_gbps, **fixed
    )


def shared(
    num_blocks: int = 100, worker: float = 1.0, backend: float = INF, **more: Any
) -> _core.SharedTierConfig:
    """A tier of the run: the worker's own link is what limits it unless told."""
    return _core.SharedTierConfig(num_blocks=num_blocks, worker=way(worker), backend=way(backend), **more)


def tiers(g2_blocks: int = 100, gbps: float = 1.0, **settings: Any) -> _core.TierConfig:
    """1 MB a block. No estimate of what computing would cost: loads are always taken."""
    given: dict[str, Any] = {
        "bytes_per_block": 1_000_000,
        "host": way(gbps),
        "recompute_fallback": False,
        **settings,
    }
    return _core.TierConfig(g2_blocks=g2_blocks, **given)


def chain(tag: int, blocks: int = 64) -> Identities:
    """The blocks of conversation `tag`: block i has local hash 1000 * tag + i + 1."""
    return Identities.from_local_hashes([1000 * tag + i + 1 for i in range(blocks)])


def forked(tag: int, shared_blocks: int, fork: int, blocks: int = 64) -> Identities:
    """Blocks of `tag` to begin with, and then those of its own."""
    return Identities.from_local_hashes(
        [1000 * tag + i + 1 for i in range(shared_blocks)]
        + [1_000_000 * (fork + 1) + i for i in range(blocks - shared_blocks)]
    )


class Worker:
    """An engine with a clock, checked after everything that it does."""

    def __init__(
        self,
        num_gpu_blocks: int,
        config: _core.TierConfig | None,
        run: _core.TierRun | None = None,
        step_ms: float = 1.0,
        name: str = "worker",
        **settings: Any,
    ) -> None:
        self.engine = _core.VllmEngine(
            _core.VllmEngineConfig(block_size=BLOCK, num_gpu_blocks=num_gpu_blocks, events=True, **settings),
            _core.constant_timing(0.0, step_ms),
            tiers=config,
            run=run,
            name=name,
        )
        self.run = run
        self.now_ns = 0
        self.records: dict[int, _core.RequestRecord] = {}

    def submit(self, identities: Identities | int, prompt: int, outputs: int = 1, **more: Any) -> int:
        """Queue a request of `prompt` tokens; a number stands for its chain."""
        blocks = chain(identities) if isinstance(identities, int) else identities
        return self.engine.submit(f"r{more.pop('name', '')}", prompt, outputs, blocks, **more)

    def begin(self, now_ms: float | None = None) -> bool:
        """Begin a step; False when the engine sleeps instead."""
        if now_ms is not None:
            assert now_ms * MS >= self.now_ns
            self.now_ns = round(now_ms * MS)
        self.engine.begin_step(self.now_ns)
        self.duration_ns = self.engine.now_ns - self.now_ns
        self.check()
        return not self.engine.asleep

    def end(self) -> None:
        self.now_ns += self.duration_ns
        self.keep(self.engine.end_step(self.now_ns))
        self.check()

    def keep(self, effects: _core.Effects) -> None:
        """The records of those that have finished."""
        self.records |= {record.id: record for record in effects.finished}

    def emitted(self, request: int) -> int:
        record = self.records.get(request)
        return self.engine.emitted(request) if record is None else record.output_tokens

    def below_tokens(self, request: int) -> tuple[int, ...]:
        record = self.records.get(request)
        return self.engine.below_tokens(request) if record is None else tuple(record.below_total)

    def tier_waits(self, request: int) -> tuple[int, int]:
        record = self.records.get(request)
        return self.engine.tier_waits(request) if record is None else (record.parked_ns, record.room_wait_ns)

    def step(self, now_ms: float | None = None) -> None:
        """One whole step."""
        assert self.begin(now_ms)
        self.end()

    def land(self, now_ms: float) -> None:
        """Only transfers: the worker itself does nothing."""
        self.now_ns = max(self.now_ns, round(now_ms * MS))
        self.engine.land(round(now_ms * MS))
        self.check()

    def play(self) -> None:
        """Until nothing is left to do, transfers included."""
        for _ in range(10_000):
            if self.engine.idle:
                break
            if self.begin():
                assert not self.engine.stuck
                self.end()
            else:
                wake = self.engine.wake_ns
                assert wake is not None
                self.now_ns = max(self.now_ns, wake)
        assert self.engine.idle
        while (wake := self.engine.wake_ns) is not None:
            self.now_ns = max(self.now_ns, wake)
            self.engine.land(wake)
            self.check()

    def cache(self, identities: Identities | int, blocks: int) -> None:
        """Compute that many blocks and finish, so that they are cached on the device."""
        self.submit(identities, blocks * BLOCK)
        self.play()

    def check(self) -> None:
        self.engine.check()
        if self.run is not None:
            self.run.check()

    def held(self) -> int:
        return self.engine.tier_blocks(_core.Tier.G1)[3]

    def active(self) -> int:
        return self.engine.tier_blocks(_core.Tier.G1)[1]

    def answers(self, identities: Identities | int, blocks: int = 64) -> list[tuple[str, int]]:
        """(kind, tier) of the leading blocks, the first miss included."""
        named = chain(identities) if isinstance(identities, int) else identities
        return [(kind, tier) for kind, tier, _ in self.engine.tier_lookup(named[:blocks])]

    def events(self) -> list[tuple[str, int, int]]:
        """(stored or removed, tier, local hash) since the call before."""
        return told(self.engine.take_all_events())


def told(batch: _core.EventBatch) -> list[tuple[str, int, int]]:
    """The rows of a batch: (stored or removed, tier, local hash)."""
    kinds = ["stored" if kind == 0 else "removed" for kind in batch.kinds.tolist()]
    return list(zip(kinds, batch.tiers.tolist(), batch.local_hashes.tolist(), strict=True))


def of_tier(events: Sequence[tuple[str, int, int]], tier: int) -> list[tuple[str, int]]:
    """What happened on one tier."""
    return [(kind, block) for kind, on, block in events if on == tier]


class Only:
    """An offload policy that keeps these blocks and no other."""

    def __init__(self, *wanted: Identities) -> None:
        self.wanted = {identity.lineage_hash for identities in wanted for identity in identities}
        self.asked: list[tuple[int, int]] = []  # (blocks, most reuse) of each question

    def select(self, lineages: Sequence[int], reuse: npt.NDArray[np.uint32]) -> list[bool]:
        self.asked.append((len(lineages), int(max(reuse))))
        return [lineage in self.wanted for lineage in lineages]


def reader_of(
    filled: Sequence[tuple[Identities, int]], num_gpu_blocks: int, tier: str = "g3", **settings: Any
) -> tuple[Worker, Worker]:
    """A worker with empty tiers of its own, whose run has those blocks on a shared tier; and who put them there.

    Nothing that the reader evicts is copied. Its clock stands at a whole number of milliseconds, and steps take none.
    """
    below: dict[str, Any] = {tier: shared()}
    config = tiers(write_through=True, **below)
    run = _core.TierRun(config, BLOCK, True)
    writer = Worker(64, config, run=run, step_ms=0.0, name="writer")
    for identities, blocks in filled:
        writer.cache(identities, blocks)
    reader = Worker(
        num_gpu_blocks,
        tiers(**{"offload_filter": Only(), **below, **settings}),
        run=run,
        step_ms=0.0,
        name="reader",
    )
    reader.now_ns = writer.now_ns
    return reader, writer
