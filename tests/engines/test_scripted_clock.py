"""The engine under a driver with a clock of its own: what becomes visible when, with arrivals and cancels anywhere."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from engines.building import MS, constant, engine_for
from engines.live_driver import LiveDriver
from model.replay_gen import random_case
from understudy import _core
from understudy.conformance.submit import blocks_of
from understudy.errors import InvalidArgument, WrongState
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload import OpenLoop

if TYPE_CHECKING:
    from understudy.engines.vllm_config import VllmConfig
    from understudy.workload import Workload

CONFIG = {"block_size": 4, "num_blocks": 33}
BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def content(first: int, tokens: int, block_size: int = 4) -> _core.Identities:
    return blocks_of(np.arange(first, first + tokens, dtype=np.uint32), block_size)[0]


def driver(asynchronous: bool = False, prefill_ms: float = 4.0, decode_ms: float = 10.0) -> LiveDriver:
    config = {**CONFIG, "async_scheduling": asynchronous}
    return LiveDriver(engine_for(config, timing=constant(prefill_ms, decode_ms)))


def submit_later(live: LiveDriver, time_ns: int, prompt_tokens: int, max_tokens: int, first: int = 1) -> None:
    live.at(
        time_ns,
        lambda d: void(d.submit(prompt_tokens, max_tokens, content(first, prompt_tokens + max_tokens))),
    )


def void(_: object) -> None:
    """An action's result that nobody needs."""


# ── When things become visible ──


@BOTH
def test_admissions_are_visible_at_the_start_of_a_step_and_tokens_at_its_end(asynchronous: bool) -> None:
    live = driver(asynchronous)
    submit_later(live, 0, 8, 3)
    live.run()
    (request,) = live.seen
    assert request.admitted_ns == 0
    # The prompt's step takes 4 + 10 ms, each further one 10: asynchronously too.
    assert request.token_ns == [14 * MS, 24 * MS, 34 * MS]
    assert request.finished_ns == 34 * MS


def test_asynchronously_a_request_that_arrives_while_a_batch_runs_is_computed_in_the_batch_after_the_next() -> (
    None
):
    live = driver(asynchronous=True)
    submit_later(live, 0, 8, 5)
    submit_later(live, 1 * MS, 8, 1, first=100)
    submit_later(live, 24 * MS, 8, 1, first=200)  # when a batch ends: it is read before the next schedule
    live.run()
    first, second, third = live.seen
    # Batches: 0-14 the first prompt; 14-24 scheduled at 0; 24-38 with the second prompt, scheduled at 14; 38-52.
    assert first.token_ns == [14 * MS, 24 * MS, 38 * MS, 52 * MS, 62 * MS]
    assert (second.admitted_ns, second.token_ns) == (14 * MS, [38 * MS])
    assert (third.admitted_ns, third.token_ns) == (24 * MS, [52 * MS])


def test_asynchronously_nothing_is_computed_for_nobody_behind_a_last_token() -> None:
    engine = engine_for({**CONFIG, "async_scheduling": True})
    engine.submit("a", 8, 2, content(1, 10))
    engine.begin_step(0)
    assert (engine.batch, engine.scheduled) == ([(0, 8)], [(0, 1)])
    assert engine.end_step(MS).tokens == [(0, 1)]
    engine.begin_step(MS)
    assert (engine.batch, engine.scheduled) == ([(0, 1)], [])
    (record,) = engine.end_step(2 * MS).finished
    assert (record.first_token_ns, record.second_token_ns, record.finish_ns) == (MS, 2 * MS, 2 * MS)
    assert (engine.idle, engine.free_blocks, engine.steps) == (True, 32, 2)


def test_a_request_that_arrives_in_the_middle_of_a_step_waits_for_its_end() -> None:
    live = driver()
    submit_later(live, 0, 8, 3)
    submit_later(live, 15 * MS, 8, 1, first=100)
    live.run()
    assert live.seen[1].admitted_ns == 24 * MS
    assert live.seen[1].token_ns == [38 * MS]
    assert live.seen[0].token_ns == [14 * MS, 24 * MS, 38 * MS]


def test_a_request_that_arrives_when_a_step_ends_is_in_the_next_one() -> None:
    live = driver()
    submit_later(live, 0, 8, 3)
    submit_later(live, 14 * MS, 8, 1, first=100)
    live.run()
    assert live.seen[1].admitted_ns == 14 * MS


def test_an_engine_that_is_idle_begins_when_a_request_arrives() -> None:
    live = driver()
    submit_later(live, 0, 8, 1)
    submit_later(live, 100 * MS, 8, 1)
    live.run()
    assert live.step_starts_ns == [0, 100 * MS]
    assert live.seen[1].token_ns == [114 * MS]
    assert live.seen[1].cached_tokens == 4  # its last block is computed again


@BOTH
def test_a_request_without_output_finishes_at_the_end_of_its_prefill_without_a_token(
    asynchronous: bool,
) -> None:
    live = driver(asynchronous)
    submit_later(live, 0, 8, 0)
    live.run()
    assert live.seen[0].token_ns == []
    assert live.seen[0].finished_ns == 4 * MS  # no token is sampled, so no decode time is spent
    assert live.engine.idle
    assert live.engine.free_blocks == 32


# ── Cancels ──


@BOTH
def test_a_request_cancelled_in_the_middle_of_a_step_gets_no_token_at_its_end(asynchronous: bool) -> None:
    live = driver(asynchronous)
    submit_later(live, 0, 8, 5)
    submit_later(live, 0, 8, 5, first=100)
    live.at(20 * MS, lambda d: void(d.engine.cancel(0, d.now_ns)))
    live.run()
    assert live.seen[0].token_ns == [14 * MS]
    assert live.seen[0].finished_ns == -1
    assert live.seen[1].token_ns == [14 * MS, 24 * MS, 34 * MS, 44 * MS, 54 * MS]
    assert live.engine.free_blocks == 32


@BOTH
def test_blocks_of_a_cancelled_request_are_free_before_the_step_ends(asynchronous: bool) -> None:
    live = driver(asynchronous)
    submit_later(live, 0, 8, 5)
    live.run(until_ns=0)
    assert live.engine.free_blocks == (
        29 if asynchronous else 30
    )  # the token behind the prompt has its block
    assert live.engine.cancel(0, 5 * MS).finished
    assert live.engine.free_blocks == 32
    live.engine.check()
    live.run()
    assert live.engine.idle


@BOTH
def test_a_request_cancelled_before_its_first_step_is_never_admitted(asynchronous: bool) -> None:
    live = driver(asynchronous)
    submit_later(live, 0, 8, 2)
    submit_later(live, 5 * MS, 8, 5, first=100)
    live.at(6 * MS, lambda d: void(d.engine.cancel(1, d.now_ns)))
    live.run()
    assert live.seen[1].token_ns == []
    assert live.engine.free_blocks == 32
    assert live.seen[0].token_ns == [14 * MS, 24 * MS]


# ── Misuse ──


def test_steps_do_not_nest() -> None:
    engine = engine_for(CONFIG)
    with pytest.raises(WrongState, match="end_step without a step"):
        engine.end_step(0)
    engine.submit("a", 8, 1, content(1, 9))
    engine.begin_step(0)
    with pytest.raises(WrongState, match="before the step in progress has ended"):
        engine.begin_step(0)
    engine.end_step(MS)
    assert engine.take_finished() == [0]


def test_identities_that_do_not_begin_at_the_first_block_are_refused() -> None:
    engine = engine_for(CONFIG)
    message = (
        r"request a: identities\[0\] is the block at position 1; give a sequence from its first block on"
    )
    with pytest.raises(InvalidArgument, match=message):
        engine.submit("a", 8, 4, content(1, 20)[1:])
    assert engine.idle


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "named_tokens", "message"),
    [
        (0, 1, 4, "prompt is empty"),
        (-1, 1, 4, "prompt_tokens"),
        (4, -1, 4, "max_tokens"),
        (8, 1, None, "prefix caching needs identities"),
        (8, 1, 4, "identities name 1 blocks, prompt and output fill 2"),
        (8, 5, 11, "identities name 2 blocks, prompt and output fill 3"),
        (64, 1, 65, "leaves no room for output in max_model_len=64"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_and_leaves_no_trace(
    prompt_tokens: int, max_tokens: int, named_tokens: int | None, message: str
) -> None:
    engine = engine_for({**CONFIG, "max_model_len": 64})
    with pytest.raises(InvalidArgument, match=message):
        engine.submit("a", prompt_tokens, max_tokens, content(1, named_tokens) if named_tokens else None)
    assert engine.idle
    assert engine.submit("b", 8, 4, content(1, 11)) == 0  # the last token fills no block
    engine.advance(100 * MS)
    assert engine.take_finished() == [0]


# ── Live and offline ──


def tokens_of(workload: Workload, row: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """The prompt as the workload describes it, then its outputs, or ones that nobody else has."""
    positions = np.arange(workload.prompt_tokens[row]) // workload.trace_block_size
    prompt = workload.prompt_hash_ids(row)[positions]
    outputs = workload.known_output_tokens(row)
    if outputs is None:
        first = 1_000_000 + 1_000 * row
        outputs = np.arange(first, first + workload.output_tokens[row], dtype=np.uint32)
    return np.concatenate([prompt, outputs])


def play_live(workload: Workload, config: VllmConfig, engine: _core.VllmEngine) -> LiveDriver:
    live = LiveDriver(engine)

    def arrive(row: int, driver: LiveDriver) -> None:
        identities = blocks_of(tokens_of(workload, row), config.block_size)[0]
        prompt, output = int(workload.prompt_tokens[row]), int(workload.output_tokens[row])
        driver.submit(prompt, output, identities, priority=int(workload.priority[row]))

    for row in range(len(workload)):
        live.at(int(workload.arrival_ns[row]), partial(arrive, row))
    live.run()
    return live


@pytest.mark.parametrize("part", range(4))
def test_a_driver_with_a_clock_sees_what_a_replay_reports(part: int) -> None:
    compared = bursts = 0
    for seed in range(part, 120, 4):
        case = random_case(seed, single_turns=True)
        workload = case.workload.normalised()
        engine = _core.VllmEngine(case.config.native(), case.config.native_timing())
        lengths = zip(workload.prompt_tokens, workload.output_tokens, strict=True)
        if any(engine.never_fits(prompt, output) for prompt, output in lengths):
            continue
        try:
            columns = run_offline(RunPlan(workload, case.config, load=OpenLoop())).timeline
        except WrongState:
            continue
        live = play_live(workload, case.config, engine)
        seen = live.seen
        assert [s.admitted_ns for s in seen] == columns.first_admit_ns.tolist(), seed
        assert [s.cached_tokens for s in seen] == columns.cached_tokens_first.tolist(), seed
        assert [s.finished_ns for s in seen] == columns.finish_ns.tolist(), seed
        assert [len(s.token_ns) for s in seen] == columns.output_tokens.tolist(), seed
        assert [s.token_ns[0] if s.token_ns else -1 for s in seen] == columns.first_token_ns.tolist(), seed
        assert [s.token_ns[1] if s.token_ns[1:] else -1 for s in seen] == columns.second_token_ns.tolist(), (
            seed
        )
        gaps = Counter(b - a for s in seen for a, b in itertools.pairwise(s.token_ns))
        assert gaps == dict(zip(columns.itl_ns.tolist(), columns.itl_count.tolist(), strict=True)), seed
        bursts += columns.burst_tokens > columns.burst_steps
        assert live.engine.steps == columns.steps, seed
        assert live.engine.free_blocks == case.config.num_gpu_blocks
        compared += 1
    assert compared > 10
    assert bursts > 0
