"""`understudy replay --engine trtllm`: flags of trtllm-serve, its file of options, and flags of the wrong engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from understudy.cli import main
from understudy.cli.trtllm_flags import TRTLLM_SETTINGS
from understudy.engines.trtllm_config import TrtllmConfig
from understudy.engines.trtllm_options import TRTLLM_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

TRACE = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"
ENGINE = ("--engine", "trtllm")
OPTIONS = """\
max_batch_size: 12
enable_chunked_prefill: true
tensor_parallel_size: 2
kv_cache_config:
  max_tokens: 64000
  free_gpu_memory_fraction: 0.8
  dtype: fp8
  enable_block_reuse: false
scheduler_config:
  waiting_queue_policy: priority
"""


@pytest.fixture
def run_of(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def run(*flags: str) -> dict[str, Any]:
        path = tmp_path / "report.json"
        assert main(["replay", str(TRACE), "--quiet", "--json", str(path), *ENGINE, *flags]) == 0
        facts: dict[str, Any] = json.loads(path.read_text())["run"]
        return facts

    return run


@pytest.fixture
def options(tmp_path: Path) -> Path:
    path = tmp_path / "options.yaml"
    path.write_text(OPTIONS)
    return path


def test_defaults_in_the_help_are_those_of_the_engine() -> None:
    engine = TrtllmConfig()
    for flag in TRTLLM_SETTINGS:
        default = getattr(engine, TRTLLM_NAMES.get(flag.name, flag.name), None)
        if flag.kind is int and default is not None:
            assert f"(default: {default})" in flag.help, flag.name


@pytest.mark.parametrize("spell", [str, lambda flag: flag.replace("_", "-")])
def test_flags_reach_the_engine_in_both_spellings(
    run_of: Callable[..., dict[str, Any]], spell: Callable[[str], str]
) -> None:
    flags = {
        "--max_batch_size": "9",
        "--max_num_tokens": "4096",
        "--max_seq_len": "9000",
        "--tokens_per_block": "64",
        "--kv_cache_max_tokens": "128000",
    }
    words = [word for flag, value in flags.items() for word in (spell(flag), value)]
    engine = run_of(*words, spell("--enable_chunked_prefill"), spell("--disable_overlap_scheduler"))["engine"]
    assert (engine["max_num_seqs"], engine["max_num_batched_tokens"], engine["max_model_len"]) == (
        9,
        4096,
        9000,
    )
    assert (engine["block_size"], engine["enable_chunked_prefill"]) == (64, True)
    assert engine["disable_overlap_scheduler"] is True
    assert engine["num_gpu_blocks"] * 64 >= 128_000 / 0.95
    assert engine["trtllm_version"] == "1.3.0rc25"


def test_flags_override_the_file_of_options(run_of: Callable[..., dict[str, Any]], options: Path) -> None:
    engine = run_of("--extra_llm_api_options", str(options), "--max_batch_size", "5")["engine"]
    assert (engine["max_num_seqs"], engine["waiting_queue_policy"]) == (5, "priority")
    assert (engine["enable_prefix_caching"], engine["max_model_len"]) == (False, 64000)
    again = run_of("--extra-llm-api-config", str(options), "--kv_cache_max_tokens", "128000")["engine"]
    assert again["num_gpu_blocks"] == pytest.approx(2 * engine["num_gpu_blocks"], rel=0.01)


def test_a_gpu_gives_layers_pages_and_the_share_of_free_memory(
    run_of: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    gpu = ("--model", "gpt-oss-120b", "--gpu", "H200", "--enable_chunked_prefill")
    large = run_of(*gpu)
    small = run_of(*gpu, "--kv_cache_free_gpu_memory_fraction", "0.45")
    assert large["engine"]["num_layers"] == 36
    assert large["engine"]["num_gpu_blocks"] == pytest.approx(2 * small["engine"]["num_gpu_blocks"], rel=0.01)
    assert any("from TensorRT-LLM's start-up log" in note for note in large["notes"])
    path = tmp_path / "two.yaml"
    path.write_text("tensor_parallel_size: 2\nkv_cache_config: {dtype: fp8}\n")
    halved = run_of(*gpu, "--extra_llm_api_options", str(path))["engine"]
    assert halved["layer_kv_bytes"] * 4 == large["engine"]["layer_kv_bytes"]


def test_a_model_of_manager_v1_is_refused_unless_v2_is_asked_for(
    run_of: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = ("--model", "Llama-3.1-8B", "--gpu", "H100", "--enable_chunked_prefill")
    assert main(["replay", str(TRACE), *ENGINE, *gpu]) == 2
    assert "TensorRT-LLM runs Llama-3.1-8B on KV cache manager V1" in capsys.readouterr().err
    assert run_of(*gpu, "--set", "engine.use_kv_cache_manager_v2=true")["engine"]["num_layers"] == 32


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--engine trtllm --block-size 16",
            "--block-size: no setting of TensorRT-LLM; give --tokens_per_block",
        ),
        ("--engine trtllm --max-num-seqs 4", "give --max_batch_size"),
        ("--engine trtllm --no-enable-prefix-caching", "kv_cache_config.enable_block_reuse"),
        ("--max_batch_size 4", "--max_batch_size: a setting of TensorRT-LLM; add --engine trtllm"),
        ("--engine sglang --max-num-tokens 4", "--max_num_tokens: a setting of TensorRT-LLM"),
        ("--free_gpu_memory_fraction 0.5", "--kv_cache_free_gpu_memory_fraction: a setting of TensorRT-LLM"),
        ("--engine trtllm --free_gpu_memory_fraction 0.5", "needs a GPU; give --gpu and --model"),
        ("--engine trtllm --tp_size 2", "--tp_size: needs a GPU"),
        ("--engine trtllm --trtllm_version 1.0", "trtllm_version"),
        ("--engine trtllm --max_batch_size 0", "max_num_seqs must be at least 1"),
        (
            "--engine trtllm --g2-bytes 1GiB --kv-bytes-per-token 1024",
            "g2: TensorRT-LLM has levels of its own; give host_cache_size",
        ),
        (
            "--engine trtllm --model gpt-oss-120b --gpu H200 --gpu-memory-utilization 0.5",
            "give kv_cache_config.free_gpu_memory_fraction",
        ),
    ],
)
def test_flags_of_the_wrong_engine_are_refused(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(TRACE), *flags.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("kv_cache_config: {use_kv_cache_manager_v2: false}", "asks for the C++ manager V1"),
        ("speculative_config: {decoding_type: MTP}", "speculation is not simulated"),
        ("enable_attention_dp: true", "attention with data parallelism is not simulated"),
        ("- 1", "expected options by name at the top level"),
        ("tp_size: 0", "tp_size must be at least 1"),
        ("kv_cache_confg: {}", "kv_cache_confg is not a setting of the engine"),
    ],
)
def test_a_wrong_option_is_named(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(content)
    assert main(["replay", str(TRACE), *ENGINE, "--extra_llm_api_options", str(path)]) == 2
    assert message in capsys.readouterr().err
