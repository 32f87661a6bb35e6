"""Scenarios of a prefill and a decode instance, as the recordings of vLLM's NixlConnector have them."""

from __future__ import annotations

from typing import Literal

import msgspec

from understudy._core import VllmTransfer
from understudy.workload.scenario import ScenarioConfig, ScenarioRequest

NS_PER_S = 1_000_000_000
SideName = Literal["p", "d"]
Role = Literal["kv_producer", "kv_consumer", "kv_both"]


class HostSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the host, and the duration of a copy in ticks. Without `blocks_per_tick` blocks take no time."""

    host_chunks: int
    blocks_per_chunk: int = 1
    eviction_policy: Literal["lru", "arc"] = "lru"
    offload_prompt_only: bool = True
    store_ticks: int = 0
    load_ticks: int = 0
    blocks_per_tick: int | None = None


class SideSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When an instance iterates, and settings of its connector. `stall` are ranges of ticks without their ends.

    With a `host` there are two connectors in one, hand-offs first, or last (`multi_rev`). `kv_role` is that of the one
    that has both; `nixl_role` that of hand-offs. The host's own has no effect.
    """

    every: int = 1
    stall: list[tuple[int, int]] = []
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    kv_lease_duration: int = 30
    kv_role: Role | None = None
    connector: Literal["nixl", "multi", "multi_rev"] | None = None
    nixl_role: Role | None = None
    host_role: Role | None = None
    host: HostSettings | None = None

    def iterates(self, tick: int) -> bool:
        """Whether the instance may iterate in a tick."""
        return tick % self.every == 0 and not any(first <= tick < last for first, last in self.stall)

    def role(self, side: SideName) -> Role:
        """The role of the connector."""
        return self.kv_role or ("kv_producer" if side == "p" else "kv_consumer")

    def transfer(self, side: SideName) -> VllmTransfer:
        """The core's form of the settings of hand-offs."""
        role = self.nixl_role or self.role(side)
        return VllmTransfer(
            produces=role != "kv_consumer",
            consumes=role != "kv_producer",
            recomputes=self.kv_load_failure_policy == "recompute",
            lease_s=self.kv_lease_duration,
            log=True,
        )


class Side(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One instance."""

    config: ScenarioConfig
    side: SideSettings


class WireSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Durations in ticks: of a transfer, of the first handshake, and from the end of a prefill to the decode instance.

    Without `blocks_per_tick` blocks take no time. `parallel` transfers do not slow each other; `fifo` ones queue.
    """

    latency: int = 0
    proxy: int = 1
    blocks_per_tick: int | None = None
    link: Literal["parallel", "fifo"] = "parallel"
    handshake: int = 0
    dispatch: Literal["serial", "parallel"] = "serial"
    tick_s: float = 1.0


class HandOffRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request. `local`: it arrives at the decode instance, without a hand-off; `drop`: it never gets there."""

    id: str
    arrival_tick: int
    prompt: list[int | tuple[int, int]]
    max_tokens: int
    priority: int = 0
    local: bool = False
    proxy: int | None = None
    drop: bool = False

    def scenario_request(self) -> ScenarioRequest:
        """The same request without a hand-off."""
        return ScenarioRequest(
            id=self.id,
            arrival_step=self.arrival_tick,
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            priority=self.priority,
        )


class HandOffAbort(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request is aborted at an instance: `before` its schedule, or `mid`, between its poll and its update."""

    id: str
    side: SideName
    tick: int
    when: Literal["before", "mid"]


class CacheReset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An instance drops all caches, in its first turn from a tick on."""

    side: SideName
    tick: int


class HandOffScenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A workload by ticks for two instances. `fail`: transfers that fail when posted (setup) or when done (read)."""

    name: str
    p: Side
    d: Side
    wire: WireSettings
    requests: list[HandOffRequest]
    max_ticks: int
    mode: Literal["pull", "push"] = "pull"
    aborts: list[HandOffAbort] = []
    fail: dict[str, Literal["setup", "read", True]] = {}
    resets: list[CacheReset] = []

    @property
    def has_host(self) -> bool:
        """Whether an instance offloads to a host."""
        return self.p.side.host is not None or self.d.side.host is not None
