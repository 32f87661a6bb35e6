"""Logits and tokens against the Qwen3 of `transformers`, with the same weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from qwen3.building import CPU, LIKE_0_6B, TINY, engine_of, executor_of, generate, manager_of, prompt_of
from understudy.qwen3.batch import Chunk, Decode
from understudy.qwen3.forward import batch_decode, batch_prefill, unified_step
from understudy.qwen3.weights import Weights, expected_shapes, random_weights

if TYPE_CHECKING:
    from understudy.qwen3.config import Qwen3Config

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def build_twin(config: Qwen3Config, weights: Weights) -> Any:
    """The same network in `transformers`."""
    settings = transformers.Qwen3Config(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_positions,
        rope_theta=config.rope_theta,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tied_embeddings,
    )
    model = transformers.Qwen3ForCausalLM(settings).to(getattr(torch, config.dtype)).eval()
    state: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(weights.layers):
        name = f"model.layers.{index}."
        q, k, v = layer.qkv.split((config.attention_width, config.kv_width, config.kv_width))
        gate, up = layer.gate_up.chunk(2)
        state |= {
            f"{name}input_layernorm.weight": layer.input_norm,
            f"{name}self_attn.q_proj.weight": q,
            f"{name}self_attn.k_proj.weight": k,
            f"{name}self_attn.v_proj.weight": v,
            f"{name}self_attn.q_norm.weight": layer.q_norm,
            f"{name}self_attn.k_norm.weight": layer.k_norm,
            f"{name}self_attn.o_proj.weight": layer.out,
            f"{name}post_attention_layernorm.weight": layer.mlp_norm,
            f"{name}mlp.gate_proj.weight": gate,
            f"{name}mlp.up_proj.weight": up,
            f"{name}mlp.down_proj.weight": layer.down,
        }
    state |= {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.norm}
    if not config.tied_embeddings:
        state["lm_head.weight"] = weights.head
    assert state.keys() == expected_shapes(config).keys()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model


@torch.inference_mode()
def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    answer: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return answer


@pytest.mark.parametrize(
    "config", [TINY, replace(TINY, tied_embeddings=False), LIKE_0_6B], ids=["tiny", "untied", "0.6B-like"]
)
def test_every_logit_of_a_prompt_is_that_of_transformers(config: Qwen3Config) -> None:
    weights = random_weights(config, 7, CPU)
    model = build_twin(config, weights)
    manager = manager_of(config, 64)
    executor = executor_of(config, manager, weights)
    tokens = prompt_of(3, 41, config.vocab_size)
    with manager.request(tokens, 2) as kv, torch.inference_mode():
        kv.schedule_prefill(len(tokens))
        ours = batch_prefill(
            weights, [Chunk(np.array(tokens), kv.view())], executor.buffer, executor.backend, echo=True
        )
    assert (ours - logits_of(model, tokens)).abs().max() <= 1e-4


@torch.inference_mode()
def test_chunks_and_decodes_in_one_step_see_what_each_would_see_alone() -> None:
    weights = random_weights(TINY, 7, CPU)
    model = build_twin(TINY, weights)
    manager = manager_of(TINY, 64)
    executor = executor_of(TINY, manager, weights)
    first, second = prompt_of(1, 21), prompt_of(2, 13)
    buffer, backend = executor.buffer, executor.backend
    with manager.request(first, 4) as a, manager.request(second, 4) as b:
        a.schedule_prefill(21)
        logits = batch_prefill(weights, [Chunk(np.array(first), a.view())], buffer, backend)
        token = int(logits.argmax())
        a.apply_prefill(token)
        a.schedule_decode()
        b.schedule_prefill(9)
        both = unified_step(
            weights, [Chunk(np.array(second[:9]), b.view())], [Decode(token, a.view())], buffer, backend
        )
        assert (both[0] - logits_of(model, second[:9])[-1]).abs().max() <= 1e-4
        assert (both[1] - logits_of(model, [*first, token])[-1]).abs().max() <= 1e-4
        b.apply_prefill()
        b.schedule_prefill(4)
        rest = batch_prefill(weights, [Chunk(np.array(second[9:]), b.view())], buffer, backend)
        assert (rest[0] - logits_of(model, second)[-1]).abs().max() <= 1e-4
        b.apply_prefill(5)
        b.schedule_decode()
        decoded = batch_decode(weights, [Decode(5, b.view())], buffer, backend)
        assert (decoded[0] - logits_of(model, [*second, 5])[-1]).abs().max() <= 1e-4


def test_greedy_tokens_are_those_of_transformers() -> None:
    weights = random_weights(TINY, 7, CPU)
    model = build_twin(TINY, weights)
    prompts = [prompt_of(seed, length) for seed, length in ((1, 5), (2, 16), (3, 33))]
    answers = generate(engine_of(weights=weights, budget=16), *prompts, max_tokens=20)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = list(prompt)
        for _ in range(20):
            expected.append(int(logits_of(model, expected)[-1].argmax()))
        assert answer == expected[len(prompt) :]
