"""A plan as lines of text: the answer in four lines, then what surrounds it."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

from understudy.planning.levers import MUCH
from understudy.planning.result import Plan, cost_of
from understudy.report.worst_hour import format_length
from understudy.run.facts import TimeFacts
from understudy.run.times import format_times
from understudy.sweep.candidate import format_flags
from understudy.sweep.commands import make_commands
from understudy.sweep.cost import HOURS_PER_MONTH, format_price
from understudy.text import duration, plural, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.planning.levers import Lever
    from understudy.planning.question import Question
    from understudy.planning.replays import Fleet

NAMES = {"ttft_ms": "TTFT", "itl_ms": "TPOT", "e2e_ms": "E2E"}
_FLAGS = {"ttft_ms": "--slo-ttft-ms", "itl_ms": "--slo-tpot-ms", "e2e_ms": "--slo-e2e-ms"}
MAX_REASONS = 4


class ReadablePlan(Plan):
    """A plan that prints as the command prints it."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(describe_plan(self))

    def __repr__(self) -> str:
        return "\n".join(describe_answer(self))


def describe_plan(plan: Plan) -> Iterator[str]:
    """Yield the lines that `understudy plan` prints."""
    yield from describe_answer(plan)
    yield ""
    yield f"goal: {describe_goal(plan.question)}"
    users = "" if plan.users == 1 else f", {plan.users:g} times its users"
    found = f" ({plan.found:,} found in the store)" if plan.found else ""
    yield (
        f"log: {visible(plan.workload)}, {plural(plan.requests, 'request')}{users}; {plural(plan.tried, 'shape')} of "
        f"engines compared by {plural(plan.ran, 'replay')}{found}, {plan.cpu_s:,.0f} CPU s"
    )
    if plan.runner_up is not None and plan.best is not None:
        yield ""
        yield "Runner-up (the cheapest fleet of another kind):"
        yield f"  {describe_bill(plan.runner_up)}: {plan.runner_up.shape.describe(plan.runner_up.size)}"
        yield f"  {describe_margin(plan.question, plan.runner_up)}"
    yield from _describe_levers(plan)
    yield from _describe_left_out(plan)
    if plan.best is not None:
        yield from describe_commands(plan.best)
    if plan.notes:
        yield ""
        yield "Notes:"
        for note in plan.notes:
            yield f"  {note}"


def describe_goal(question: Question) -> str:
    """Return the objectives and the share of requests that must meet them."""
    limits = " and ".join(
        f"{NAMES[name]} ≤ {limit:g} ms"
        for name in NAMES
        if (limit := getattr(question.slo, name)) is not None
    )
    window = question.goal_window_s
    where = "" if window is None else f" in every window of {format_length(window)}"
    return f"{limits} for {100 * question.goal:.4g} % of requests{where}"


def describe_answer(plan: Plan) -> Iterator[str]:
    """Yield the four lines of the answer, or the nearest miss and its remedies."""
    best = plan.best
    if best is None:
        yield from _describe_miss(plan)
        return
    cost = cost_of(best)
    yield f"Fleet   {plural(best.gpus, 'GPU')}: {best.shape.describe(best.size)}"
    yield f"Bill    {describe_bill(best)}{_describe_cost_range(plan)}"
    yield (
        f"Tokens  {format_price(cost.per_million_tokens)} per million (input and output), "
        f"{format_price(cost.per_million_output_tokens)} per million output tokens"
    )
    yield f"Margin  {describe_margin(plan.question, best)}{_describe_share_range(plan)}"


def describe_bill(fleet: Fleet) -> str:
    """Return the price of a fleet per hour and per month."""
    return f"${fleet.cost:,.2f}/h, ${fleet.cost * HOURS_PER_MONTH:,.0f} per month ({HOURS_PER_MONTH} h)"


def describe_margin(question: Question, fleet: Fleet) -> str:
    """Return the share of requests in time in the worst hour, and its distance from the goal."""
    summary = fleet.summary
    assert summary is not None
    hour = summary.worst_hour
    if hour is None:
        where = f"whole log ({duration(summary.duration_s)})"
        shares = summary.good
    else:
        where = f"worst {format_length(hour.length_s)} (from {duration(hour.start_s)} on, {hour.requests:,} requests)"
        shares = hour.attainment
    points = 100 * (shares - question.goal)
    side = "above" if points >= 0 else "below"
    tails = ", ".join(
        f"{NAMES[name]} p99 {value:,.0f} of {limit:g} ms"
        for name in NAMES
        if (limit := getattr(question.slo, name)) is not None
        and (value := getattr(summary, name).p99) is not None
    )
    return f"{where}: {shares:.2%} in time, {abs(points):.2f} points {side} the goal ({tails})"


def _describe_cost_range(plan: Plan) -> str:
    sure = plan.sure
    if sure is None or plan.best is None:
        return ""
    least = plan.best.cost if sure.least_cost is None else sure.least_cost
    if sure.most_cost is None:
        return f"; from ${least:,.2f}/h, and no number of these engines is enough if steps take as long as they may"
    if (least, sure.most_cost) == (plan.best.cost, plan.best.cost):
        return "; the same over the range of the step times"
    return f"; ${least:,.2f}/h to ${sure.most_cost:,.2f}/h over the range of the step times"


def _describe_share_range(plan: Plan) -> str:
    sure = plan.sure
    if sure is None or sure.shortest is None or sure.longest is None:
        return ""
    return (
        f"; {sure.longest.judged:.2%} to {sure.shortest.judged:.2%} if steps take ± {sure.range.percent:.0f} % "
        f"({sure.range.origin})"
    )


def _describe_miss(plan: Plan) -> Iterator[str]:
    question, nearest = plan.question, plan.nearest
    stopped = plan.stopped_at_cpu_s
    if stopped is None:
        yield f"No fleet of up to {question.most_gpus} GPUs meets the goal."
    else:
        yield (
            f"None of {plural(plan.fleets, 'fleet')} tried in {stopped:g} CPU s meets the goal; others may."
        )
    if nearest is not None:
        yield f"Nearest {plural(nearest.gpus, 'GPU')}: {nearest.shape.describe(nearest.size)}; {describe_bill(nearest)}"
        yield f"        {describe_margin(question, nearest)}"
        summary = nearest.summary
        assert summary is not None
        limits = [
            f"{_FLAGS[name]} {math.ceil(value):g}"
            for name in NAMES
            if (limit := getattr(question.slo, name)) is not None
            and (value := getattr(summary, name).p99) is not None
            and value > limit
        ]
        if limits:
            yield f"  relax the goal, such as {' '.join(limits)}, the p99 of this fleet"
        if summary.rejected:
            yield (
                f"  {summary.rejected:,} requests fit no engine: leave them out, or give a longer "
                "--set engine.max_model_len"
            )
    if stopped is not None:
        longer = max(60.0, 4 * stopped)
        yield f"  try more of them: --most-cpu-s {longer:g}, with --store or --out to keep the replays that are done"
    yield f"  or give faster GPUs (--gpu), or more of them (--most-gpus {2 * question.most_gpus})"


def _describe_levers(plan: Plan) -> Iterator[str]:
    if plan.best is None or not plan.levers:
        return
    cost = plan.best.cost
    much = sorted(
        (each for each in plan.levers if not 1 / MUCH < each.ratio(cost) < MUCH),
        key=lambda each: -each.ratio(cost),
    )
    little = [each.change for each in plan.levers if 1 / MUCH < each.ratio(cost) < MUCH]
    yield ""
    yield "What changes the bill:"
    for each in much:
        yield f"  {describe_lever(each, cost)}"
    if little:
        text = f"less than a quarter: {'; '.join(little)}"
        yield from textwrap.wrap(text, 118, initial_indent="  ", subsequent_indent="    ")


def describe_lever(lever: Lever, cost: float) -> str:
    """Return a lever with the new bill and its ratio to the old one."""
    if lever.cost is None:
        return f"no fleet of these shapes: {lever.change}"
    return f"{lever.ratio(cost):.2f} x: {lever.change}: ${lever.cost:,.2f}/h, {lever.fleet}"


def _describe_left_out(plan: Plan) -> Iterator[str]:
    if plan.slow:
        yield ""
        yield "Too slow even for a request alone:"
        slow = sorted(plan.slow.items(), key=lambda item: -item[1])
        for shape, share in slow[:MAX_REASONS]:
            yield f"  {shape.removeprefix('1 engine of ')}: at most {share:.2%} in time, however many"
        if len(slow) > MAX_REASONS:
            yield f"  and {len(slow) - MAX_REASONS:,} more"
    reasons: dict[str, list[str]] = {}
    for shape, reason in plan.rejected.items():
        reasons.setdefault(reason, []).append(shape.removeprefix("1 engine of "))
    if reasons:
        yield ""
        yield "Cannot be built:"
        for reason, shapes in list(reasons.items())[:MAX_REASONS]:
            more = f" and {len(shapes) - 1} more" if len(shapes) > 1 else ""
            yield f"  {shapes[0]}{more}: {reason}"
        if len(reasons) > MAX_REASONS:
            yield f"  and {len(reasons) - MAX_REASONS:,} more reasons"


def describe_commands(fleet: Fleet) -> Iterator[str]:
    """Yield the commands of a fleet, and the replay that repeats its numbers."""
    commands = make_commands(fleet.candidate)
    timing = fleet.candidate.settings.engine.timing
    sizes = ", ".join(each.describe() for each in commands.engines)
    yield ""
    yield f"Commands of the answer ({sizes}):"
    for line in commands.lines():
        yield f"  {line}"
    for setting in commands.not_expressed:
        yield f"  not part of these commands: {setting}"
    yield f"  flags of `understudy replay`: {format_flags(fleet.candidate.flags)}"
    yield f"times from {format_times(TimeFacts(timing.describe_origin(), 0.0, timing.front_end_ms))}"
