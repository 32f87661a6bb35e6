"""Commands of random deployments start the GPUs that are billed; the reader of commands refuses what engines refuse."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from answers.bill import count_manifest
from answers.engine_commands import SGLANG, SGLANG_SWITCHES, VLLM, VLLM_SWITCHES, read_engine
from understudy.report import Slo
from understudy.run.settings import ReplaySettings
from understudy.server import flags
from understudy.sweep.candidate import Candidate
from understudy.sweep.checkpoints import refuse_unspoken
from understudy.sweep.commands import make_commands
from understudy.sweep.manifest import write_manifest
from understudy.sweep.prices import Prices

MODELS = {"Llama-3.1-8B": "H100", "Qwen3-32B": "H200", "Qwen3-30B-A3B": "H100"}
EXPERTS = {"Qwen3-30B-A3B"}
HOSTS = {"7GB": 7 * 10**9, "8GB": 8 * 10**9, "64GB": 64 * 10**9, "8GiB": 8 << 30}
"""Sizes of host memory, in bytes."""
FLAGS = Path(flags.__file__).parent
"""Flags as the engines' own parsers list them."""


@st.composite
def deployments(draw: st.DrawFn) -> tuple[dict[str, Any], int, int]:
    """Draw settings of a replay, the GPUs of one engine, and the number of engines."""
    model = draw(st.sampled_from(sorted(MODELS)))
    kind = draw(st.sampled_from(("vllm", "sglang")))
    tensor = draw(st.sampled_from((1, 2, 4)))
    ranks = draw(st.sampled_from((1, 1, 2, 4))) if kind == "vllm" or model not in EXPERTS else 1
    engine: dict[str, Any] = {"engine_type": kind}
    gpu: dict[str, Any] = {"name": MODELS[model], "tensor_parallel_size": tensor}
    settings: dict[str, Any] = {"model": model, "gpu": gpu, "engine": engine}
    is_split = ranks == 1 and kind == "vllm" and draw(st.booleans())
    if is_split:
        sizes = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
        settings["disaggregation"] = {"prefill_workers": sizes[0], "decode_workers": sizes[1]}
    else:
        sizes = (draw(st.integers(1, 4)), 0)
        settings["workers"] = sizes[0]
        settings["routing"] = draw(st.sampled_from(("round_robin", "kv", "least_loaded", "session_affinity")))
    if ranks > 1:
        draw(st.sampled_from((engine, gpu)))["data_parallel_size"] = ranks
    if model in EXPERTS and draw(st.booleans()):
        gpu["enable_expert_parallel"] = True
    if draw(st.booleans()):
        gpu["gpu_memory_utilization"] = draw(st.sampled_from((0.8, 0.85, 0.95)))
    elif draw(st.booleans()):
        pool = draw(st.integers(200, 5000))
        engine |= {"num_gpu_blocks": pool} if kind == "vllm" else {"max_total_tokens": pool}
    if kind == "sglang" and draw(st.booleans()):
        settings["tiers"] = [{"tier": "g2", "bytes": draw(st.sampled_from(sorted(HOSTS)))}]
    if kind == "vllm" and draw(st.booleans()):
        engine["max_num_seqs"] = draw(st.integers(1, 300))
    if draw(st.booleans()):
        gpu["weight_dtype"] = draw(st.sampled_from(("fp8", "bf16")))
    return settings, tensor * ranks, sum(sizes)


def audit(drawn: tuple[dict[str, Any], int, int], price: float) -> None:
    """Compare the bill of a drawn deployment with its commands and its manifest."""
    given, engine_gpus, engines = drawn
    fleet = Candidate(
        flags={},
        settings=ReplaySettings.read(None, given, []),
        slo=Slo(ttft_ms=1),
        model=given["model"],
    )
    refuse_unspoken(fleet)
    name = given["gpu"]["name"]
    assert fleet.gpus == engine_gpus * engines
    assert Prices.parse([f"{name}={price}", "99"]).cost(fleet) == pytest.approx(fleet.gpus * price)
    commands = make_commands(fleet)
    read = [(each.workers, read_engine(each.words)) for each in commands.engines]
    assert sum(count * engine.gpus for count, engine in read) == fleet.gpus
    assert count_manifest(write_manifest(fleet)) == fleet.gpus
    for _, engine in read:
        assert engine.kind == given["engine"]["engine_type"]
        assert engine.model.split("/")[-1].startswith(given["model"])
        assert engine.given["tp"] == given["gpu"]["tensor_parallel_size"]
        asked = given["engine"].get("num_gpu_blocks", given["engine"].get("max_total_tokens"))
        if asked is not None and "gpu_memory_utilization" not in given["gpu"]:
            assert engine.blocks == asked == fleet.settings.engine.num_gpu_blocks
        if "tiers" in given:
            # SGLang's size is that of each GPU, which holds its own of the model's 4 or 8 KV heads.
            host, gpus = HOSTS[given["tiers"][0]["bytes"]], given["gpu"]["tensor_parallel_size"]
            per_gpu_gb = host / gpus / 1e9
            assert engine.given.get("hicache-size") == (per_gpu_gb if per_gpu_gb.is_integer() else None)
            assert per_gpu_gb.is_integer() != any("hicache-size" in one for one in commands.not_expressed)
        if "gpu_memory_utilization" in given["gpu"]:
            assert float(engine.given["memory"]) == given["gpu"]["gpu_memory_utilization"]
        if "max_num_seqs" in given["engine"]:
            assert int(engine.given["max-num-seqs"]) == given["engine"]["max_num_seqs"]
        is_whole = engine.given.get("whole experts", False) or engine.given.get("ep", 1) > 1
        assert is_whole == (given["gpu"].get("enable_expert_parallel", False) and engine_gpus > 1) or (
            engine_gpus == 1
        )
        assert engine.given.get("quantization") == (
            "fp8" if given["gpu"].get("weight_dtype") == "fp8" else None
        )
    hosts = [word for word in commands.router or () if "8000" in word]
    if engines > 1:
        assert hosts
    elif (
        given.get("routing") in ("kv", "least_loaded", "session_affinity")
        and engine_gpus > given["gpu"]["tensor_parallel_size"]
    ):
        assert hosts  # a router that sees the ranks of one engine


@settings(max_examples=30)
@given(drawn=deployments(), price=st.floats(0.1, 20))
def test_commands_start_the_gpus_that_are_billed(
    drawn: tuple[dict[str, Any], int, int], price: float
) -> None:
    audit(drawn, price)


@pytest.mark.soak
@settings(max_examples=3000)
@given(drawn=deployments(), price=st.floats(0.1, 20))
def test_thousands_of_commands_start_the_gpus_that_are_billed(
    drawn: tuple[dict[str, Any], int, int], price: float
) -> None:
    audit(drawn, price)


# ── The reader of commands ──


def test_a_command_of_every_flag_is_read() -> None:
    engine = read_engine(shlex.split("vllm serve m -tp 2 -dp 4 --no-async-scheduling --block-size 16"))
    assert (engine.kind, engine.model, engine.gpus) == ("vllm", "m", 8)
    assert engine.given["async"] is False
    words = "python -m sglang.launch_server --model-path m --tp-size 4 --dp-size 2 --enable-dp-attention --page-size 4"
    assert read_engine(shlex.split(words)).gpus == 4
    assert read_engine([*shlex.split(words), "--max-total-tokens", "64"]).blocks == 16


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("vllm serve m --tensor-parallel 2", "vllm has no flag --tensor-parallel"),
        ("vllm serve m --page-size 4", "vllm has no flag --page-size"),
        ("vllm serve m --enable-dp-attention", "vllm has no flag"),
        ("vllm serve m -tp 2 --tensor-parallel-size 4", "given twice"),
        ("vllm serve m --tensor-parallel-size 2.0", "tp: 2.0"),
        ("vllm serve m --tensor-parallel-size", "has no value"),
        ("vllm serve m --gpu-memory-utilization 92", "memory: 92"),
        ("vllm serve m --enable-lora true", "models"),
        ("vllm serve", "models"),
        ("vllm serve m --kv-cache-dtype --enable-lora", "kv: --enable-lora"),
        ("python -m sglang.launch_server --model-path m --no-disable-radix-cache", "sglang has no flag"),
        ("python -m sglang.launch_server --model-path m --block-size 4", "sglang has no flag --block-size"),
        ("vllm bench m", "bench"),
    ],
)
def test_a_command_that_an_engine_refuses_is_no_bill(command: str, problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        read_engine(shlex.split(command))


@pytest.mark.parametrize(
    ("recording", "known"),
    [("vllm-0.33.0", {**VLLM, **VLLM_SWITCHES}), ("sglang-0.5.23", {**SGLANG, **SGLANG_SWITCHES})],
)
def test_the_reader_knows_no_flag_that_the_engines_lack(recording: str, known: dict[str, str]) -> None:
    lines = (FLAGS / f"{recording}.jsonl").read_text().splitlines()
    recorded = {name for line in lines for name in json.loads(line).get("names", ())}
    assert set(known) - recorded == set()
