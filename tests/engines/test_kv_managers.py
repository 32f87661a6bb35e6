"""The engine under both KV managers: the rules they share, and what differs, in numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from engines.building import MS, engine_for, request_spec, submit_spec

if TYPE_CHECKING:
    from understudy import _core

BLOCK = 4
MANAGERS = pytest.mark.parametrize("manager", ["native", "kvbm"])


def engine(manager: str, blocks: int = 100, **config: Any) -> _core.VllmEngine:
    """An engine with so many usable blocks of 4 that checks itself and its events at every step."""
    settings = {"block_size": BLOCK, "num_blocks": blocks + 1, "kv_manager": manager, **config}
    return engine_for(settings, check=True)


def submit(worker: _core.VllmEngine, prompt: int, outputs: int, start: int = 1, index: int = 0) -> int:
    """A prompt of so many tokens that count from `start`; `index` decides the outputs."""
    spec = request_spec(f"{index}", [[start, prompt]], outputs)
    return submit_spec(worker, spec, index, BLOCK)


def step(worker: _core.VllmEngine) -> list[_core.RequestRecord]:
    worker.begin_step(worker.now_ns)
    return worker.end_step(worker.now_ns).finished


def drain(worker: _core.VllmEngine) -> list[_core.RequestRecord]:
    records = []
    for _ in range(1000):
        if worker.idle:
            break
        records += step(worker)
    worker.check()
    free, active, inactive = worker.pool
    assert active == 0
    assert free + inactive == worker.free_blocks
    return records


# ── Rules that do not depend on the manager ──


@MANAGERS
def test_a_prompt_is_computed_in_chunks_and_the_next_waits_for_budget(manager: str) -> None:
    worker = engine(manager, max_num_batched_tokens=4)
    first, second = submit(worker, 8, 4), submit(worker, 8, 4, start=101, index=1)
    step(worker)
    assert worker.scheduled == [(first, 4)]
    assert worker.emitted(first) == 0
    step(worker)
    assert worker.scheduled == [(first, 4)]
    assert worker.emitted(first) == 1
    assert worker.running == [first]
    assert worker.waiting_head() == [second]


@MANAGERS
def test_growth_preempts_the_newest_which_goes_to_the_head_of_the_queue(manager: str) -> None:
    worker = engine(manager, 6)
    first, second = submit(worker, 8, 8), submit(worker, 8, 8, start=101, index=1)
    while not worker.preemptions:
        step(worker)
    assert worker.preempted == [second]
    assert worker.waiting_head() == [second]
    assert worker.running == [first]
    assert worker.admitted == []
    assert worker.emitted(first) == 6  # 13 tokens need the fourth block
    assert [(record.id, record.output_tokens) for record in drain(worker)] == [(first, 8), (second, 8)]


@MANAGERS
def test_a_large_prompt_is_not_overtaken_by_a_small_one(manager: str) -> None:
    worker = engine(manager, 6)
    holder = submit(worker, 16, 4)
    large, small = submit(worker, 12, 1, start=101, index=1), submit(worker, 4, 1, start=201, index=2)
    for _ in range(3):
        step(worker)
        assert worker.running == [holder]
    step(worker)
    step(worker)
    assert [request for request, _, _ in worker.admitted] == [large, small]
    assert worker.preemptions == 0


@MANAGERS
def test_decode_takes_from_the_budget_before_prompts(manager: str) -> None:
    worker = engine(manager, max_num_batched_tokens=8)
    first = submit(worker, 8, 4)
    step(worker)
    second = submit(worker, 8, 4, start=101, index=1)
    step(worker)
    assert worker.scheduled == [(first, 1), (second, 7)]


@MANAGERS
def test_a_request_without_output_ends_with_its_prompt(manager: str) -> None:
    worker = engine(manager)
    done = submit(worker, 8, 0)
    (record,) = step(worker)
    assert (record.id, record.output_tokens) == (done, 0)
    drain(worker)


# ── Tokens and blocks ──


@MANAGERS
def test_a_sampled_token_takes_a_block_in_the_next_step(manager: str) -> None:
    worker = engine(manager)
    submit(worker, 8, 4)
    step(worker)
    assert worker.pool[1] == 2  # nine tokens are known, eight have a place
    step(worker)
    assert worker.pool[1] == 3


@MANAGERS
def test_a_last_token_never_takes_a_block(manager: str) -> None:
    worker = engine(manager, 2)
    done = submit(worker, 8, 1)
    worker.begin_step(0)
    assert worker.free_after_schedule == 0
    worker.end_step(MS)
    assert worker.take_finished() == [done]
    assert worker.pool == (0, 0, 2)


@MANAGERS
def test_a_fully_cached_prompt_computes_its_last_block_again(manager: str) -> None:
    worker = engine(manager)
    submit(worker, 8, 1)
    drain(worker)
    again = submit(worker, 8, 1)
    step(worker)
    assert worker.admitted == [(again, False, 4)]
    assert worker.scheduled == [(again, 4)]
    # vLLM computes it into a block of its own and keeps both copies; kvbm has one block a hash.
    assert worker.pool[2] == (3 if manager == "native" else 2)


@MANAGERS
def test_a_preempted_request_of_nine_tokens_has_eight_cached(manager: str) -> None:
    worker = engine(manager, 5)
    first, second = submit(worker, 8, 3), submit(worker, 8, 2, start=101, index=1)
    step(worker)
    step(worker)
    assert worker.preempted == [second]
    step(worker)
    assert worker.take_finished() == [first]
    step(worker)
    assert worker.admitted == [(second, True, 8)]
    assert worker.scheduled == [(second, 1)]


# ── What sharing changes ──


@pytest.mark.parametrize(("manager", "active"), [("native", 3), ("kvbm", 2)])
def test_equal_prompts_in_flight_take_blocks_of_their_own_or_share_them(manager: str, active: int) -> None:
    worker = engine(manager)
    submit(worker, 8, 4)
    submit(worker, 8, 4, index=1)
    step(worker)
    assert worker.pool[1] == active
    assert len(worker.resident_hashes()) == 2


def test_prompts_that_branch_share_what_they_have_in_common() -> None:
    worker = engine("kvbm")
    for index, tail in enumerate((50, 60)):
        submit_spec(worker, request_spec(f"{index}", [[1, 8], [tail, 4]], 4), index, BLOCK)
    step(worker)
    assert worker.pool[1] == len(worker.resident_hashes()) == 4
    assert [cached for _, _, cached in worker.admitted] == [0, 8]


@pytest.mark.parametrize(("manager", "visible"), [("native", 1), ("kvbm", 2)])
def test_a_prompt_block_is_visible_when_its_last_token_is_scheduled_or_once_it_is_acquired(
    manager: str, visible: int
) -> None:
    worker = engine(manager, max_num_batched_tokens=6)
    submit(worker, 8, 1)
    step(worker)  # six of eight tokens: the second block is allocated and half computed
    assert worker.pool[1] == 2
    assert len(worker.resident_hashes()) == visible


@pytest.mark.parametrize(("manager", "after"), [("native", 2), ("kvbm", 3)])
def test_a_generated_block_is_visible_when_scheduled_or_when_the_token_behind_it_comes(
    manager: str, after: int
) -> None:
    worker = engine(manager)
    submit(worker, 6, 10)
    step(worker)
    step(worker)  # seven tokens computed, eight known
    assert len(worker.resident_hashes()) == 1
    worker.begin_step(worker.now_ns)  # the eighth is scheduled
    assert len(worker.resident_hashes()) == (2 if after == 2 else 1)
    worker.end_step(worker.now_ns)  # and the ninth is known
    assert len(worker.resident_hashes()) == 2


def test_two_that_generate_the_same_end_up_with_one_block() -> None:
    worker = engine("kvbm", 10)
    submit(worker, 6, 8)
    submit(worker, 6, 8)  # the same index, so the same outputs
    step(worker)
    assert worker.pool == (7, 3, 0)  # the prompt's full block, and a partial one each
    step(worker)
    step(worker)
    assert worker.pool == (8, 2, 0)
    drain(worker)
    assert worker.pool == (7, 0, 3)  # 13 tokens were computed: three full blocks


def test_what_nobody_holds_is_evicted_from_the_leaves_up() -> None:
    worker = engine("kvbm", 4)
    submit(worker, 16, 1)
    drain(worker)
    assert worker.pool == (0, 0, 4)
    submit(worker, 4, 1, start=101, index=1)
    drain(worker)
    again = submit(worker, 16, 1)
    step(worker)
    assert worker.admitted == [(again, False, 12)]


# ── Without prefix caching ──


@MANAGERS
def test_without_prefix_caching_nobody_is_asked_for_identities_and_nothing_is_told(manager: str) -> None:
    worker = engine(manager, enable_prefix_caching=False)
    for index in range(3):
        worker.submit(f"{index}", 9, 9)
    drain(worker)
    assert worker.preemptions == 0
    assert len(worker.take_all_events()) == 0
    assert len(worker.take_events()[0]) == 0


def test_without_prefix_caching_a_preempted_request_finds_its_own_blocks_but_computes_them_again() -> None:
    worker = engine("kvbm", 8, enable_prefix_caching=False, block_size=16)
    first, second = worker.submit("first", 64, 2), worker.submit("second", 64, 2)
    step(worker)
    assert worker.pool == (0, 8, 0)
    names = set(worker.resident_hashes())
    assert len(names) == 8
    worker.begin_step(2 * MS)
    assert worker.preempted == [second]
    assert worker.pool == (0, 5, 3)  # the first took a fifth block, the last of the second's four
    worker.end_step(3 * MS)
    assert worker.take_finished() == [first]
    assert worker.pool == (1, 0, 7)
    step(worker)
    assert worker.admitted == [(second, True, 0)]
    assert worker.scheduled == [(second, 65)]
    assert set(worker.resident_hashes()) < names  # three were here, the fourth has its old name again
    drain(worker)


def test_native_registers_nothing_without_prefix_caching() -> None:
    worker = engine("native", enable_prefix_caching=False)
    worker.submit("a", 8, 2)
    step(worker)
    assert worker.resident_hashes() == []
    drain(worker)
    assert worker.pool == (100, 0, 0)
