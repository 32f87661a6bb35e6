"""vLLM's command line: its grammar, its defaults, what is refused and what says that it changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from understudy.cli import main as cli_main
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.server.flags import vllm_flags
from understudy.server.flags.serving import read_serve
from understudy.server.server import Server

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("version", "count"), [("0.32.0", 316), ("0.33.0", 320)])
def test_every_flag_of_the_release_is_accepted(version: str, count: int) -> None:
    flags = {flag.name: flag for flag in vllm_flags(version).values()}
    assert len(flags) == count
    for flag in flags.values():
        if flag.name in ("config", "help", "model"):
            continue
        value = {"bool": [], "int": ["1"], "float": ["0.5"], "size": ["4k"], "json": ["{}"]}.get(
            flag.kind, ["1"]
        )
        if flag.choices:
            value = [str(flag.choices[0])]
        if flag.name in ("kv-events-config", "kv-transfer-config"):
            value = ["{}"]
        if flag.name == "speculative-config":  # an empty one says nothing that could be honoured
            value = ['{"method": "ngram", "num_speculative_tokens": 2}']
        if flag.name in (
            "watermark",
            "block-size",
            "tokenizer",
            "lora-modules",
            "async-scheduling",
            "kv-cache-metrics",
        ):
            continue
        read_serve(["m", "--vllm-version", version, flag.names[0], *value])


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--max-model-len", "32k"], "max_model_len", 32000),
        (["--max_model_len=1K"], "max_model_len", 1024),
        (["--served-model-name", "a", "b", "--port", "9"], "served_model_name", ("a", "b")),
        (["--port=9"], "port", 9),
        (["--api-key", "k1", "k2"], "api_keys", ("k1", "k2")),
        (["--enable-request-id-headers"], "enable_request_id_headers", True),
        (["--allowed-origins", '["http://a"]'], "allowed_origins", ("http://a",)),
        (["--kv-events-config", '{"topic": "t"}'], "kv_events_config", {"topic": "t"}),
        (
            ["--kv-events-config.topic", "t", "--kv-events-config.buffer-steps=5"],
            "kv_events_config",
            {"topic": "t", "buffer_steps": 5},
        ),
        (["-dp", "2"], "data_parallel_size", 2),
        (["--shutdown-timeout", "3"], "shutdown_timeout_s", 3.0),
        (["--time-to-first-token", "20"], "latency_ms", (20.0, 0.0)),
    ],
)
def test_what_a_flag_means(arguments: list[str], field: str, value: object) -> None:
    assert getattr(read_serve(["m", *arguments]).settings, field) == value


@pytest.mark.parametrize("flag", ["prefix-cache-retention-interval", "prefix-match-unit"])
def test_settings_of_cache_groups_are_reported_as_unused_without_groups(flag: str) -> None:
    assert read_serve(["m", f"--{flag}", "16"]).idle == [flag]


def test_the_engine_gets_its_own() -> None:
    words = (
        "m --block-size 32 --no-enable-prefix-caching --max-num-seqs 7 --scheduling-policy priority "
        "--num-gpu-blocks-override 4096 --set timing.kind=constant timing.prefill_ms=3 timing.decode_ms=4"
    )
    plan = read_serve(words.split())
    engine = plan.settings.engine
    assert (engine.block_size, engine.max_num_seqs, engine.num_gpu_blocks) == (32, 7, 4096)
    assert engine.enable_prefix_caching is False
    assert isinstance(engine, VllmConfig)
    assert engine.scheduling_policy == "priority"
    assert type(engine.timing).__name__ == "Constant"
    assert plan.idle == []


def test_flags_that_change_nothing_are_named() -> None:
    plan = read_serve(
        ["m", "--tensor-parallel-size", "4", "--dtype", "auto", "--enforce-eager", "--port", "1"]
    )
    assert plan.idle == ["tensor-parallel-size", "dtype", "enforce-eager"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-modle-len", "1"], "did you mean --max-model-len"),
        (["--vllm-version", "0.32", "--disable-log-requests"], "gone"),
        (["--port"], "needs a value"),
        (["--port", "x"], "--port must be a whole number, got 'x'"),
        (["--max-model-len", "many"], "must be a number, as 32768, 32k or 32K"),
        (["a", "b"], "one model"),
        (["--scheduling-policy", "chaos"], "must be one of"),
        (["--clock-speed", "0"], "positive"),
        (["--clock-speed", "nan"], "must be a number"),
        (["--set", "colour=red"], "colour"),
        (["--config", "/nowhere.yaml"], "nowhere"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_serve(arguments)


def test_a_file_of_flags_gives_way_to_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: from-file\nport: 1\nmax_num_seqs: 3\nenable-prefix-caching: false\nserved-model-name: [x, y]\n"
        "kv-events-config: {topic: t}\n"
    )
    settings = read_serve(["--config", str(file), "--port", "2"]).settings
    assert (settings.model, settings.port, settings.engine.max_num_seqs) == ("from-file", 2, 3)
    assert settings.served_model_name == ("x", "y")
    assert settings.engine.enable_prefix_caching is False
    assert settings.kv_events_config == {"topic": "t"}
    file.write_text("colour: red\n")
    with pytest.raises(ConfigError, match="--colour is not a flag"):
        read_serve(["--config", str(file)])


def test_adapters_without_enable_lora_say_that_they_change_nothing() -> None:
    assert read_serve(["m", "--max-loras", "4", "--max-cpu-loras", "8"]).idle == [
        "max-loras",
        "max-cpu-loras",
    ]
    assert read_serve(["m", "--enable-lora", "--max-loras", "4"]).idle == []


def test_flags_that_vllm_takes_without_their_company_say_that_they_change_nothing() -> None:
    adaptive = "--long-prefill-token-threshold-adaptive"
    alone = read_serve(["m", adaptive, "--kv-cache-metrics-sample", "0.5"])
    assert alone.idle == [adaptive.removeprefix("--"), "kv-cache-metrics-sample"]
    both = read_serve(["m", adaptive, "--kv-cache-metrics-sample", "0.5", "--kv-cache-metrics"])
    assert both.idle == [adaptive.removeprefix("--")]
    raised = read_serve(["m", adaptive, "--set", "long_prefill_token_threshold=64"])
    assert raised.idle == []
    assert isinstance(raised.settings.engine, VllmConfig)
    assert raised.settings.engine.long_prefill_token_threshold_adaptive


def test_what_contradicts_is_refused_by_its_name() -> None:
    drafts = ["speculative_config.method=mtp", "speculative_config.num_speculative_tokens=1"]
    with pytest.raises(ConfigError, match=r"speculative_config.accept_rates has 3 rates"):
        read_serve(["m", "--set", *drafts, "speculative_config.accept_rates=[0.5,0.5,0.5]"])
    offload = ["--kv-offloading-size", "1", "--tiers", '{"kv_bytes_per_token": 1024}']
    plan = read_serve(["m", "--enable-lora", *offload])
    with pytest.raises(ConfigError, match="contradicts enable_lora"):
        Server(plan.settings)


def test_help_names_the_flags_of_times(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("serve", "fleet"):
        with pytest.raises(SystemExit):
            cli_main([verb, "--help"])
        told = capsys.readouterr().out
        assert "--gpu NAME" in told
        assert "--timing FILE" in told


def test_a_fleet_without_pools_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "fleet.yaml"
    for pools in ("[]", "4", "null"):
        config.write_text(f"pools: {pools}\n")
        assert cli_main(["fleet", "m", "--fleet-config", str(config)]) == 2
        assert "pools must be a list" in capsys.readouterr().err


def test_a_server_knows_its_model_and_asks_for_a_gpu_alone() -> None:
    with pytest.raises(ConfigError, match=r"needs --gpu \(or its data sheet\)$"):
        read_serve(["m", "--timing", "aiconfigurator"])
