"""User-defined host policies and filters that raise, with several KV groups: the error surfaces, nothing is lost."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from eviction.strict import StrictLru
from model.grouped_device import Group
from tiers.building import way
from tiers.group_building import GroupWorker, below, chain
from understudy import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STATE, FULL = Group(32, kind="mamba"), Group(32)
LAYOUTS = [  # groups, unit of hashing, and blocks for about two requests
    ([Group(16, window=64), Group(16)], 0, 90),
    ([STATE, STATE, FULL], 0, 36),
    ([STATE, FULL], 8, 32),  # hits end inside blocks
    ([Group(32, kind="mamba", checkpoint=True), FULL, Group(16, kind="circular")], 0, 32),
    ([Group(16, window=40, kind="rswa"), Group(16, window=24, kind="sliding_window_mla"), Group(32)], 0, 90),
]
ROUNDS = 4


class NotTodayError(Exception):
    """An error that only the user's code raises."""


class Fragile:
    """Raises at certain calls."""

    def __init__(self, failures: set[int]) -> None:
        self.calls = 0
        self.failures = failures

    def ask(self) -> None:
        self.calls += 1
        if self.calls in self.failures:
            raise NotTodayError

    def select(self, lineages: Sequence[int], _reuse: object) -> list[bool]:
        self.ask()
        return [True] * len(lineages)

    def host_policy(self) -> StrictLru:
        policy = StrictLru()
        policy.hook = lambda name: self.ask() if name == "select" else None
        return policy


def play(worker: GroupWorker) -> int:
    """Run to the end, with each failed call made again; return the number of errors."""
    errors = 0

    def insist(call: Callable[[int], Any], now_ns: int) -> Any:
        nonlocal errors
        for _ in range(100):
            try:
                return call(now_ns)
            except NotTodayError:
                errors += 1
                worker.engine.check()
        raise AssertionError("the call fails again and again")

    for _ in range(20_000):
        if worker.engine.idle:
            break
        insist(worker.engine.begin_step, worker.now_ns)
        if not worker.engine.asleep:
            assert not worker.engine.stuck
            worker.now_ns = worker.engine.now_ns
            effects = insist(worker.engine.end_step, worker.now_ns)
            worker.records |= {record.id: record for record in effects.finished}
        else:
            wake = worker.engine.wake_ns
            assert wake is not None
            worker.now_ns = max(worker.now_ns, wake)
        worker.engine.check()
    assert worker.engine.idle
    while (wake := worker.engine.wake_ns) is not None:
        worker.now_ns = max(worker.now_ns, wake)
        insist(worker.engine.land, wake)
        worker.engine.check()
    return errors


@pytest.mark.parametrize("raising", ["filter", "host policy"])
@pytest.mark.parametrize("mode", ["write_through", "evict", "exclusive"])
@pytest.mark.parametrize(
    ("groups", "match_unit", "blocks"), LAYOUTS, ids=["window", "states", "partial", "checkpoint", "rswa"]
)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_every_request_ends_and_no_block_is_lost(
    raising: str, mode: str, groups: list[Group], match_unit: int, blocks: int, is_async: bool
) -> None:
    rng = Random(f"{raising} {mode} {groups} {is_async}")
    errors = 0
    for _ in range(ROUNDS):
        fragile = Fragile({rng.randrange(1, 25) for _ in range(4)})
        part: dict[str, Any] = (
            {"offload_filter": fragile} if raising == "filter" else {"g2_policy": fragile.host_policy}
        )
        config = below(
            rng.choice([12, 40]),
            rng.choice([None, 60]),
            write_through=mode == "write_through",
            exclusive=mode == "exclusive",
            host=way(rng.choice([0.5, 5.0])),
            offload_batch_size=rng.choice([2, 4096]),
            **part,
        )
        settings = {"async_scheduling": is_async, "max_num_batched_tokens": rng.choice([96, 2048])}
        worker = GroupWorker(groups, blocks, config, rng.choice([0, None]), settings, match_unit)
        numbers = []
        for _ in range(12):
            outputs = rng.randrange(1, 40)
            prompt = rng.randrange(40, 400)
            identities = chain(rng.randrange(10, 13), 440 // worker.unit, rng.choice([0, 4, 12]))
            numbers.append((worker.submit(identities, prompt, outputs), outputs))
            if rng.random() < 0.3:
                errors += play(worker)
        errors += play(worker)
        assert [worker.records[number].output_tokens for number, _ in numbers] == [o for _, o in numbers]
        _, active, _, held = worker.engine.tier_blocks(_core.Tier.G1)
        assert (active, held) == (0, 0)
    assert errors > 0
