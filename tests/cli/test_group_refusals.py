"""Refusals around KV cache groups name the flags as they were typed."""

from __future__ import annotations

import pytest

from understudy.cli import main

GROUPS = '[{"kind": "full", "block_size": 16}]'


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--kv-cache-groups", GROUPS, "--block-size", "64"],
            "--block-size=64 contradicts --kv-cache-groups",
        ),
        (
            ["--kv-cache-groups", GROUPS, "--prefix-match-unit", "0"],
            "--prefix-match-unit must be at least 1, got 0",
        ),
        (
            ["--prefix-match-unit", "16"],
            "--prefix-match-unit needs KV cache groups (--kv-cache-groups, or a model",
        ),
        (
            ["--kv-cache-groups", GROUPS, "--aic-nextn", "2"],
            "--aic-nextn does not work with several KV cache groups",
        ),
        (
            ["--kv-cache-groups", '[{"kind": "full", "block_size": 16, "x": 1}]'],
            "--kv-cache-groups[0].x is not known; known are kind, block_size, window",
        ),
        (
            ["--kv-cache-groups", '[{"kind": "mamba", "block_size": 16, "mode": "none"}]'],
            "--kv-cache-groups: a state group with prefix caching needs mode align",
        ),
        (
            ["--kv-cache-groups", GROUPS, "--prefill-workers", "1", "--decode-workers", "1"],
            "--kv-cache-groups: several groups do not work with prefill and decode workers yet",
        ),
        (
            ["--kv-cache-groups", GROUPS, "--model", "gemma-3-27b", "--gpu", "H200"],
            "give --num-gpu-blocks, or leave --kv-cache-groups out",
        ),
        (
            ["--model", "Qwen3-Next-80B-A3B", "--gpu", "B200", "--disable-hybrid-kv-cache-manager"],
            "--disable-hybrid-kv-cache-manager (disable_hybrid): the layers still differ",
        ),
        (
            [
                "--model",
                "gpt-oss-20b",
                "--gpu",
                "H200",
                "--num-gpu-blocks",
                "500",
                "--max-model-len",
                "64000",
            ],
            "--max-model-len=64000 needs",
        ),
    ],
)
def test_a_refusal_names_the_flag(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "examples/demo_trace.jsonl", *flags]) == 2
    assert message in capsys.readouterr().err
