"""Keys of the `config.json` of models with latent attention, states, experts next to MLPs, or indexers."""

from __future__ import annotations

from typing import Any

_FP8 = {"quantization_config": {"quant_method": "fp8"}}
_INT4_OF_32 = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"group_size": 32, "num_bits": 4, "type": "int"}}},
    }
}

_LATENT: dict[str, Any] = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 1,
}
_DEEPSEEK = {
    **_LATENT,
    **_FP8,
    "model_type": "deepseek_v3",
    "num_attention_heads": 128,
    "intermediate_size": 18432,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "max_position_embeddings": 163840,
    "vocab_size": 129280,
}
_KIMI = {
    **_DEEPSEEK,
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "first_k_dense_replace": 1,
    "n_routed_experts": 384,
    "max_position_embeddings": 131072,
    "vocab_size": 163840,
}
_KIMI_INT4 = {**_KIMI, **_INT4_OF_32, "max_position_embeddings": 262144}
_GLM_5 = {
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "intermediate_size": 12288,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "max_position_embeddings": 202752,
    "vocab_size": 154880,
}
_QWEN_3_5 = {
    "model_type": "qwen3_5_moe",
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "num_key_value_heads": 2,
    "vocab_size": 248320,
}
_GEMMA_4: dict[str, Any] = {
    "model_type": "gemma4",
    "attention_k_eq_v": True,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "vocab_size": 262144,
}
_NEMOTRON_3 = {
    "model_type": "nemotron_h",
    "conv_kernel": 4,
    "head_dim": 128,
    "mamba_head_dim": 64,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "num_key_value_heads": 2,
    "ssm_state_size": 128,
    "vocab_size": 131072,
}


def _qwen_3_5(
    hidden: int, layers: int, heads: int, value_heads: int, experts: tuple[int, int, int]
) -> dict[str, Any]:
    return {
        **_QWEN_3_5,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "linear_num_value_heads": value_heads,
        "num_experts": experts[0],
        "num_experts_per_tok": experts[1],
        "moe_intermediate_size": experts[2],
        "shared_expert_intermediate_size": experts[2],
    }


CONFIGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("DeepSeek-V3", "DeepSeek-R1", "DeepSeek-V3.1"), _DEEPSEEK),
    "Kimi-K2": _KIMI,
    **dict.fromkeys(("Kimi-K2-Thinking", "Kimi-K2.5", "Kimi-K2.6"), _KIMI_INT4),
    # The language model of Mistral Large 3, whose makers count 673 billion parameters, 39 of them active.
    "Mistral-Large-3-675B": {
        **_DEEPSEEK,
        "intermediate_size": 16384,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 4096,
        "max_position_embeddings": 262144,
        "vocab_size": 131072,
    },
    **dict.fromkeys(("GLM-5", "GLM-5.1"), _GLM_5),
    "GLM-4.7-Flash": {
        "model_type": "glm4_moe_lite",
        "hidden_size": 2048,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "intermediate_size": 10240,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "max_position_embeddings": 202752,
        "vocab_size": 154880,
    },
    "Qwen3.5-397B-A17B": _qwen_3_5(4096, 60, 32, 64, (512, 10, 1024)),
    "Qwen3.5-122B-A10B": _qwen_3_5(3072, 48, 32, 64, (256, 8, 1024)),
    "Qwen3.5-35B-A3B": _qwen_3_5(2048, 40, 16, 32, (256, 8, 512)),
    "Qwen3.5-27B": {
        **_QWEN_3_5,
        "model_type": "qwen3_5",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
        "intermediate_size": 17408,
    },
    "Gemma-4-31B": {
        **_GEMMA_4,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
    },
    "Gemma-4-26B-A4B": {
        **_GEMMA_4,
        "enable_moe_block": True,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "top_k_experts": 8,
    },
    "MiniMax-M3": {
        "model_type": "minimax_m3",
        "dense_intermediate_size": 12288,
        "first_k_dense_replace": 3,
        "head_dim": 128,
        "hidden_size": 6144,
        "max_position_embeddings": 1048576,
        "moe_intermediate_size": 3072,
        "n_shared_experts": 1,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 4,
        "num_local_experts": 128,
        "shared_intermediate_size": 3072,
        "sparse_attention_config": {
            "sparse_attention_freq": [0] * 3 + [1] * 57,
            "sparse_block_size": 128,
            "sparse_index_dim": 128,
            "sparse_num_index_heads": 4,
            "sparse_topk_blocks": 16,
        },
        "vocab_size": 200064,
    },
    "Nemotron-3-Nano-30B-A3B": {
        **_NEMOTRON_3,
        "hidden_size": 2688,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "mamba_num_heads": 64,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "n_routed_experts": 128,
        "num_attention_heads": 32,
        "num_experts_per_tok": 6,
    },
    "Nemotron-3-Super-120B-A12B": {
        **_NEMOTRON_3,
        "hidden_size": 4096,
        "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM"
        "*EMEMEMEME",
        "mamba_num_heads": 128,
        "moe_intermediate_size": 2688,
        "moe_latent_size": 1024,
        "moe_shared_expert_intermediate_size": 5376,
        "n_routed_experts": 512,
        "num_attention_heads": 32,
        "num_experts_per_tok": 22,
    },
}
"""Configurations by repository name, without the owner and suffixes such as -Instruct."""
