"""A model of step times, fitted on recorded steps: what the twin takes its time from."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from understudy.errors import InvalidArgument
from understudy.qwen3.executor import SHORT_STEP_TOKENS
from understudy.qwen3.graphs import BUCKETS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from understudy.qwen3.twin import Composition


@dataclass(frozen=True, slots=True)
class FittedStepTime:
    """Linear in what a step reads and computes, apart for steps that only decode (captured) and those with prompts."""

    decode: tuple[float, ...]
    mixed: tuple[float, ...]
    floor_tokens: float
    """A step with prompts costs no less than one of so many tokens: launching its kernels takes the host that long."""

    @classmethod
    def fit(cls, steps: Sequence[tuple[Composition, float]]) -> FittedStepTime:
        """Least squares of relative errors, none negative. InvalidArgument when a kind of step is missing."""
        kinds: tuple[list[tuple[Composition, float]], list[tuple[Composition, float]]] = ([], [])
        for step in steps:
            if not step[0].chunks:
                kinds[0].append(step)
            elif _tokens(step[0]) > SHORT_STEP_TOKENS:
                kinds[1].append(step)
        for name, kind in zip(("that only decode", "with prompts"), kinds, strict=True):
            if len(kind) < 8:
                raise InvalidArgument(f"a fit needs at least 8 steps {name}, got {len(kind)}")
        decode = _least_squares([_decode_terms(step) for step, _ in kinds[0]], [ms for _, ms in kinds[0]])
        fits = []
        for floor in (0.0, 128.0, 256.0, 384.0, 512.0, 768.0, 1024.0):
            mixed = _least_squares([_mixed_terms(s, floor) for s, _ in kinds[1]], [ms for _, ms in kinds[1]])
            guesses = [float(np.dot(mixed, _mixed_terms(s, floor))) for s, _ in kinds[1]]
            error = float(np.median([abs(g / ms - 1) for g, (_, ms) in zip(guesses, kinds[1], strict=True)]))
            fits.append((error, floor, mixed))
        _, floor, mixed = min(fits)
        return cls(decode, mixed, floor)

    def ms(self, step: Composition) -> float:
        """Of one step."""
        if step.chunks and _tokens(step) > SHORT_STEP_TOKENS:
            return float(np.dot(self.mixed, _mixed_terms(step, self.floor_tokens)))
        rows = (history + i + 1 for tokens, history in step.chunks for i in range(tokens))
        return float(np.dot(self.decode, _decode_terms(step._replace(decodes=(*rows, *step.decodes)))))


def _tokens(step: Composition) -> int:
    return sum(tokens for tokens, _ in step.chunks) + len(step.decodes)


def _decode_terms(step: Composition) -> list[float]:
    count = len(step.decodes)
    at = bisect_left(BUCKETS, count)
    bucket = float(BUCKETS[at]) if at < len(BUCKETS) else float(count)
    return [1.0, min(bucket, 64.0), max(0.0, bucket - 64.0), float(count), float(sum(step.decodes))]


def _mixed_terms(step: Composition, floor_tokens: float) -> list[float]:
    tokens = max(floor_tokens, float(_tokens(step)))
    behind = float(sum(chunk * history for chunk, history in step.chunks))
    own = float(sum(chunk * chunk for chunk, _ in step.chunks)) / 2
    read = float(sum(history for _, history in step.chunks))
    terms = [1.0, tokens, behind, own, read]
    return [*terms, float(len(step.chunks)), float(len(step.decodes)), float(sum(step.decodes))]


def _least_squares(rows: list[list[float]], times: list[float]) -> tuple[float, ...]:
    terms, wanted = np.array(rows), np.array(times)
    weight = 1.0 / np.maximum(wanted, 1e-3)
    keep = np.ones(terms.shape[1], bool)
    solution: npt.NDArray[np.float64] = np.zeros(terms.shape[1])
    while keep.any():
        scale = np.abs(terms[:, keep]).max(axis=0).clip(min=1e-12)
        found = (
            np.linalg.lstsq(terms[:, keep] / scale * weight[:, None], wanted * weight, rcond=None)[0] / scale
        )
        solution = np.zeros(terms.shape[1])
        solution[keep] = found
        if (found >= 0).all():
            break
        keep[np.flatnonzero(keep)[found.argmin()]] = False
    return tuple(float(value) for value in solution)
