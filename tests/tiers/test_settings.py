"""Settings of tiers: what they resolve to, and what is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from understudy.errors import ConfigError
from understudy.kv import BUILT_IN_POLICIES, BlockManager, EvictionPolicy, Tier
from understudy.tiers import Links, PlannedLink, TierPlan, TiersConfig, take_dynamo_names
from understudy.tiers.settings import OffloadSettings
from understudy.tiers.sizes import parse_bytes


def plan(block_size: int = 64, **settings: Any) -> TierPlan:
    resolved = TierPlan.of(TiersConfig.from_dict(settings), block_size)
    assert resolved is not None
    return resolved


def dynamo(**settings: Any) -> TierPlan:
    rest, config = take_dynamo_names(settings)
    assert rest == {}
    resolved = TierPlan.of(config, 64)
    assert resolved is not None
    return resolved


# --- sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512GiB", 512 * 2**30),
        ("64GB", 64 * 10**9),
        ("1.5TiB", 3 * 2**39),
        ("0.1GB", 10**8),
        ("1 KiB", 1024),
        ("7B", 7),
        ("7", 7),
        (7, 7),
    ],
)
def test_sizes_are_read_exactly(text: int | str, size: int) -> None:
    assert parse_bytes("bytes", text) == size


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("64G", "an unknown unit; known are B, KB, MB"),
        ("64gb", "an unknown unit"),
        ("0.3KiB", "not a whole number"),
        ("GiB", "such as 512GiB"),
        ("-1GB", "such as 512GiB"),
        ("1e3", "such as 512GiB"),
        (0, "at least one byte"),
        ("0GB", "at least one byte"),
    ],
)
def test_a_size_that_is_none_is_refused(text: int | str, match: str) -> None:
    with pytest.raises(ConfigError, match=rf"g2: bytes.*{match}"):
        parse_bytes("g2: bytes", text)


# --- plans --------------------------------------------------------------------------------------------


def test_without_tiers_there_is_no_plan() -> None:
    assert TierPlan.of(TiersConfig(), 64) is None
    assert TierPlan.of(TiersConfig.from_dict({"kv_bytes_per_token": 1}), 64) is None


def test_a_host_tier_has_a_link_each_way_of_14_gigabytes_a_second() -> None:
    resolved = plan(tiers=[{"tier": "g2", "blocks": 65536}], kv_bytes_per_token=131072)
    assert (resolved.bytes_per_token, resolved.block_bytes) == (131072, 8 << 20)
    (host,) = resolved.tiers
    assert (host.tier, host.blocks, host.eviction, host.shared) == (Tier.G2, 65536, "lru", False)
    assert host.down == (PlannedLink("g1_to_g2", 14.0, 0, False, None, None),)
    assert host.up == (PlannedLink("g2_to_g1", 14.0, 0, False, None, None),)
    assert resolved.offload.offload_batch_size == 32


def test_capacity_in_bytes_is_whole_blocks() -> None:
    resolved = plan(tiers=[{"tier": "g2", "bytes": "512GiB"}], kv_bytes_per_token=131072)
    assert resolved.tiers[0].blocks == 65536
    resolved = plan(tiers=[{"tier": "g2", "bytes": "64GB"}], kv_bytes_per_token=131072)
    assert resolved.tiers[0].blocks == 7629


def test_bytes_per_token_may_come_from_a_model() -> None:
    resolved = plan(tiers=[{"tier": "g2", "blocks": 1}], model="Llama-3.1-8B", kv_dtype="fp8")
    assert resolved.bytes_per_token == 65536


def test_tiers_are_planned_nearest_first_and_backends_are_shared() -> None:
    resolved = plan(
        kv_bytes_per_token=1024,
        tiers=[
            {"tier": "g4", "blocks": "unlimited", "latency_ms": 20},
            {
                "tier": "g3",
                "bytes": "1TB",
                "link": {"down_gbps": 3, "backend_down_gbps": 5, "backend_up_gbps": "inf", "fixed_us": 8.171},
            },
            {"tier": "g2", "blocks": 10, "link": {"duplex_gbps": 80}},
        ],
    )
    host, disk, store = resolved.tiers
    assert [tier.tier for tier in resolved.tiers] == [Tier.G2, Tier.G3, Tier.G4]
    assert host.down[0].duplex == host.up[0].duplex == "g1_g2"
    assert host.down[0].duplex_gbps == 80
    assert disk.down == (
        PlannedLink("g2_to_g3", 3.0, 8171, False, None, None),
        PlannedLink("g2_to_g3_backend", 5.0, 0, True, None, None),
    )
    assert disk.up == (PlannedLink("g3_to_g2_backend", math.inf, 8171, True, None, None),)
    assert store.blocks is None
    assert store.down == (PlannedLink("g2_to_g4_backend", 4.0, 20_000_000, True, None, None),)


def test_every_planned_link_is_one_that_the_core_takes() -> None:
    links = Links()
    resolved = dynamo(num_g2_blocks=1, num_g3_blocks=1, enable_g4_storage=True, kv_bytes_per_token=1)
    for tier in resolved.tiers:
        for link in (*tier.down, *tier.up):
            links.add_link(link.name, link.bandwidth_gbps, fixed_ns=link.fixed_ns)


def test_the_policies_are_those_of_the_block_manager() -> None:
    for name in BUILT_IN_POLICIES:
        BlockManager(2, policy=name)  # type: ignore[arg-type]
        assert plan(tiers=[{"tier": "g2", "blocks": 1, "eviction": name}], kv_bytes_per_token=1)
    with pytest.raises(ConfigError) as refusal:
        BlockManager(2, policy="nonsense")  # type: ignore[arg-type]
    assert f"choose one of {', '.join(BUILT_IN_POLICIES)}, or" in str(refusal.value)


def test_a_policy_may_be_a_class_but_not_one_object_for_all_workers() -> None:
    class Mine(EvictionPolicy):
        def on_freed(self, blocks: Any, lineage_hashes: Any) -> None: ...
        def on_taken(self, blocks: Any) -> None: ...
        def select(self, count: int) -> list[int]:
            return list(range(count))

    resolved = plan(tiers=[{"tier": "g2", "blocks": 1, "eviction": Mine}], kv_bytes_per_token=1)
    assert resolved.tiers[0].eviction is Mine
    with pytest.raises(ConfigError, match="g2: eviction must be a name or a subclass"):
        plan(tiers=[{"tier": "g2", "blocks": 1, "eviction": Mine()}], kv_bytes_per_token=1)


G2 = {"tier": "g2", "blocks": 4}


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"tiers": [G2]}, "g2 needs the KV bytes per token; give kv_bytes_per_token"),
        ({"tiers": [{"tier": "g3", "blocks": 4}], "kv_bytes_per_token": 1}, "g3 needs g2"),
        ({"tiers": [{"tier": "g4", "blocks": 4}], "kv_bytes_per_token": 1}, "g4 needs g2"),
        ({"tiers": [G2, G2], "kv_bytes_per_token": 1}, "g2 is given 2 times"),
        ({"tiers": [{"tier": "g5", "blocks": 4}]}, r"tiers\[0\]\.tier must be one of g2, g3, g4; got 'g5'"),
        ({"tiers": [{"tier": "g2"}]}, "g2: the capacity is missing"),
        ({"tiers": [{"tier": "g2", "blocks": 4, "bytes": 4}]}, "g2: blocks and bytes both"),
        ({"tiers": [{"tier": "g2", "blocks": 0}]}, "g2: blocks must be at least 1"),
        ({"tiers": [{"tier": "g2", "blocks": 2**30 + 1}], "kv_bytes_per_token": 1}, "g2: .* exceed"),
        (
            {"tiers": [{"tier": "g2", "bytes": "63B"}], "kv_bytes_per_token": 1},
            "g2: bytes=63 is less than a block of 64",
        ),
        (
            {"tiers": [{**G2, "eviction": "magic"}]},
            "g2: eviction 'magic' is not known; choose one of lineage,",
        ),
        ({"tiers": [{**G2, "latency_ms": -1}]}, "g2: latency_ms"),
        ({"tiers": [{**G2, "colour": 1}]}, r"tiers\[0\]\.colour is not known; known are tier,"),
        ({"tiers": [{**G2, "link": {"down_gbps": 0}}]}, "down_gbps .*Dynamo reads 0 as unlimited"),
        ({"tiers": [{**G2, "link": {"up_gbps": -3}}]}, "up_gbps must be from"),
        ({"tiers": [{**G2, "link": {"duplex_gbps": math.nan}}]}, "duplex_gbps must be from"),
        (
            {"tiers": [{**G2, "link": {"backend_up_gbps": 3}}]},
            "g2: backend_up_gbps is for tiers that workers share",
        ),
        ({"tiers": [{**G2, "link": {"fixed_us": -1}}]}, "fixed_us"),
        ({"tiers": [{**G2, "link": {"offload_concurrency": 0}}]}, "offload_concurrency"),
        ({"offload": {"offload_batch_size": 0}}, "offload_batch_size must be at least 1"),
        ({"offload": {"min_reuse": -1}}, "min_reuse"),
        ({"offload": {"min_reuse": 1}}, "offload needs a tier"),
        ({"offload": {"mode": "write_through", "placement": "exclusive"}}, "contradicts mode=write_through"),
        ({"kv_bytes_per_token": 0}, "kv_bytes_per_token must be at least 1"),
        ({"kv_bytes_per_token": 1, "model": "Qwen3-0.6B"}, "model and kv_bytes_per_token both"),
        ({"kv_dtype": "fp8"}, "kv_dtype needs model"),
        ({"tiers": [G2], "model": "nonsense"}, "model 'nonsense' is neither a known name nor the path"),
        ({"links": []}, "links is not known; known are tiers,"),
    ],
)
def test_what_cannot_work_is_refused_by_name(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        plan(**settings)


# --- Dynamo's names -----------------------------------------------------------------------------------


def test_names_that_are_not_of_tiers_are_left_alone() -> None:
    rest, config = take_dynamo_names({"block_size": 16, "num_g2_blocks": 8, "kv_bytes_per_token": 2})
    assert rest == {"block_size": 16}
    assert config.tiers[0].blocks == 8


def test_dynamos_defaults_are_14_7_and_4_gigabytes_a_second() -> None:
    resolved = dynamo(num_g2_blocks=9, num_g3_blocks=8, enable_g4_storage=True, kv_bytes_per_token=2)
    assert [tier.blocks for tier in resolved.tiers] == [9, 8, None]
    assert [[link.bandwidth_gbps for link in (*t.down, *t.up)] for t in resolved.tiers] == [
        [14, 14],
        [7, 7],
        [4, 4],
    ]
    assert [tier.down[0].shared for tier in resolved.tiers] == [False, True, True]


def test_dynamos_bandwidths_and_batch_size_are_read() -> None:
    resolved = dynamo(
        num_g2_blocks=9,
        num_g3_blocks=8,
        enable_g4_storage=True,
        kv_cache_bytes_per_token=2,
        offload_batch_size=5,
        bandwidth_g1_to_g2_gbps=1,
        bandwidth_g2_to_g1_gbps=2.5,
        bandwidth_g2_to_g3_gbps=3,
        bandwidth_g3_to_g2_gbps=4,
        bandwidth_g2_to_g4_gbps=5,
        bandwidth_g4_to_g2_gbps=None,
    )
    assert [[link.bandwidth_gbps for link in (*t.down, *t.up)] for t in resolved.tiers] == [
        [1, 2.5],
        [3, 4],
        [5, 4],
    ]
    assert (resolved.offload.offload_batch_size, resolved.bytes_per_token) == (5, 2)


def test_nothing_null_and_zero_blocks_are_no_tier() -> None:
    for settings in (
        {},
        {"num_g2_blocks": None, "enable_g4_storage": False},
        {"num_g2_blocks": 0, "num_g3_blocks": 0},
    ):
        assert take_dynamo_names(settings)[1].tiers == ()


def test_native_host_offload_is_a_write_through_host_tier() -> None:
    resolved = dynamo(
        kv_cache_bytes_per_token=131072,
        native_host_offload={"num_host_blocks": 65536, "d2h_bandwidth_gbps": 25, "h2d_bandwidth_gbps": 20},
    )
    (host,) = resolved.tiers
    assert (host.blocks, host.eviction, resolved.offload.mode) == (65536, "lru", "write_through")
    assert (host.down[0].bandwidth_gbps, host.up[0].bandwidth_gbps) == (25, 20)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_g2_blocks": 4}, "g2 needs the KV bytes per token"),
        ({"num_g3_blocks": 4, "kv_bytes_per_token": 1}, "num_g3_blocks needs num_g2_blocks"),
        ({"enable_g4_storage": True, "kv_bytes_per_token": 1}, "enable_g4_storage needs num_g2_blocks"),
        ({"bandwidth_g1_to_g2_gbps": 4}, "bandwidth_g1_to_g2_gbps needs num_g2_blocks"),
        (
            {"num_g2_blocks": 4, "bandwidth_g4_to_g2_gbps": 4},
            "bandwidth_g4_to_g2_gbps needs enable_g4_storage",
        ),
        ({"num_g2_blocks": 4, "bandwidth_g1_to_g2_gbps": 0}, "bandwidth_g1_to_g2_gbps .*Dynamo reads 0"),
        ({"num_g2_blocks": 4, "bandwidth_g1_to_g2_gbps": "fast"}, "bandwidth_g1_to_g2_gbps must be a number"),
        ({"num_g2_blocks": -4}, "g2: blocks must be at least 1"),
        ({"num_g2_blocks": "many"}, "Invalid enum value 'many'"),
        ({"offload_batch_size": 4}, "offload_batch_size needs a tier"),
        ({"kv_bytes_per_token": 4, "kv_cache_bytes_per_token": 5}, "two names of one setting"),
        ({"native_host_offload": {"num_host_blocks": 1}, "num_g2_blocks": 1}, "both define tiers"),
        ({"native_host_offload": 5}, "native_host_offload must be a mapping"),
        ({"native_host_offload": {}}, "num_host_blocks is missing"),
        (
            {"native_host_offload": {"num_host_blocks": 1, "speed": 2}},
            "native_host_offload.speed is not known",
        ),
        (
            {"native_host_offload": {"num_host_blocks": 1, "d2h_bandwidth_gbps": 0}},
            "native_host_offload.d2h_bandwidth_gbps must be positive",
        ),
    ],
)
def test_dynamo_settings_that_cannot_work_are_refused_by_their_own_name(
    settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        dynamo(**settings)


def test_blocks_are_copied_as_they_are_completed_unless_told_otherwise() -> None:
    assert OffloadSettings().mode == "write_through"
    # The mocker's names keep the mocker's meaning.
    _, staged = take_dynamo_names({"num_g2_blocks": 5})
    _, host = take_dynamo_names({"native_host_offload": {"num_host_blocks": 5}})
    assert (staged.offload.mode, host.offload.mode) == ("evict", "write_through")
