"""The page of a plan: the answer with its verdict on top, then runner-up, levers and commands."""

from __future__ import annotations

import math
import re
from html import escape
from typing import TYPE_CHECKING

from understudy.planning.result import cost_of
from understudy.planning.text import (
    describe_answer,
    describe_bill,
    describe_goal,
    describe_margin,
)
from understudy.report.html.frame import THEME_BUTTON, build_document, prose
from understudy.sweep.commands import make_commands
from understudy.sweep.cost import format_price

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.planning.replays import Fleet
    from understudy.planning.result import Plan

_LABEL = re.compile(r"^(Fleet|Bill|Tokens|Margin)\s+")
_STYLE = """
.verdict { border-left: 5px solid var(--s4); padding: 4px 0 4px 14px; margin: 14px 0 18px; }
.verdict.missed { border-color: var(--s2); }
.verdict p { margin: 4px 0; overflow-wrap: anywhere; } .verdict p:first-child { font-size: 18px; font-weight: 600; }
table.levers td:first-child, table.levers th:first-child { text-align: left; white-space: normal; }
table.fleets { width: 100%; table-layout: fixed; } table.fleets th { white-space: normal; vertical-align: bottom; }
table.fleets tr.name td { text-align: left; white-space: normal; border-bottom: 0; padding-bottom: 0; }
.wide { overflow-x: auto; } h2 { margin-top: 22px; }
table.levers i { display: block; height: 10px; border-radius: 3px; background: var(--s1); min-width: 1px; }
table.levers td.bar { width: 30%; }
pre { overflow-x: auto; margin: 6px 0; padding: 8px 10px; border: 1px solid var(--line); border-radius: 8px;
  font: 12px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
details { margin: 14px 0; } summary { cursor: pointer; font-weight: 600; }
"""


def build_page(plan: Plan) -> str:
    """Build the page."""
    question = plan.question
    facts = (
        ("Goal", describe_goal(question)),
        ("Model", question.model),
        ("GPUs", ", ".join(f"{name} ${price:g}/h" for name, price in question.prices.by_name.items())),
        ("Requests", f"{plan.requests:,}" + ("" if plan.users == 1 else f" ({plan.users:g} x the users)")),
        ("Shapes compared", f"{plan.tried:,}"),
    )
    shown = "".join(f"<span>{name} <b>{escape(value)}</b></span>" for name, value in facts)
    lines = [_LABEL.sub(r"\1: ", prose(line.strip())) for line in describe_answer(plan)]
    missed = "" if plan.best is not None else " missed"
    body = [
        f'<header><div><h1>Plan for {escape(plan.workload)}</h1><div class="facts">{shown}</div></div>'
        f"{THEME_BUTTON}</header>",
        f'<div class="verdict{missed}">{"".join(f"<p>{line}</p>" for line in lines)}</div>',
        *_show_fleets(plan),
        *_show_levers(plan),
        *_show_commands(plan),
        *_show_left_out(plan),
    ]
    return build_document(f"Plan for {plan.workload}", body, style=_STYLE)


def _show_fleets(plan: Plan) -> Iterator[str]:
    fleets = [("Answer", plan.best), ("Runner-up", plan.runner_up), ("Nearest", plan.nearest)]
    rows = [_show_fleet(plan, name, fleet) for name, fleet in fleets if fleet is not None]
    if rows:
        head = "".join(
            f"<th>{name}</th>"
            for name in ("GPUs", "$ per month", "$ per M tokens", "in time", "TTFT p99 ms", "TPOT p99 ms")
        )
        yield f'<h2>Fleets</h2><div class="wide"><table class="fleets"><tr>{head}</tr>{"".join(rows)}</table></div>'


def _show_fleet(plan: Plan, name: str, fleet: Fleet) -> str:
    summary, cost = fleet.summary, cost_of(fleet)
    assert summary is not None
    tails = [summary.ttft_ms.p99, summary.itl_ms.p99]
    cells = [
        f"{fleet.gpus:,}",
        f"{cost.per_month:,.0f}",
        format_price(cost.per_million_tokens),
        f"{summary.judged:.2%}",
        *("-" if value is None else f"{value:,.0f}" for value in tails),
    ]
    described = escape(fleet.shape.describe(fleet.size))
    title = f"<b>{name}</b>: {described}<br>{prose(describe_margin(plan.question, fleet))}"
    numbers = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr class="name"><td colspan="{len(cells)}">{title}</td></tr><tr>{numbers}</tr>'


def _show_levers(plan: Plan) -> Iterator[str]:
    if plan.best is None or not plan.levers:
        return
    cost = plan.best.cost
    known = [each.ratio(cost) for each in plan.levers if each.cost is not None]
    most = max([1.0, *known])
    rows = []
    for each in sorted(plan.levers, key=lambda each: -each.ratio(cost)):
        ratio = each.ratio(cost)
        width = 0 if math.isinf(ratio) else 100 * ratio / most
        shown = "no fleet of these shapes" if math.isinf(ratio) else f"{ratio:.2f} x"
        bill = "" if each.cost is None else f"${each.cost:,.2f}/h, {each.fleet}"
        rows.append(
            f'<tr><td>{escape(each.change)}<br><span class="note">{escape(bill)}</span></td><td>{shown}</td>'
            f'<td class="bar"><i style="width:{width:.1f}%"></i></td></tr>'
        )
    yield f'<h2>What changes the bill</h2><table class="levers">{"".join(rows)}</table>'


def _show_commands(plan: Plan) -> Iterator[str]:
    if plan.best is None:
        return
    commands = make_commands(plan.best.candidate)
    lines = "\n".join(commands.lines())
    sizes = ", ".join(each.describe() for each in commands.engines)
    more = "".join(f"<p>not part of these commands: {prose(each)}</p>" for each in commands.not_expressed)
    yield f"<h2>Commands</h2><p>{escape(sizes)}; {escape(describe_bill(plan.best))}</p><pre>{escape(lines)}</pre>{more}"


def _show_left_out(plan: Plan) -> Iterator[str]:
    slow = [f"{shape}: alone, at most {share:.2%} in time" for shape, share in plan.slow.items()]
    rejected = [f"{shape}: {reason}" for shape, reason in plan.rejected.items()]
    for title, lines in (
        ("Notes", list(plan.notes)),
        ("Too slow even for a request alone", slow),
        ("Cannot be built", rejected),
    ):
        if lines:
            items = "".join(f"<li>{prose(line)}</li>" for line in lines)
            yield f"<details><summary>{title} ({len(lines)})</summary><ul>{items}</ul></details>"
