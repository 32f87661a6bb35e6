"""Plans of random layers: what holds for all of them, and what is refused, as vLLM refuses it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy._core import GroupLayout, VllmEngineConfig, with_groups
from understudy.engines.kv_groups import kv_cache_groups
from understudy.errors import ConfigError
from understudy.groups.layer import Layer
from understudy.groups.plan import GroupPlan, plan_groups

GIB = 1 << 30
FULL = Layer(kind="full", block_size=16, kv_heads=8, head_size=128)
NARROW = Layer(kind="full", block_size=16, kv_heads=5, head_size=128)
WINDOW = Layer(kind="sliding_window", block_size=16, kv_heads=8, head_size=128, window=1024)
THIN = Layer(kind="sliding_window", block_size=16, kv_heads=2, head_size=128, window=128)
LOCAL = Layer(kind="chunked_local", block_size=16, kv_heads=8, head_size=128, chunk=8192)
MLA = Layer(kind="mla", block_size=64, kv_heads=1, head_size=576)
INDEXER = Layer(kind="mla", block_size=64, kv_heads=1, head_size=132, dtype="u8", role="indexer")
MLA_WINDOW = Layer(
    kind="sliding_window_mla", block_size=16, kv_heads=1, head_size=512, dtype="u8", window=128
)
REPLAYED = Layer(
    kind="sliding_window_mla",
    block_size=16,
    kv_heads=1,
    head_size=512,
    dtype="u8",
    window=128,
    bounded_replay=True,
)
RING = Layer(kind="circular", block_size=8, kv_heads=1, head_size=128, dtype="f32")
REFERENCE = Layer(kind="rswa", block_size=16, kv_heads=8, head_size=128, window=64)
STATE = Layer(kind="mamba", shapes=((3, 8192), (32, 128, 128)), dtypes=("bf16", "bf16"), checkpoint_blocks=1)
SMALL_STATE = Layer(kind="mamba", shapes=((3, 8192), (8192, 16)), dtypes=("bf16", "bf16"))
LAYERS = (
    *(FULL, NARROW, WINDOW, THIN, LOCAL, MLA, INDEXER),
    *(MLA_WINDOW, REPLAYED, RING, REFERENCE, STATE, SMALL_STATE),
)


def plan(*layers: Layer, **settings: Any) -> GroupPlan:
    return plan_groups(layers, **{"memory_bytes": 64 * GIB, "max_model_len": 8192, **settings})


@st.composite
def models(draw: st.DrawFn) -> list[Layer]:
    kinds = draw(st.lists(st.sampled_from(LAYERS), min_size=1, max_size=3, unique=True))
    return draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=24))


settings_drawn = st.fixed_dictionaries(
    {
        "memory_bytes": st.integers(8 * GIB, 200 * GIB),
        "max_model_len": st.sampled_from((100, 4096, 8192, 131072)),
        "max_num_batched_tokens": st.sampled_from((512, 8192)),
        "async_scheduling": st.booleans(),
        "prefix_caching": st.booleans(),
        "layout": st.sampled_from(("LBNHC", "BLHNC")),
        "disable_hybrid": st.sampled_from((False, False, False, True)),
    }
)


@given(models(), settings_drawn)
def test_groups_hold_every_layer_once_and_blocks_fit_in_memory(
    layers: list[Layer], settings: dict[str, Any]
) -> None:
    try:
        found = plan_groups(layers, **settings)
    except ConfigError:
        return
    assert sorted(index for group in found.groups for index in group.layers) == list(range(len(layers)))
    assert found.num_blocks * found.bytes_per_block <= settings["memory_bytes"]
    assert (found.num_blocks + 1) * found.bytes_per_block > settings["memory_bytes"]
    for group in found.groups:
        pages = group.page_bytes if group.uniform_type else group.page_bytes * len(group.layers)
        assert pages <= found.bytes_per_block
        assert group.layers == tuple(sorted(group.layers))
        assert found.scheduler_block_size % group.block_size == 0
        if group.layer.is_cacheable and settings["prefix_caching"]:
            assert group.block_size % found.hash_block_size == 0
    per_request = sum(group.blocks_per_request for group in found.groups)
    assert per_request < found.num_blocks
    assert found.max_concurrency == found.num_blocks / per_request


@given(models(), settings_drawn)
def test_the_engine_derives_the_same_sizes_from_the_groups(
    layers: list[Layer], settings: dict[str, Any]
) -> None:
    try:
        found = plan_groups(layers, **settings)
    except ConfigError:
        return
    cacheable = [group for group in found.groups if group.layer.is_cacheable]
    if not cacheable or any(
        group.layer.kind == "chunked_local" and 8192 % group.block_size for group in cacheable
    ):
        return  # the engine refuses both
    config = VllmEngineConfig(
        max_model_len=settings["max_model_len"],
        max_num_batched_tokens=settings["max_num_batched_tokens"],
        async_scheduling=settings["async_scheduling"],
        enable_prefix_caching=settings["prefix_caching"],
    )
    layout = GroupLayout(with_groups(config, [group.native() for group in kv_cache_groups(found)]))
    assert layout.scheduler_block_size == found.scheduler_block_size
    assert layout.hash_block_size == found.hash_block_size
    assert layout.blocks_per_request == sum(group.blocks_per_request for group in found.groups)
    assert layout.hit_unit == found.cache_hit_alignment


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2))
def test_groups_of_equal_pages_differ_by_less_than_the_rarest_kind(
    windows: int, full: int, order: int
) -> None:
    """A group of a kind has at most as many layers as the rarest kind, or all kinds have about as many."""
    layers = [[WINDOW] * windows + [FULL] * full, [FULL] * full + [WINDOW] * windows][order % 2]
    sizes = [len(group.layers) for group in plan(*layers).groups]
    assert max(sizes) == (
        max(windows, full) if max(windows, full) < 1.5 * min(windows, full) else min(windows, full)
    )


def test_without_prefix_caching_a_state_is_one_block_of_the_whole_context() -> None:
    found = plan(STATE, STATE, STATE, FULL, prefix_caching=False)
    assert [group.block_size for group in found.groups] == [8192, 8192, 8192, 272]
    assert [group.blocks_per_request for group in found.groups] == [1, 1, 1, 31]
    assert found.hash_block_size == found.scheduler_block_size == found.cache_hit_alignment == 8192 * 17


def test_a_finer_unit_of_matching_lets_hits_end_inside_a_state_s_block() -> None:
    found = plan(STATE, FULL, prefix_match_unit=16)
    assert (found.scheduler_block_size, found.hash_block_size, found.cache_hit_alignment) == (272, 16, 16)
    windowed = plan(STATE, FULL, WINDOW, prefix_match_unit=16)
    assert windowed.cache_hit_alignment == windowed.scheduler_block_size == 272


def test_checkpoints_on_the_grid_are_one_unit_of_matching_apart() -> None:
    grid = Layer(
        kind="mamba", shapes=((3, 8192),), dtypes=("bf16",), checkpoint_blocks=1, checkpoint_alignment="grid"
    )
    assert plan(grid, FULL).groups[0].checkpoint_alignment == 16
    assert plan(grid, FULL, prefix_match_unit=8).groups[0].checkpoint_alignment == 8
    assert plan(STATE, FULL).groups[0].checkpoint_alignment == 1


def test_windows_of_full_layers_do_not_divide_them() -> None:
    wide = Layer(kind="full", block_size=16, kv_heads=8, head_size=128, window=512)
    found = plan(FULL, wide, FULL, wide)
    assert [group.layers for group in found.groups] == [(0, 1, 2, 3)]
    assert not found.groups[0].uniform_type
    assert found.groups[0].window is None


def test_two_windows_next_to_full_attention_are_one_full_group_with_the_hybrid_manager_off() -> None:
    found = plan(WINDOW, FULL, THIN, disable_hybrid=True)
    assert [(group.kind, group.layers) for group in found.groups] == [("full_attention", (0, 1, 2))]
    assert found.groups[0].uniform_type  # their heads differ


@pytest.mark.parametrize(
    ("layers", "settings", "message"),
    [
        ([], {}, "layers: a model without layers has no KV cache; give at least one"),
        (
            [FULL, STATE],
            {"disable_hybrid": True},
            "--disable-hybrid-kv-cache-manager .disable_hybrid.: the layers still differ .*; leave",
        ),
        ([WINDOW, THIN], {"disable_hybrid": True}, "disable_hybrid.: the layers still differ"),
        (
            [MLA, FULL, STATE],
            {},
            r"layers: the page of layer 0 \(mla, .*choose another block_size, or a layout",
        ),
        ([MLA, MLA_WINDOW, WINDOW.with_block(32)], {}, "layers: the page of layer 0"),
        ([STATE], {}, "layers: block_size of mamba: no attention layer sets it; give block_size"),
        (
            [FULL],
            {"memory_bytes": 1 << 20},
            "max_model_len: one request of 8192 tokens needs 512 blocks .*; give more",
        ),
        ([FULL], {"memory_bytes": 0}, "memory_bytes must be an int of at least 1"),
        ([FULL], {"max_model_len": 0}, "max_model_len must be an int of at least 1"),
        ([FULL], {"layout": "LBNH"}, "layout: 'LBNH' does not order the letters .*; give LBNHC or BLHNC"),
        ([STATE, FULL], {"prefix_match_unit": 48}, "prefix_match_unit: 48 does not divide the block of 272"),
    ],
)
def test_what_vllm_refuses_is_refused_with_a_remedy(
    layers: list[Layer], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(*layers, **settings)


def test_exactly_one_request_and_the_null_block_fit() -> None:
    page = FULL.page_bytes
    assert plan(FULL, memory_bytes=513 * page).num_blocks == 513
    with pytest.raises(ConfigError, match="hold 512"):
        plan(FULL, memory_bytes=513 * page - 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "sliding_window"}, "layers: sliding_window has no window; give its tokens"),
        ({"kind": "chunked_local"}, "layers: chunked_local has no chunk"),
        ({"kind": "full", "dtype": "f8"}, "layers: dtype 'f8' is not known; give one of f32"),
        ({"kind": "full", "kv_heads": 0}, "layers: kv_heads of full must be an int of at least 1"),
        ({"kind": "full", "bounded_replay": True}, "bounded_replay of full: only sliding_window_mla has it"),
        ({"kind": "mamba", "shapes": ((1,),)}, "mamba has 1 shapes and 0 dtypes; give one dtype per shape"),
    ],
)
def test_a_layer_that_does_not_add_up_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layer(**{"block_size": 16, "kv_heads": 1, "head_size": 64, **fields})
