"""Flags of a server that would do nothing: ours are refused by name, vLLM's are told."""

from __future__ import annotations

import pytest

from understudy.errors import ConfigError
from understudy.server.flags.serving import read_serve

CONSTANT = ["timing.kind=constant", "timing.prefill_ms=1", "timing.decode_ms=2"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--timing", "polynomial", "--time-to-first-token", "9"],
            "--time-to-first-token and --timing both say",
        ),
        (
            ["--inter-token-latency", "9", "--set", *CONSTANT],
            "--inter-token-latency and --set timing both say",
        ),
        (
            ["--gpu", "H100", "--num-gpu-blocks", "4096", "--inter-token-latency", "9"],
            "--gpu changes nothing beside --inter-token-latency, which says how long steps take, and --num-gpu",
        ),
        (
            ["--num-gpu-blocks", "4096", "--num-gpu-blocks-override", "4097"],
            "--num-gpu-blocks and --num-gpu-blocks-override both say how many blocks",
        ),
        (["--engine", "qwen3", "--timing", "polynomial"], "--timing is for a simulated engine; leave it out"),
        (["--engine", "qwen3", "--gpu", "H100"], "--gpu is for a simulated engine; leave it out"),
        (["--engine", "qwen3", "--gpu-memory", "9GB"], "--gpu-memory is for a simulated engine"),
    ],
)
def test_flags_of_ours_that_would_do_nothing_are_refused(flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_serve(["Llama-3.1-8B", *flags])


@pytest.mark.parametrize(
    "flags",
    [
        ["--gpu", "H100", "--inter-token-latency", "9"],  # it says how many blocks there are
        ["--num-gpu-blocks", "4096", "--num-gpu-blocks-override", "4096"],
        ["--num-gpu-blocks", "4096", "--inter-token-latency", "9"],
        ["--engine", "qwen3", "--tensor-parallel-size", "2"],
    ],
)
def test_flags_that_go_together_are_taken(flags: list[str]) -> None:
    read_serve(["Llama-3.1-8B", *flags])


def test_an_assignment_wins_over_the_flag_of_times_as_in_a_replay() -> None:
    settings = read_serve(["m", "--timing", "polynomial", "--set", *CONSTANT]).settings
    assert settings.describe_times() == "given constants: 1 ms of prefill, 2 ms of decode"


@pytest.mark.parametrize(
    ("flags", "idle"),
    [
        (["--uds", "/tmp/x", "--host", "h", "--port", "1"], ["host", "port"]),
        (["--uds", "/tmp/x", "--port", "1", "--kv-events-config", "{}"], []),  # its topic may name them
        (["--host", "h", "--port", "1"], []),
        (["--seed", "1"], []),
        (["--seed", "1", "--response-mode", "echo"], ["seed"]),
        (["--seed", "1", "--response-mode", "echo", "--engine", "qwen3"], []),
        (
            [
                *("--seed", "1", "--response-mode", "echo"),
                *("--inter-token-latency", "10", "--inter-token-latency-std-dev", "1"),
            ],
            [],
        ),
        (["--kv-offloading-backend", "native"], ["kv-offloading-backend"]),
        (
            [
                "--kv-offloading-backend",
                "native",
                "--kv-offloading-size",
                "1",
                "--tiers",
                '{"model": "Qwen3-8B"}',
            ],
            [],
        ),
    ],
)
def test_flags_of_vllm_that_do_nothing_are_told(flags: list[str], idle: list[str]) -> None:
    assert read_serve(["m", *flags]).idle == idle
