"""Verdicts on prefill and decode workers: which side, or which link, delays the first token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.report.text import fixed, quantity
from understudy.report.verdict import MIN_REQUESTS, Verdict

if TYPE_CHECKING:
    from understudy.report.report import Report

SIDES = {
    "prefill queue": (
        "Prefill workers are the bottleneck",
        "Use more prefill workers, or fewer decode workers.",
    ),
    "decode queue": (
        "Decode workers are the bottleneck",
        "Use more decode workers, or fewer prefill workers.",
    ),
    "transfer": (
        "The hand-offs are the bottleneck",
        "Use faster links (--kv-link-gbps), or hand off fewer prompts (--disaggregation uncached:2048).",
    ),
    "polls": (
        "The decode workers' steps are the bottleneck",
        "Use shorter steps on decode workers (fewer --max-num-batched-tokens), or more of them.",
    ),
}
LARGE_PART = 0.3


def handoff_bottleneck(report: Report) -> Verdict | None:
    """Report the part that takes 30 % of the time to the first token, if it is a wait."""
    handoff = report.handoff
    if handoff is None or handoff.remote < MIN_REQUESTS:
        return None
    waits = {name: handoff.ttft_parts_ms[name] for name in SIDES}
    part = max(waits, key=lambda name: waits[name])
    share = waits[part] / handoff.ttft_ms if handoff.ttft_ms else 0.0
    if share < LARGE_PART:
        return None
    finding, remedy = SIDES[part]
    return Verdict(
        "handoff_bottleneck",
        f"{finding}: {part} takes {fixed(waits[part])} ms of a mean TTFT of {fixed(handoff.ttft_ms)} ms "
        f"({quantity(share, 'ratio')}).",
        remedy,
    )
