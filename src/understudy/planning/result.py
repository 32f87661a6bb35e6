"""`Plan`: the answer, how sure it is, the runner-up and the levers, as JSON values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.run.facts import TimeFacts
from understudy.run.times import format_times
from understudy.sweep.commands import make_commands
from understudy.sweep.cost import Cost
from understudy.version import __version__

if TYPE_CHECKING:
    from understudy.planning.levers import Lever
    from understudy.planning.question import Question
    from understudy.planning.replays import Fleet
    from understudy.planning.scaled_times import TimeRange

SCHEMA = "understudy.plan/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sure:
    """The answer if steps take as short or as long as they may."""

    range: TimeRange
    shortest: Fleet | None
    """The fleet of the answer at the shortest times; None if it was not replayed."""
    longest: Fleet | None
    least_cost: float | None
    """$ per hour of the fewest engines of the answer's shape that meet the goal at the shortest times."""
    most_cost: float | None
    """The same at the longest times; None if no number of engines meets the goal then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The cheapest fleet of a log, and what follows from it."""

    workload: str
    workload_digest: str
    requests: int
    users: float
    question: Question
    best: Fleet | None
    """Cheapest fleet that meets the goal; None if none does."""
    nearest: Fleet | None
    """Without an answer: the fleet with the most requests in time."""
    runner_up: Fleet | None
    """Cheapest fleet of another kind."""
    sure: Sure | None
    levers: tuple[Lever, ...]
    tried: int
    """Shapes of which at least one fleet was replayed, or ruled out by a bound."""
    fleets: int
    """Fleets that were replayed, whole or in part."""
    stopped_at_cpu_s: float | None
    """The limit on CPU time, if it was reached before everything was tried."""
    slow: dict[str, float]
    """Shapes that the bound of a lone request rules out, and the most requests that can be in time."""
    rejected: dict[str, str]
    """Shapes that no fleet can have, and why."""
    ran: int
    found: int
    cpu_s: float
    wall_s: float
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values; docs/plan.md describes them."""
        question, sure = self.question, self.sure
        limits = {name: getattr(question.slo, name) for name in ("ttft_ms", "itl_ms", "e2e_ms")}
        return {
            "schema": SCHEMA,
            "understudy": __version__,
            "workload": self.workload,
            "workload_digest": self.workload_digest,
            "requests": self.requests,
            "users": self.users,
            "model": question.model,
            "gpus": list(question.gpus),
            "prices": question.prices.by_name,
            "assumed_prices": list(question.prices.assumed),
            "objectives": {name: limit for name, limit in limits.items() if limit is not None},
            "goal": question.goal,
            "goal_window_s": question.goal_window_s,
            "answer": describe_fleet(self.best),
            "nearest": describe_fleet(self.nearest),
            "runner_up": describe_fleet(self.runner_up),
            "range": None
            if sure is None
            else {
                "percent": sure.range.percent,
                "origin": sure.range.origin,
                "in_time_at_shortest": None if sure.shortest is None else sure.shortest.judged,
                "in_time_at_longest": None if sure.longest is None else sure.longest.judged,
                "cost_per_hour_at_shortest": sure.least_cost,
                "cost_per_hour_at_longest": sure.most_cost,
            },
            "levers": [
                {"change": each.change, "cost_per_hour": each.cost, "gpus": each.gpus, "fleet": each.fleet}
                for each in self.levers
            ],
            "too_slow_alone": self.slow,
            "rejected": self.rejected,
            "notes": list(self.notes),
            "fleets": self.fleets,
            "stopped_at_cpu_s": self.stopped_at_cpu_s,
            "ran": self.ran,
            "found": self.found,
            "cpu_s": self.cpu_s,
            "wall_s": self.wall_s,
        }

    def to_json(self) -> bytes:
        """Return the plan as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self.to_dict()), indent=2) + b"\n"


def describe_fleet(fleet: Fleet | None) -> dict[str, Any] | None:
    """Return a fleet, its bill and its results as plain JSON values."""
    if fleet is None or fleet.summary is None:
        return None
    cost = cost_of(fleet)
    commands = make_commands(fleet.candidate)
    timing = fleet.candidate.settings.engine.timing
    return {
        "fleet": fleet.shape.describe(fleet.size),
        "flags": fleet.candidate.flags,
        "gpus": fleet.gpus,
        "engines": fleet.size.total,
        "cost_per_hour": cost.per_hour,
        "cost_per_month": cost.per_month,
        "cost_per_million_tokens": cost.per_million_tokens,
        "cost_per_million_output_tokens": cost.per_million_output_tokens,
        "in_time": fleet.summary.good,
        "judged": fleet.summary.judged,
        "summary": msgspec.to_builtins(fleet.summary),
        "commands": commands.lines(),
        "not_expressed": commands.not_expressed,
        "times": format_times(TimeFacts(timing.describe_origin(), 0.0, timing.front_end_ms)),
    }


def cost_of(fleet: Fleet) -> Cost:
    """Return the bill of a fleet that was replayed whole, as `sweep` defines it."""
    assert fleet.summary is not None
    return Cost.of_summary(fleet.cost, fleet.summary)
