"""A prompt that quotes an answer which ended by itself: SGLang's tree, its events and the index agree.

With overlap the batch behind the last one has computed the last output too, so the tree keeps it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.building import sessions
from understudy.engines.sglang_config import SglangConfig
from understudy.engines.timing import Constant
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan

if TYPE_CHECKING:
    from understudy.workload import Workload

TIMING = Constant(prefill_ms=2.0, decode_ms=1.0)


def quoting(turns: list[tuple[int, int, int]]) -> Workload:
    """One session; each turn is (new prompt tokens, outputs, tokens that it could have had beyond them)."""
    rows: list[tuple[int, int, float]] = []
    for new, outputs, _ in turns:
        before = sum(rows[-1][:2]) if rows else 0
        rows.append((before + new, outputs, 0.0))
    limits = [-1 if more < 0 else outputs + more for _, outputs, more in turns]
    return sessions(rows, trace_block_size=1, quoted=True, max_tokens=limits)


@pytest.mark.parametrize(("overlap", "cached"), [(True, 9), (False, 8)])
def test_the_last_output_is_a_hit_where_it_was_computed(overlap: bool, cached: int) -> None:
    engine = SglangConfig(
        block_size=1, num_gpu_blocks=900, timing=TIMING, disable_overlap_schedule=not overlap
    )
    run = run_offline(RunPlan(quoting([(4, 5, 5), (11, 2, -1)]), engine, check=True))
    assert run.timeline.cached_tokens_first.tolist() == [0, cached]


TURNS = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 3, 5, 30]), st.sampled_from([-1, 0, 1, 5])),
    min_size=2,
    max_size=5,
)


@given(turns=TURNS, page=st.sampled_from([1, 2, 4]), overlap=st.booleans(), blocks=st.sampled_from([60, 900]))
@settings(max_examples=40)
def test_events_name_each_block_once(
    turns: list[tuple[int, int, int]], page: int, overlap: bool, blocks: int
) -> None:
    engine = SglangConfig(
        block_size=page,
        num_gpu_blocks=max(blocks, 240 // page),
        timing=TIMING,
        disable_overlap_schedule=not overlap,
    )
    run = run_offline(RunPlan(quoting(turns), engine, check="deep", events=True))
    assert run.kv is not None
    assert run.timeline.completed.all()
    prompts = run.timeline.prompt_tokens.tolist()
    hits = run.timeline.cached_tokens_first.tolist()
    for (before, after), (_, outputs, more), hit in zip(pairwise(prompts), turns, hits[1:], strict=False):
        # The last output was computed only behind an end that the overlapped loop could not foresee.
        known = before + outputs - (0 if overlap and more > 0 else 1)
        assert hit == min(known // page, (after - 1) // page) * page
