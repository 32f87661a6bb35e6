"""Synthetic traffic for the real engine and its twin: random arrivals, prompts with and without shared prefixes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from understudy.qwen3.request import Request


@dataclass(frozen=True, slots=True)
class Traffic:
    """`rate` requests per second on average, with gamma-distributed lengths after one of `stems` shared prefixes."""

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
"""Traffic for recording a fit: low and high load, short and long, with and without cache hits."""


def generate_workload(
    traffic: Traffic | tuple[Traffic, ...], count: int, vocab: int, *, seed: int = 0, longest: int = 1 << 30
) -> list[tuple[int, Request]]:
    """Generate `count` requests with arrivals (ns); several traffics follow each other with equal shares."""
    parts = traffic if isinstance(traffic, tuple) else (traffic,)
    rng = np.random.default_rng(seed)
    at_ms = 0.0
    rows: list[tuple[int, Request]] = []
    for number, part in enumerate(parts):
        stems = [rng.integers(0, vocab, part.stem_tokens) for _ in range(part.stems)]
        for _ in range(count * number // len(parts), count * (number + 1) // len(parts)):
            at_ms += rng.exponential(1e3 / part.rate)
            own = rng.integers(0, vocab, max(8, int(rng.gamma(2.0, part.prompt / 2))))
            tokens = np.concatenate((stems[rng.integers(len(stems))], own)) if stems else own
            output = min(max(2, int(rng.gamma(2.0, part.output / 2))), max(2, longest // 2))
            tokens = tokens[: max(1, longest - output)]
            rows.append((round(at_ms * 1e6), Request(f"{len(rows)}", tokens.tolist(), output)))
    return rows


def copy_requests(rows: list[tuple[int, Request]]) -> list[tuple[int, Request]]:
    """Return new copies of the requests for another run."""
    return [(at_ns, Request(r.id, r.prompt, r.max_tokens)) for at_ns, r in rows]
