"""Models with latent attention and other recent kinds: bytes and times against sums done by hand."""

from __future__ import annotations

import json
from math import hypot
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from understudy._core import StepLoad
from understudy.errors import ConfigError
from understudy.groups import layers_of_model
from understudy.run.settings import ReplaySettings
from understudy.timing.deployment import Deployment, Parallelism
from understudy.timing.drafter import find_drafter
from understudy.timing.efficiencies import Efficiencies
from understudy.timing.find_architecture import find_architecture
from understudy.timing.gpus import find_gpu

if TYPE_CHECKING:
    from pathlib import Path

R1: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "num_nextn_predict_layers": 1,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
"""As its makers publish it; every sum below is from these numbers."""

ATTENTION = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
EXPERT = 3 * 7168 * 2048
LINEAR = 61 * ATTENTION + 3 * 3 * 7168 * 18432 + 58 * (EXPERT + 7168 * 256)
EXPERTS = 58 * 256 * EXPERT
VOCABULARY = 2 * 129280 * 7168 * 2  # embedding and head, 16 bits
PLAIN = Efficiencies(
    weights=1.0,
    compute=1.0,
    kv=1.0,
    attention=1.0,
    experts=1.0,
    expert_compute=1.0,
    link=1.0,
    link_latency_us=0.0,
)


def write(folder: Path, **config: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def deployed(model: str, tensor: int = 8, **settings: Any) -> Deployment:
    shape = find_architecture(model)
    settings = {"weights": shape.weights, **settings}
    return Deployment(model=shape, gpu=find_gpu("H200"), parallel=Parallelism(tensor=tensor), **settings)


def test_a_file_says_the_same_as_the_name(tmp_path: Path) -> None:
    found = find_architecture(write(tmp_path, **R1))
    assert msgspec.structs.replace(found, name="") == msgspec.structs.replace(
        find_architecture("DeepSeek-R1"), name=""
    )


def test_weights_are_counted_from_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, **R1)
    assert find_architecture(path).weight_bytes() == LINEAR + EXPERTS + VOCABULARY
    # Checkpoints in 4 bits keep all but the experts in 16.
    assert find_architecture(path).weight_bytes("nvfp4") == int(2 * LINEAR + EXPERTS * 0.5625 + VOCABULARY)


def test_projections_to_latents_are_whole_on_every_gpu(tmp_path: Path) -> None:
    whole = 61 * 7168 * (1536 + 576)
    per_gpu = (LINEAR - whole + EXPERTS + VOCABULARY) / 8 + whole
    assert deployed(write(tmp_path, **R1)).weight_bytes_per_gpu == pytest.approx(per_gpu, abs=1)


def test_kimi_in_int4_has_a_scale_for_each_32_weights(tmp_path: Path) -> None:
    kimi = {
        **R1,
        "model_type": "kimi_k2",
        "num_attention_heads": 64,
        "first_k_dense_replace": 1,
        "n_routed_experts": 384,
        "vocab_size": 163840,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"group_size": 32, "num_bits": 4, "type": "int"}}},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
        },
    }
    attention = 7168 * 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 * 64 * 256 + 64 * 128 * 7168
    linear = 61 * attention + 3 * 7168 * 18432 + 60 * (EXPERT + 7168 * 384)
    stored = 60 * 384 * EXPERT * (0.5 + 2 / 32)
    wanted = int(2 * linear + stored + 2 * 163840 * 7168 * 2)
    outer = {"model_type": "kimi_k25", "dtype": "bfloat16", "tie_word_embeddings": False, "text_config": kimi}
    found = find_architecture(write(tmp_path, **outer))
    assert (found.weights, found.weight_bytes()) == ("int4", wanted)
    assert find_architecture("moonshotai/Kimi-K2.5").weight_bytes() == wanted


@pytest.mark.parametrize(
    ("model", "kv", "tensor", "expected"),
    [
        ("DeepSeek-R1", "bf16", 8, 61 * 576 * 2),
        ("DeepSeek-R1", "fp8", 8, 61 * 576),
        ("Kimi-K2", "bf16", 1, 61 * 576 * 2),
        ("Mistral-Large-3-675B", "bf16", 8, 61 * 576 * 2),
        ("GLM-4.7-Flash", "bf16", 4, 47 * 576 * 2),
        ("GLM-4.7", "bf16", 8, 92 * 2 * 1 * 128 * 2),
        # MLA and, per layer, an indexer's key: 128 in fp8 and a scale; vLLM packs sparse MLA in fp8 to 656 bytes.
        ("GLM-5", "bf16", 8, 78 * (576 * 2 + 132)),
        ("GLM-5", "fp8", 8, 78 * (656 + 132)),
        # Full attention in every fourth layer.
        ("Qwen3.5-397B-A17B", "bf16", 2, 15 * 2 * 1 * 256 * 2),
        ("Qwen3.5-27B", "bf16", 1, 16 * 2 * 4 * 256 * 2),
        # Ten layers of full attention with heads of their own.
        ("Gemma-4-31B", "bf16", 2, 10 * 2 * 2 * 512 * 2 + 50 * 2 * 8 * 256 * 2),
        ("Gemma-4-26B-A4B", "bf16", 1, 5 * 2 * 2 * 512 * 2 + 25 * 2 * 8 * 256 * 2),
        # An index key of 128 in 16 bits in 57 of 60 layers.
        ("MiniMax-M3", "bf16", 4, 60 * 2 * 1 * 128 * 2 + 57 * 128 * 2),
        ("Nemotron-3-Nano-30B-A3B", "bf16", 1, 6 * 2 * 2 * 128 * 2),
        ("Nemotron-3-Super-120B-A12B", "bf16", 1, 8 * 2 * 2 * 128 * 2),
    ],
)
def test_kv_bytes_of_a_token(model: str, kv: str, tensor: int, expected: int) -> None:
    assert deployed(model, tensor, kv=kv).kv_bytes_per_token == expected
    layers = [
        one for one in layers_of_model(model, kv_dtype=kv, tensor_parallel=tensor) if one.kind != "mamba"
    ]
    assert sum(layer.page_bytes // layer.tokens for layer in layers) == expected


def test_weights_of_other_recent_models() -> None:
    # Qwen3.5: an output gate as wide as the queries, delta states in 45 layers, a shared expert in each.
    attention = 4096 * 256 * (2 * 32 + 32 + 2 * 2)
    channels = 2 * 16 * 128 + 64 * 128
    delta = 4096 * (channels + 64 * 128 + 2 * 64) + 64 * 128 * 4096 + 4 * channels
    routed = 60 * (512 + 1) * 3 * 4096 * 1024 + 60 * 4096 * 512
    total = 15 * attention + 45 * delta + routed + 2 * 248320 * 4096
    assert find_architecture("Qwen3.5-397B-A17B").weight_bytes() == 2 * total
    # Gemma 4: an MLP next to the experts of each layer, and one embedding that is also the head.
    window, full = 2816 * 256 * 2 * (16 + 8), 2816 * 512 * 2 * (16 + 2)
    total = 25 * window + 5 * full + 30 * (128 * 3 * 2816 * 704 + 3 * 2816 * 2112 + 2816 * 128)
    assert find_architecture("Gemma-4-26B-A4B").weight_bytes() == 2 * (total + 262144 * 2816)
    # Nemotron 3: 23 layers of Mamba 2, 23 of experts without gates, 6 of attention.
    inner, channels = 64 * 64, 64 * 64 + 2 * 8 * 128
    mamba = 2688 * (inner + channels + 64) + inner * 2688 + 4 * channels
    experts = 2 * 2688 * (128 * 1856 + 3712) + 2688 * 128
    attention = 2688 * 128 * 2 * (32 + 2)
    total = 23 * (mamba + experts) + 6 * attention + 2 * 131072 * 2688
    assert find_architecture("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16").weight_bytes() == 2 * total
    # MiniMax-M3: three dense layers; queries and one key of the indexer in the others.
    attention = 6144 * 128 * 2 * (64 + 4)
    experts = 57 * (129 * 3 * 6144 * 3072 + 6144 * 128 + 6144 * 128 * (4 + 1))
    total = 60 * attention + experts + 3 * 3 * 6144 * 12288 + 2 * 200064 * 6144
    assert find_architecture("MiniMax-M3").weight_bytes() == 2 * total


def test_decodes_are_absorbed_and_prompts_expanded() -> None:
    """Decodes read 576 elements per token and multiply them by all heads; prompts have keys of 192, values of 128."""
    found = deployed("DeepSeek-R1", 8).coefficients(PLAIN)
    read, flop = 1e3 / 4800e9, 1e3 / 989e12
    heads = 128 / 8
    absorbed = 61 * 2 * heads * (576 + 512) * flop
    assert found.context_ms == pytest.approx(hypot(61 * 576 * 2 * read, absorbed))
    assert found.attention_ms == pytest.approx(61 * 2 * heads * (192 + 128) * flop)
    assert found.draft_attention_ms == pytest.approx(absorbed)
    # A cached latent that a chunk of a prompt finds becomes keys and values of every head, in 16 bits.
    computed = 2 * 512 * heads * 256 * 1e3 / 1979e12
    assert found.history_ms == pytest.approx(61 * hypot(computed, 2 * heads * 320 * 2 * read))
    whole = 61 * 7168 * (1536 + 576)
    assert found.weights_ms == pytest.approx((whole + (LINEAR - whole) / 8) * read)
    assert found.token_ms == pytest.approx(2 * (whole + (LINEAR - whole) / 8) * 1e3 / 1979e12)


def test_the_latent_is_read_by_each_gpu_and_computed_by_parts() -> None:
    alone, eight = (deployed("DeepSeek-R1", n).coefficients(PLAIN) for n in (1, 8))
    assert eight.context_ms < alone.context_ms < 8 * eight.context_ms
    assert alone.attention_ms == pytest.approx(8 * eight.attention_ms)


def test_steps_with_history_and_drafts_take_the_time_of_their_coefficients() -> None:
    found = deployed("DeepSeek-R1").coefficients(PLAIN)
    none = msgspec.structs.replace(found, history_ms=0.0, draft_attention_ms=0.0)
    step, plain = found.build(), none.build()
    prompt = StepLoad(chunks=[(256, 10_000)])
    assert step.step_ms(prompt) - plain.step_ms(prompt) == pytest.approx(10_000 * found.history_ms)
    drafts = StepLoad(
        decodes=4, context_tokens=40_000, drafts=12
    )  # each attends to a context of 10,000, absorbed
    assert step.step_ms(drafts) > plain.step_ms(drafts)


def test_windows_and_full_attention_have_sizes_of_their_own() -> None:
    found = deployed("Gemma-4-31B", 1).coefficients(PLAIN)
    read, flop = 1e3 / 4800e9, 1e3 / 989e12
    assert found.context_ms == pytest.approx(10 * 2 * 4 * 512 * 2 * read)
    assert found.window_context_ms == pytest.approx(50 * 2 * 16 * 256 * 2 * read)
    assert found.attention_ms == pytest.approx(10 * 4 * 32 * 512 * flop)
    assert found.window_attention_ms == pytest.approx(50 * 4 * 32 * 256 * flop)


def test_a_layer_predicts_tokens_of_a_model_with_a_latent() -> None:
    target = deployed("DeepSeek-R1")
    drafter = find_drafter("mtp", target)
    assert drafter.kv_bytes_per_token(target) == 576 * 2
    assert drafter.coefficients(target, PLAIN).context_ms == pytest.approx(
        target.coefficients(PLAIN).context_ms / 61
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model_type": "deepseek_v32", "index_head_dim": 128, "index_topk": 2048}, "sparse attention"),
        (
            {"index_head_dim": 128, "index_topk": 2048, "index_n_heads": 64},
            "index_head_dim: sparse attention",
        ),
        (
            {
                "model_type": "glm_moe_dsa",
                "index_head_dim": 128,
                "index_topk": 2048,
                "index_n_heads": 32,
                "indexer_types": ["full", "shared"],
            },
            "indexers that layers share",
        ),
        ({"compress_ratios": [0, 4]}, r"compressed MLA \(DeepSeek-V4\)"),
        ({"v_head_dim": None}, "v_head_dim is missing"),
        ({"linear_attn_config": {"full_attn_layers": [1]}}, "Kimi delta attention"),
    ],
)
def test_what_is_not_timed_is_refused_by_its_reason(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        find_architecture(write(tmp_path, **{**R1, **change}))


def test_a_replay_sizes_and_times_a_model_with_a_latent_by_itself() -> None:
    found = ReplaySettings.read(
        None, {}, ["model=DeepSeek-R1", "gpu.name=H200", "gpu.tensor_parallel_size=8"]
    )
    assert found.engine.block_size == 64
    # Of 138 GB (0.92 of the memory), 671 GB of weights on eight GPUs leave about 48 GB on each for 70 KB per token.
    assert 500_000 < found.engine.num_gpu_blocks * 64 < 730_000
    kimi = ReplaySettings.read(None, {}, ["model=Kimi-K2.5", "gpu.name=B200", "gpu.tensor_parallel_size=8"])
    assert "Kimi-K2.5 in int4" in kimi.engine.timing.describe_origin()


@pytest.mark.parametrize("model", ["GLM-5", "MiniMax-M3"])
def test_sparse_attention_that_is_timed_as_full_is_named(model: str) -> None:
    found = ReplaySettings.read(
        None, {}, [f"model={model}", "gpu.name=B200", "gpu.tensor_parallel_size=8", "gpu.weight_dtype=fp8"]
    )
    assert (
        "attention to all tokens, not to the 2,048 that its indexer selects"
        in found.engine.timing.describe_origin()
    )
