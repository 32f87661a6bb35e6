"""Tokens a second of the real engine beside `transformers` generate, same prompts, one after the other (CUDA).

python benchmarks/qwen3_vs_transformers.py --model Qwen3-4B
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
import transformers

from understudy.qwen3 import EngineOptions, Request, build_engine
from understudy.qwen3.config import find_config

PROMPT, OUTPUT = 128, 64


def prompts_of(batch: int, attempt: int) -> Any:
    """The same for both."""
    return np.random.default_rng(attempt).integers(0, 1000, (batch, PROMPT))


def ours(model: str, batches: tuple[int, ...]) -> dict[int, float]:
    engine = build_engine(model, EngineOptions(random_weights=1, max_model_len=4096, num_blocks=4096))
    rates = {}
    for batch in batches:
        for attempt in range(2):  # the first compiles
            prompts = prompts_of(batch, attempt)
            start = time.perf_counter()
            for number, prompt in enumerate(prompts):
                engine.submit(Request(f"{number}", prompt.tolist(), OUTPUT))
            engine.run()
            rates[batch] = batch * OUTPUT / (time.perf_counter() - start)
    engine.close()
    return rates


@torch.inference_mode()
def theirs(model: str, batches: tuple[int, ...]) -> dict[int, float]:
    config = find_config(model)
    settings = transformers.Qwen3Config(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        tie_word_embeddings=config.tied_embeddings,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        network = transformers.Qwen3ForCausalLM(settings).eval()
    torch.set_default_dtype(torch.float32)
    rates = {}
    for batch in batches:
        for attempt in range(2):
            prompts = torch.tensor(prompts_of(batch, attempt), device="cuda")
            torch.cuda.synchronize()
            start = time.perf_counter()
            network.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=OUTPUT,
                min_new_tokens=OUTPUT,
                do_sample=False,
                pad_token_id=0,
            )
            torch.cuda.synchronize()
            rates[batch] = batch * OUTPUT / (time.perf_counter() - start)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Qwen3-4B")
    args = parser.parse_args()
    batches = (1, 64)
    mine, peer = ours(args.model, batches), theirs(args.model, batches)
    for batch in batches:
        print(
            f"batch {batch:3d}: {mine[batch]:8.0f} tokens/s, transformers {peer[batch]:7.1f} tokens/s: "
            f"{mine[batch] / peer[batch]:.1f}x"
        )


if __name__ == "__main__":
    main()
