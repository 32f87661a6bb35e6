"""`understudy replay --engine sglang`: SGLang's flags, with its names and defaults, and flags of the wrong engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from understudy.cli import build_parser, main
from understudy.cli.sglang_flags import SGLANG_SETTINGS
from understudy.engines.sglang_config import SGLANG_NAMES, SglangConfig

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


def test_every_setting_of_sglang_has_a_flag() -> None:
    elsewhere = {"timing", "mocker", "tiers", "data_parallel_size", "max_num_batched_tokens"}
    elsewhere |= {"enable_prefix_caching", "load_back_threshold"}  # vLLM's name; a constant in SGLang
    fields = set(SglangConfig.__struct_fields__) - elsewhere - set(SGLANG_NAMES.values())
    assert {flag.name for flag in SGLANG_SETTINGS} == fields | set(SGLANG_NAMES)


def test_defaults_in_the_help_are_those_of_the_engine() -> None:
    engine = SglangConfig()
    for flag in SGLANG_SETTINGS:
        default = getattr(engine, SGLANG_NAMES.get(flag.name, flag.name))
        if flag.kind in (int, float) and default is not None:
            assert f"(default: {default:.16g})" in flag.help, flag.name


def test_flags_reach_the_engine(run_of: Callable[..., dict[str, Any]]) -> None:
    flags = """
        --page-size 16 --max-total-tokens 160000 --max-running-requests 9 --max-queued-requests 500
        --context-length 9000 --chunked-prefill-size 1024 --max-prefill-tokens 2048 --prefill-max-requests 4
        --schedule-policy lof --schedule-conservativeness 0.5 --enable-mixed-chunk --radix-eviction-policy slru
        --disable-overlap-schedule --enable-priority-scheduling --retraction-policy priority --speedup-ratio 2
    """
    engine = run_of("--engine", "sglang", *flags.split())["engine"]
    expected = {
        "block_size": 16,
        "num_gpu_blocks": 10000,
        "max_num_seqs": 9,
        "max_model_len": 9000,
        "max_queued_requests": 500,
        "chunked_prefill_size": 1024,
        "max_prefill_tokens": 2048,
        "prefill_max_requests": 4,
        "schedule_policy": "lof",
        "schedule_conservativeness": 0.5,
        "enable_mixed_chunk": True,
        "radix_eviction_policy": "slru",
        "disable_overlap_schedule": True,
        "enable_priority_scheduling": True,
        "retraction_policy": "priority",
        "speedup_ratio": 2.0,
        "sglang_version": "0.5.23",
    }
    assert {name: engine[name] for name in expected} == expected


def test_a_gpu_gives_the_pool_and_its_share(run_of: Callable[..., dict[str, Any]]) -> None:
    gpu = ("--engine", "sglang", "--model", "Llama-3.1-8B", "--gpu", "H100")
    large, small = (run_of(*gpu, "--mem-fraction-static", share) for share in ("0.9", "0.5"))
    assert large["engine"]["num_gpu_blocks"] > 1.5 * small["engine"]["num_gpu_blocks"]
    assert any(
        "--max-total-tokens and --page-size from SGLang's start-up log" in note for note in large["notes"]
    )


def test_a_host_tier_is_hicache(run_of: Callable[..., dict[str, Any]]) -> None:
    tiers = ("--g2-bytes", "1GiB", "--kv-bytes-per-token", "1024", "--hicache-write-policy", "write_back")
    facts = run_of("--engine", "sglang", "--max-total-tokens", "20000", *tiers)
    assert facts["engine"]["hicache_write_policy"] == "write_back"


def test_a_settings_file_mixes_pools(tmp_path: Path, run_of: Callable[..., dict[str, Any]]) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        """
        routing: kv
        pools:
          - {name: one, workers: 2, engine: {engine_type: sglang, page_size: 64, schedule_policy: lpm}}
          - {name: two, workers: 2, engine: {engine_type: vllm, block_size: 64}}
        """
    )
    pools = run_of("--config", str(path))["pools"]
    assert [pool["name"] for pool in pools] == ["one", "two"]
    assert pools[0]["engine"]["schedule_policy"] == "lpm"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--engine sglang --block-size 16", "--block-size: no setting of SGLang; give --page-size"),
        (
            "--engine sglang --max-num-seqs 4",
            "--max-num-seqs: no setting of SGLang; give --max-running-requests",
        ),
        ("--engine sglang --kv-manager kvbm", "--kv-manager: no setting of SGLang; leave it out"),
        ("--engine sglang --no-enable-prefix-caching", "give --disable-radix-cache"),
        ("--engine sglang --num-g2-blocks 4", "--num-g2-blocks: no setting of SGLang; give --g2-bytes"),
        ("--page-size 16", "--page-size: a setting of SGLang; add --engine sglang, or leave it out"),
        (
            "--disable-overlap-schedule",
            "--disable-overlap-schedule: a setting of SGLang; add --engine sglang",
        ),
        ("--mem-fraction-static 0.5", "--mem-fraction-static: a setting of SGLang"),
        ("--engine sglang --mem-fraction-static 0.5", "--mem-fraction-static: needs a GPU"),
        ("--engine sglang --schedule-policy random", "--schedule-policy"),
        ("--engine sglang --sglang-version 0.4", "--sglang-version"),
        ("--engine sglang --page-size 64 --max-total-tokens 100", "--max-total-tokens=100 is not a multiple"),
        ("--engine sglang --page-size 64 --chunked-prefill-size 100", "--chunked-prefill-size must be -1 or"),
        ("--engine sglang --aic-nextn 2", "--aic-nextn contradicts engine sglang"),
        ("--engine sglang --g3-bytes 1GiB --g2-bytes 1GiB --kv-bytes-per-token 1024", "g3: SGLang's HiCache"),
    ],
)
def test_flags_of_the_wrong_engine_are_refused(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(TRACE), *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_help_shows_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["replay", "--help-all"])
    out = capsys.readouterr().out
    for flag in SGLANG_SETTINGS:
        assert f"--{flag.name.replace('_', '-')}" in out
