"""Defaults of every verb and of the Python API: those of `vllm serve` on the GPU that is simulated.

vLLM chooses the limits of a batch in `EngineArgs.get_batch_defaults`, by the memory and the name of the device.
"""

from __future__ import annotations

from enum import KEEP, IntFlag
from typing import NamedTuple

GIB = 1 << 30


class Default(IntFlag, boundary=KEEP):
    """A setting that was not given, which a model and its GPU may replace; otherwise a plain number.

    A flag of an enumeration, because encoders write its number; arithmetic makes a plain int of it.
    """

    NOTHING = 0
    __hash__ = int.__hash__
    __repr__ = int.__repr__


class BatchLimits(NamedTuple):
    """Limits of a step: tokens, and running requests."""

    max_num_batched_tokens: int
    max_num_seqs: int


UNKNOWN_DEVICE = BatchLimits(2048, 256)
"""Limits of a device that vLLM does not know, and of one with less than 70 GiB; also of an A100."""
LARGE_DEVICE = BatchLimits(8192, 1024)
"""Limits of a device with at least 70 GiB."""
LARGEST_DEVICE = BatchLimits(16384, 1024)
"""Limits of a device with at least 160 GiB, since vLLM 0.28."""

GOAL = 0.99
"""Share of requests that must be within all objectives: for verdicts, smaller fleets, and sweeps without `--goal`."""

BLOCK_SIZE = Default(16)
"""Tokens per KV block."""
LATENT_BLOCK_SIZE = 64
"""Tokens per KV block of a model with latent attention (MLA)."""
SPARSE_BLOCK_SIZE = 128
"""Tokens per KV block of a model whose sparse attention selects blocks (MiniMax-M3)."""
NUM_GPU_BLOCKS = Default(16384)
"""KV blocks of a worker whose GPU is not known."""
MAX_NUM_BATCHED_TOKENS = Default(UNKNOWN_DEVICE.max_num_batched_tokens)
MAX_NUM_SEQS = Default(UNKNOWN_DEVICE.max_num_seqs)
LEAST_LENGTH = 0.8
"""Shortest random length of a benchmark's requests, as a share of the longest."""
MEMORY_SHARE = 0.92
"""Share of a GPU's memory for weights, KV cache and activations: that of vLLM since 0.20."""
EARLIER_MEMORY_SHARE = 0.9
"""Share of vLLM before 0.20."""
STATIC_SHARE = 0.9
"""Share of a GPU's memory for weights and KV pool of SGLang (`mem_fraction_static`)."""


def choose_limits(name: str | None, memory_bytes: float, *, has_largest: bool = True) -> BatchLimits:
    """Return the limits that `vllm serve` chooses on a device; `has_largest`: the release knows the largest ones."""
    if has_largest and memory_bytes >= 160 * GIB:
        return LARGEST_DEVICE
    if memory_bytes >= 70 * GIB and "a100" not in (name or "").lower():
        return LARGE_DEVICE
    return UNKNOWN_DEVICE


def is_default(value: object) -> bool:
    """Whether a setting was not given."""
    return isinstance(value, Default)
