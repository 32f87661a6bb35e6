"""Small steps that the tests of the block manager share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from understudy.kv import MutableBlocks, RegisteredBlocks, StagedBlocks
from understudy.tokens import Identities

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.kv import BlockManager, BlockStore

AnyGuard = MutableBlocks | StagedBlocks | RegisteredBlocks


def chain(count: int, seed: int = 1) -> Identities:
    """`count` blocks of one sequence. Different seeds share no block."""
    return Identities.from_local_hashes([1_000_000 * seed + i for i in range(count)])


def roots(count: int, seed: int = 1) -> Identities:
    """`count` unrelated blocks, each the first of its sequence."""
    out = Identities()
    for i in range(count):
        out = out + chain(1, 100_000 * seed + i)
    return out


def register(manager: BlockManager, identities: Identities) -> RegisteredBlocks:
    """Allocate and register: the caller holds the only references."""
    return manager.allocate(len(identities)).register(identities)


def cache(manager: BlockManager, identities: Identities) -> list[int]:
    """Leave the blocks registered and unreferenced; their ids."""
    with register(manager, identities) as blocks:
        return ids(blocks)


def ids(blocks: RegisteredBlocks) -> list[int]:
    return [int(block) for block in blocks.ids]


def pools(manager: BlockManager) -> tuple[int, int]:
    """(empty blocks, cached blocks)."""
    metrics = manager.metrics()
    return metrics.reset_blocks, metrics.inactive_blocks


def refused(store: BlockStore, error: type[Exception], message: str, call: Callable[[], object]) -> None:
    """`call` raises, with a message like this, and the store is as before to the last bit."""
    before = store.dump()
    with pytest.raises(error, match=message):
        call()
    assert store.dump() == before
    store.check()
