"""Wrong calls, and ends that come in the middle: typed errors, nothing changed, every block returned."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator

import pytest

from kv.request_building import (
    ANY,
    LAYOUT,
    Memory,
    assert_idle,
    assert_sound,
    decode,
    greedy,
    prefill,
    prompt,
    run,
    snapshot,
)
from understudy.errors import CapacityExhausted, ConfigError, InvalidArgument, UnderstudyError, WrongState
from understudy.kv import KvCacheManager, KvLayout, RequestKv

PROMPT = 40
BUDGET = 30


@pytest.fixture
def manager() -> Iterator[KvCacheManager]:
    with KvCacheManager(16, LAYOUT, events=True) as manager:
        yield manager


def make(manager: KvCacheManager, place: str) -> RequestKv:
    """A request in one of the places of its life."""
    kv = manager.request(prompt(PROMPT), BUDGET)
    if place in ("between chunks", "chunk scheduled", "last chunk scheduled"):
        kv.schedule_prefill(20)
        kv.apply_prefill()
    if place in ("decoding", "decode scheduled", "speculation scheduled", "finished", "preempted"):
        prefill(kv)
        decode(kv)
    match place:
        case "prefill scheduled":
            kv.schedule_prefill(PROMPT)
        case "chunk scheduled":
            kv.schedule_prefill(10)
        case "last chunk scheduled":
            kv.schedule_prefill(20)
        case "decode scheduled":
            kv.schedule_decode()
        case "speculation scheduled":
            kv.schedule_speculative(8)
        case "finished":
            run(kv)
        case "preempted":
            kv.preempt()
        case "closed":
            kv.close()
    return kv


PLACES = {
    "fresh": 0,
    "prefill scheduled": 3,
    "between chunks": 2,
    "chunk scheduled": 2,
    "last chunk scheduled": 3,
    "decoding": 3,
    "decode scheduled": 3,
    "speculation scheduled": 4,
    "finished": 5,
    "preempted": 0,
    "closed": 0,
}
Call = Callable[[RequestKv], object]
CALLS: dict[str, Call] = {
    "match_prefix()": lambda kv: kv.match_prefix(),
    "schedule_prefill(1)": lambda kv: kv.schedule_prefill(1),
    "schedule_prefill(0)": lambda kv: kv.schedule_prefill(0),
    "schedule_prefill(-1)": lambda kv: kv.schedule_prefill(-1),
    "schedule_prefill(past the prompt)": lambda kv: kv.schedule_prefill(PROMPT + BUDGET),
    "schedule_prefill(2**70)": lambda kv: kv.schedule_prefill(2**70),
    "schedule_decode()": lambda kv: kv.schedule_decode(),
    "schedule_speculative(2)": lambda kv: kv.schedule_speculative(2),
    "schedule_speculative(0)": lambda kv: kv.schedule_speculative(0),
    "view_ahead()": lambda kv: kv.view_ahead(),
    "revert()": lambda kv: kv.revert(),
    "view()": lambda kv: kv.view(),
    "page_ids": lambda kv: kv.page_ids,
    "view_length": lambda kv: kv.view_length,
    "apply_prefill()": lambda kv: kv.apply_prefill(),
    "apply_prefill(token)": lambda kv: kv.apply_prefill(ANY),
    "apply_prefill(-1)": lambda kv: kv.apply_prefill(-1),
    "apply_decode(token)": lambda kv: kv.apply_decode(ANY),
    "apply_decode(2**32)": lambda kv: kv.apply_decode(2**32),
    "apply_speculative([])": lambda kv: kv.apply_speculative([]),
    "apply_speculative(too many)": lambda kv: kv.apply_speculative([ANY] * 9),
    "apply_speculative([-1])": lambda kv: kv.apply_speculative([-1]),
    "preempt()": lambda kv: kv.preempt(),
}
IDLE = {"preempt()"}
SCHEDULED = {"revert()", "view()", "page_ids", "view_length"}
LEGAL: dict[str, set[str]] = {
    "fresh": IDLE | {"match_prefix()", "schedule_prefill(1)"},
    "prefill scheduled": SCHEDULED | {"apply_prefill(token)"},
    "between chunks": IDLE | {"schedule_prefill(1)"},
    "chunk scheduled": SCHEDULED | {"apply_prefill()"},
    "last chunk scheduled": SCHEDULED | {"apply_prefill(token)"},
    "decoding": IDLE | {"schedule_decode()", "schedule_speculative(2)"},
    "decode scheduled": SCHEDULED | {"apply_decode(token)", "view_ahead()"},
    "speculation scheduled": SCHEDULED | {"apply_speculative([])"},
    "finished": IDLE,
    "preempted": IDLE | {"match_prefix()", "schedule_prefill(1)"},
    "closed": set(),
}
MALFORMED = {  # whatever the state: the value itself cannot be taken
    "schedule_prefill(-1)",
    "schedule_prefill(2**70)",
    "apply_prefill(-1)",
    "apply_decode(2**32)",
    "apply_speculative([-1])",
}
MISFIT = {  # the state is right, the value is not
    ("fresh", "schedule_prefill(0)"),
    ("fresh", "schedule_prefill(past the prompt)"),
    ("between chunks", "schedule_prefill(0)"),
    ("between chunks", "schedule_prefill(past the prompt)"),
    ("preempted", "schedule_prefill(0)"),
    ("preempted", "schedule_prefill(past the prompt)"),
    ("prefill scheduled", "apply_prefill()"),
    ("last chunk scheduled", "apply_prefill()"),
    ("chunk scheduled", "apply_prefill(token)"),
    ("decoding", "schedule_speculative(0)"),
    ("speculation scheduled", "apply_speculative(too many)"),
}


# --- every call in every state --------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", CALLS)
def test_every_call_in_every_state_works_or_changes_nothing(
    manager: KvCacheManager, place: str, call: str
) -> None:
    with make(manager, place) as kv:
        assert kv.held_blocks == PLACES[place]
        if call in LEGAL[place]:
            CALLS[call](kv)
            assert_sound(manager, [kv])
        else:
            bad_value = call in MALFORMED or (place, call) in MISFIT
            before = manager.blocks.store.dump(), snapshot(kv)
            with pytest.raises(InvalidArgument if bad_value else WrongState) as raised:
                CALLS[call](kv)
            assert (manager.blocks.store.dump(), snapshot(kv)) == before
            assert len(str(raised.value)) > 20
    assert_idle(manager)


def test_a_refused_apply_can_be_repeated_rightly(manager: KvCacheManager) -> None:
    memory = Memory()
    with manager.request(prompt(40), 20) as kv:
        kv.schedule_prefill(40)
        (token,) = memory.forward(kv)[-1:]
        with pytest.raises(InvalidArgument, match="needs the token that it sampled"):
            kv.apply_prefill()
        kv.apply_prefill(token)
        kv.schedule_decode()
        with pytest.raises(InvalidArgument, match="token must be 0 to 4294967295"):
            kv.apply_decode(-5)
        kv.apply_decode(memory.forward(kv)[-1])
        kv.schedule_speculative(3)
        with pytest.raises(InvalidArgument, match="at most the 3 tokens"):
            kv.apply_speculative([1, 2, 3, 4])
        kv.revert()
        assert run(kv, memory) == greedy(prompt(40), 20)


@pytest.mark.parametrize(
    ("place", "call", "message"),
    [
        ("decoding", "schedule_prefill(1)", "prefill is complete: all 40 tokens are computed"),
        ("between chunks", "schedule_decode()", "before prefill is complete: 20 of 40 tokens"),
        ("finished", "schedule_decode()", "after the output budget of 30 tokens is used up"),
        ("between chunks", "schedule_prefill(past the prompt)", "takes 1 to 20 tokens"),
        ("chunk scheduled", "apply_prefill(token)", "only the last chunk of a prefill samples a token"),
        ("decode scheduled", "apply_prefill()", "this one is decode_scheduled"),
        ("between chunks", "match_prefix()", "20 tokens are already there"),
        ("closed", "schedule_prefill(1)", "this one is closed"),
    ],
)
def test_an_error_says_what_is_wrong(manager: KvCacheManager, place: str, call: str, message: str) -> None:
    with make(manager, place) as kv, pytest.raises(UnderstudyError, match=message):
        CALLS[call](kv)


def test_without_an_output_budget_prefill_samples_nothing(manager: KvCacheManager) -> None:
    with manager.request(prompt(20), 0) as kv:
        kv.schedule_prefill(20)
        before = snapshot(kv)
        with pytest.raises(InvalidArgument, match="output budget is used up"):
            kv.apply_prefill(ANY)
        assert snapshot(kv) == before
        assert kv.apply_prefill().finished
        with pytest.raises(WrongState, match="budget of 0 tokens"):
            kv.schedule_decode()


def test_the_token_of_the_prefill_counts_against_the_output_budget(manager: KvCacheManager) -> None:
    with manager.request(prompt(20), 1) as kv:
        kv.schedule_prefill(20)
        assert kv.apply_prefill(ANY).finished
        with pytest.raises(WrongState):
            kv.schedule_decode()


@pytest.mark.parametrize("held", [0, 1, 14])
def test_a_schedule_that_does_not_fit_takes_nothing(manager: KvCacheManager, held: int) -> None:
    with manager.request(prompt(240), 1) as kv:
        if held:
            kv.schedule_prefill(held * 16)
            kv.apply_prefill()
        with manager.request(prompt(16 * (15 - held), seed=2), 1) as other:
            other.schedule_prefill(16 * (15 - held))
            before = manager.blocks.store.dump(), snapshot(kv)
            with pytest.raises(CapacityExhausted, match="but only 0 of 16 are available"):
                kv.schedule_prefill(240 - held * 16)
            assert (manager.blocks.store.dump(), snapshot(kv)) == before
        prefill(kv)


@pytest.mark.parametrize(
    ("tokens", "budget", "message"),
    [
        ([], 1, "prompt must hold at least one token"),
        ([-1], 1, r"prompt\[0\]"),
        ([2**32], 1, r"prompt\[0\]"),
        ([1, 1.5], 1, "prompt"),
        ([1], -1, "max_output_tokens"),
        ([1], 2**40, "max_output_tokens"),
        ([1], "many", "max_output_tokens"),
    ],
)
def test_a_request_that_cannot_be_is_refused(
    manager: KvCacheManager, tokens: list[int], budget: int, message: str
) -> None:
    before = manager.blocks.store.dump()
    with pytest.raises(InvalidArgument, match=message):
        manager.request(tokens, budget)
    assert manager.blocks.store.dump() == before


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.request([1, 2, 3], 1, mm_runs=[(9, 2, 2)]),
        lambda m: m.request([1, 2, 3], 1, mm_runs=[(9, 0, 2), (9, 1, 1)]),
        lambda m: m.request([1, 2, 3], 1, mm_runs=[(9, -1, 2)]),
        lambda m: m.lifetime_blocks(-1, 1),
        lambda m: m.lifetime_blocks(1, 2**60),
    ],
)
def test_bad_arguments_of_the_manager_are_refused(
    manager: KvCacheManager, call: Callable[[KvCacheManager], object]
) -> None:
    with pytest.raises(InvalidArgument):
        call(manager)


@pytest.mark.parametrize("num_blocks", [-1, 0, 1, 2**40, 2.5, "8", None])
def test_a_pool_needs_a_block_besides_the_padding(num_blocks: int) -> None:
    with pytest.raises(ConfigError, match="num_blocks"):
        KvCacheManager(num_blocks, LAYOUT)


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy"):
        KvCacheManager(8, LAYOUT, policy="newest")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="duplicates"):
        KvCacheManager(8, LAYOUT, duplicates="merge")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="block_size"):
        KvCacheManager(8, KvLayout(2**21, 1, 1, 1))


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_close_in_every_state_returns_every_block_and_is_idempotent(
    manager: KvCacheManager, place: str
) -> None:
    kv = make(manager, place)
    for _ in range(3):
        kv.close()
        assert (kv.state, kv.held_blocks) == ("closed", 0)
        assert_sound(manager, [kv])
        assert_idle(manager)
    with kv:
        pass
    assert manager.blocks.metrics().leaked_guards == 0


@pytest.mark.parametrize("place", PLACES)
def test_a_dropped_request_returns_every_block_and_warns(manager: KvCacheManager, place: str) -> None:
    kv = make(manager, place)
    held = PLACES[place]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        del kv
        gc.collect()
    assert [w.category for w in seen] == [ResourceWarning] * (held > 0)
    assert all(f"{held} blocks were dropped" in str(w.message) for w in seen)
    assert manager.blocks.metrics().leaked_guards == (held > 0)
    assert_idle(manager)


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_returns_every_block_and_goes_on(manager: KvCacheManager, place: str) -> None:
    with pytest.raises(ZeroDivisionError), make(manager, place):
        _ = 1 // 0
    assert_idle(manager)


def test_closing_keeps_the_numbers_and_the_cached_blocks(manager: KvCacheManager) -> None:
    with manager.request(prompt(40), 2) as kv:
        run(kv)
    assert (kv.computed_tokens, kv.generated_tokens, len(kv.tokens)) == (41, 2, 42)
    assert kv.finished
    with manager.request(prompt(40), 2) as again:
        assert again.match_prefix() == 32


def test_a_request_outlives_its_manager() -> None:
    manager = KvCacheManager(8, LAYOUT)
    store = manager.blocks.store
    kv = manager.request(prompt(40), 2)
    prefill(kv)
    manager.close()
    manager.close()
    del manager
    gc.collect()
    run(kv)
    kv.close()
    store.check()
