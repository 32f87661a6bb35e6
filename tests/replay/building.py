"""Small workloads and runs for the tests of the replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.engines.timing import Constant
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload import Normal, Poisson, SharedRatio, SyntheticSpec, Workload, synthesise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.engines.vllm_config import VllmConfig

MS = 1_000_000
ONE_MS = Constant(prefill_ms=0.0, decode_ms=1.0)
"""Every step that samples takes a millisecond, every other none."""


def single_turns(
    prompts: Sequence[int],
    output_tokens: Sequence[int] | int = 1,
    arrival_ms: Sequence[float] | None = None,
    content: Sequence[Sequence[int]] | None = None,
    trace_block_size: int = 16,
    **columns: Any,
) -> Workload:
    """One request each, all at 0 and of unique content unless told otherwise."""
    counts = [-(-tokens // trace_block_size) for tokens in prompts]
    if content is None:
        starts = np.cumsum([0, *counts])
        content = [range(start, start + count) for start, count in zip(starts, counts, strict=False)]
    arrivals = arrival_ms if arrival_ms is not None else [0] * len(prompts)
    outputs = [output_tokens] * len(prompts) if isinstance(output_tokens, int) else output_tokens
    return _workload(
        columns,
        arrival_ns=[round(time_ms * MS) for time_ms in arrivals],
        prompt_tokens=prompts,
        output_tokens=outputs,
        hash_offsets=np.cumsum([0, *counts]),
        hash_ids=[hash_id for ids in content for hash_id in ids],
        trace_block_size=trace_block_size,
    )


def sessions(
    *turns: Sequence[tuple[int, int, float]],
    arrival_ms: Sequence[float] | None = None,
    trace_block_size: int = 16,
    quoted: bool = False,
    texts: Sequence[int] | None = None,
    **columns: Any,
) -> Workload:
    """Sessions as lists of (prompt tokens, output tokens, delay in ms); the prompts of one extend each other.

    With `quoted`, a prompt contains the output of the turn before. Sessions of the same text extend each other, too.
    """
    rows: list[tuple[int, int, int, int, float]] = []
    ids: list[range] = []
    for session, tuples in enumerate(turns):
        start = 100_000 * (session if texts is None else texts[session])
        for turn, (prompt, output, delay_ms) in enumerate(tuples):
            rows.append((session, turn, prompt, output, delay_ms))
            ids.append(range(start, start - (-prompt // trace_block_size)))
    last = {session: turn for session, turn, *_ in rows}
    arrivals = arrival_ms if arrival_ms is not None else [0] * len(turns)
    if quoted:
        columns["output_in_next"] = [turn < last[session] for session, turn, *_ in rows]
    return _workload(
        columns,
        arrival_ns=[round(arrivals[session] * MS) for session, *_ in rows],
        prompt_tokens=[prompt for _, _, prompt, _, _ in rows],
        output_tokens=[output for _, _, _, output, _ in rows],
        session=[session for session, *_ in rows],
        turn=[turn for _, turn, *_ in rows],
        delay_ns=[round(delay_ms * MS) for *_, delay_ms in rows],
        hash_offsets=np.cumsum([0, *map(len, ids)]),
        hash_ids=[hash_id for row in ids for hash_id in row],
        trace_block_size=trace_block_size,
    )


def _workload(given: dict[str, Any], **columns: Any) -> Workload:
    return Workload(**columns, **given)


def crowd(sessions: int = 60, **changes: Any) -> Workload:
    """Requests of some hundred tokens that share prefixes, 40 a second."""
    spec: dict[str, Any] = {
        "sessions": sessions,
        "prompt_tokens": Normal(mean=300, std=120),
        "output_tokens": Normal(mean=20, std=8),
        "arrivals": Poisson(qps=40),
        "prefixes": SharedRatio(groups=3, ratio=0.5),
    }
    return synthesise(SyntheticSpec(**{**spec, **changes}))


def conversations(count: int = 25, **changes: Any) -> Workload:
    """The same with some turns each, and time to think."""
    return crowd(
        count,
        turns=Normal(mean=3, std=1),
        followup_tokens=Normal(mean=40, std=10),
        think_time_ms=Normal(mean=50, std=30),
        **changes,
    )


def play(workload: Workload, engine: VllmConfig | None = None, **how: Any) -> OfflineRun:
    """Replay with every invariant checked after every step."""
    return run_offline(RunPlan(workload, engine, check=True, **how))
