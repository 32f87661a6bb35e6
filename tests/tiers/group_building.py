"""A worker with several KV groups and tiers; a block is 1 MB, and every link up has 1 GB/s."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from model.grouped_device import Group, Sizes
from tiers.building import INF, MS, tiers, way
from understudy import _core
from understudy.tokens import Identities

WINDOW, FULL = Group(16, window=64), Group(16)


def kv_group(group: Group) -> _core.KvGroup:
    return _core.KvGroup(
        group.name,
        block_size=group.block,
        window=group.window,
        chunk=group.chunk,
        checkpoint_blocks=int(group.checkpoint),
        bounded_replay=group.name == "sliding_window_mla",
    )


def chain(tag: int, units: int, shared_units: int = 0, stem: int = 0) -> Identities:
    """Units of hashing of conversation `tag`, which begins as `stem` does."""
    return Identities.from_local_hashes(
        [1000 * (stem if i < shared_units else tag) + i + 1 for i in range(units)]
    )


def below(
    blocks: int, disk: int | None = None, *, write_through: bool = True, **settings: Any
) -> _core.TierConfig:
    """Tiers whose copies down take no time; a block needs a millisecond for each hop up."""
    if disk is not None:
        settings["g3"] = _core.SharedTierConfig(num_blocks=disk, worker=way(INF, 1.0), backend=way(INF))
    return tiers(
        blocks,
        INF,
        **{"host": way(INF, 1.0), "write_through": write_through, "offload_batch_size": 4096, **settings},
    )


@dataclass
class GroupWorker:
    """An engine with a clock, checked after every step."""

    groups: list[Group]
    blocks: int
    config: _core.TierConfig | None
    retention: int | None = 0
    settings: dict[str, Any] = field(default_factory=dict)
    match_unit: int = 0

    def __post_init__(self) -> None:
        self.unit = Sizes(self.groups, self.match_unit).hash
        base = _core.VllmEngineConfig(
            block_size=self.unit, num_gpu_blocks=self.blocks, check=True, **self.settings
        )
        native = _core.with_groups(
            base,
            [kv_group(group) for group in self.groups],
            prefix_match_unit=self.match_unit,
            prefix_cache_retention_interval=self.retention,
        )
        self.engine = _core.VllmEngine(native, _core.constant_timing(0.0, 1.0), tiers=self.config)
        self.now_ns = 0
        self.records: dict[int, _core.RequestRecord] = {}

    def submit(self, identities: Identities, prompt: int, outputs: int = 1) -> int:
        return self.engine.submit("r", prompt, outputs, identities)

    def play(self) -> None:
        """Run until nothing is left to do, transfers included."""
        for _ in range(20_000):
            if self.engine.idle:
                break
            self.engine.begin_step(self.now_ns)
            if not self.engine.asleep:
                assert not self.engine.stuck
                self.now_ns = self.engine.now_ns
                effects = self.engine.end_step(self.now_ns)
                self.records |= {record.id: record for record in effects.finished}
            else:
                wake = self.engine.wake_ns
                assert wake is not None
                self.now_ns = max(self.now_ns, wake)
            self.engine.check()
        assert self.engine.idle
        while self.config is not None and (wake := self.engine.wake_ns) is not None:
            self.now_ns = max(self.now_ns, wake)
            self.engine.land(wake)
            self.engine.check()

    def run(self, identities: Identities, prompt: int, outputs: int = 1) -> _core.RequestRecord:
        """Run one request to its end."""
        number = self.submit(identities, prompt, outputs)
        self.play()
        return self.records[number]

    def cached_on_host(self) -> int:
        return self.engine.tier_blocks(_core.Tier.G2)[2]

    def parked_ms(self, record: _core.RequestRecord) -> float:
        return record.parked_ns / MS
