"""SGLang's command line: its flags, their meaning, what is refused and what has no effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from understudy.cli.fleet import read_fleet
from understudy.engines.sglang_config import SglangConfig
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.server.flags.grammar import sglang_flags
from understudy.server.flags.serving import read_serve
from understudy.server.kv_events import KvEventsConfig

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.server.settings import ServerSettings

SGLANG = ("--engine", "sglang")
VALUES = {"bool": [], "int": ["1"], "float": ["0.5"], "json": ["{}"]}
REFUSED = (
    *("admin-api-key", "smg-grpc-mode", "grpc-mode", "disaggregation-mode", "speculative-algorithm"),
    *("hicache-storage-backend", "skip-tokenizer-init"),
)


def read(*arguments: str) -> ServerSettings:
    return read_serve(["m", *SGLANG, *arguments]).settings


def engine_of(*arguments: str) -> SglangConfig:
    engine = read(*arguments).engine
    assert isinstance(engine, SglangConfig)
    return engine


def test_every_flag_of_the_release_is_accepted() -> None:
    flags = {flag.name: flag for flag in sglang_flags().values()}
    assert len(flags) == 530
    for flag in flags.values():
        value = [str(flag.choices[0])] if flag.choices else VALUES.get(flag.kind, ["1"])
        if flag.name in ("config", *REFUSED):
            continue
        # Values that these accept and a simulated engine has; the table of choices is SGLang's.
        known: dict[str, list[str]] = {
            "schedule-policy": ["lpm"],
            "radix-eviction-policy": ["lfu"],
            "retraction-policy": ["length"],
            "mem-fraction-static": ["0.8", "--gpu", "H100", "--model", "Llama-3.1-8B"],
            "max-total-tokens": ["64k"],
            "enable-priority-scheduling": ["--schedule-policy", "fcfs"],
            "tokenizer-path": [],
            "model-path": ["m"],
            "enable-hierarchical-cache": ["--tiers", '{"kv_bytes_per_token": 1024}'],
        }
        given = known.get(flag.name, value)
        if flag.name == "tokenizer-path":
            continue
        model = [] if flag.name in ("model-path", "mem-fraction-static") else ["m"]
        read_serve([*model, *SGLANG, flag.names[0], *given])


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ([], "port", 30000),
        (["--port", "9"], "port", 9),
        (["--served-model-name", "a"], "served_model_name", ("a",)),
        (["--context-length", "32k"], "max_model_len", 32000),
        (["--context-length", "32Ki"], "max_model_len", 32768),
        ([], "max_model_len", 131072),
        (["--api-key", "k"], "api_keys", ("k",)),
        (["--random-seed", "7"], "seed", 7),
        (["--dp-size", "2"], "data_parallel_size", 2),
        (["--enable-cache-report"], "enable_prompt_tokens_details", True),
        (["--incremental-streaming-output"], "incremental_streaming_output", True),
        (["--stream-interval", "8"], "stream_interval", 8),
        (["--time-to-first-token", "20"], "latency_ms", (20.0, 0.0)),
        (["--clock-speed", "4"], "clock_speed", 4.0),
    ],
)
def test_what_a_flag_means(arguments: list[str], field: str, value: object) -> None:
    assert getattr(read(*arguments), field) == value


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--page-size", "64"], "block_size", 64),
        (["--page-size", "64", "--max-total-tokens", "6400"], "num_gpu_blocks", 100),
        (["--max-running-requests", "7"], "max_num_seqs", 7),
        (["--chunked-prefill-size", "512"], "chunked_prefill_size", 512),
        (["--schedule-policy", "lpm"], "schedule_policy", "lpm"),
        (["--disable-radix-cache"], "disable_radix_cache", True),
        (["--disable-overlap-schedule"], "disable_overlap_schedule", True),
        (["--enable-mixed-chunk"], "enable_mixed_chunk", True),
        (["--set", "schedule_policy=lof"], "schedule_policy", "lof"),
    ],
)
def test_the_engine_gets_its_own(arguments: list[str], field: str, value: object) -> None:
    assert getattr(engine_of(*arguments), field) == value


def test_hicache_is_a_host_tier_by_ratio_or_size() -> None:
    kv = ("--tiers", '{"kv_bytes_per_token": 1000}', "--page-size", "16", "--max-total-tokens", "1600")
    (tier,) = read("--enable-hierarchical-cache", *kv).tiers.tiers
    assert (tier.tier, tier.blocks) == ("g2", 200)
    (tier,) = read("--enable-hierarchical-cache", "--hicache-ratio", "3.5", *kv).tiers.tiers
    assert tier.blocks == 350
    (tier,) = read("--enable-hierarchical-cache", "--hicache-size", "2", *kv).tiers.tiers
    assert tier.bytes == 2_000_000_000
    assert not read(*kv).tiers.tiers


@pytest.mark.parametrize(
    ("model", "gpus", "parts"),
    [("Llama-3.1-8B", 1, 1), ("Llama-3.1-8B", 4, 4), ("Llama-3.1-8B", 16, 8), ("DeepSeek-V3", 8, 1)],
)
def test_the_size_of_hicache_is_that_of_each_gpu(model: str, gpus: int, parts: int) -> None:
    # Each GPU keeps its heads, or a whole latent, of as many tokens as fit its 3 GB.
    pool = ("--max-total-tokens", "1600", "--tp-size", str(gpus))
    server = read_serve(
        [model, *SGLANG, "--enable-hierarchical-cache", "--hicache-size", "3", *pool]
    ).settings
    assert server.tiers.tiers[0].bytes == 3_000_000_000 * parts


def test_a_model_on_a_gpu_gets_its_pool_and_times() -> None:
    plan = read_serve(["Llama-3.1-8B", *SGLANG, "--gpu", "H100", "--mem-fraction-static", "0.85"])
    engine = plan.settings.engine
    assert 100_000 < engine.num_gpu_blocks * engine.block_size < 600_000
    assert plan.settings.max_model_len == 131072
    assert not plan.idle


def test_events_are_published_if_the_publisher_is_zmq() -> None:
    config = '{"publisher": "zmq", "endpoint": "tcp://*:0", "topic": "t"}'
    assert KvEventsConfig.read(read("--kv-events-config", config).kv_events_config).publishes
    assert not KvEventsConfig.read(read("--kv-events-config", '{"topic": "t"}').kv_events_config).publishes


def test_flags_without_effect_are_listed() -> None:
    assert read_serve(["m", *SGLANG, "--attention-backend", "fa3", "--page-size", "16"]).idle == [
        "attention-backend"
    ]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--speculative-algorithm", "EAGLE"], "--speculative-algorithm: SGLang's speculation"),
        (["--hicache-storage-backend", "file"], "--hicache-storage-backend: HiCache has no storage"),
        (["--admin-api-key", "k"], "--admin-api-key: --api-key protects"),
        (["--grpc-mode"], "--grpc-mode: gRPC is not served"),
        (["--skip-tokenizer-init"], "--skip-tokenizer-init: answers are made with the tokenizer"),
        (["--pp-size", "2"], "--pp-size: pipeline stages are not simulated"),
        (["--block-size", "16"], "--block-size: a flag of vLLM; give --page-size"),
        (["--schedule-policy", "hrrn"], "schedule_policy"),
        (["--context-length", "many"], "--context-length must be a number of tokens"),
        (["--kv-events-config", '{"publisher": "zmq", "format": "dynamo"}'], "format must be default"),
        (["--hicache-ratio", "0", "--enable-hierarchical-cache"], "--hicache-ratio must be positive"),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(arguments: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(*arguments)


@pytest.mark.parametrize("flag", ["--pp-size", "--dcp-size", "--attn-cp-size"])
def test_one_part_is_no_division(flag: str) -> None:
    assert engine_of(flag, "1") == engine_of()
    with pytest.raises(ConfigError, match=f"{flag}: .* not simulated"):
        read(flag, "2")


def test_a_fleet_mixes_both_kinds(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "pools:\n"
        "  - {workers: 2, flags: {block-size: 64}}\n"
        "  - {workers: 2, flags: {engine: sglang, page-size: 64}}\n"
    )
    settings, _ = read_fleet(["m", "--fleet-config", str(path), "--routing", "kv", "--base-port", "0"])
    kinds: list[Any] = [type(pool.engine) for _, pool in settings.pools]
    assert kinds == [VllmConfig, SglangConfig]
    assert [pool.engine.block_size for _, pool in settings.pools] == [64, 64]


def test_a_flag_of_sglang_needs_its_engine() -> None:
    with pytest.raises(ConfigError, match="--page-size: a flag of SGLang; add --engine sglang"):
        read_serve(["m", "--page-size", "16"])
