"""Leaping is not seen either where requests come and go between calls, and where a policy of the user's fails."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from tiers.building import EVENT_COLUMNS, INF, chain, forked, shared, way
from understudy import _core

if TYPE_CHECKING:
    from collections.abc import Sequence


class Picky:
    """Keeps three blocks of four; fails when it is asked for certain times."""

    def __init__(self, failures: set[int]) -> None:
        self.asked = 0
        self.failures = failures

    def select(self, lineages: Sequence[int], reuse: Sequence[int]) -> list[bool]:  # noqa: ARG002
        self.asked += 1
        if self.asked in self.failures:
            raise RuntimeError("not today")
        return [lineage % 4 != 0 for lineage in lineages]


def engine_of(rng: Random, failing: bool) -> _core.VllmEngine:
    """An engine with tiers, small enough that everything happens."""
    gbps = rng.choice([0.05, 0.3, 1.0, 10.0, INF])
    through = rng.random() < 0.3
    below: dict[str, Any] = {
        "g2_blocks": rng.choice([3, 12, 100]),
        "host": way(
            gbps,
            rng.choice([gbps, INF]),
            down_fixed_ns=rng.choice([0, 1000, 2_000_000]),
            up_fixed_ns=rng.choice([0, 2_000_000]),
        ),
        "recompute_fallback": rng.random() < 0.3,
        "offload_batch_size": rng.choice([1, 2, 32]),
        "offload_concurrency": rng.choice([None, 1, 2]),
        "write_through": through,
        "exclusive": not through and rng.random() < 0.3,
        "min_reuse": rng.choice([0, 0, 1]),
        "demand_first": rng.random() < 0.4,
        "onboard_failure_rate": rng.choice([0, 0, 0.3]),
    }
    if failing or rng.random() < 0.3:
        below["offload_filter"] = Picky({rng.randrange(1, 12) for _ in range(2)} if failing else set())
    if rng.random() < 0.2:
        below["g3"] = shared(rng.choice([10, 100]))
    config = _core.VllmEngineConfig(
        block_size=rng.choice([1, 2, 4]),
        num_gpu_blocks=rng.choice([12, 18, 30]),
        max_num_seqs=rng.choice([2, 4, 16]),
        max_num_batched_tokens=rng.choice([8, 64, 2048]),
        free_order=rng.choice(["all_last", "unkeyed_first"]),
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        async_scheduling=rng.random() < 0.5,
        events=True,
        kv_trace=True,
    )
    timing = _core.constant_timing(rng.choice([0.0, 1.0]), rng.choice([0.5, 1.0, 3.0]))
    return _core.VllmEngine(config, timing, tiers=_core.TierConfig(bytes_per_block=1_000_000, **below))


def live(seed: int, failing: bool, fast_forward: bool) -> list[Any]:
    """Everything that can be seen of a life with requests that come, and are cancelled, at any time."""
    rng = Random(f"live {seed}")
    engine = engine_of(rng, failing)
    engine.set_fast_forward(fast_forward)
    seen: list[Any] = []
    requests: list[int] = []
    emitted: Counter[int] = Counter()
    ended: list[Any] = []

    def advance(until_ns: int, stop_on_finish: bool) -> None:
        for _ in range(20):
            try:
                effects = engine.advance(until_ns, stop_on_finish)
            except RuntimeError as error:
                seen.append((str(error), engine.steps, engine.now_ns, engine.running))
            else:
                for request, tokens in effects.tokens:
                    emitted[request] += tokens
                for record in effects.finished:
                    times = (record.first_admit_ns, record.first_token_ns, record.second_token_ns)
                    waits = (record.parked_ns, record.room_wait_ns, record.below_total)
                    ended.append((record.id, *times, record.last_token_ns, record.finish_ns, *waits))
                return

    until_ns = 0
    for turn in range(rng.randrange(15, 40)):
        for _ in range(rng.choice([0, 1, 1, 3])):
            prompt, outputs = rng.randrange(1, 24), rng.randrange(1, rng.choice([5, 60]))
            blocks = forked(rng.randrange(3), rng.randrange(6), rng.randrange(1000), 100)
            if engine.never_fits(prompt, outputs) is None:
                more: dict[str, Any] = {"priority": rng.randrange(3), "arrival_time": float(turn)}
                requests.append(
                    engine.submit("r", prompt, outputs, blocks if turn % 5 else chain(turn, 100), **more)
                )
        until_ns += rng.choice([1, 3, 10, 40, 100]) * rng.choice([250_000, 1_000_000])
        advance(until_ns, rng.random() < 0.3)
        seen.append((tuple(ended), engine.now_ns, engine.asleep, engine.stuck, engine.idle, engine.steps))
        seen.append((engine.free_head(40), engine.wake_ns, sorted(emitted.items())))
        if requests and rng.random() < 0.3:
            now_ns = until_ns if engine.in_step else engine.now_ns
            seen.append(not engine.cancel(rng.choice(requests), now_ns).finished)
        if engine.idle:
            engine.skip_to(until_ns)
    advance(10**13, False)
    engine.check()
    batch, times_ns = engine.take_events()
    seen += [getattr(batch, name).tolist() for name in EVENT_COLUMNS]
    seen += [times_ns.tolist(), engine.take_kv_trace(), engine.idle, engine.stuck, engine.preemptions]
    seen += [*ended, sorted(emitted.items())]
    return seen


@pytest.mark.parametrize("seed", range(50))
def test_requests_come_and_go_between_fast_forwards_as_between_steps(seed: int) -> None:
    assert live(seed, failing=False, fast_forward=True) == live(seed, failing=False, fast_forward=False)


@pytest.mark.parametrize("seed", range(50, 80))
def test_a_policy_that_fails_in_a_fast_forward_leaves_what_it_leaves_in_a_step(seed: int) -> None:
    assert live(seed, failing=True, fast_forward=True) == live(seed, failing=True, fast_forward=False)


def test_that_policy_does_fail() -> None:
    seen = live(50, failing=True, fast_forward=True)
    assert "not today" in [row[0] for row in seen if isinstance(row, tuple)]


def cancelled_at(time_ns: int, victim: int, fast_forward: bool) -> list[Any]:
    """Two requests decode on a device full of what others left, which leaves by slow copies; a third one waits.

    One of them goes at `time_ns`: between steps, in one, or where blocks were taken for a step that cannot begin
    before a copy has ended, and whose events nobody has seen.
    """
    engine = _core.VllmEngine(
        _core.VllmEngineConfig(block_size=4, num_gpu_blocks=12, max_num_seqs=2, events=True, kv_trace=True),
        _core.constant_timing(1.0, 1.0),
        tiers=_core.TierConfig(
            bytes_per_block=1_000_000, g2_blocks=20, host=way(0.6, 0.6), recompute_fallback=False
        ),
    )
    engine.set_fast_forward(fast_forward)
    engine.submit("before", 44, 4, chain(9, 20))
    engine.advance(20_000_000)
    requests = [
        engine.submit("a", 6, 20, chain(1, 20)),
        engine.submit("b", 7, 17, chain(2, 20)),
        engine.submit("c", 12, 9, chain(9, 20)),
    ]
    engine.advance(time_ns)
    seen: list[Any] = [engine.now_ns, engine.in_step, engine.asleep, engine.running, engine.free_blocks]
    cancelled = engine.cancel(requests[victim], time_ns if engine.in_step else max(time_ns, engine.now_ns))
    told, told_ns = engine.take_events()  # what a router knows by now
    seen += [getattr(told, name).tolist() for name in EVENT_COLUMNS] + [told_ns.tolist()]
    engine.check()
    finished = engine.advance(10**12).finished
    engine.check()
    assert engine.idle
    for ended in [*cancelled.finished, *finished]:
        seen.append(
            (ended.id, ended.output_tokens, ended.first_token_ns, ended.finish_ns, ended.room_wait_ns)
        )
    batch, times_ns = engine.take_events()
    seen += [getattr(batch, name).tolist() for name in EVENT_COLUMNS]
    return [*seen, times_ns.tolist(), engine.take_kv_trace()]


@pytest.mark.parametrize("victim", range(3))
def test_a_request_may_go_wherever_a_fast_forward_has_stopped(victim: int) -> None:
    waits = 0
    for time_ns in range(20_000_000, 62_000_000, 250_000):
        forwarded, stepped = (cancelled_at(time_ns, victim, fast_forward) for fast_forward in (True, False))
        assert forwarded == stepped, time_ns
        waits += forwarded[2] is True
    assert waits, "nobody ever waited for a copy"
