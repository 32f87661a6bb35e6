"""Damped least squares in the logarithms of positive numbers, with a robust loss and a prior at their start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Vector = NDArray[np.float64]

_ROBUST = 0.1
"""Residuals beyond this count linearly: one bad measurement does not bend the rest."""
_DIFFERENCE = 0.06
"""Of finite differences to both sides, in the logarithm."""
_LONGEST_STEP = 0.5
_TRIES = 7
"""Of ever shorter steps, before there is none that helps: where batches change at every step, long ones may not."""
_WIDER = 1.5
"""Than linear theory has it: a schedule is not linear. Found by benchmarks/coverage.py; no wider than the prior."""


class Solution(msgspec.Struct, frozen=True):
    """Numbers that fit best, and what it takes to say how well: residuals there, and their slopes in the logarithms."""

    values: Vector
    residuals: Vector
    slope: Vector
    prior: Vector
    noise: float
    evaluations: int

    def deviations(self, systematic: Vector | None = None) -> Vector:
        """Standard deviations of the logarithms of the numbers.

        Three things make an estimate wrong: noise of each residual by itself, as large as what the fit leaves; a
        prior that pulls, as far from the truth as it says it may be; and errors that many residuals have in common:
        columns of `systematic`, each what one standard deviation of such an error does to all of them.
        """
        weights = _weights(self.residuals)
        left = np.linalg.inv(
            self.slope.T @ (weights[:, None] * self.slope) / self.noise**2 + np.diag(1 / self.prior**2)
        )
        moved = left @ (self.slope.T * weights) / self.noise**2  # the numbers, by the residuals
        spread = max(self.noise, float(np.sqrt(np.average(self.residuals**2, weights=weights))))
        pulled = np.eye(len(self.values)) - moved @ self.slope
        parts = [spread * moved / np.sqrt(weights), pulled * self.prior]
        if systematic is not None and systematic.size:
            parts.append(moved @ systematic)
        found: Vector = _WIDER * np.sqrt(sum((part**2).sum(axis=1) for part in parts))
        return np.minimum(found, np.maximum(self.prior, found / _WIDER))


def solve(
    residuals: Callable[[Vector], Vector],
    start: Vector,
    *,
    prior: Vector,
    noise: float,
    iterations: int = 8,
    progress: Callable[[int], None] | None = None,
) -> Solution:
    """Find positive numbers for which `residuals` (about 0, in relative terms) are small.

    `prior` is how far each number may be from its start, as a standard deviation of its logarithm; `noise` that of a
    residual that nothing explains.
    """
    origin = np.log(start)
    at = origin.copy()
    left = residuals(np.exp(at))
    evaluations = 1
    damping = 0.01
    for iteration in range(iterations):
        found = _slopes(residuals, at, left)
        evaluations += 2 * len(at)
        # What moves by chance with every change cannot be told from the data: the prior holds the more.
        weight_of_prior = (noise**2 + found.chance**2) / prior**2
        best = _cost(left, at - origin, weight_of_prior)
        weights = _weights(left)
        normal = found.slope.T @ (weights[:, None] * found.slope) + np.diag(weight_of_prior)
        downhill = -found.slope.T @ (weights * left) - weight_of_prior * (at - origin)
        gain = 0.0
        for _ in range(_TRIES):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), downhill)
            tried = at + np.clip(step, -_LONGEST_STEP, _LONGEST_STEP)
            then = residuals(np.exp(tried))
            evaluations += 1
            cost = _cost(then, tried - origin, weight_of_prior)
            if cost < best:
                gain, at, left, best = best - cost, tried, then, cost
                damping = max(damping / 3, 1e-4)
                break
            damping *= 6
        damping = min(damping, 1.0)
        if progress is not None:
            progress(iteration + 1)
        if gain < 1e-3 * best:
            break
    found = _slopes(residuals, at, left)
    return Solution(
        values=np.exp(at),
        residuals=left,
        slope=found.slope,
        prior=prior,
        noise=float(np.hypot(noise, found.chance)),
        evaluations=evaluations + 2 * len(at),
    )


class _Slopes(msgspec.Struct, frozen=True):
    slope: Vector
    chance: float
    """By how much a residual moves with any change at all, since another request is in a batch: what differences on
    both sides do not agree on."""


def _slopes(residuals: Callable[[Vector], Vector], at: Vector, left: Vector) -> _Slopes:
    """How residuals, which are `left` at the logarithms `at`, change with each of these."""
    slope = np.zeros((len(left), len(at)))
    bent = np.zeros_like(slope)
    for column in range(len(at)):
        sides = []
        for way in (1, -1):
            moved = at.copy()
            moved[column] += way * _DIFFERENCE
            sides.append(residuals(np.exp(moved)))
        slope[:, column] = (sides[0] - sides[1]) / (2 * _DIFFERENCE)
        bent[:, column] = sides[0] + sides[1] - 2 * left
    chance = float(np.sqrt(np.mean(bent**2) / 6))
    # Of a slope, what chance alone would give tells nothing.
    size = (slope**2).mean(axis=0)
    slope *= np.clip(1 - chance**2 / (2 * _DIFFERENCE**2) / np.maximum(size, 1e-30), 0, 1)
    return _Slopes(slope, chance)


def _weights(left: Vector) -> Vector:
    weights: Vector = np.minimum(1.0, _ROBUST / np.maximum(np.abs(left), 1e-12))
    return weights


def _cost(left: Vector, moved: Vector, weight_of_prior: Vector) -> float:
    size = np.abs(left)
    loss = np.where(size < _ROBUST, size**2 / 2, _ROBUST * (size - _ROBUST / 2))
    return float(loss.sum() + (weight_of_prior * moved**2).sum() / 2)
