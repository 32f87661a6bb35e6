"""Every setting of an engine is a flag, and so are the mocker's names, with the mocker's meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from understudy.cli import build_parser, main
from understudy.cli.engine_flags import MOCKER_NAMES, MOCKER_SETTINGS, SETTINGS
from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.vllm_config import VllmConfig
from understudy.tiers.dynamo import DYNAMO_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

TRACE = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"


@pytest.fixture
def run_of(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def run(*flags: str) -> dict[str, Any]:
        path = tmp_path / "report.json"
        assert main(["replay", str(TRACE), "--quiet", "--json", str(path), *flags]) == 0
        facts: dict[str, Any] = json.loads(path.read_text())["run"]
        return facts

    return run


def test_every_setting_of_the_engine_has_a_flag() -> None:
    # --data-parallel-size describes GPUs: ranks that share experts. Ranks behind one front are set by name.
    # --pipeline-parallel-size divides the model over GPUs, and is a flag of theirs.
    elsewhere = {"timing", "mocker", "tiers", "data_parallel_size", "pipeline_parallel_size"}
    assert {flag.name for flag in SETTINGS} == set(VllmConfig.__struct_fields__) - elsewhere
    apart = {"route_rejected"}  # for the fleet, also where its pools have engines of their own
    assert {flag.name for flag in MOCKER_SETTINGS} == set(MockerSettings.__struct_fields__) - apart


def test_every_name_of_the_mockers_tiers_has_a_flag() -> None:
    elsewhere = {"kv_bytes_per_token", "offload_batch_size"}  # flags of tiers
    settings_alone = {"native_host_offload"}  # holds a mapping
    assert set(DYNAMO_NAMES) - elsewhere - settings_alone <= {flag.name for flag in MOCKER_NAMES}


def test_defaults_in_the_help_are_those_of_the_engine() -> None:
    engine = VllmConfig()
    for flag in SETTINGS:
        default = getattr(engine, flag.name)
        if flag.kind in (int, float) and default is not None:
            assert f"(default: {default:g}" in flag.help, flag.name


def test_flags_reach_the_engine(run_of: Callable[..., dict[str, Any]]) -> None:
    flags = """
        --long-prefill-token-threshold 300 --no-enable-prefix-caching --watermark 0.1 --speedup-ratio 2
        --scheduling-policy priority --aic-nextn 2 --aic-nextn-accept-rates 0.5,0.5 --aic-mtp-seed 7
        --no-scheduler-reserve-full-isl --g1-backend kvbm
    """
    engine = run_of(*flags.split())["engine"]
    assert (engine["long_prefill_token_threshold"], engine["enable_prefix_caching"]) == (300, False)
    assert (engine["watermark"], engine["speedup_ratio"]) == (0.1, 2)
    assert (engine["scheduling_policy"], engine["kv_manager"]) == ("priority", "kvbm")
    assert (engine["aic_nextn"], engine["aic_nextn_accept_rates"], engine["aic_mtp_seed"]) == (
        2,
        "0.5,0.5",
        7,
    )
    assert engine["scheduler_reserve_full_isl"] is False


def test_the_mockers_flags_describe_tiers(run_of: Callable[..., dict[str, Any]]) -> None:
    flags = """
        --num-gpu-blocks 300 --num-g2-blocks 4000 --num-g3-blocks 9000 --enable-g4-storage
        --kv-cache-bytes-per-token 131072 --bandwidth-g1-to-g2-gbps 20 --bandwidth-g4-to-g2-gbps 3
        --offload-batch-size 8
    """
    tiers = run_of(*flags.split())["tiers"]
    assert [(tier["tier"], tier["blocks"]) for tier in tiers["tiers"]] == [
        ("g2", 4000),
        ("g3", 9000),
        ("g4", "unlimited"),
    ]
    assert tiers["tiers"][0]["link"]["down_gbps"] == 20
    assert tiers["tiers"][2]["link"]["backend_up_gbps"] == 3
    assert (tiers["kv_bytes_per_token"], tiers["offload"]["offload_batch_size"]) == (131072, 8)


@pytest.mark.parametrize("weight", [["--kv-bytes-per-token", "131072"], ["--model", "Llama-3.1-8B"]])
def test_a_weight_of_ours_goes_with_tiers_of_the_mocker(
    run_of: Callable[..., dict[str, Any]], weight: list[str]
) -> None:
    tiers = run_of("--num-gpu-blocks", "300", "--num-g2-blocks", "40", *weight)["tiers"]
    assert tiers["kv_bytes_per_token" if weight[0].startswith("--kv") else "model"] is not None
    mode = run_of(
        "--num-gpu-blocks", "300", "--num-g2-blocks", "40", *weight, "--offload-mode", "write_through"
    )
    assert mode["tiers"]["offload"]["mode"] == "write_through"


def test_a_number_of_0_blocks_is_no_tier(run_of: Callable[..., dict[str, Any]]) -> None:
    assert "tiers" not in run_of("--num-g2-blocks", "0")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-g3-blocks", "5"], "--num-g3-blocks needs --num-g2-blocks"),
        (["--num-g2-blocks", "5", "--g2", "6", "--kv-bytes-per-token", "1"], "tiers are given twice"),
        (["--num-g2-blocks", "5", "--kv-cache-bytes-per-token", "1", "--model", "Qwen3-8B"], "contradicts"),
        (["--g1-backend", "kvbm", "--kv-manager", "kvbm"], "--g1-backend and --kv-manager"),
        (["--num-g2-blocks", "5", "--bandwidth-g1-to-g2-gbps", "0"], "--bandwidth-g1-to-g2-gbps"),
    ],
)
def test_contradictions_are_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["replay", str(TRACE), *flags]) == 2
    assert message in capsys.readouterr().err


def test_help_shows_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["replay", "--help-all"])
    out = capsys.readouterr().out
    for flag in SETTINGS + MOCKER_SETTINGS + MOCKER_NAMES:
        assert f"--{flag.name.replace('_', '-')}" in out
