"""Tokens a second of the real engine beside `transformers` generate, same prompts, one after the other (CUDA).

    python benchmarks/qwen3_vs_transformers.py --model Qwen3-4B
    python benchmarks/qwen3_vs_transformers.py --prompt 128 --output 512 --batches 1,64

Both answer the same prompts greedily to the same length, after a first answer of a few tokens that compiles and warms
up; `transformers` is as it comes: bfloat16, its own attention (sdpa) and cache. The time is that of the whole answer,
prompts included; beside it stand the time of the first token and that of each later one, which say where the rest goes.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import transformers

from harness.publish import add_json_flag, publish
from understudy.qwen3 import EngineOptions, Request, build_engine
from understudy.qwen3.config import find_config

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Prompts = npt.NDArray[np.int64]
    Answer = Callable[[Prompts, int], None]
    """Generates so many tokens behind each prompt."""

ROUNDS = 2
WARM_TOKENS = 8


class Speed(NamedTuple):
    """Of a batch: tokens a second over all, and milliseconds of the first token and of each later one."""

    rate: float
    first_ms: float
    step_ms: float


def measured(answer: Answer, batch: int, prompt: int, output: int) -> Speed:
    """The best of several rounds; the prompts of each are new, and the same for whoever answers."""
    best = {}
    for tokens in (1, output):
        times = []
        for attempt in range(1 + ROUNDS):
            prompts = np.random.default_rng([batch, tokens, attempt]).integers(0, 1000, (batch, prompt))
            torch.cuda.synchronize()
            start = time.perf_counter()
            answer(prompts, tokens if attempt else min(tokens, WARM_TOKENS))
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        best[tokens] = min(times[1:])
    later = (best[output] - best[1]) / max(output - 1, 1)
    return Speed(batch * output / best[output], best[1] * 1e3, later * 1e3)


def ours(model: str, sizes: argparse.Namespace) -> dict[int, Speed]:
    """Of the engine."""
    engine = build_engine(
        model,
        EngineOptions(
            random_weights=1,
            max_model_len=max(4096, sizes.prompt + sizes.output),
            num_blocks=max(4096, max(sizes.batches) * (sizes.prompt + sizes.output) // 16 * 5 // 4),
            max_batched_tokens=sizes.budget,
            max_num_seqs=max(sizes.batches),
        ),
    )

    def answer(prompts: Prompts, tokens: int) -> None:
        for number, prompt in enumerate(prompts):
            engine.submit(Request(f"{number}", prompt.tolist(), tokens))
        engine.run()

    speeds = {batch: measured(answer, batch, sizes.prompt, sizes.output) for batch in sizes.batches}
    engine.close()
    return speeds


@torch.inference_mode()
def theirs(model: str, sizes: argparse.Namespace) -> dict[int, Speed]:
    """Of the peer, with weights of the same shapes."""
    network = network_of(model)

    def answer(prompts: Prompts, tokens: int) -> None:
        rows = torch.tensor(prompts, device="cuda")
        network.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )

    return {batch: measured(answer, batch, sizes.prompt, sizes.output) for batch in sizes.batches}


def network_of(model: str) -> Any:
    """The network in `transformers`, bfloat16 on the device."""
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
    return network


def main() -> None:
    """Print a line for each batch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Qwen3-4B")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt (128)")
    parser.add_argument("--output", type=int, default=256, help="tokens of each answer (256)")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a step of ours (8192)")
    parser.add_argument(
        "--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 64]
    )
    add_json_flag(parser)
    args = parser.parse_args()
    mine, peer = ours(args.model, args), theirs(args.model, args)
    print(f"{args.model}, prompts of {args.prompt} tokens, answers of {args.output}")
    measured: dict[str, dict[str, float]] = {}
    for batch in args.batches:
        us, them = mine[batch], peer[batch]
        measured[f"{batch}"] = {
            "Understudy": us.rate,
            "transformers": them.rate,
            "ratio": us.rate / them.rate,
            "our step": us.step_ms,
            "their step": them.step_ms,
        }
        print(f"batch {batch}: first token {us.first_ms:.1f} against {them.first_ms:.1f} ms")
    version = f"transformers {transformers.__version__}"
    publish("qwen3_vs_transformers", measured, args.json, gpu=torch.cuda.get_device_name(), peers=[version])


if __name__ == "__main__":
    main()
