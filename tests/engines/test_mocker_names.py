"""Every name of the mocker's engine arguments: it means something here, or is refused by name with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.run.settings import ReplaySettings

LATER = "which this version does not have yet"

TAKEN: dict[str, Any] = {
    "engine_type": "vllm",
    "num_gpu_blocks": 100,
    "block_size": 32,
    "max_model_len": 1000,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
    "speedup_ratio": 2.0,
    "decode_speedup_ratio": 2.0,
    "aic_nextn": 2,
    "aic_mtp_seed": 7,
    "preemption_mode": "fifo",
}
"""Names with a meaning, and a value that is not the default."""

REFUSED: dict[str, tuple[Any, str]] = {
    "dp_size": (2, LATER),
    "startup_time": (1.0, LATER),
    "worker_type": ("prefill", LATER),
    "is_prefill": (True, LATER),
    "is_decode": (True, LATER),
    "perf_model": ({}, "give timing"),
    **dict.fromkeys(
        (
            "aic_backend",
            "aic_system",
            "aic_backend_version",
            "aic_model_path",
            "aic_gemm_dtype",
            "aic_moe_dtype",
            "aic_fmha_dtype",
            "aic_kv_cache_dtype",
            "aic_comm_dtype",
        ),
        ("x", "AIConfigurator"),
    ),
    **dict.fromkeys(
        ("aic_tp_size", "aic_moe_tp_size", "aic_moe_ep_size", "aic_attention_dp_size"), (1, "AIConfigurator")
    ),
    **dict.fromkeys(
        ("gpu_memory_utilization", "mem_fraction_static", "free_gpu_memory_fraction"),
        (0.9, "give num_gpu_blocks"),
    ),
    "enable_local_indexer": (True, LATER),
    "bootstrap_port": (9000, LATER),
    "handoff_session_timeout_ms": (1000, LATER),
    "kv_transfer_bandwidth": (64.0, LATER),
    "kv_transfer_timing_mode": ("destination_missing", LATER),
    "reasoning": ({"thinking_ratio": 0.5}, LATER),
    "response_replay_trace_path": ("outputs.jsonl", "into the trace"),
    "zmq_kv_events_port": (5557, LATER),
    "zmq_replay_port": (5558, LATER),
    "router_queue_policy": ("fcfs", LATER),
    "sglang": ({}, LATER),
    "trtllm": ({}, LATER),
    "has_perf_model": (True, "give timing"),
}
"""Names that are refused, a value that asks for something, and a part of the reason."""

UNSET: dict[str, Any] = {
    **dict.fromkeys(REFUSED),
    "dp_size": 1,
    "worker_type": "aggregated",
    "is_prefill": False,
    "is_decode": False,
    "enable_local_indexer": False,
    "handoff_session_timeout_ms": 300_000,
    "kv_transfer_timing_mode": "full_prompt",
    "has_perf_model": False,
}
"""The same names with what the mocker writes when they are not in use."""


@pytest.mark.parametrize("name", TAKEN)
def test_a_name_with_a_meaning_is_taken(name: str) -> None:
    company = {"aic_nextn": 1} if name == "aic_mtp_seed" else {}
    config = VllmConfig.from_dict({**company, name: TAKEN[name]})
    if name == "engine_type":
        assert config == VllmConfig()
    else:
        owner, default = (
            (config, VllmConfig()) if hasattr(config, name) else (config.mocker, MockerSettings())
        )
        assert getattr(owner, name) == TAKEN[name] != getattr(default, name)


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_without_a_meaning_is_refused_with_the_reason(name: str) -> None:
    value, reason = REFUSED[name]
    with pytest.raises(ConfigError, match=f"^{name} .*{reason}"):
        VllmConfig.from_dict({name: value})


def test_names_that_are_not_in_use_do_no_harm() -> None:
    assert VllmConfig.from_dict(UNSET) == VllmConfig()


@pytest.mark.parametrize(("name", "value"), [("dp_size", True), ("is_prefill", 0), ("has_perf_model", 0)])
def test_a_value_of_another_type_is_not_the_one_that_does_no_harm(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name} "):
        VllmConfig.from_dict({name: value})


@pytest.mark.parametrize("name", ["vllm", "VLLM", "vLLM"])
def test_engine_type_is_read_in_any_case(name: str) -> None:
    assert VllmConfig.from_dict({"engine_type": name}) == VllmConfig()


@pytest.mark.parametrize(
    ("name", "reason"), [("sglang", LATER), ("TRTLLM", LATER), ("llama.cpp", "must be"), (None, "must be")]
)
def test_another_engine_is_refused(name: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"engine_type .*{reason}"):
        VllmConfig.from_dict({"engine_type": name})


def test_an_old_spelling_of_preemption_mode_is_read() -> None:
    assert VllmConfig.from_dict({"preemption_mode": "Fifo"}).preemption_mode == "fifo"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_gpu_blocks", 16384),
        ("max_model_len", None),
        ("max_num_seqs", None),
        ("max_num_batched_tokens", None),
    ],
)
def test_null_means_the_default_or_no_limit(name: str, value: int | None) -> None:
    assert getattr(VllmConfig.from_dict({name: None}), name) == value


@pytest.mark.parametrize(
    "name", ["block_size", "enable_prefix_caching", "enable_chunked_prefill", "speedup_ratio", "aic_mtp_seed"]
)
def test_null_where_there_must_be_a_value_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        VllmConfig.from_dict({name: None})


@pytest.mark.parametrize("given", [{"block_sise": 16}, {"block_size": "16"}])
def test_a_name_that_nobody_knows_and_a_wrong_type_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        VllmConfig.from_dict(given)


def test_a_mocker_s_configuration_works_in_a_replay_s_settings() -> None:
    settings = ReplaySettings.read(None, {}, ["engine.dp_size=1", "engine.aic_nextn=1", "engine.sglang=null"])
    assert settings.engine.mocker.aic_nextn_accept_rates == "0.85"
