"""Compare plans with exhaustive searches of small spaces: python tests/planning/spaces.py --count 20."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from planning.exhaustive import find_cheapest
from understudy.planning.find import find_plan
from understudy.planning.price_list import PriceList
from understudy.planning.question import Question
from understudy.report import Slo
from understudy.workload import Workload, read_trace

TRACE = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"


class Space(NamedTuple):
    """A log and a question whose space is small enough to be searched as a whole."""

    speed: float
    """Arrival rate relative to the log's."""
    ttft_ms: float
    tpot_ms: float
    goal: float
    prices: tuple[float, float]
    """$ per hour of an H100 and of an L40S."""


SPACES = (
    Space(8.0, 400.0, 12.0, 0.9, (2.5, 1.2)),
    Space(8.0, 250.0, 20.0, 0.95, (2.5, 0.5)),
    Space(20.0, 300.0, 14.0, 0.9, (3.0, 0.9)),
    Space(20.0, 1000.0, 40.0, 0.99, (2.5, 0.6)),
    Space(40.0, 600.0, 20.0, 0.8, (2.0, 1.0)),
    Space(40.0, 60.0, 8.0, 0.9, (2.5, 1.2)),
)
"""Spaces of the tests; `draw_space` has more."""


def draw_space(number: int) -> Space:
    """Return the space of a number: the first ones are `SPACES`, the others are random and always the same."""
    if number < len(SPACES):
        return SPACES[number]
    draw = random.Random(number)
    return Space(
        speed=draw.choice((4.0, 8.0, 16.0, 32.0, 64.0)),
        ttft_ms=round(draw.uniform(50, 1500)),
        tpot_ms=round(draw.uniform(7, 45), 1),
        goal=draw.choice((0.8, 0.9, 0.95, 0.99)),
        prices=(round(draw.uniform(1.5, 4), 2), round(draw.uniform(0.4, 1.6), 2)),
    )


def ask(prices: tuple[float, float] = (2.5, 1.2), **more: Any) -> Question:
    """Return a question whose fleets have at most three GPUs."""
    given = {"H100": prices[0], "L40S": prices[1]}
    defaults: dict[str, Any] = {"slo": Slo(ttft_ms=400, itl_ms=12), "goal": 0.9}
    return Question(
        model="Llama-3.1-8B",
        gpus=("H100", "L40S"),
        prices=PriceList(given),
        most_gpus=3,
        node_gpus=2,
        **{**defaults, **more},
    )


def compare(workload: Workload, space: Space) -> tuple[float | None, float | None, int, int]:
    """Return $ per hour of the plan and of the exhaustive search, and the replays of each; None: no fleet."""
    log = workload.scale_arrival_rate(space.speed)
    question = ask(space.prices, slo=Slo(ttft_ms=space.ttft_ms, itl_ms=space.tpot_ms), goal=space.goal)
    found = find_plan(log, question, name="log", jobs=1, most_cpu_s=None)
    cheapest, everything = find_cheapest(question, log)
    assert len({summary.digest for _, summary in everything}) > 20, "the space has fewer than 20 fleets"
    if found.best is None:
        assert found.nearest is not None, "a plan without an answer names no nearest fleet"
        return None, cheapest, found.ran, len(everything)
    assert found.best.summary in [summary for _, summary in everything], "the answer is not in the space"
    assert found.best.meets(space.goal), "the answer misses the goal"
    return found.best.cost, cheapest, found.ran, len(everything)


def main() -> int:
    """Compare so many spaces; return 1 if a plan is not the cheapest fleet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="spaces to compare (default: 20)")
    parser.add_argument("--first", type=int, default=0, help="number of the first one (default: 0)")
    parser.add_argument("--requests", type=int, default=160, help="requests of the log (default: 160)")
    args = parser.parse_args()
    workload = read_trace(TRACE).head(args.requests)
    wrong = 0
    for number in range(args.first, args.first + args.count):
        space = draw_space(number)
        mine, cheapest, ran, everything = compare(workload, space)
        is_equal = mine == cheapest or (
            mine is not None and cheapest is not None and abs(mine - cheapest) < 1e-9
        )
        wrong += not is_equal
        names = ["no fleet" if cost is None else f"${cost:.2f}/h" for cost in (mine, cheapest)]
        verdict = "equal" if is_equal else f"WRONG: the cheapest is {names[1]}"
        print(
            f"{number}: plan {names[0]} in {ran} replays, {everything} fleets in all: {verdict}; {space}",
            flush=True,
        )
    print(f"{args.count - wrong} of {args.count} plans are the cheapest fleet")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
