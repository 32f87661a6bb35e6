"""Search every fleet of a small space, with no bound: the slow version of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.errors import ConfigError
from understudy.planning.shape import Shape, Size
from understudy.planning.space import Reuse, list_base_shapes, list_variants
from understudy.sweep.candidate import Summary, replay_candidate, summarise
from understudy.sweep.prices import Prices

if TYPE_CHECKING:
    from understudy.planning.question import Question
    from understudy.workload import Workload


def list_shapes(question: Question, workload: Workload) -> list[Shape]:
    """List all shapes that a plan may try, also those that cannot be built."""
    shapes: list[Shape] = []
    for base in list_base_shapes(question, Reuse.of(workload))[0]:
        shapes.append(base)
        try:
            shapes += list_variants(question, base, tier_gain=1.0)
        except ConfigError:
            continue
    return shapes


def list_fleets(shape: Shape, most_gpus: int) -> list[Size]:
    """List all fleets of a shape."""
    most = most_gpus // shape.engine_gpus
    if not shape.is_split:
        return [Size(engines=count) for count in range(1, most + 1)]
    return [
        Size(prefill=prefill, engines=total - prefill)
        for total in range(2, most + 1)
        for prefill in range(1, total)
    ]


def find_cheapest(question: Question, workload: Workload) -> tuple[float | None, list[tuple[float, Summary]]]:
    """Return the lowest price per hour that meets the goal, and price and results of every fleet."""
    prices = Prices(question.prices.by_name)
    found: list[tuple[float, Summary]] = []
    for shape in list_shapes(question, workload):
        for size in list_fleets(shape, question.most_gpus):
            try:
                candidate = shape.build(question, size)
            except ConfigError:
                continue
            summary = summarise(replay_candidate(workload, candidate), question.goal_window_s)
            found.append((prices.cost(candidate), summary))
    meeting = [cost for cost, summary in found if summary.judged >= question.goal]
    return min(meeting, default=None), found
