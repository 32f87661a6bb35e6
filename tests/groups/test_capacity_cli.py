"""`understudy capacity`: groups and capacity of a model, as vLLM logs them."""

from __future__ import annotations

import json

import pytest

from understudy.cli import main
from understudy.errors import ConfigError
from understudy.tiers.gpu import GpuSettings
from understudy.timing.gpus import find_gpu

from .test_derivations import DERIVATIONS

GPT_OSS = ["capacity", "--model", "gpt-oss-20b", "--max-model-len", "131072"]
LOGGED = ["--max-num-batched-tokens", "8192", "--kv-memory"]
"""Flags with the memory that vLLM logged, in the recordings."""


def test_it_prints_the_groups_and_the_two_lines_that_vllm_logs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT_OSS, *LOGGED, "8GiB"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[2].split() == ["0", "sliding_window", "12", "16", "32,768", "128", "1,033"]
    assert printed[3].split() == ["1", "full_attention", "12", "16", "32,768", "-", "8,192"]
    assert printed[4] == "21,845 blocks of 393,216 bytes on each GPU"
    assert printed[-2:] == [
        "GPU KV cache size: 310,381 tokens",
        "Maximum concurrency for 131,072 tokens per request: 2.37x",
    ]


def test_json_has_the_form_of_a_derivation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT_OSS, *LOGGED, "8GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {key: DERIVATIONS[0][key] for key in found}


def test_flags_change_the_plan_as_in_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--no-async-scheduling", "--disable-hybrid-kv-cache-manager", "--kv-dtype=fp8"):
        assert main([*GPT_OSS, *LOGGED, "9GiB", flag]) == 0
    printed = capsys.readouterr().out
    assert "             521" in printed  # (127 + 8192) / 16 rounded up, and one more
    assert "0  full_attention      24" in printed
    assert "16,384" in printed


def test_a_gpu_gives_the_memory_that_weights_leave(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT_OSS, "--gpu", "H100"]) == 0
    few = GpuSettings(name="H100").groups("gpt-oss-20b", None, max_model_len=131072)
    assert f"{few.num_blocks:,} blocks" in capsys.readouterr().out
    more = GpuSettings(name="H100", tensor_parallel_size=2).groups("gpt-oss-20b", None, max_model_len=131072)
    assert more.num_blocks > 2 * few.num_blocks


def test_memory_and_weights_are_enough_for_any_model() -> None:
    gpu = GpuSettings(memory="80GB", weights="32GB", overhead="4GB", gpu_memory_utilization=0.5)
    assert gpu.kv_memory("Kimi-Linear-48B-A3B", None) == 4_000_000_000
    named = GpuSettings(name="H200", weights="98GB")
    assert named.kv_memory("Kimi-Linear-48B-A3B", None) == int(0.92 * find_gpu("H200").memory_gb * 1e9 - 98e9)
    with pytest.raises(ConfigError, match=r"leaves no room for KV blocks; use more memory"):
        GpuSettings(memory="80GB", weights="90GB").kv_memory("Kimi-Linear-48B-A3B", None)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization must be a share above 0"):
        GpuSettings(memory="80GB", weights="9GB", gpu_memory_utilization=2.0).kv_memory("DeepSeek-V3", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--kv-memory: the memory is not known; give it, or --gpu"),
        (["--kv-memory", "8GiB", "--gpu", "H100"], "both set the memory; give one"),
        ([*LOGGED, "1GiB"], "one request of 131072 tokens needs 9225 blocks"),
        (["--gpu", "L40S", "--gpu-weights", "90GB"], "leaves no room for KV blocks"),
        (["--kv-memory", "8GiB", "--tensor-parallel-size", "3"], "does not fit the 8 KV heads"),
        (["--gpu", "H200", "--block-size", "0"], "--block-size must be an int of at least 1, got 0"),
        (["--gpu", "H200", "--max-num-batched-tokens", "0"], "--max-num-batched-tokens must be at least 1"),
        (["--gpu", "H200", "--max-num-seqs", "0"], "--max-num-seqs must be at least 1, got 0"),
        (
            ["--gpu", "H200", "--state-dtype", "float32"],
            "--state-dtype: no layer of gpt-oss-20b keeps a state",
        ),
        (
            ["--gpu", "H200", "--tensor-parallel-size", "0"],
            "--tensor-parallel-size must be an int of at least 1",
        ),
        (["--gpu", "H200", "--kv-dtype", "float32"], "--kv-dtype: KV type 'float32' is not known"),
    ],
)
def test_what_does_not_fit_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GPT_OSS, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_model_without_known_weights_needs_them(capsys: pytest.CaptureFixture[str]) -> None:
    kimi = ["capacity", "--model", "Kimi-Linear-48B-A3B", "--max-model-len", "8192", "--gpu", "H200"]
    assert main(kimi) == 2
    assert "the weights of Kimi-Linear-48B-A3B are not known; give their size" in capsys.readouterr().err
    assert main([*kimi, "--gpu-weights", "98GB"]) == 0


def test_auto_is_the_longest_context_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    auto = ["capacity", "--model", "gpt-oss-20b", *LOGGED, "2GiB", "--max-model-len"]
    for text in ("auto", "-1"):
        assert main([*auto, text, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        # 5,461 blocks, one of them vLLM's null block; the window plans 1,033 at any length above 16,511 tokens.
        assert found["max_model_len"] == (5461 - 1 - 1033) * 16
        assert found["max_concurrency"] == 5461 / 5460
    assert main([*auto, "70833"]) == 2
    assert "one request of 70833 tokens needs 5461 blocks" in capsys.readouterr().err
    assert main([*auto, "70832"]) == 0
    assert main(["capacity", "--model", "gpt-oss-20b", *LOGGED, "8GiB", "--max-model-len", "auto"]) == 0
    assert "Maximum concurrency for 131,072 tokens per request: 2.37x" in capsys.readouterr().out


def test_without_prefix_caching_no_units_of_hashing_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT_OSS, *LOGGED, "8GiB", "--no-enable-prefix-caching"]) == 0
    assert "prefix cache" not in capsys.readouterr().out


def test_an_unknown_model_is_named_before_its_context(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", "--model", "Nobody-7B", "--gpu", "H200", "--max-model-len", "auto"]) == 2
    assert "'Nobody-7B' is neither a known name" in capsys.readouterr().err
    assert main(["capacity", "--model", "qwen3-nxt-80b", "--gpu", "H200", "--max-model-len", "auto"]) == 2
    assert capsys.readouterr().err.count("Qwen3-Next-80B-A3B") == 1
