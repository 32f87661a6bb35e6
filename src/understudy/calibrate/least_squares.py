"""Damped least squares over the logarithms of positive parameters, with a robust loss and a prior."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Vector = NDArray[np.float64]

_ROBUST = 0.1
"""Larger residuals count linearly, so that one bad measurement does not dominate the fit."""
_DIFFERENCE = 0.06
"""Step of central differences, in the logarithm."""
_LONGEST_STEP = 0.5
_TRIES = 7
"""Number of ever shorter steps to try; batches change with every step, so long steps may not help."""
_WIDER = 1.5
"""Factor on the linear error estimate, because schedules are not linear (benchmarks/coverage.py); at most the prior."""


class Solution(msgspec.Struct, frozen=True):
    """The best parameters, with the residuals and their slopes (by logarithm) for error estimates."""

    values: Vector
    residuals: Vector
    slope: Vector
    prior: Vector
    noise: float
    evaluations: int

    def deviations(self, systematic: Vector | None = None) -> Vector:
        """Return the standard deviations of the logarithms of the parameters.

        Three sources of error are added: independent noise of the residuals, as large as the fit leaves; the pull of
        the prior, by its standard deviation; and errors that many residuals share, as columns of `systematic` (the
        effect of one standard deviation on all residuals).
        """
        weights = _weights(self.residuals)
        left = np.linalg.inv(
            self.slope.T @ (weights[:, None] * self.slope) / self.noise**2 + np.diag(1 / self.prior**2)
        )
        moved = left @ (self.slope.T * weights) / self.noise**2  # change of parameters per residual
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
    guess: Vector | None = None,
) -> Solution:
    """Find positive parameters that minimise `residuals` (relative deviations, about 0).

    `prior` is the standard deviation of each parameter's logarithm around its start; `noise` is that of an
    unexplained residual; `guess` is where to begin, if not at `start`.
    """
    origin = np.log(start)
    at = origin.copy() if guess is None else np.log(guess)
    left = residuals(np.exp(at))
    evaluations = 1
    damping = 0.01
    for iteration in range(iterations):
        found = _slopes(residuals, at, left)
        evaluations += 2 * len(at)
        # Residuals that change randomly with any step carry little information: strengthen the prior.
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
    """Random change of a residual with any step, because batches change: the disagreement of both differences."""


def _slopes(residuals: Callable[[Vector], Vector], at: Vector, left: Vector) -> _Slopes:
    """Return the slopes of the residuals, which are `left` at the logarithms `at`."""
    slope = np.zeros((len(left), len(at)))
    bent = np.zeros_like(slope)
    for column in range(len(at)):
        sides = []
        for sign in (1, -1):
            moved = at.copy()
            moved[column] += sign * _DIFFERENCE
            sides.append(residuals(np.exp(moved)))
        slope[:, column] = (sides[0] - sides[1]) / (2 * _DIFFERENCE)
        bent[:, column] = sides[0] + sides[1] - 2 * left
    chance = float(np.sqrt(np.mean(bent**2) / 6))
    # Shrink slopes that chance alone would give.
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
