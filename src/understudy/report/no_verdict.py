"""State that no rule found a problem, with the numbers that a reader would check."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.report.engine_terms import terms_of
from understudy.report.thresholds import LONG_QUEUE, MIN_REQUESTS
from understudy.report.verdict import compute_queue_share
from understudy.text import plural, quantity

if TYPE_CHECKING:
    from understudy.report.judged import JudgedReport


def describe_no_verdict(report: JudgedReport) -> str:
    """Return a sentence on a report without verdicts; empty if there are verdicts, or no requests."""
    completed = report.requests.completed
    if report.verdicts or not report.requests.total:
        return ""
    if completed < MIN_REQUESTS:
        done = plural(completed, "request")
        return f"No bottleneck found, but only {done} completed; most rules need {MIN_REQUESTS}."
    found = "No bottleneck found" if is_calm(report) else "No rule names a bottleneck, but requests waited"
    text = f"{found}: {', '.join(_list_numbers(report))}."
    trials = () if report.advice is None or report.handoff is not None else report.advice.trials
    if trials and report.goodput is not None:
        text += f" A smaller fleet is not enough; replayed: {', '.join(map(str, trials))}."
    elif trials:  # judged by more than the measure of the trials
        text += f" A smaller fleet is not enough (replayed: {', '.join(one.change for one in trials)}): "
        text += "mean E2E or TTFT p99 rises by more than 5 %, or requests are lost."
    if report.advice is not None and report.advice.smaller_untried:
        tried = " or ".join(report.advice.smaller_untried)
        text += f" Whether fewer workers do is not known: {tried} was not replayed ({report.advice.describe_limit()}); "
        text += "replay it yourself."
    return text


def is_calm(report: JudgedReport) -> bool:
    """Whether no request lost its blocks and few waited; the queues of prefill and decode workers have own rules."""
    return not report.preemptions and (report.handoff is not None or compute_queue_share(report) < LONG_QUEUE)


def _list_numbers(report: JudgedReport) -> list[str]:
    terms, hits = terms_of(report), quantity(report.prefix_hit_ratio.first_admission, "ratio")
    numbers = [] if report.goodput is None else [f"SLO attainment {quantity(report.goodput.ratio, 'ratio')}"]
    if report.handoff is None:
        numbers.append(f"{quantity(compute_queue_share(report), 'ratio')} of the E2E time in queues")
    elif report.handoff.ttft_ms:
        part, took = max(report.handoff.ttft_parts_ms.items(), key=lambda item: item[1])
        share = quantity(took / report.handoff.ttft_ms, "ratio")
        numbers.append(f"{part} is the largest part of TTFT ({share})")
    numbers.append(f"{terms.usage} at most {quantity(report.kv.usage_max, 'ratio')}")
    numbers.append(f"{report.preemptions:,} {terms.requeued}")
    best = report.unlimited_hit_ratio
    possible = "" if best is None else f" (an unlimited cache: {quantity(best, 'ratio')})"
    numbers.append(f"prefix hits {hits}{possible if report.kv.evictions else f', no {terms.block} evicted'}")
    return numbers
