"""GPU budgets by enumeration: every pair is tried, and the rules are the sentences of the planner's documentation."""

from __future__ import annotations

from itertools import product

Pair = tuple[int, int]


def holds(pair: Pair, costs: Pair, least: int, most: int, slack: int = 0) -> bool:
    """Whether the pair's GPUs are within the band."""
    total = pair[0] * costs[0] + pair[1] * costs[1]
    return (most < 0 or total <= most) and (least < 0 or total >= least - slack)


def nearest_between(now: Pair, wanted: Pair, costs: Pair, least: int, most: int, floors: Pair) -> Pair:
    """The pair that the budget allows between two, nearest to the second; roles that oppose move together."""
    slack = max(costs) if least >= 0 and most >= 0 else 0
    opposing = (wanted[0] > now[0] and wanted[1] < now[1]) or (wanted[0] < now[0] and wanted[1] > now[1])
    fitting: list[Pair] = []
    for pair in product(range(60), range(60)):
        inside = all(
            min(a, b) <= x <= max(a, b) and x >= f
            for a, b, x, f in zip(now, wanted, pair, floors, strict=True)
        )
        moves = [x != a for a, x in zip(now, pair, strict=True)]
        if inside and holds(pair, costs, least, most, slack) and not (opposing and any(moves) != all(moves)):
            fitting.append(pair)
    if not fitting:
        return now

    def rank(pair: Pair) -> tuple[int, ...]:
        moved = [abs(x - a) for a, x in zip(now, pair, strict=True)]
        asked = [abs(w - a) for a, w in zip(now, wanted, strict=True)]
        away = sum(abs(w - x) for w, x in zip(wanted, pair, strict=True))
        return (away, abs(moved[0] * asked[1] - moved[1] * asked[0]), -sum(moved), *pair)

    return min(fitting, key=rank)
