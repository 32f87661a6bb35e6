"""Drives the block manager and its model with seeded random operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model.side_by_side import DuplicatesName, PolicyName, SideBySide
from model.world import world

if TYPE_CHECKING:
    import random

MAX_GUARDS = 8  # of a kind: with more, everything would soon be referenced and nothing evicted


def drive(rng: random.Random, policy: PolicyName, duplicates: DuplicatesName, operations: int) -> SideBySide:
    """Does so many operations on a manager of random size, comparing after each. Everything is released at the end."""
    both = SideBySide(
        rng.randrange(1, 25),
        policy,
        duplicates,
        world(rng.randrange(1, 4)),
        reset_on_release=rng.random() < 0.1,
    )
    for _ in range(operations):
        one_operation(both, rng)
        both.compare()
    both.compare_events()
    both.compare_uses()
    both.close()
    return both


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
