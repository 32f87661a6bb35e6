"""Outputs that SGLang ends by its own rule, because its pool or context holds no more."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.building import single_turns
from understudy.api import replay
from understudy.engines.sglang_config import SglangConfig
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import WrongState
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan

TIMING = Constant(prefill_ms=2.0, decode_ms=1.0)


@pytest.mark.parametrize("check", [False, True, "deep"])
def test_a_run_with_cut_outputs_passes_the_check_and_says_how_many(check: bool | Literal["deep"]) -> None:
    # A pool of 192 tokens, less the prompt in whole pages (48), a page and one token.
    engine = SglangConfig(block_size=16, num_gpu_blocks=12, timing=TIMING)
    run = run_offline(RunPlan(single_turns([38, 20], [130, 7]), engine, check=check))
    assert run.timeline.output_tokens.tolist() == [127, 7]
    assert run.notes[0].startswith("outputs cut: 1 of 2 completed requests lack 3 of the tokens")


def test_the_report_says_that_outputs_were_cut() -> None:
    engine = SglangConfig(block_size=16, num_gpu_blocks=12, timing=TIMING)
    report = replay(single_turns([38], 130), engine)
    assert any(note.startswith("outputs cut: 1 of 1") for note in report.run.notes)


def test_vllm_says_that_a_context_cut_outputs() -> None:
    engine = VllmConfig(block_size=16, num_gpu_blocks=12, max_model_len=64, timing=TIMING)
    run = run_offline(RunPlan(single_turns([38], 130), engine, check=True))
    assert run.timeline.output_tokens.tolist() == [26]
    assert run.notes[0].startswith("outputs cut: 1 of 1 completed requests lack 104")


def test_whole_outputs_have_no_note() -> None:
    engine = SglangConfig(block_size=16, num_gpu_blocks=100, timing=TIMING)
    assert run_offline(RunPlan(single_turns([38], 130), engine)).notes == ()


@given(
    page=st.sampled_from([1, 2, 16, 64]),
    pages=st.integers(2, 40),
    context=st.one_of(st.none(), st.integers(20, 300)),
    prompt=st.integers(1, 200),
    outputs=st.integers(1, 300),
    more=st.sampled_from([None, 0, 1, 50]),
    overlap=st.booleans(),
)
@settings(max_examples=50)
def test_the_check_accepts_every_length_that_sglang_gives(
    page: int, pages: int, context: int | None, prompt: int, outputs: int, more: int | None, overlap: bool
) -> None:
    engine = SglangConfig(
        block_size=page,
        num_gpu_blocks=pages,
        max_model_len=context,
        timing=TIMING,
        disable_overlap_schedule=not overlap,
    )
    limit: dict[str, Any] = {} if more is None else {"max_tokens": [outputs + more]}
    try:
        run = run_offline(RunPlan(single_turns([prompt], outputs, **limit), engine, check=True))
    except WrongState:  # a pool without the page that SGLang keeps back admits nothing
        return
    pool = page * pages
    window = min(context or pool, pool) - 1
    rounded = -(-prompt // page) * page
    if run.timeline.completed[0]:
        most = min(window - prompt - 1, pool - rounded - page - 1)
        assert run.timeline.output_tokens[0] == max(min(outputs, most), 1)
