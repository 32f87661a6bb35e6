"""The result of a sweep as lines of text."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from understudy.report.worst_hour import HOUR_S, format_length
from understudy.run.bootstrap import CONFIDENCE
from understudy.sweep.answer import LOAD_FLAGS, describe_load
from understudy.sweep.candidate import format_flags
from understudy.sweep.commands import make_commands
from understudy.sweep.cost import Cost, format_price
from understudy.sweep.remedies import describe_remedies
from understudy.sweep.space import SPLIT
from understudy.text import duration, plural, visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from understudy.sweep.answer import Answer
    from understudy.sweep.result import Sweep
    from understudy.sweep.space import Value
    from understudy.sweep.trials import Trial

MAX_REASONS = 6
NAMES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "e2e_ms": "E2E"}
MEANINGS = {
    "ttft_ms": "TTFT: time to the first token, ms",
    "itl_ms": "ITL: mean time between the tokens of a request, ms",
    "e2e_ms": "E2E: time of a whole request, ms",
}
FRONT = "no cheaper fleet has more requests in time"


def describe_sweep(sweep: Sweep) -> Iterator[str]:
    """Yield the lines that `understudy sweep` prints."""
    stored = f" ({sweep.found:,} found in the store)" if sweep.found else ""
    yield (
        f"{visible(sweep.workload)}: {plural(sweep.requests, 'request')}; {plural(sweep.space.size, 'combination')}, "
        f"{len(sweep.trials):,} replayed{stored}, {len(sweep.invalid):,} invalid, {len(sweep.failed):,} failed; "
        f"{sweep.wall_s:,.1f} s, {sweep.cpu_s:,.1f} CPU s"
    )
    yield f"goal: {describe_goal(sweep)}"
    for source in sweep.times:
        yield f"times from {source}"
    for answer in sweep.answers:
        yield ""
        yield from _describe_answer(sweep, answer)
        yield from _describe_commands(answer)
    if any(len(answer.front) > 1 or _find_splits(sweep, answer) for answer in sweep.answers):
        yield ""
        yield from _describe_columns(sweep)
    if sweep.variance:
        rest = max(0.0, 1 - sum(sweep.variance.values()))
        shares = ", ".join(f"{flag} {share:.0%}" for flag, share in sweep.variance.items())
        yield ""
        yield "Flags that mattered, as shares of the variance of requests in time:"
        yield f"  {shares}" + (f"; combinations of them {rest:.0%}" if len(sweep.variance) > 1 else "")
    yield from _describe_reasons(sweep)
    if sweep.notes:
        yield ""
        yield "Notes:"
        for note in sweep.notes:
            yield f"  {note}"


def describe_goal(sweep: Sweep) -> str:
    """Return the objectives and the share of requests that must meet them."""
    limits = " and ".join(f"{NAMES[name]} ≤ {limit:g} ms" for name, limit in sweep.objectives.items())
    window = sweep.goal_window_s
    windows = "" if window is None else f" in every window of {format_length(window)}"
    return f"{limits} for {100 * sweep.goal:.4g} % of requests{windows}"


def describe_margin(sweep: Sweep, trial: Trial) -> str:
    """Return by how much a trial exceeds the goal, and whether that is above the noise of the workload."""
    margin = f"{100 * (trial.judged - sweep.goal):.2f} percentage points above the goal"
    found = trial.summary.good_range
    if found is None or trial.judged < trial.good or found[0] >= sweep.goal:
        return margin
    return (
        f"{margin}, within the noise: other sessions of this kind may get {found[0]:.2%} to {found[1]:.2%} "
        f"({100 * CONFIDENCE:g} % confidence)"
    )


def describe_worst_hour(sweep: Sweep, trial: Trial) -> str:
    """Return the worst hour (with windows of the goal: the worst window) of a trial; empty for a short trace."""
    hour, whole = trial.summary.worst_hour, trial.summary
    if hour is None:
        return ""
    name = "hour" if hour.length_s == HOUR_S else f"window of {format_length(hour.length_s)}"
    holds = "holds" if hour.attainment >= sweep.goal else "does not hold"
    tail = "-" if hour.ttft_p99_ms is None else f"{format_number(hour.ttft_p99_ms)} ms"
    rate = format_number(whole.requests / whole.duration_s) if whole.duration_s else "-"
    return (
        f"worst {name}: from {duration(hour.start_s)} on, in time for {hour.attainment:.2%} of "
        f"{plural(hour.requests, 'request')} ({format_number(hour.requests_per_s)}/s; whole run {rate}/s), "
        f"TTFT p99 {tail}; the goal {holds} in it"
    )


def describe_fleet(sweep: Sweep, trial: Trial) -> str:
    """Return the size of a fleet and, with prices, its cost."""
    price = f" (${trial.cost:,.2f}/h)" if sweep.has_prices else ""
    return f"{plural(trial.gpus, 'GPU')}{price}"


def describe_tails(sweep: Sweep, trial: Trial) -> str:
    """Return the 99th percentile of every latency that has an objective."""
    parts = []
    for name, limit in sweep.objectives.items():
        value = getattr(trial.summary, name).p99
        shown = "-" if value is None else f"{format_number(value)} ms"
        parts.append(f"{NAMES[name]} p99 {shown} (limit {limit:g})")
    return ", ".join(parts)


def describe_miss(sweep: Sweep, trial: Trial) -> str:
    """Return by how much a trial misses the goal, and at which objectives."""
    shares = ", ".join(
        f"{NAMES[name]} in time for {share:.2%}" for name, share in trial.summary.within.items()
    )
    where = "" if trial.judged == trial.good else " in the worst window"
    return (
        f"in time for {trial.good:.2%}, {100 * (sweep.goal - trial.judged):.2f} percentage points below the goal"
        f"{where}: {shares}"
    )


def _describe_answer(sweep: Sweep, answer: Answer) -> Iterator[str]:
    load = f" at {describe_load(answer.load)}" if answer.load else ""
    best, smaller = answer.best, answer.smaller
    if best is not None:
        kind = "lowest cost" if sweep.has_prices else "fewest GPUs"
        yield f"Answer{load} ({kind}): {describe_fleet(sweep, best)}, in time for {best.good:.2%} of requests"
        if sweep.has_prices:
            yield f"  {Cost.of(best).describe()}"
        yield f"  {format_flags(best.flags)}"
        yield f"  {describe_margin(sweep, best)}; {describe_tails(sweep, best)}"
        if hour := describe_worst_hour(sweep, best):
            yield f"  {hour}"
        lower = "cheaper" if sweep.has_prices else "smaller"
        if smaller is None:
            yield f"  next {lower} fleet: none in the space"
        else:
            yield f"  next {lower} fleet: {describe_fleet(sweep, smaller)}, {describe_miss(sweep, smaller)}"
            yield f"    {format_flags(smaller.flags)}; {describe_tails(sweep, smaller)}"
    elif smaller is not None:
        yield f"Answer{load}: no fleet of the space meets the goal"
        yield f"  nearest: {describe_fleet(sweep, smaller)}, {describe_miss(sweep, smaller)}"
        yield f"    {format_flags(smaller.flags)}; {describe_tails(sweep, smaller)}"
        for remedy in describe_remedies(sweep, smaller):
            yield f"  {remedy}"
    load = f" at {format_flags(answer.load)}" if answer.load else ""
    if len(answer.front) > 1:
        yield ""
        yield f"Front (the best fleet of each cost){load}: {FRONT}"
        yield from _format_table(sweep, answer.front, best)
    if splits := _find_splits(sweep, answer):
        yield ""
        yield f"Splits{load} (prefill + decode workers; one number: without roles), each with its best flags:"
        yield from _format_table(sweep, splits, best)


def _find_splits(sweep: Sweep, answer: Answer) -> list[Trial]:
    """Return the best trial of each split under the answer's load, the best split first; empty without `--splits`."""
    found: dict[Value, Trial] = {}
    for trial in sorted(sweep.trials, key=lambda trial: (-trial.good, trial.cost, trial.point)):
        if SPLIT in trial.flags and answer.load.items() <= trial.flags.items():
            found.setdefault(trial.flags[SPLIT], trial)
    return list(found.values())


def _format_table(sweep: Sweep, trials: Sequence[Trial], best: Trial | None) -> Iterator[str]:
    head = [
        "GPUs",
        *(["$/h", "$/month", "$/M tok"] if sweep.has_prices else []),
        "in time",
        "in time req/s",
        "out tok/s",
    ]
    head += [f"{NAMES[name]} p99" for name in sweep.objectives]
    rows = [head]
    for each in trials:
        summary = each.summary
        row = [f"{each.gpus:,}", *(format_costs(each) if sweep.has_prices else []), f"{each.good:.2%}"]
        row += [format_number(summary.goodput_per_s), format_number(summary.output_tokens_per_s)]
        row += [format_number(getattr(summary, name).p99) for name in sweep.objectives]
        rows.append(row)
    widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
    lines: list[Trial | None] = [None, *trials]
    for row, trial in zip(rows, lines, strict=True):
        cells = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        flags = (
            "flags"
            if trial is None
            else format_flags({name: value for name, value in trial.flags.items() if name not in LOAD_FLAGS})
        )
        yield f"  {cells}  {flags}{'  <- answer' if trial is not None and trial is best else ''}"


def _describe_columns(sweep: Sweep) -> Iterator[str]:
    meanings = "; ".join(MEANINGS[name] for name in sweep.objectives)
    yield "Columns:"
    yield "  in time: share of requests within every limit of the goal; in time req/s: such requests per second;"
    yield f"  out tok/s: output tokens per second; {meanings}; p99: 99 % of requests take at most this"


def format_costs(trial: Trial) -> list[str]:
    """Return the cells of a trial's costs: per hour, per month, and per million tokens."""
    cost = Cost.of(trial)
    per_million = format_price(cost.per_million_tokens).removeprefix("$")
    return [f"{cost.per_hour:,.2f}", f"{cost.per_month:,.0f}", per_million]


def _describe_commands(answer: Answer) -> Iterator[str]:
    """Yield the commands of the answer, and those of engines of the other points of the front with their flags."""
    if answer.best is not None:
        commands = make_commands(answer.best.candidate)
        yield ""
        sizes = ", ".join(each.describe() for each in commands.engines)
        yield f"Commands of the answer ({sizes}):"
        for line in commands.lines():
            yield f"  {line}"
        for setting in commands.not_expressed:
            yield f"  not part of these commands: {setting}"
    others = [trial for trial in answer.front if trial is not answer.best]
    if others:
        whose = "" if answer.best is None else "other points of the "
        yield ""
        yield f"Engines of the {whose}front (--json and --html have all of their commands):"
        for trial in others:
            yield f"  {format_flags(trial.flags)} ({plural(trial.gpus, 'GPU')}):"
            for engine in make_commands(trial.candidate).engines:
                yield f"    {engine.describe()}: {shlex.join(engine.words)}"


def _describe_reasons(sweep: Sweep) -> Iterator[str]:
    reasons = sweep.count_reasons()
    if reasons:
        yield ""
        yield f"Invalid combinations, not run: {len(sweep.invalid):,}"
        for reason, count, point in reasons[:MAX_REASONS]:
            yield f"  {count:,} such as {format_flags(sweep.space.values(point))}: {reason}"
        if (more := len(reasons) - MAX_REASONS) > 0:
            yield f"  and {more:,} more reasons (--json lists all)"
    if sweep.failed:
        point, reason = next(iter(sweep.failed.items()))
        yield ""
        yield f"Failed: {len(sweep.failed):,}, such as {format_flags(sweep.space.values(point))}: {reason}"


def format_number(value: float | None) -> str:
    """Return a number with 4 significant digits, or a dash."""
    return "-" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
