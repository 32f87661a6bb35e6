"""Hours of random operations in minutes: `UNDERSTUDY_SOAK_OPS=1000000 pytest -m soak`."""

from __future__ import annotations

import os
import random

import pytest

from model.side_by_side import DUPLICATES, POLICIES, DuplicatesName, PolicyName, SideBySide, world

OPERATIONS = int(os.environ.get("UNDERSTUDY_SOAK_OPS", "0"))
SEED = int(os.environ.get("UNDERSTUDY_SOAK_SEED", "0"))
COMBINATIONS = [(policy, duplicates) for policy in POLICIES for duplicates in DUPLICATES]
MAX_GUARDS = 8  # of a kind: with more, everything would soon be referenced and nothing evicted

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(OPERATIONS <= 0, reason="set UNDERSTUDY_SOAK_OPS to a number of operations"),
]


def one_operation(both: SideBySide, rng: random.Random) -> None:
    def which() -> int:
        return rng.randrange(100)

    def some_blocks() -> list[int]:
        return [rng.randrange(1000) for _ in range(rng.randrange(7))]

    blocks = both.scattered(some_blocks()) if rng.random() < 0.4 else both.prefix(which(), which())
    if len(both.registered) > MAX_GUARDS:
        both.release(which(), tail_first=rng.random() < 0.7)
    if len(both.mutable) + len(both.staged) > MAX_GUARDS // 2:
        rng.choice([both.release_mutable, both.release_staged])(which())
    if len(both.weak) > MAX_GUARDS:
        both.weak.pop(rng.randrange(len(both.weak)))
    match rng.randrange(24):
        case 0 | 1 | 2 | 3:
            both.allocate(rng.randrange(7))
        case 4 | 5:
            both.stage(which(), blocks)
        case 6 | 7:
            both.register_staged(which())
        case 8 | 9 | 10:
            both.register_direct(which(), blocks)
        case 11:
            both.unstage(which())
        case 12 | 13:
            both.match_prefix(blocks)
        case 14:
            both.match_scattered(blocks)
        case 15:
            both.scan(blocks, touch=rng.random() < 0.5)
        case 16:
            both.look(blocks)
            both.touch(blocks)
        case 17:
            both.clone(which())
        case 18:
            both.take(which(), which())
            both.take_mutable(which(), which())
        case 19:
            both.remember(which())
            both.upgrade(which())
        case 20 | 21:
            both.release(which(), tail_first=rng.random() < 0.7)
        case 22:
            both.set_reset_on_release(which(), rng.random() < 0.3)
            both.misuse(which(), which())
        case _:
            both.drain_events(rng.randrange(40))
            if rng.random() < 0.05:
                both.clear_inactive()


@pytest.mark.parametrize(("policy", "duplicates"), COMBINATIONS)
def test_the_manager_stays_equal_to_its_model_for_long(policy: PolicyName, duplicates: DuplicatesName) -> None:
    rng = random.Random(f"{SEED} {policy} {duplicates}")
    remaining = -(-OPERATIONS // len(COMBINATIONS))
    while remaining > 0:  # a fresh manager now and then: other sizes, other defaults
        both = SideBySide(
            rng.randrange(1, 25), policy, duplicates, world(rng.randrange(1, 4)), reset_on_release=rng.random() < 0.1
        )
        for _ in range(min(remaining, 2000)):
            one_operation(both, rng)
            both.compare()
        remaining -= 2000
        both.compare_events()
        both.compare_uses()
        both.close()
