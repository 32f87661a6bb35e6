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
_DIFFERENCE = 0.03
"""Of finite differences, in the logarithm."""
_LONGEST_STEP = 0.5


class Solution(msgspec.Struct, frozen=True):
    """Numbers that fit best, their standard deviations in the logarithm, and what is left."""

    values: Vector
    deviations: Vector
    residuals: Vector
    evaluations: int


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
    weight_of_prior = (noise / prior) ** 2
    damping = 0.01
    best = _cost(left, at - origin, weight_of_prior)
    slope = np.zeros((len(left), len(at)))
    for iteration in range(iterations):
        for column in range(len(at)):
            moved = at.copy()
            moved[column] += _DIFFERENCE
            slope[:, column] = (residuals(np.exp(moved)) - left) / _DIFFERENCE
        evaluations += len(at)
        weights = _weights(left)
        normal = slope.T @ (weights[:, None] * slope) + np.diag(weight_of_prior)
        downhill = -slope.T @ (weights * left) - weight_of_prior * (at - origin)
        gain = 0.0
        for _ in range(4):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), downhill)
            tried = at + np.clip(step, -_LONGEST_STEP, _LONGEST_STEP)
            then = residuals(np.exp(tried))
            evaluations += 1
            cost = _cost(then, tried - origin, weight_of_prior)
            if cost < best:
                gain, at, left, best = best - cost, tried, then, cost
                damping = max(damping / 3, 1e-4)
                break
            damping *= 4
        if progress is not None:
            progress(iteration + 1)
        if gain < 1e-4 * best:
            break
    weights = _weights(left)
    spread = max(noise, float(np.sqrt(np.average(left**2, weights=weights))))
    normal = slope.T @ (weights[:, None] * slope) / spread**2 + np.diag(1 / prior**2)
    return Solution(np.exp(at), np.sqrt(np.diag(np.linalg.inv(normal))), left, evaluations)


def _weights(left: Vector) -> Vector:
    weights: Vector = np.minimum(1.0, _ROBUST / np.maximum(np.abs(left), 1e-12))
    return weights


def _cost(left: Vector, moved: Vector, weight_of_prior: Vector) -> float:
    size = np.abs(left)
    loss = np.where(size < _ROBUST, size**2 / 2, _ROBUST * (size - _ROBUST / 2))
    return float(loss.sum() + (weight_of_prior * moved**2).sum() / 2)
