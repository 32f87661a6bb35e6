"""A model on a GPU: replay, serve and predict take its KV cache groups and blocks from vLLM's plan."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import understudy as us
from understudy.calibrate.predict import build_engine_on_gpu
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.groups import groups_of_model
from understudy.run.model_groups import apply_model_groups
from understudy.run.settings import ReplaySettings
from understudy.server.flags.serving import read_serve
from understudy.tiers.gpu import GpuSettings
from understudy.tiers.plan import TierPlan

from .test_derivations import DERIVATIONS

if TYPE_CHECKING:
    from pathlib import Path

GPT_OSS = ("model=gpt-oss-120b", "gpu.name=H200", "engine.block_size=16")
WINDOW = us.KvCacheGroup(kind="sliding_window", block_size=16, window=128)
FULL = us.KvCacheGroup(kind="full", block_size=16)


def settings(*assignments: str) -> ReplaySettings:
    return ReplaySettings.read(None, {}, list(assignments))


def engine_of(*assignments: str) -> VllmConfig:
    engine = settings(*assignments).engine
    assert isinstance(engine, VllmConfig)
    return engine


def test_a_replay_gets_the_groups_and_blocks_that_capacity_prints() -> None:
    plan = GpuSettings(name="H200").groups("gpt-oss-120b", None, max_model_len=131072, block_size=16)
    found = settings(*GPT_OSS, "engine.max_model_len=131072")
    assert isinstance(found.engine, VllmConfig)
    assert found.engine.kv_cache_groups == (WINDOW, FULL)
    assert found.engine.num_gpu_blocks == plan.num_blocks - 1
    assert "2 KV cache groups of gpt-oss-120b" in found.notes[0]


def test_all_recorded_memory_gives_the_recorded_number_of_blocks() -> None:
    recorded = DERIVATIONS[0]  # gpt-oss-20b
    gpu = GpuSettings(memory=recorded["memory_bytes"] + 1, weights=1, gpu_memory_utilization=1.0)
    engine, _ = apply_model_groups(
        gpu,
        VllmConfig(block_size=16, max_model_len=recorded["max_model_len"]),
        "gpt-oss-20b",
        None,
        has_blocks=False,
    )
    assert engine.num_gpu_blocks == recorded["num_blocks"] - 1
    assert [group.describe_kind()[0] for group in engine.kv_cache_groups] == [
        group["kind"] for group in recorded["groups"]
    ]


def test_a_replay_in_python_uses_the_groups_of_the_model(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 512, "output_length": 4, "hash_ids": [1]}
    trace.write_text("".join(json.dumps({**row, "timestamp": 5000 * n}) + "\n" for n in range(3)))
    report = us.replay(trace, us.VllmConfig(block_size=16), model="gpt-oss-20b", gpu="H100")
    assert [group["kind"] for group in report.to_dict()["run"]["engine"]["kv_cache_groups"]] == [
        "sliding_window",
        "full",
    ]


def test_a_server_gets_the_groups_of_its_model() -> None:
    words = "gpt-oss-120b --gpu H200 --max-model-len 8192 --prefix-cache-retention-interval 64"
    plan = read_serve(words.split())
    engine = plan.settings.engine
    assert isinstance(engine, VllmConfig)
    assert engine.kv_cache_groups == (WINDOW, FULL)
    assert engine.prefix_cache_retention_interval == 64
    assert plan.idle == []
    uniform = read_serve(["Llama-3.1-8B", "--gpu", "H200", "--prefix-cache-retention-interval", "64"])
    assert isinstance(uniform.settings.engine, VllmConfig)
    assert uniform.settings.engine.kv_cache_groups == ()
    assert uniform.idle == ["prefix-cache-retention-interval"]


def test_a_prediction_gets_the_groups_of_its_model() -> None:
    engine = build_engine_on_gpu(
        GpuSettings(name="H200"),
        "gpt-oss-120b",
        None,
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
    )
    assert isinstance(engine, VllmConfig)
    assert engine.kv_cache_groups == (WINDOW, FULL)


def test_given_blocks_are_kept_and_shared_by_the_groups() -> None:
    engine = engine_of(*GPT_OSS, "engine.num_gpu_blocks=5000")
    assert engine.kv_cache_groups == (WINDOW, FULL)
    assert engine.num_gpu_blocks == 5000


def test_given_groups_are_kept() -> None:
    groups = '[{"kind": "full", "block_size": 16}]'
    engine = engine_of(*GPT_OSS, f"engine.kv_cache_groups={groups}", "engine.num_gpu_blocks=50")
    assert engine.kv_cache_groups == (FULL,)


def write_windows(tmp_path: Path, **changed: Any) -> Path:
    config: dict[str, Any] = {
        "model_type": "qwen2",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 1024,
        "vocab_size": 1000,
        "intermediate_size": 4096,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        **changed,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_a_file_whose_layers_are_not_known_is_refused(tmp_path: Path) -> None:
    path = write_windows(tmp_path, torch_dtype="int3")
    with pytest.raises(ConfigError, match="torch_dtype: 'int3' is not known"):
        settings(f"model={path}", "gpu.name=H200")


def test_a_file_without_a_type_has_groups_and_a_note_on_its_type(tmp_path: Path) -> None:
    path = write_windows(tmp_path, torch_dtype=None)
    found = settings(f"model={path}", "gpu.name=H200")
    assert len(found.engine.describe()["kv_cache_groups"]) == 2
    assert found.notes[-1].endswith("torch_dtype is missing: KV in bfloat16, as vLLM computes without it")
    alike = write_windows(tmp_path, torch_dtype=None, layer_types=None, sliding_window=None)
    assert "torch_dtype is missing" in settings(f"model={alike}", "gpu.name=H200").notes[-1]


def test_a_config_file_with_layers_that_differ_works(tmp_path: Path) -> None:
    path = write_windows(tmp_path)
    engine = engine_of(f"model={path}", "gpu.memory=10GiB", "gpu.weights=2GiB", "engine.block_size=16")
    memory = int(10 * 2**30 * 0.92) - 2 * 2**30
    plan = groups_of_model(str(path), memory_bytes=memory, max_model_len=4096)
    assert engine.num_gpu_blocks == plan.num_blocks - 1
    assert [group.window for group in engine.kv_cache_groups] == [64, None]


def test_models_whose_layers_are_alike_keep_one_group() -> None:
    engine = engine_of("model=Llama-3.1-8B", "gpu.name=H200")
    assert engine.kv_cache_groups == ()
    assert engine.num_gpu_blocks == GpuSettings(name="H200").num_blocks("Llama-3.1-8B", None, 16).blocks


def test_without_the_hybrid_manager_one_group_holds_all_layers() -> None:
    one = engine_of(*GPT_OSS, "gpu.disable_hybrid_kv_cache_manager=true")
    assert one.kv_cache_groups == ()
    assert one.num_gpu_blocks == pytest.approx(engine_of(*GPT_OSS).num_gpu_blocks / 2, abs=1)


def test_chunked_local_attention_is_one_group_unless_the_hybrid_manager_is_on() -> None:
    scout = ("model=Llama-4-Scout-17B-16E", "gpu.name=B200", "gpu.weight_dtype=fp8", "engine.block_size=16")
    assert engine_of(*scout).kv_cache_groups == ()
    on = engine_of(*scout, "gpu.disable_hybrid_kv_cache_manager=false")
    assert {group.kind for group in on.kv_cache_groups} == {"chunked_local", "full"}


@pytest.mark.parametrize(
    ("assignment", "problem"),
    [
        ('engine.vllm_version="0.32"', "vllm_version: gpt-oss-120b has 2 KV cache groups, whose rules are"),
        ("engine.max_model_len=1000000000", "give more memory, or a shorter max_model_len"),
        (
            'engine.kv_cache_groups=[{"kind": "full", "block_size": 16}]',
            "kv_cache_groups: the blocks of given groups do not follow .*; give --num-gpu-blocks, or leave",
        ),
    ],
)
def test_engines_without_groups_and_requests_that_do_not_fit_are_refused(
    assignment: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        settings("model=gpt-oss-120b", "gpu.name=H200", assignment)


def test_a_model_with_states_is_not_told_to_plan_one_group() -> None:
    old = 'engine.vllm_version="0.32"'
    with pytest.raises(ConfigError, match=r"has 4 KV cache groups.*; choose 0.33$"):
        settings("model=qwen3-next-80b-a3b", "gpu.name=H200", "gpu.tensor_parallel_size=2", old)


def test_a_given_length_that_the_given_blocks_do_not_hold_is_refused() -> None:
    given = (*GPT_OSS, "engine.num_gpu_blocks=2000")
    assert engine_of(*given, "engine.max_model_len=15000").num_gpu_blocks == 2000
    with pytest.raises(
        ConfigError, match="max_model_len=16000 needs 2001 blocks in all KV cache groups of gpt"
    ):
        engine_of(*given, "engine.max_model_len=16000")
    assert engine_of(*given).max_model_len is None


def test_a_model_with_states_runs_without_prefix_caching() -> None:
    given = ("model=qwen3-next-80b-a3b", "gpu.name=H200", "gpu.tensor_parallel_size=2")
    engine = engine_of(*given, "engine.enable_prefix_caching=false")
    assert {group.mode for group in engine.kv_cache_groups if group.kind == "mamba"} == {"none"}
    assert engine.block_size % 544 == 0


def test_groups_do_not_work_with_prefill_and_decode_workers() -> None:
    given = 'engine.kv_cache_groups=[{"kind": "full", "block_size": 16}]'
    with pytest.raises(ConfigError, match="prefill and decode workers yet; leave them out, or leave out"):
        settings(given, "disaggregation.prefill_workers=1", "disaggregation.decode_workers=1")


REMEDY = r"give measured times \(--timing\) and, in place of --gpu, .* \(--gpu-memory, --gpu-weights\)$"


@pytest.mark.parametrize(
    "model", ["Kimi-Linear-48B-A3B", "Nemotron-H-8B", "DeepSeek-V3.2", "AI21-Jamba-1.5-Mini"]
)
def test_a_model_of_which_only_the_groups_are_known_is_refused_with_a_remedy_that_works(model: str) -> None:
    with pytest.raises(ConfigError, match=REMEDY):
        settings(f"model={model}", "gpu.name=H200")
    found = settings(
        f"model={model}", "gpu.memory=150GB", "gpu.weights=90GB", "engine.timing.kind=polynomial"
    )
    assert found.engine.num_gpu_blocks > 100
    served = read_serve([model, "--gpu-memory", "150GB", "--gpu-weights", "90GB", "--max-model-len", "4096"])
    assert served.settings.engine.num_gpu_blocks > 100


def test_a_file_with_states_is_refused_with_that_remedy_too(tmp_path: Path) -> None:
    path = write_windows(
        tmp_path,
        model_type="jamba",
        layer_types=None,
        sliding_window=None,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=16,
        mamba_expand=2,
        mamba_d_conv=4,
    )
    with pytest.raises(ConfigError, match=REMEDY):
        settings(f"model={path}", "gpu.name=H200")


def test_a_server_says_at_start_which_groups_it_has() -> None:
    (with_gpu,) = read_serve(["gpt-oss-120b", "--gpu", "H200", "--max-model-len", "8192"]).settings.notes
    assert "2 KV cache groups of gpt-oss-120b" in with_gpu
    (without,) = read_serve(["gpt-oss-120b"]).settings.notes
    assert without.startswith(
        "without --gpu, gpt-oss-120b has one KV cache group of 16,384 blocks of 16 tokens"
    )
    assert read_serve(["gpt-oss-120b", "--disable-hybrid-kv-cache-manager"]).settings.notes == ()
    assert read_serve(["gpt-oss-120b", "--engine", "sglang"]).settings.notes == ()
    assert read_serve(["my-model"]).settings.notes == ()
    assert read_serve(["Llama-3.1-8B"]).settings.notes == ()


@pytest.mark.parametrize(
    "flags",
    [
        ["--kv-offloading-size", "4"],
        ["--tiers", '{"tiers": [{"tier": "g2", "bytes": "64GiB"}], "model": "gpt-oss-120b"}'],
    ],
)
def test_a_host_of_a_model_with_groups_needs_its_gpu(flags: list[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"layers are of several kinds; give --gpu, .* or kv_bytes_per_token"
    ):
        TierPlan.of(read_serve(["gpt-oss-120b", *flags]).settings.tiers, 16)


def test_a_server_takes_groups_and_the_names_that_capacity_prints() -> None:
    listed = [
        {"kind": "full_attention", "block_size": 32},
        {"kind": "sliding_window", "block_size": 32, "window": 64},
        {"kind": "chunked_local_attention", "block_size": 32, "chunk": 64},
        {"kind": "mla_attention", "block_size": 32},
    ]
    flags = ["--num-gpu-blocks", "4000", "--kv-cache-groups", json.dumps(listed)]
    engine = read_serve(["my-model", *flags]).settings.engine
    assert isinstance(engine, VllmConfig)
    kinds = [group.kind for group in engine.kv_cache_groups]
    assert kinds == ["full", "sliding_window", "chunked_local", "mla"]
    assert engine.block_size == 32
    with pytest.raises(ConfigError, match="block_size=16 contradicts kv_cache_groups"):
        read_serve(["my-model", *flags, "--block-size", "16"])
