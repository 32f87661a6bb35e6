"""Steps that an engine simulates by themselves are counted by the reason why they were not fast-forwarded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engines.building import MS, engine_for, request_spec, submit_spec

if TYPE_CHECKING:
    from understudy import _core

PROMPT, IDLE = "a running request computes its prompt", "no request runs, or a step is open"
EVENT = "a request ends, or needs a block that only a schedule can find"


def engine(**settings: Any) -> _core.VllmEngine:
    config = {
        "block_size": 16,
        "num_blocks": 100,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        **settings,
    }
    return engine_for(config)


def play(one: _core.VllmEngine, prompts: tuple[int, ...] = (40, 100), outputs: int = 50) -> dict[str, int]:
    for index, tokens in enumerate(prompts):
        submit_spec(one, request_spec(f"r{index}", [[index * 1000, tokens]], outputs), index, 16)
    one.advance(1_000 * MS)
    assert one.idle
    return one.stepped


def test_only_steps_with_a_prompt_or_an_admission_are_simulated_by_themselves() -> None:
    one = engine(async_scheduling=False)
    found = play(one)
    assert found[IDLE] == 1  # the first: both wait
    assert set(found) <= {IDLE, PROMPT, EVENT}
    assert found[PROMPT] == 2  # 140 tokens in steps of 64, and one step that decodes the first prompt
    assert sum(found.values()) < one.steps == 52


def test_an_engine_that_may_not_fast_forward_says_so() -> None:
    one = engine(async_scheduling=False)
    one.set_fast_forward(False)
    assert play(one) == {"fast-forward is off, or every step is reported": one.steps}
    drafts = engine(async_scheduling=True)
    assert sum(play(drafts).values()) < drafts.steps


def test_a_head_that_may_be_admitted_and_tokens_in_bursts_are_reasons() -> None:
    found = play(engine(async_scheduling=True), (64, 64, 16), 20)
    assert found["the head of the queue may be admitted"] == 1  # the first step had tokens for one prompt
    bursts = engine(async_scheduling=False, aic_nextn=1, aic_nextn_accept_rates="0.5")
    found = play(bursts)
    assert found == {"a step gives several tokens of a request": bursts.steps}
