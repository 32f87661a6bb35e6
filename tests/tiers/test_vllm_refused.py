"""What vLLM's offload cannot be asked for is refused by name before anything runs, whichever way it is asked."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import understudy
import understudy.engines.offload as offload_module
from understudy._core import LinkPairConfig, TierConfig, VllmEngine, VllmOffload, constant_timing
from understudy.cli import main
from understudy.cli.fleet import read_fleet
from understudy.engines.offload_profiles import V0_32
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.fleets.fleet import Fleet
from understudy.server.flags.serving import read_serve
from understudy.server.server import Server
from understudy.tiers.settings import TiersConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROW = '{"timestamp": 0, "input_length": 10, "output_length": 2, "hash_ids": [1]}\n'
WEIGHT = 131072


def connector(name: str = "OffloadingConnector", **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


ASKED: dict[str, tuple[object, str]] = {
    "another connector": (
        connector("LMCacheConnectorV1"),
        "kv_connector 'LMCacheConnectorV1' is not supported",
    ),
    "no JSON": ('{"kv_connector": ', "--kv-transfer-config is not JSON"),
    "no object": ("[1, 2]", "--kv-transfer-config must be a JSON object"),
    "a strange key": ({**connector(cpu_bytes_to_use=1e9), "junk": 3}, "junk is not known"),
    "a strange key alone": ({"junk": 3}, "junk is not known"),
    "settings of no connector": (
        {"kv_connector_extra_config": {"cpu_bytes_to_use": 1e9}},
        "cpu_bytes_to_use needs kv_connector: OffloadingConnector",
    ),
    "no size": (connector(), "needs cpu_bytes_to_use"),
    "a host smaller than a chunk": (
        connector(cpu_bytes_to_use=8 << 20, blocks_per_chunk=8),
        "is smaller than a chunk: 8 blocks of 2,097,152 bytes take 16,777,216",
    ),
    "chunks that do not divide": (
        connector(cpu_bytes_to_use=1 << 30, block_size=40),
        r"blocks of 16 tokens \(block_size\) do not divide chunks of 40",
    ),
    "another order": (
        connector(cpu_bytes_to_use=1 << 30, eviction_policy="fifo"),
        "eviction must be lru or arc in offload mode vllm, got 'fifo'",
    ),
    "no answer": (
        connector(cpu_bytes_to_use=1 << 30, offload_prompt_only="perhaps"),
        "offload_prompt_only must be true or false, got 'perhaps'",
    ),
}


def text(transfer: object) -> str:
    return transfer if isinstance(transfer, str) else json.dumps(transfer)


def refuse(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    raise ConfigError(told)


def replay(transfer: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.jsonl").write_text(ROW)
    flags = ["--block-size", "16", "--kv-bytes-per-token", str(WEIGHT)]
    refuse(["replay", str(tmp_path / "trace.jsonl"), *flags, "--kv-transfer-config", text(transfer)], capsys)


def replay_of_a_file(transfer: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.jsonl").write_text(ROW)
    settings = {
        "kv_bytes_per_token": WEIGHT,
        "engine": {"block_size": 16, "kv_transfer_config": transfer},
    }
    (tmp_path / "fleet.yaml").write_text(json.dumps(settings))  # which is YAML, too
    refuse(["replay", str(tmp_path / "trace.jsonl"), "--config", str(tmp_path / "fleet.yaml")], capsys)


def serve(transfer: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Server(read_serve(["Llama-3.1-8B", "--port", "0", "--kv-transfer-config", text(transfer)]).settings)


def serve_with_a_setting(transfer: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setting = f"kv_transfer_config={json.dumps(transfer)}"
    Server(read_serve(["Llama-3.1-8B", "--port", "0", "--set", setting]).settings)


def fleet(transfer: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Fleet(read_fleet(["Llama-3.1-8B", "--workers", "2", "--kv-transfer-config", text(transfer)])[0])


def fleet_of_a_file(transfer: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pools = {"pools": [{"workers": 1, "flags": {"kv-transfer-config": transfer}}]}
    (tmp_path / "pools.yaml").write_text(json.dumps(pools))
    Fleet(read_fleet(["Llama-3.1-8B", "--fleet-config", str(tmp_path / "pools.yaml")])[0])


def in_python(transfer: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.jsonl").write_text(ROW)
    engine = VllmConfig.from_dict(
        {"block_size": 16, "kv_cache_bytes_per_token": WEIGHT, "kv_transfer_config": transfer}
    )
    understudy.replay(tmp_path / "trace.jsonl", engine)


WAYS = (replay, replay_of_a_file, serve, serve_with_a_setting, fleet, fleet_of_a_file, in_python)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ASKED)
def test_what_is_not_simulated_is_refused_by_name_whichever_way_it_is_asked(
    what: str,
    way: Callable[[object, Path, pytest.CaptureFixture[str]], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    transfer, message = ASKED[what]
    with pytest.raises(ConfigError, match=message):
        way(transfer, tmp_path, capsys)


@pytest.mark.parametrize("way", WAYS)
def test_eviction_that_the_release_lacks_is_refused_by_name(
    way: Callable[[object, Path, pytest.CaptureFixture[str]], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All releases that are simulated have ARC; one that had not would be refused so."""
    without = msgspec.structs.replace(V0_32, has_arc=False)
    monkeypatch.setattr(offload_module, "offload_profile", lambda _: without)
    with pytest.raises(ConfigError, match=r"g2: eviction arc: vLLM v0\.32 does not have it"):
        way(connector(cpu_bytes_to_use=1 << 30, eviction_policy="arc"), tmp_path, capsys)


def test_sizes_without_a_weight_of_a_token_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.jsonl").write_text(ROW)
    with pytest.raises(ConfigError, match="g2 needs the KV bytes per token"):
        refuse(["replay", str(tmp_path / "trace.jsonl"), "--kv-offloading-size", "4"], capsys)
    with pytest.raises(ConfigError, match="g2 needs the KV bytes per token"):
        understudy.replay(tmp_path / "trace.jsonl", VllmConfig.from_dict({"kv_offloading_size": 4}))
    for start in (
        lambda: Server(read_serve(["my-model", "--kv-offloading-size", "4"]).settings),
        lambda: Fleet(read_fleet(["my-model", "--workers", "2", "--kv-offloading-size", "4"])[0]),
    ):
        with pytest.raises(ConfigError, match="my-model"):
            start()


def test_another_backend_is_refused_where_there_is_something_to_offload_to() -> None:
    with pytest.raises(ConfigError, match="--kv-offloading-backend lmcache is not supported"):
        read_serve(["Llama-3.1-8B", "--kv-offloading-size", "4", "--kv-offloading-backend", "lmcache"])
    with pytest.raises(ConfigError, match="--kv-offloading-backend lmcache is not supported"):
        VllmConfig.from_dict({"kv_offloading_size": 4, "kv_offloading_backend": "lmcache"})


# --- what can be asked is understood the same way ---------------------------------------------------------------------


def test_chunks_in_tokens_are_of_the_block_size_that_a_file_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.jsonl").write_text(ROW)
    (tmp_path / "fleet.yaml").write_text("engine: {block_size: 16}\nkv_bytes_per_token: 1\n")
    asked = text(connector(cpu_bytes_to_use=1 << 20, block_size=96))
    arguments = [
        "--config",
        str(tmp_path / "fleet.yaml"),
        "--kv-transfer-config",
        asked,
        "--json",
        str(tmp_path / "out.json"),
    ]
    assert main(["replay", str(tmp_path / "trace.jsonl"), "--quiet", *arguments]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["tiers"]["tiers"][1]["capacity_blocks"] == (1 << 20) // 4096 * 6


def test_the_settings_of_an_engine_may_hold_vllms_names() -> None:
    asked = {"kv_transfer_config": connector(cpu_bytes_to_use=1 << 30, eviction_policy="arc", block_size=64)}
    tiers = VllmConfig.from_dict({**asked, "kv_cache_bytes_per_token": 7}).tiers
    assert tiers == TiersConfig.from_dict(
        {
            "tiers": [{"tier": "g2", "bytes": 1 << 30, "eviction": "arc"}],
            "offload": {"mode": "vllm", "chunk_tokens": 64},
            "kv_bytes_per_token": 7,
        }
    )
    plan = read_serve(["Llama-3.1-8B", "--set", "kv_offloading_size=2"])
    assert plan.settings.tiers == TiersConfig.from_dict(
        {
            "tiers": [{"tier": "g2", "bytes": 2 << 30}],
            "offload": {"mode": "vllm"},
            "model": "Llama-3.1-8B",
        }
    )
    with pytest.raises(ConfigError, match="contradicts Dynamo's tiers; give one"):
        VllmConfig.from_dict({**asked, "num_g2_blocks": 100, "kv_bytes_per_token": 7})


def test_two_measures_of_a_chunk_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="both set the chunk size"):
        TiersConfig.from_dict({"offload": {"mode": "vllm", "chunk_tokens": 64, "blocks_per_chunk": 2}})


# --- the core ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [23, 25, 48])
def test_a_host_of_another_size_than_the_offloads_is_refused_by_the_core(blocks: int) -> None:
    offload = VllmOffload(host_chunks=12, blocks_per_chunk=2)
    way = LinkPairConfig(down_gbps=1.0, up_gbps=1.0)
    below = TierConfig(bytes_per_block=1 << 16, g2_blocks=blocks, host=way, write_through=True)
    config = VllmConfig(block_size=16).native(offload=offload)
    with pytest.raises(
        ConfigError, match=f"g2_blocks={blocks} contradicts the offload, whose host has 12 chunks"
    ):
        VllmEngine(config, constant_timing(1.0, 1.0), tiers=below)


def test_an_unlimited_host_is_whole_chunks_wherever_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(ROW * 3)
    tiers = TiersConfig.from_dict(
        {
            "kv_bytes_per_token": 64,
            "tiers": [{"tier": "g2", "blocks": "unlimited"}],
            "offload": {"mode": "vllm", "blocks_per_chunk": 4},
        }
    )
    assert understudy.replay(tmp_path / "trace.jsonl", tiers=tiers).tiers is not None


@pytest.mark.parametrize("way", [serve, fleet, fleet_of_a_file, replay, in_python])
def test_an_unknown_connector_is_refused_with_the_known_ones(
    way: Callable[[object, Path, pytest.CaptureFixture[str]], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    is_live = way in (serve, fleet, fleet_of_a_file)
    known = "use OffloadingConnector" + " or NixlConnector" * is_live + r"\s*$"
    with pytest.raises(ConfigError, match=known):
        way(connector("LMCacheConnectorV1"), tmp_path, capsys)
