"""Audit step times of known models: no step is faster than the GPU can read the weights, or compute the prompt.

Parameters are those of the models' cards; bandwidths and peaks those of the GPUs' data sheets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from answers.evidence import ns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from answers.definitions import Difference
    from answers.evidence import Evidence

PARAMETERS = {
    "Llama-3.1-8B": 8.03e9,
    "Llama-3.1-70B": 70.6e9,
    "Qwen3-32B": 32.8e9,
    "Gemma-3-27B": 27.0e9,
}
"""Dense models, whose every parameter takes part in every token."""
EMBEDDED = 0.15
"""Most that embeddings, which no step reads whole, and towers for images have of them."""
BYTES = 2
"""Bytes of a parameter in bf16, the default."""
GPUS = {"H100": (3.35e12, 989e12), "H200": (4.8e12, 989e12), "RTX-4090": (1.01e12, 330e12)}
"""Bandwidth, and peak of dense bf16 products with the fastest accumulation."""


def no_step_beats_the_hardware(evidence: Evidence) -> Iterator[Difference]:
    """Gaps between tokens and times to first tokens have a floor."""
    flags = evidence.case.flags
    if flags.get("model") not in PARAMETERS:
        return
    parameters = PARAMETERS[flags["model"]] * (1 - EMBEDDED)
    bandwidth, peak = GPUS[flags["gpu"]]
    gpus = int(flags.get("tensor-parallel-size", 1))
    reading_ms = parameters * BYTES / (bandwidth * gpus) * 1e3
    gap = evidence.report["itl_ms"]["min"]
    if gap is not None:
        yield f"gap of {gap} ms, weights read in {reading_ms}", gap >= reading_ms, True
    for line in evidence.lines:
        first, admitted = ns(line["first_token_ms"]), ns(line["first_admit_ms"])
        if first is None or admitted is None:
            continue
        computed = line["prompt_tokens"] - line["cached_tokens_first"]
        least_ms = max(2 * parameters * computed / (peak * gpus) * 1e3, reading_ms)
        yield f"{line['request']}: prompt of {computed} tokens", (first - admitted) / 1e6 >= least_ms, True


def weights_and_blocks_fit(evidence: Evidence) -> Iterator[Difference]:
    """The blocks of a known model and its weights fit into the memory of its GPUs."""
    flags = evidence.case.flags
    if flags.get("model") not in SIZES:
        return
    layers, kv_heads, head = SIZES[flags["model"]]
    gpus = int(flags.get("tensor-parallel-size", 1))
    engine = evidence.report["run"]["engine"]
    kv_bytes = engine["num_gpu_blocks"] * engine["block_size"] * 2 * layers * kv_heads * head * BYTES
    used = kv_bytes + PARAMETERS[flags["model"]] * BYTES
    yield "bytes in use", used <= MEMORY[flags["gpu"]] * gpus, True
    yield "bytes left over", used >= MEMORY[flags["gpu"]] * gpus * 0.6, True


SIZES = {"Llama-3.1-8B": (32, 8, 128), "Llama-3.1-70B": (80, 8, 128), "Qwen3-32B": (64, 8, 128)}
"""Layers, KV heads, and width of a head."""
MEMORY = {"H100": 80 * 2**30, "H200": 141 * 2**30, "RTX-4090": 24 * 2**30}
