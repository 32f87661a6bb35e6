"""Synthetic traffic for the real engine and its twin: arrivals by chance, prompts with and without shared stems."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from understudy.qwen3.request import Request


@dataclass(frozen=True, slots=True)
class Traffic:
    """`rate` requests a second, on average, of gamma-distributed lengths behind one of `stems` shared beginnings."""

    rate: float
    prompt: int
    output: int
    stems: int = 0
    stem_tokens: int = 0


RAMP = (
    Traffic(4.0, 500, 120),
    Traffic(12.0, 800, 120),
    Traffic(24.0, 500, 160),
    Traffic(40.0, 200, 200, 4, 512),
    Traffic(6.0, 3000, 150),
    Traffic(20.0, 250, 100, 8, 2048),
    Traffic(30.0, 40, 250, 4, 1024),
    Traffic(3.0, 5000, 200),
    Traffic(8.0, 200, 100, 6, 3500),
)
"""What a fit is recorded on: quiet and busy, short and long, with and without a cache."""


def workload(
    traffic: Traffic | tuple[Traffic, ...], count: int, vocab: int, *, seed: int = 0, longest: int = 1 << 30
) -> list[tuple[float, Request]]:
    """`count` requests with their arrivals (ms); of several traffics each has its share, one after the other."""
    parts = traffic if isinstance(traffic, tuple) else (traffic,)
    rng = np.random.default_rng(seed)
    at_ms = 0.0
    rows: list[tuple[float, Request]] = []
    for number, part in enumerate(parts):
        stems = [rng.integers(0, vocab, part.stem_tokens) for _ in range(part.stems)]
        for _ in range(count * number // len(parts), count * (number + 1) // len(parts)):
            at_ms += rng.exponential(1e3 / part.rate)
            own = rng.integers(0, vocab, max(8, int(rng.gamma(2.0, part.prompt / 2))))
            tokens = np.concatenate((stems[rng.integers(len(stems))], own)) if stems else own
            output = min(max(2, int(rng.gamma(2.0, part.output / 2))), max(2, longest // 2))
            tokens = tokens[: max(1, longest - output)]
            rows.append((at_ms, Request(f"{len(rows)}", tokens.tolist(), output)))
    return rows


def fresh(rows: list[tuple[float, Request]]) -> list[tuple[float, Request]]:
    """The same requests, unplayed."""
    return [(at_ms, Request(r.id, r.prompt, r.max_tokens)) for at_ms, r in rows]
