"""KV events and KV routing next to several KV groups with tiers of ours: hits count what all tiers can serve."""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import understudy as us
from model.grouped_device import Group, Key
from model.tiered_groups import TieredGroups
from replay.building import conversations, single_turns
from server.test_live_groups import list_turns
from understudy._core import Tier
from understudy.engines.timing import Constant
from understudy.events.events import Stored
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers.settings import TiersConfig
from understudy.workload.identities import row_identities

if TYPE_CHECKING:
    from understudy.workload import Workload

WINDOW, FULL, WIDE = Group(16, window=64), Group(16), Group(32)
LAYOUTS = {
    "window": [WINDOW, FULL],
    "two windows": [WINDOW, Group(16, window=40), FULL],
    "wide": [WINDOW, WIDE],
    "wide window": [Group(32, window=48), FULL],
    "chunk": [Group(16, chunk=128), FULL],
    "state": [Group(64, kind="mamba"), Group(64)],
    "part of a state": [Group(64, kind="mamba"), FULL],
    "rswa": [Group(16, window=64, kind="rswa"), WINDOW],
}
TIERS = {"host": (400, None, None), "disk": (60, 150, None), "store": (60, None, 4000), "all": (40, 90, 4000)}


def kv_groups(groups: list[Group]) -> tuple[us.KvCacheGroup, ...]:
    return tuple(
        us.KvCacheGroup(
            kind=group.name,  # type: ignore[arg-type]
            block_size=group.block,
            window=group.window or None,
            chunk=group.chunk or None,
        )
        for group in groups
    )


def below(g2: int, g3: int | None = None, g4: int | None = None, **offload: Any) -> TiersConfig:
    sizes = {"g2": g2, "g3": g3, "g4": g4}
    tiers = [{"tier": name, "blocks": blocks} for name, blocks in sizes.items() if blocks]
    offload = {"recompute_fallback": False, **offload}
    return TiersConfig.from_dict({"tiers": tiers, "kv_bytes_per_token": 1024, "offload": offload})


def run(groups: list[Group], tiers: TiersConfig, *, retention: int | None = 0, **settings: Any) -> OfflineRun:
    """Replay turns of eight conversations, each after the transfers of the one before have ended."""
    engine = us.VllmConfig(
        kv_cache_groups=kv_groups(groups),
        num_gpu_blocks=120,
        max_model_len=800,
        prefix_cache_retention_interval=retention,
        timing=Constant(prefill_ms=1.0, decode_ms=1.0),
    )
    given = {"workers": 2, "routing": us.KvRouting(), "events": True, "check": True, **settings}
    return run_offline(RunPlan(turns(), engine, tiers=tiers, **given))


def turns() -> Workload:
    prompts = list_turns()
    return single_turns(
        [16 * len(blocks) + 5 for blocks in prompts],
        arrival_ms=[10_000.0 * row for row in range(len(prompts))],
        content=[[*blocks, 1_000_000 + row] for row, blocks in enumerate(prompts)],
    )


class ByEvents(TieredGroups):
    """A worker that knows its blocks from events alone: of its own tiers, and of the shared ones."""

    def __init__(self, groups: list[Group], shared: Counter[tuple[Tier, int, int]]) -> None:
        super().__init__(groups, 1, 1)
        self.copies: Counter[tuple[Tier, int, int]] = Counter()
        self.shared = shared

    def tier_of(self, key: Key) -> int:
        group, _, content = key
        places = ((int(tier), (tier, group, content)) for tier in (Tier.G1, Tier.G2, Tier.G3, Tier.G4))
        return next((tier for tier, place in places if self.copies[place] or self.shared[place]), 9)


def replay_events(found: OfflineRun, groups: list[Group]) -> list[list[int]]:
    """Return the longest hits over the tiers down to G1, G2, G3 and G4 that events predict for each decision."""
    shared: Counter[tuple[Tier, int, int]] = Counter()
    workers = [ByEvents(groups, shared) for _ in range(2)]
    log, decisions, tiers, load = found.kv, found.decisions, found.timeline.tiers, turns()
    assert log is not None
    assert decisions is not None
    assert tiers is not None
    streams = [log.events(worker, "consolidated") for worker in range(2)]
    places = [worker.copies for worker in workers]
    for tier in (Tier.G3, Tier.G4):
        if any(summary.tier == tier for summary in tiers.tiers):
            streams.append(log.shared_events(tier, "consolidated"))
            places.append(shared)
    merged = heapq.merge(
        *(zip(stream, repeat(place)) for stream, place in zip(streams, places, strict=True)),
        key=lambda one: one[0][0],
    )
    pending, hits = next(merged, None), []
    for row, time_ns, worker in zip(
        decisions.rows.tolist(), decisions.time_ns.tolist(), decisions.worker.tolist(), strict=True
    ):
        while pending is not None and pending[0][0] < time_ns:  # the choice itself may evict
            (_, event), copies = pending
            for block in event.blocks:
                name = (event.tier, event.group, block.sequence_hash)
                copies[name] += 1 if isinstance(event, Stored) else -1
                assert copies[name] in (0, 1)
            pending = next(merged, None)
        model = workers[worker]
        tokens = int(load.prompt_tokens[row])
        unit = model.sizes.hash
        named = row_identities(load, row, unit, tokens // unit)
        contents = [block.sequence_hash for block in named]
        hits.append([model.longest(contents, tokens - 1, lowest) for lowest in range(1, 5)])
    return hits


@pytest.mark.parametrize("retention", [0, None])
@pytest.mark.parametrize("sizes", TIERS.values(), ids=TIERS)
@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_the_router_counts_what_the_worker_then_serves(
    groups: list[Group], sizes: tuple[int, int | None, int | None], retention: int | None
) -> None:
    found = run(groups, below(*sizes), retention=retention)
    decisions, unit = found.decisions, found.timeline.block_size
    assert decisions is not None
    device, lower = decisions.overlap_blocks * unit, decisions.lower_overlap_blocks * unit
    hits = np.array(replay_events(found, groups))
    assert device.tolist() == hits[:, 0].tolist()
    assert (device + lower).tolist() == hits[:, 3].tolist()
    assert (device + lower).tolist() == found.timeline.cached_tokens_first[decisions.rows].tolist()


def test_the_requests_hit_every_tier() -> None:
    groups = LAYOUTS["window"]
    hits = np.concatenate([replay_events(run(groups, below(*sizes)), groups) for sizes in TIERS.values()])
    assert np.diff(hits, axis=1, prepend=0).sum(axis=0).all()  # device, host, disk, object store


@pytest.mark.parametrize("mode", ["write_through", "evict"])
@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_fast_forward_routes_and_publishes_as_stepping_does(groups: list[Group], mode: str) -> None:
    engine = us.VllmConfig(kv_cache_groups=kv_groups(groups), num_gpu_blocks=150)
    tiers = below(200, 400, mode=mode, placement="inclusive")
    fast, slow = (
        run_offline(
            RunPlan(
                conversations(16),
                engine,
                workers=3,
                routing=us.KvRouting(),
                tiers=tiers,
                events=True,
                check=fast_forward,
                fast_forward=fast_forward,
            )
        )
        for fast_forward in (True, False)
    )
    assert fast.facts.digest == slow.facts.digest
    assert fast.facts.digests == slow.facts.digests
    assert fast.facts.router["mean_cost_regret_blocks"] == 0


def test_events_name_each_block_of_a_tier_by_group_content_and_parent() -> None:
    found = run([WINDOW, WIDE], below(90, 400), routing="session_affinity")
    log = found.kv
    assert log is not None
    device: dict[tuple[int, int], tuple[int, int | None, int | None]] = {}
    seen: Counter[tuple[Tier, int]] = Counter()
    streams = [log.events(0, "raw"), log.events(1, "raw"), log.shared_events(Tier.G3, "raw")]
    events = [event for stream in streams for _, event in stream if isinstance(event, Stored)]
    for event in sorted(events, key=lambda event: event.tier):
        parent = event.parent_hash
        for block in event.blocks:
            named = (block.position, block.local_hash, parent)
            assert device.setdefault((event.group, block.sequence_hash), named) == named
            parent = block.sequence_hash
            seen[event.tier, event.group] += 1
    assert set(seen) == {(tier, group) for tier in (Tier.G1, Tier.G2, Tier.G3) for group in (0, 1)}


def test_an_index_of_the_first_group_finds_its_blocks_on_every_tier() -> None:
    first = run([FULL, WINDOW], below(60, 150), routing=us.KvRouting(index_groups="first"))
    decisions = first.decisions
    assert decisions is not None
    counted = (decisions.overlap_blocks + decisions.lower_overlap_blocks) * first.timeline.block_size
    served = first.timeline.cached_tokens_first[decisions.rows]
    assert decisions.lower_overlap_blocks.sum() > 0
    assert (counted >= served).all()
    assert counted.sum() > served.sum()
