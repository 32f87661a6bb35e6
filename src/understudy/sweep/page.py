"""The page of a sweep: answer, front, parallel coordinates, flags that mattered and commands."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from understudy.report.html.charts import render_card
from understudy.report.html.frame import THEME_BUTTON, build_document, prose
from understudy.sweep.answer import describe_load
from understudy.sweep.candidate import format_flags
from understudy.sweep.commands import make_commands
from understudy.sweep.cost import Cost
from understudy.sweep.plots import plot_coordinates, plot_front
from understudy.sweep.remedies import describe_remedies
from understudy.sweep.text import (
    FRONT,
    NAMES,
    describe_fleet,
    describe_goal,
    describe_margin,
    describe_miss,
    describe_tails,
    describe_worst_hour,
    format_costs,
    format_number,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from understudy.sweep.answer import Answer
    from understudy.sweep.result import Sweep
    from understudy.sweep.space import Point
    from understudy.sweep.trials import Trial

_STYLE = """
.conclusion { font-size: 17px; font-weight: 600; margin: 0 0 6px; overflow-wrap: anywhere; }
.cards + .cards { margin-top: 12px; } .cards + .verdicts { margin-top: 12px; }
.load { margin: 22px 0 10px; }
td.flags { text-align: left; white-space: normal; min-width: 220px; }
tr.answer td { font-weight: 600; }
pre { overflow-x: auto; margin: 6px 0; padding: 8px 10px; border: 1px solid var(--line); border-radius: 8px;
  font: 12px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 6px 12px; align-items: center; }
.bars i { display: block; height: 10px; border-radius: 3px; background: var(--s1); min-width: 1px; }
a { color: var(--s1); }
svg .many { stroke: var(--c); fill: none; stroke-width: 1; opacity: .35; stroke-linejoin: round; }
svg .chosen { stroke: var(--c); fill: none; stroke-width: 3; stroke-linejoin: round; }
svg a .marker { cursor: pointer; r: 5px; }
"""


def build_page(sweep: Sweep, reports: Mapping[Point, str]) -> str:
    """Build the page; `reports` are links to the reports of single candidates, by combination."""
    facts = (
        ("Goal", describe_goal(sweep)),
        ("Requests", f"{sweep.requests:,}"),
        (
            "Combinations",
            f"{len(sweep.trials):,} replayed of {sweep.space.size:,}, {len(sweep.invalid):,} invalid",
        ),
        ("Search", sweep.search),
        ("CPU time", f"{sum(trial.cpu_s for trial in sweep.trials):,.1f} s"),
        *(("Times from", source) for source in sweep.times),
    )
    shown = "".join(f"<span>{name} <b>{escape(value)}</b></span>" for name, value in facts)
    body = [
        f'<header><div><h1>Sweep of {escape(sweep.workload)}</h1><div class="facts">{shown}</div></div>'
        f"{THEME_BUTTON}</header>"
    ]
    for answer in sweep.answers:
        body += _answer_parts(sweep, answer, reports)
    body += ['<div class="cards">', _render_variance(sweep), _render_invalid(sweep), "</div>"]
    notes = "".join(f'<li class="note">{prose(note)}</li>' for note in sweep.notes)
    body.append(f'<ul class="verdicts">{notes}</ul>' if notes else "")
    return build_document(f"Sweep of {sweep.workload}", body, style=_STYLE)


def _answer_parts(sweep: Sweep, answer: Answer, reports: Mapping[Point, str]) -> Iterator[str]:
    if answer.load:
        yield f'<h2 class="load">{escape(describe_load(answer.load))}</h2>'
    best, smaller = answer.best, answer.smaller
    if best is not None:
        verb = "meets" if best.gpus == 1 else "meet"
        yield (
            f'<p class="conclusion">{escape(describe_fleet(sweep, best))} {verb} the goal: in time for '
            f"{best.good:.2%} of requests.</p>{_describe_cost(sweep, best)}<p>{escape(format_flags(best.flags))}; "
            f"{escape(describe_margin(sweep, best))}; {escape(describe_tails(sweep, best))}</p>"
        )
        if hour := describe_worst_hour(sweep, best):
            yield f"<p>{escape(hour[0].upper() + hour[1:])}</p>"
    else:
        yield '<p class="conclusion">No fleet of the space meets the goal.</p>'
    if smaller is not None:
        lower = "cheaper" if sweep.has_prices else "smaller"
        what = f"Next {lower} fleet" if best is not None else "Nearest"
        yield (
            f'<ul class="verdicts"><li>{what}: <strong>{escape(describe_fleet(sweep, smaller))}</strong>, '
            f"{escape(describe_miss(sweep, smaller))}; {escape(describe_tails(sweep, smaller))} "
            f"({escape(format_flags(smaller.flags))})</li>"
        )
        remedies = [] if best is not None else describe_remedies(sweep, smaller)
        yield "".join(f"<li>{escape(one[0].upper() + one[1:])}</li>" for one in remedies) + "</ul>"
    trials = [
        trial
        for trial in sweep.trials
        if all(trial.flags[name] == value for name, value in answer.load.items())
    ]
    yield '<div class="cards">'
    yield render_card(plot_front(sweep, answer, trials, reports))
    yield render_card(plot_coordinates(sweep, answer, trials))
    yield _render_front(sweep, answer, reports)
    yield "</div>"


def _describe_cost(sweep: Sweep, trial: Trial) -> str:
    return f"<p>{escape(Cost.of(trial).describe())}</p>" if sweep.has_prices else ""


def _render_front(sweep: Sweep, answer: Answer, reports: Mapping[Point, str]) -> str:
    head = [
        "GPUs",
        *(["$/h", "$/month", "$/M tokens"] if sweep.has_prices else []),
        "In time",
        "In time requests/s",
        "Output tokens/s",
    ]
    head += [f"{NAMES[name]} p99 ms" for name in sweep.objectives]
    rows = "".join(_render_row(sweep, answer, trial, reports) for trial in answer.front)
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    shortened = "; points that add least are left out" if answer.is_front_shortened else ""
    return (
        '<section class="card full"><div class="head"><h2>Front: the best fleet of each cost</h2>'
        f'<span class="sub">{FRONT}{shortened}; in time: within every limit of the goal</span></div>'
        f'<div class="scroll"><table><thead><tr>{titles}<th class="text">Flags and commands</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _render_row(sweep: Sweep, answer: Answer, trial: Trial, reports: Mapping[Point, str]) -> str:
    summary = trial.summary
    cells = [f"{trial.gpus:,}", *(format_costs(trial) if sweep.has_prices else []), f"{trial.good:.2%}"]
    cells += [format_number(summary.goodput_per_s), format_number(summary.output_tokens_per_s)]
    cells += [format_number(getattr(summary, name).p99) for name in sweep.objectives]
    flags = escape(format_flags(trial.flags))
    if trial.point in reports:
        flags = f'<a href="{escape(reports[trial.point])}">{flags}</a>'
    commands = make_commands(trial.candidate)
    missing = "".join(
        f"<div>not part of these commands: {escape(one)}</div>" for one in commands.not_expressed
    )
    lines = escape("\n".join(commands.lines()))
    sizes = escape(", ".join(each.describe().replace(" x ", " × ") for each in commands.engines))
    detail = f"<details><summary>{sizes}</summary><pre>{lines}</pre>{missing}</details>"
    style = ' class="answer"' if trial is answer.best else ""
    numbers = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr{style}>{numbers}<td class="flags">{flags}{detail}</td></tr>'


def _render_variance(sweep: Sweep) -> str:
    if not sweep.variance:
        return ""
    shares = {**sweep.variance, "combinations of them": max(0.0, 1 - sum(sweep.variance.values()))}
    bars = "".join(
        f'<span>{escape(flag)}</span><i style="width: {100 * min(1, share):.1f}%"></i><b>{share:.0%}</b>'
        for flag, share in shares.items()
    )
    return (
        '<section class="card half"><div class="head"><h2>Flags that mattered</h2><span class="sub">share of the '
        f'variance of requests in time</span></div><div class="bars">{bars}</div></section>'
    )


def _render_invalid(sweep: Sweep) -> str:
    reasons = sweep.count_reasons()
    if not reasons and not sweep.failed:
        return ""
    rows = [
        f'<tr><td>{count:,}</td><td class="text">{escape(format_flags(sweep.space.values(point)))}</td>'
        f'<td class="text">{prose(reason)}</td></tr>'
        for reason, count, point in reasons
    ]
    rows += [
        f'<tr><td>failed</td><td class="text">{escape(format_flags(sweep.space.values(point)))}</td>'
        f'<td class="text">{prose(reason)}</td></tr>'
        for point, reason in list(sweep.failed.items())[:20]
    ]
    return (
        '<section class="card half"><div class="head"><h2>Not replayed</h2><span class="sub">combinations by reason'
        '</span></div><div class="scroll"><table><thead><tr><th>Count</th><th class="text">Such as</th>'
        f'<th class="text">Reason</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div></section>'
    )
