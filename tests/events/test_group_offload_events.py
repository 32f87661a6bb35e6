"""KV events and KV routing of vLLM's offload with several KV cache groups."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import understudy as us
from replay.building import ONE_MS, conversations
from understudy._core import Tier
from understudy.events import Removed, Stored
from understudy.events.dialects import dialect
from understudy.events.translate import to_wire
from understudy.events.wire import BlockRemoved, BlockStored
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers.settings import TiersConfig

WINDOW = us.KvCacheGroup(kind="sliding_window", block_size=16, window=64)
FULL = us.KvCacheGroup(kind="full", block_size=16)
LOCAL = us.KvCacheGroup(kind="chunked_local", block_size=16, chunk=128)
RING = us.KvCacheGroup(kind="circular", block_size=8)
STATE = us.KvCacheGroup(kind="mamba", block_size=16)
REPLAY = us.KvCacheGroup(kind="sliding_window_mla", block_size=16, window=32, bounded_replay=True)
GROUPS = {
    "window": (WINDOW, FULL),
    "two windows": (WINDOW, FULL, WINDOW),
    "chunk": (LOCAL, FULL),
    "ring": (RING, WINDOW, FULL),
    "states": (STATE, FULL, STATE),
    "replay": (REPLAY, FULL),
}


def replay(groups: tuple[us.KvCacheGroup, ...], host: int = 400, **settings: Any) -> OfflineRun:
    offload = {"mode": "vllm", "blocks_per_chunk": settings.pop("blocks_per_chunk", 1)}
    tiers = TiersConfig.from_dict(
        {"tiers": [{"tier": "g2", "blocks": host}], "kv_bytes_per_token": 1024, "offload": offload}
    )
    blocks = 70 if REPLAY in groups else 120  # a window that is not cached leaves more to the others
    engine = us.VllmConfig(kv_cache_groups=groups, num_gpu_blocks=blocks, timing=ONE_MS)
    return run_offline(RunPlan(conversations(16), engine, workers=2, tiers=tiers, check=True, **settings))


@pytest.mark.parametrize("per_chunk", [1, 2])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_host_events_name_the_chunks_of_each_group(
    groups: tuple[us.KvCacheGroup, ...], per_chunk: int
) -> None:
    found = replay(groups, host=80, events=True, blocks_per_chunk=per_chunk)
    assert found.kv is not None
    for worker in range(2):
        held: Counter[tuple[int, int]] = Counter()
        events = [event for _, event in found.kv.events(worker, "consolidated") if event.tier == Tier.G2]
        for event in events:
            for block in event.blocks:
                held[event.group, block.sequence_hash] += 1 if isinstance(event, Stored) else -1
                assert held[event.group, block.sequence_hash] in (0, 1)
        cached = {number for number, group in enumerate(groups) if group not in (RING, REPLAY)}
        assert {group for group, _ in held} == cached
        assert any(isinstance(event, Removed) for event in events)
        assert 0 < sum(held.values()) <= 80 // per_chunk


def test_on_the_wire_a_chunk_has_its_hash_and_its_group_alone() -> None:
    found = replay((WINDOW, FULL), host=80, events=True)
    assert found.kv is not None
    events = [event for _, event in found.kv.events(0, "raw") if event.tier == Tier.G2]
    sent = to_wire(events, dialect("vllm-0.33.0"), block_size=16, native_offload=True)
    for event in sent:
        assert isinstance(event, BlockStored | BlockRemoved)
        assert event.medium == "CPU"
        assert event.group_idx in (0, 1)
        if isinstance(event, BlockStored):
            assert (len(event.block_hashes), event.token_ids, event.block_size) == (1, [], 0)
            assert event.kv_cache_spec_kind is None


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_kv_router_counts_what_the_host_can_serve(groups: tuple[us.KvCacheGroup, ...]) -> None:
    found = replay(groups, routing=us.KvRouting())
    decisions = found.decisions
    assert decisions is not None
    assert decisions.lower_overlap_blocks.sum() > 0
    assert found.facts.router["mean_cost_regret_blocks"] == 0


def test_an_index_of_the_first_group_counts_its_host_chunks() -> None:
    decisions = replay((WINDOW, FULL), routing=us.KvRouting(index_groups="first")).decisions
    assert decisions is not None
    assert (decisions.lower_overlap_blocks >= 0).all()


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_fast_forward_under_kv_routing_equals_stepping(groups: tuple[us.KvCacheGroup, ...]) -> None:
    digests = {
        replay(groups, routing=us.KvRouting(), events=True, fast_forward=fast).facts.digest
        for fast in (True, False)
    }
    assert len(digests) == 1
