"""Fit proposed numbers of workers to a budget of GPUs, as Dynamo's planner does.

Two kinds of fit: `shrink_or_grow` keeps the proportion of the roles, `fit_between` stays between the present and the
proposed numbers. The guards decide which of them applies, so that a budget never turns a scale-down into a scale-up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Pair = tuple[int, int]
"""Workers for prefill and for decode."""


@dataclass(frozen=True, slots=True)
class GpuBand:
    """Least and most GPUs of a deployment; negative: no limit."""

    least: int = -1
    most: int = 8

    def holds(self, total: int, slack: int) -> bool:
        """Return whether so many GPUs are within the band; `slack` lowers the lower end."""
        return not (0 <= self.most < total) and not (self.least >= 0 and total < self.least - slack)

    def slack(self, *costs: int) -> int:
        """Return how far below `least` a total may be: whole workers cannot always meet it."""
        return max(costs) if self.least >= 0 and self.most >= 0 else 0


def clamp_one(wanted: int, cost: int, band: GpuBand, floor: int) -> int:
    """Return the number of workers nearest to `wanted` within the band; 0 if not even `floor` fits."""
    if band.holds(wanted * cost, band.slack(cost)):
        return wanted
    if 0 <= band.most < wanted * cost:
        return 0 if band.most < floor * cost else max(floor, band.most // cost)
    return max(floor, math.ceil(band.least / cost))


def guard_one(now: int, wanted: int, cost: int, band: GpuBand, floor: int) -> int:
    """Return the number that a fleet of one role may have next: `wanted`, or nearer to `now`."""
    total = now * cost
    if not band.holds(total, band.slack(cost)):
        return clamp_one(now, cost, band, floor)
    if (band.least >= 0 and total <= band.least and wanted < now) or (
        0 <= band.most <= total and wanted > now
    ):
        return now
    fitted = clamp_one(wanted, cost, band, floor)
    return fitted if _between(now, wanted, fitted) else now


def clamp_pair(wanted: Pair, costs: Pair, band: GpuBand, floors: Pair) -> Pair:
    """Shrink or grow both roles in proportion until the band holds; (0, 0) if not even the floors fit."""
    total = _cost(wanted, costs)
    if band.holds(total, band.slack(*costs)):
        return wanted
    if 0 <= band.most < total:
        if band.most < _cost(floors, costs):
            return 0, 0
        most = (band.most - floors[1] * costs[1]) // costs[0]
        prefill = max(floors[0], min(most, math.floor(wanted[0] * (band.most / total))))
        return prefill, max(floors[1], (band.most - prefill * costs[0]) // costs[1])
    if total <= 0:
        prefill = max(floors[0], math.ceil(band.least / 2 / costs[0]))
    else:
        prefill = max(floors[0], math.ceil(wanted[0] * (band.least / total)))
    rest = max(0, band.least - prefill * costs[0])
    grown = prefill, max(floors[1], math.ceil(rest / costs[1]))
    return wanted if 0 <= band.most < _cost(grown, costs) else grown


def fit_between(now: Pair, wanted: Pair, costs: Pair, band: GpuBand, floors: Pair) -> Pair:
    """Return the pair nearest to `wanted`, between it and `now`, that the band holds; `now` if there is none.

    Where one role grows and the other shrinks, both move or none does.
    """
    slack = band.slack(*costs)
    if all(w >= f for w, f in zip(wanted, floors, strict=True)) and band.holds(_cost(wanted, costs), slack):
        return wanted
    asked = abs(wanted[0] - now[0]), abs(wanted[1] - now[1])
    opposing = (wanted[0] - now[0]) * (wanted[1] - now[1]) < 0
    best: tuple[tuple[int, ...], Pair] | None = None
    for prefill in range(max(min(now[0], wanted[0]), floors[0]), max(now[0], wanted[0]) + 1):
        for decode in range(max(min(now[1], wanted[1]), floors[1]), max(now[1], wanted[1]) + 1):
            if not band.holds(_cost((prefill, decode), costs), slack):
                continue
            if opposing and (prefill == now[0]) != (decode == now[1]):
                continue
            moved = abs(prefill - now[0]), abs(decode - now[1])
            rank = (
                abs(wanted[0] - prefill) + abs(wanted[1] - decode),
                abs(moved[0] * asked[1] - moved[1] * asked[0]),
                -sum(moved),
                prefill,
                decode,
            )
            if best is None or rank < best[0]:
                best = rank, (prefill, decode)
    return now if best is None else best[1]


def guard_pair(now: Pair, wanted: Pair, costs: Pair, band: GpuBand, floors: Pair) -> Pair:
    """Return the pair that a fleet of two roles may have next: `wanted`, or nearer to `now`."""
    slack = max(costs) if band.most >= 0 else 0
    total = _cost(now, costs)
    if not band.holds(total, slack):
        return clamp_pair(now, costs, band, floors)
    ups = wanted[0] > now[0], wanted[1] > now[1]
    downs = wanted[0] < now[0], wanted[1] < now[1]
    opposing = any(ups) and any(downs)
    if total <= band.least and any(downs):
        return fit_between(now, wanted, costs, band, floors) if opposing else now
    if 0 <= band.most <= total and any(ups):
        return fit_between(now, wanted, costs, band, floors) if opposing else now
    fitted = clamp_pair(wanted, costs, band, floors)
    if not all(_between(n, w, f) for n, w, f in zip(now, wanted, fitted, strict=True)):
        return now
    return fitted if band.holds(_cost(fitted, costs), slack) else now


def _between(now: int, wanted: int, fitted: int) -> bool:
    return min(now, wanted) <= fitted <= max(now, wanted)


def _cost(pair: Pair, costs: Pair) -> int:
    return pair[0] * costs[0] + pair[1] * costs[1]
