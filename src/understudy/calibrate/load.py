"""`Load`: the requests of a benchmark as a workload, with its arrival times or its concurrency."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from understudy.errors import ConfigError
from understudy.workload import ClosedLoop, OpenLoop, Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

_BLOCK = 16
_ONE_ID = 1 << 30
"""Tokens per hash id: a prompt has one id, so that prompts are equal or share no prefix."""


class Load(msgspec.Struct, frozen=True):
    """Requests, sent at their arrival times or as soon as one of `concurrency` slots is free."""

    workload: Workload
    concurrency: int = 0
    """0: send requests at their arrival times."""

    def loop(self, turnaround_ms: float) -> OpenLoop | ClosedLoop:
        """Return the load mode; `turnaround_ms` is the client's time between two requests of a slot."""
        if not self.concurrency:
            return OpenLoop()
        return ClosedLoop(concurrency=self.concurrency, turnaround_ms=turnaround_ms)


def build_load(
    prompt_tokens: ArrayLike,
    output_tokens: ArrayLike,
    *,
    arrival_s: ArrayLike | None = None,
    contents: ArrayLike | None = None,
    tokens: Sequence[Sequence[int]] | None = None,
    request_ids: Sequence[str] | None = None,
    concurrency: int = 0,
) -> Load:
    """Build a load from lengths; equal `contents` mean equal prompts, `tokens` are the prompts' token ids.

    Without both, no two prompts share a prefix.
    """
    prompts = np.asarray(prompt_tokens, dtype=np.int32)
    rows = len(prompts)
    ids = np.arange(rows) if contents is None else np.asarray(contents)
    offsets, size = np.arange(rows + 1), _ONE_ID
    if tokens is not None:
        offsets, ids, size = *_prefix_ids(tokens), _BLOCK
    times = np.zeros(rows) if arrival_s is None else np.asarray(arrival_s, dtype=np.float64)
    return Load(
        Workload(
            arrival_ns=np.round(times * 1e9).astype(np.int64),
            prompt_tokens=prompts,
            output_tokens=np.asarray(output_tokens, dtype=np.int32),
            hash_offsets=offsets,
            hash_ids=ids.astype(np.uint32),
            trace_block_size=size,
            has_arrivals=arrival_s is not None,
            request_ids=None if request_ids is None else list(request_ids),
        ),
        concurrency,
    )


def _prefix_ids(tokens: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return CSR offsets and an id per block of 16 tokens; equal ids mean equal prefixes."""
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    offsets, ids = [0], []
    for prompt in tokens:
        prefix = 0
        for start in range(0, len(prompt), _BLOCK):
            prefix = known.setdefault((prefix, tuple(prompt[start : start + _BLOCK])), len(known) + 1)
            ids.append(prefix)
        offsets.append(len(ids))
    return np.array(offsets), np.array(ids)


def random_lengths(
    mean_input: int, mean_output: int, *, least: float, concurrency: int, prompts: int, seed: int
) -> Load:
    """Build a closed loop with lengths uniform between `least` times the nominal length and the nominal length."""
    if not 0 < least <= 1:
        raise ConfigError(f"least must be in (0, 1], a share of the nominal length, got {least}")
    draw = np.random.default_rng(seed)
    lengths = [
        draw.integers(max(int(nominal * least), 1), nominal + 1, size=prompts)
        for nominal in (mean_input, mean_output)
    ]
    return build_load(lengths[0], lengths[1], concurrency=concurrency)


def constant_stages(
    prompt_tokens: int,
    output_tokens: int,
    *,
    rates_per_s: Sequence[float],
    stage_seconds: Sequence[float],
    distinct_prompts: int,
) -> Load:
    """Build a load of constant rates, stage after stage, with repeating prompts.

    Prompt lengths vary by up to 15 tokens around their mean, so that the uncached rest of a block does not depend on
    one length.
    """
    times, start = [], 0.0
    for rate, seconds in zip(rates_per_s, stage_seconds, strict=True):
        times.append(start + np.arange(round(rate * seconds)) / rate)
        start += seconds
    arrivals = np.concatenate(times)
    which = np.arange(len(arrivals)) % max(distinct_prompts, 1)
    lengths = np.maximum(prompt_tokens + which % 16 - 7, 1)
    return build_load(lengths, np.full(len(arrivals), output_tokens), arrival_s=arrivals, contents=which)
