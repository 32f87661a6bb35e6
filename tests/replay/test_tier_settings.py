"""Settings of tiers: from a file, single assignments and Dynamo's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import understudy
from replay.building import conversations, crowd
from replay.tier_scene import ENGINE, config
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.run.layers import index_tiers_by_name
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.run.settings import ReplaySettings
from understudy.tiers import TiersConfig

if TYPE_CHECKING:
    from pathlib import Path


# --- settings -------------------------------------------------------------------------------------------------------


def test_a_file_lists_tiers_and_single_settings_win_over_it(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "workers: 2\n"
        "kv_bytes_per_token: 131072\n"
        "offload: {mode: write_through, offload_batch_size: 8}\n"
        "tiers:\n"
        "  - tier: g2\n"
        "    bytes: 512GiB\n"
        "    link: {down_gbps: 55, up_gbps: 50}\n"
        "  - tier: g3\n"
        "    blocks: 1000\n"
    )
    settings = ReplaySettings.read(path, {}, [])
    host, disk = settings.tiers.tiers
    assert (host.bytes, host.blocks, host.link.down_gbps) == (512 * 2**30, None, 55)
    assert (disk.tier, disk.blocks) == ("g3", 1000)
    assert (settings.tiers.offload.mode, settings.tiers.offload.offload_batch_size) == ("write_through", 8)

    flags = {"tiers": {"g2": {"blocks": 7, "link": {"up_gbps": 9}}}, "model": "Llama-3.1-8B"}
    assignments = ["tiers.g3.latency_ms=2", "offload.mode=evict", "tiers.g2.link.down_gbps=inf"]
    settings = ReplaySettings.read(path, flags, assignments)
    host, disk = settings.tiers.tiers
    assert (host.bytes, host.blocks) == (None, 7)
    assert (host.link.down_gbps, host.link.up_gbps) == (float("inf"), 9)
    assert (disk.blocks, disk.latency_ms) == (1000, 2)
    assert (settings.tiers.kv_bytes_per_token, settings.tiers.model) == (None, "Llama-3.1-8B")
    assert (settings.tiers.offload.mode, settings.tiers.offload.offload_batch_size) == ("evict", 8)

    only = ReplaySettings.read(path, {}, ["tiers=[{tier: g2, blocks: 3}]"])
    assert [tier.blocks for tier in only.tiers.tiers] == [3]
    for nothing in ("tiers=[]", "tiers=null"):
        assert ReplaySettings.read(path, {}, [nothing]).tiers.tiers == ()


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        ({"tiers": [{"tier": "g2"}, {"tier": "g2"}]}, "g2 is given more than once"),
        ({"tiers": [5]}, r"tiers\[0\] must be settings"),
        ({"tiers": [{"blocks": 5}]}, r"tiers\[0\] must be settings with tier"),
        ({"tiers": 5}, "tiers must be a list"),
        ({"tiers": {"g2": {"tier": "g3"}}}, "tiers.g2 must be settings of g2"),
        ({"tiers": {"g2": 5}}, "tiers.g2 must be settings of g2"),
    ],
)
def test_tiers_that_are_no_list_of_tiers_are_refused(layer: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        index_tiers_by_name(layer)


# --- Dynamo's names -------------------------------------------------------------------------------------------------


def test_a_run_takes_dynamos_engine_arguments() -> None:
    engine = VllmConfig.from_dict(
        {
            "block_size": 16,
            "num_gpu_blocks": 60,
            "kv_cache_bytes_per_token": 1024,
            "native_host_offload": {
                "num_host_blocks": 400,
                "d2h_bandwidth_gbps": 25,
                "h2d_bandwidth_gbps": 25,
            },
        }
    )
    theirs = understudy.replay(crowd(), engine)
    ours = understudy.replay(crowd(), ENGINE, tiers=config(offload={"mode": "write_through"}))
    assert theirs.run.digest == ours.run.digest
    assert theirs.run.tiers == ours.run.tiers
    assert theirs.run.engine == ours.run.engine
    assert theirs.tiers is not None

    staged = VllmConfig.from_dict(
        {
            "block_size": 16,
            "num_gpu_blocks": 60,
            "kv_bytes_per_token": 1024,
            "num_g2_blocks": 100,
            "num_g3_blocks": 500,
            "offload_batch_size": 4,
            "bandwidth_g1_to_g2_gbps": 20,
        }
    )
    report = understudy.replay(conversations(), staged, workers=2)
    assert report.tiers is not None
    assert [tier.tier for tier in report.tiers.tiers] == ["g1", "g2", "g3"]


def test_tiers_given_twice_are_refused_and_a_weight_may_stand_with_the_engine() -> None:
    named = VllmConfig.from_dict({"num_g2_blocks": 5, "kv_bytes_per_token": 1})
    with pytest.raises(ConfigError, match="tiers are given twice"):
        run_offline(RunPlan(crowd(), named, tiers=config()))
    weighed = VllmConfig.from_dict({"kv_bytes_per_token": 1024})
    host = TiersConfig.from_dict({"tiers": [{"tier": "g2", "blocks": 5}]})
    run = run_offline(RunPlan(crowd(), weighed, tiers=host))
    assert run.facts.tiers["kv_bytes_per_token"] == 1024
    with pytest.raises(ConfigError, match="kv_bytes_per_token is given twice"):
        run_offline(RunPlan(crowd(), weighed, tiers=TiersConfig.from_dict({"model": "Qwen3-8B"})))
    with pytest.raises(ConfigError, match="tiers: not a setting of engine"):
        VllmConfig.from_dict({"tiers": []})
