"""Print explanations of slow requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.explain.waterfall import PARTS
from understudy.text import plural, visible

if TYPE_CHECKING:
    from rich.console import Console

BAR = 16
"""Characters of a bar."""


def ms(value_ns: float) -> str:
    """Format a duration in ms."""
    return f"{value_ns / 1e6:,.3f} ms"


def print_explanation(explained: dict[str, Any], console: Console) -> None:
    """Print the waterfall of one request, or a line for each of several, then the sum of parts."""
    requests = explained["requests"]
    if len(requests) == 1:
        _print_request(requests[0], console)
    else:
        _print_list(requests, console)
    if "misses" in explained:
        _print_misses(explained, console)
    _print_parts(explained, console)


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        is_number = name in ("latency", "TTFT", "share", "time")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number)
    return table


def _print_request(one: dict[str, Any], console: Console) -> None:
    from rich.padding import Padding

    first = "no first token" if one["ttft_ns"] is None else f"TTFT {ms(one['ttft_ns'])}"
    console.print(
        f"request {visible(one['request'])} on worker {one['worker']}: {ms(one['latency_ns'])}, {first}; "
        f"prompt {one['prompt_tokens']:,} tokens ({one['cached_tokens']:,} cached), "
        f"{one['output_tokens']:,} output tokens, {one['preemptions']} preemptions",
        soft_wrap=True,
    )
    if (choice := one["router"]) is not None:
        console.print(_describe_choice(choice), soft_wrap=True)
    for span in one["spans"]:
        start = min(BAR - 1, BAR * span["after_ns"] // max(one["latency_ns"], 1))
        length = max(1, round(BAR * span["duration_ns"] / max(one["latency_ns"], 1)))
        bar = f"{' ' * start}{'█' * min(length, BAR - start)}"
        what = _name_span(span)
        console.print(
            f"{ms(span['after_ns']):>16} {ms(span['duration_ns']):>16} {bar:<{BAR}} {what}", soft_wrap=True
        )
        if details := _describe(span):
            console.print(Padding(details, (0, 0, 0, 17)))


def _describe_choice(choice: dict[str, Any]) -> str:
    cached = f"{choice['true_overlap_blocks']} blocks were cached on the chosen worker"
    if "cost" not in choice:
        said = f"router: {cached}, {choice['best_true_overlap_blocks']} on the best"
        score = "" if choice.get("score") is None else f"; score {choice['score']:g}"
        return said + score + (f"; {visible(choice['reason'])}" if choice.get("reason") else "")
    said = f"router: cost {choice['cost']:g} blocks"
    if "cost_prefill" in choice:
        said += (
            f" (prefill {choice['cost_prefill']:g}, active {choice['cost_active']:g}, new "
            f"{choice['cost_added']:g}, requests {choice['cost_requests']:g})"
        )
    if choice.get("next_cost") is not None:
        said += f", next worker {choice['next_worker']}: {choice['next_cost']:g}"
    return f"{said}, regret {choice['cost_regret']:g}; {cached}"


def _name_span(span: dict[str, Any]) -> str:
    return {"prefill": "prefill", "recompute": "recompute", "decode": "decode"}.get(
        span["kind"], PARTS[span["kind"]]
    )


def _describe(span: dict[str, Any]) -> str:
    words = []
    if span["tokens"]:
        words.append(f"{plural(span['tokens'], 'token')} in {plural(span['steps'], 'step')}")
    parts = {part: value for part, value in span["parts"].items() if part != span["kind"]}
    words += [f"{PARTS[part].partition(', ')[2] or PARTS[part]} {ms(value)}" for part, value in parts.items()]
    if span.get("preempted_by"):
        words.append(f"to make room for {visible(span['preempted_by'])}")
    if span.get("at_head_ns"):
        words.append(f"first in the queue for {ms(span['at_head_ns'])}")
    if named := span["others"][:3]:
        unit = "blocks" if "blocks" in named[0] else "tokens"
        verb = "held by" if unit == "blocks" else "with prompts of"
        said = [f"{visible(one['request'])} ({one[unit]:,g} {unit})" for one in named]
        words.append(f"{verb} {', '.join(said)}")
    return "; ".join(words)


def _print_list(requests: list[dict[str, Any]], console: Console) -> None:
    table = _table("request", "worker", "latency", "TTFT", "largest parts")
    for one in requests:
        largest = sorted(one["parts"].items(), key=lambda item: -item[1])[:3]
        said = "; ".join(f"{PARTS[part]} {value / max(one['latency_ns'], 1):.0%}" for part, value in largest)
        first = "" if one["ttft_ns"] is None else ms(one["ttft_ns"])
        table.add_row(visible(one["request"]), str(one["worker"]), ms(one["latency_ns"]), first, said)
    console.print(table)


def _print_misses(explained: dict[str, Any], console: Console) -> None:
    found, requests = explained["misses"], explained["requests"]
    if len(requests) == 1:
        for run in requests[0]["misses"]:
            last = run["first_token"] + run["tokens"] - 1
            said = f"tokens {run['first_token']:,} to {last:,}: {found['cause_names'][run['cause']]}"
            if "evicted_ns" in run:
                said += f" at {run['evicted_ns'] / 1e9:,.3f} s"
                said += f" for {visible(run['evicted_for'])}" if run["evicted_for"] else " for decodes"
            console.print(said, soft_wrap=True)
    table = _table("tokens", "share", "why prompt tokens of the run missed the cache")
    table.columns[0].justify = "right"
    missed = found["missed_tokens"]
    for cause, tokens in found["causes"].items():
        table.add_row(f"{tokens:,}", f"{tokens / max(missed, 1):.1%}", found["cause_names"][cause])
    prompt = found["prompt_tokens"]
    table.add_row(
        f"{missed:,}", "100.0%", f"missed of {prompt:,} prompt tokens ({missed / max(prompt, 1):.1%})"
    )
    console.print()
    console.print(table)
    if found["evicted_for"]:
        named = [f"{visible(one['request'])} ({one['tokens']:,} tokens)" for one in found["evicted_for"]]
        console.print(f"room was needed most by {', '.join(named)}", soft_wrap=True)


def _print_parts(explained: dict[str, Any], console: Console) -> None:
    total = explained["latency_ns"]
    count = len(explained["requests"])
    table = _table("time", "share", "part")
    for part, value in sorted(explained["parts"].items(), key=lambda item: -item[1]):
        table.add_row(ms(value), f"{value / max(total, 1):.1%}", PARTS[part])
    table.add_row(ms(total), "100.0%", f"latency of {count} request{'s' * (count != 1)}")
    console.print()
    console.print(table)
