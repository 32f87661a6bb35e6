"""Check a trace for what is odd about it, before hours are spent on replays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from understudy.text import duration, plural
from understudy.workload.reuse import hit_curve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.workload.workload import Workload

_S = 1_000_000_000
_MOST_AT_ONCE = 0.2
"""Share of requests at one instant from which arrivals are a burst."""
_GAP = 0.25
"""Share of the span that a gap without arrivals may take."""
_FEW = 100
"""Requests below which a p99 says little."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One odd property of a trace: its name, and a text with the problem and the remedy."""

    name: str
    text: str


def describe_trace(workload: Workload) -> str:
    """Return requests, sessions, span and lengths in one line."""
    parts = [plural(len(workload), "request")]
    if workload.sessions != len(workload):
        parts.append(plural(workload.sessions, "session"))
    if workload.has_arrivals and len(workload):
        parts.append(f"over {duration(float(np.ptp(workload.arrival_ns)) / 1e9)}")
    for name, lengths in (("prompts", workload.prompt_tokens), ("outputs", workload.output_tokens)):
        if len(lengths):
            low, high = np.quantile(lengths, (0.5, 0.99), method="lower").tolist()
            parts.append(f"{name} of {low:,} tokens (p99 {high:,})")
    return ", ".join(parts)


def examine(workload: Workload, context: int | None = None) -> list[Finding]:
    """Return what is odd about a trace; `context` is the longest request that the model takes, in tokens."""
    if not len(workload):
        return [Finding("empty", "the trace has no requests")]
    found = [*_examine_times(workload), *_examine_sessions(workload), *_examine_lengths(workload, context)]
    return [*found, *_examine_reuse(workload)]


def _examine_times(workload: Workload) -> Iterator[Finding]:
    if not workload.has_arrivals:
        yield Finding(
            "no times",
            "requests have no times; convert with --time KEY, or replay a closed loop (--concurrency N)",
        )
        return
    arrivals = workload.arrival_ns
    firsts = arrivals[workload.turn == 0]
    backwards = int((np.diff(firsts) < 0).sum())
    if backwards:
        yield Finding(
            "clocks run backwards",
            f"{plural(backwards, 'session')} begin before the one above them; a replay sorts them, but clocks of "
            "several machines may differ",
        )
    _, counts = np.unique(firsts, return_counts=True)
    if len(firsts) >= _FEW and counts.max() > _MOST_AT_ONCE * len(firsts):
        yield Finding("burst", f"{counts.max():,} of {len(firsts):,} sessions begin at one instant")
    elif len(firsts) >= _FEW and not (firsts % _S).any() and counts.mean() > 1:
        yield Finding(
            "whole seconds",
            f"all times are whole seconds, so {counts.mean():.1f} sessions begin together on average; a real load is "
            "smoother, and its first tokens come earlier",
        )
    ordered = np.sort(firsts)
    span = int(ordered[-1] - ordered[0])
    gaps = np.diff(ordered)
    if len(gaps) and span and gaps.max() > _GAP * span and gaps.max() > 60 * _S:
        at = int(gaps.argmax())
        yield Finding(
            "gap",
            f"nothing begins for {duration(float(gaps[at]) / 1e9)} from "
            f"{duration(float(ordered[at] - ordered[0]) / 1e9)} on; convert a part with --from and --until",
        )


def _examine_sessions(workload: Workload) -> Iterator[Finding]:
    if workload.sessions == 1 and len(workload) > 1:
        yield Finding(
            "one session",
            "all requests are turns of one session, which run one after another; check the session's key",
        )
    waits = workload.delay_ns[workload.turn > 0]
    if len(waits) >= _FEW and not waits.any():
        yield Finding(
            "no think times", "no turn waits after the answer before it: users that read and type are slower"
        )


def _examine_lengths(workload: Workload, context: int | None) -> Iterator[Finding]:
    prompts, outputs = workload.prompt_tokens.astype(np.int64), workload.output_tokens.astype(np.int64)
    if context is not None and (long := int((prompts + outputs > context).sum())):
        longest = int((prompts + outputs).max())
        yield Finding(
            "longer than the model's",
            f"{long:,} of {len(workload):,} requests exceed the model's {context:,} tokens (the longest has "
            f"{longest:,}); vLLM rejects them at this length",
        )
    if len(workload) >= _FEW:
        for name, lengths in (("prompts", prompts), ("outputs", outputs)):
            if (lengths == lengths[0]).all():
                yield Finding(
                    f"equal {name}", f"all {name} have {lengths[0]:,} tokens, as those of a benchmark do"
                )
    else:
        yield Finding("few requests", f"{plural(len(workload), 'request')}: a p99 of so few says little")
    if (none := int((outputs <= 1).sum())) > len(workload) // 2:
        yield Finding(
            "no outputs", f"{none:,} of {len(workload):,} outputs have at most one token; check their key"
        )


def _examine_reuse(workload: Workload) -> Iterator[Finding]:
    share = hit_curve(workload, workload.trace_block_size).unlimited_hit_ratio
    if share == 0:
        yield Finding(
            "shares no prefix",
            "no prompt repeats a block of another, so caches and KV-aware routing gain nothing here; a log with text "
            "(--format openai) shows what they gain",
        )
    elif share > 0.98:
        yield Finding(
            "all prompts repeat",
            f"{share:.1%} of the prompt tokens repeat: check that copies are not counted",
        )
