"""Events of a replay as an engine of each release sends them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from replay.building import single_turns
from understudy.engines.vllm_config import VllmConfig
from understudy.events.dialects import dialect
from understudy.events.emit import merge_wire_batches
from understudy.events.wire import AllBlocksCleared, BlockRemoved, BlockStored
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers.settings import TiersConfig

if TYPE_CHECKING:
    from understudy.events.wire import WireEvent

HOST = {"tiers": [{"tier": "g2", "blocks": 256}], "offload": {"mode": "vllm"}, "kv_bytes_per_token": 2000}


def emitted(name: str, tiers: dict[str, Any] | None = None) -> list[list[WireEvent]]:
    """Batches of a worker that must evict."""
    below = TiersConfig() if tiers is None else TiersConfig.from_dict(tiers)
    engine = VllmConfig(block_size=16, num_gpu_blocks=64, max_model_len=1000)
    run = run_offline(
        RunPlan(
            single_turns([96] * 40, 4),
            engine,
            tiers=below,
            events=True,
        )
    )
    assert run.kv is not None
    native = below.offload.mode == "vllm"
    events = [run.kv.events(0, "raw")]
    merged = merge_wire_batches(list(events), dialect(name), block_size=16, native_offload=native)
    return [batch for _, _, batch in merged]


@pytest.mark.parametrize(
    ("name", "keys", "group", "kind"),
    [
        ("vllm-0.33.0", True, 0, "full_attention"),
        ("vllm-0.22.0", True, 0, "full_attention"),
        ("vllm-0.20.0", True, 0, None),
        ("vllm-0.17.0", True, None, None),
        ("vllm-0.16.0", False, None, None),
    ],
)
def test_fields_have_the_values_of_the_release(
    name: str, keys: bool, group: int | None, kind: str | None
) -> None:
    events = [event for batch in emitted(name) for event in batch]
    stored = [event for event in events if isinstance(event, BlockStored)]
    removed = [event for event in events if isinstance(event, BlockRemoved)]
    assert stored
    assert removed
    for event in stored:
        assert event.extra_keys == ([None] * len(event.block_hashes) if keys else None)
        assert (event.group_idx, event.kv_cache_spec_kind, event.lora_id) == (group, kind, None)
    assert all((len(event.block_hashes), event.group_idx) == (1, group) for event in removed)


def test_native_offload_sends_hashes_only_and_one_removal_per_eviction() -> None:
    host = [
        event
        for batch in emitted("vllm", HOST)
        for event in batch
        if not isinstance(event, AllBlocksCleared) and event.medium == "CPU"
    ]
    stored = [event for event in host if isinstance(event, BlockStored)]
    assert stored
    for event in stored:
        assert (len(event.block_hashes), event.block_size, event.token_ids, event.group_idx) == (1, 0, [], 0)
        assert (event.parent_block_hash, event.extra_keys, event.kv_cache_spec_kind) == (None, None, None)


def test_sglang_starts_with_a_cleared_cache_and_packs_removals() -> None:
    batches = emitted("sglang")
    assert isinstance(batches[0][0], AllBlocksCleared)
    assert sum(isinstance(event, AllBlocksCleared) for batch in batches for event in batch) == 1
    removed = [event for batch in batches for event in batch if isinstance(event, BlockRemoved)]
    assert max(len(event.block_hashes) for event in removed) > 1
