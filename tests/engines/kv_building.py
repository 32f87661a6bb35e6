"""Blocks and managers for the tests of the KV manager."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from model.kv_manager import Told, told
from understudy.kv.kv_manager import KvManager
from understudy.tokens import Identities, Identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from understudy.kv.sequence import ActiveSequence, Signal

PARENTS = {1: 0, 2: 1, 3: 2, 4: 3, 5: 1, 6: 5, 7: 2, 8: 7, 9: 8, 11: 10, 12: 11}  # 0, 10 and 13 are roots


def named(number: int) -> int:
    """The sequence hash of a numbered block: 0 is not a hash."""
    return 100 + number


def position(number: int) -> int:
    return position(PARENTS[number]) + 1 if number in PARENTS else 0


def tree(*numbers: int) -> list[Identity]:
    """Blocks of the lifecycle script, by number; local hashes are ten times the number."""
    blocks: list[Identity] = []
    for number in numbers:
        parent = named(PARENTS[number]) if number in PARENTS else None
        blocks += Identities.from_sequence_hashes(
            [named(number)],
            local_hashes=[10 * named(number)],
            parent_hash=parent,
            start_position=position(number),
        )
    return blocks


def root(number: int) -> Identity:
    """A block without parent."""
    return Identities.from_sequence_hashes([named(number)])[0]


def roots(*numbers: int) -> list[Identity]:
    return [root(number) for number in numbers]


def manager(num_gpu_blocks: int = 10, block_size: int = 16, **settings: Any) -> KvManager:
    return KvManager(num_gpu_blocks, block_size, events=True, **settings)


def raw(kv: KvManager) -> list[Told]:
    """The raw stream since the call before, in numbers."""
    return numbered(told(kv.drain_events().raw))


def numbered(events: Iterable[Told]) -> list[Told]:
    return [
        (kind, None if parent is None else parent - 100, [block - 100 for block in blocks])
        for kind, parent, blocks in events
    ]


def stored(*numbers: int, parent: int | None = None) -> Told:
    return ("stored", parent, list(numbers))


def removed(*numbers: int) -> Told:
    return ("removed", None, list(numbers))


def pools(kv: KvManager) -> tuple[int, int, int]:
    """(active, inactive, references)."""
    return kv.active_blocks, kv.inactive_blocks, kv.active_references


def refused(kv: KvManager, error: type[Exception], message: str, call: Callable[[], object]) -> None:
    """`call` raises, with a message like this, and the manager is as before, with nothing to say."""
    before = kv.dump(), pools(kv)
    with pytest.raises(error, match=message):
        call()
    assert (kv.dump(), pools(kv)) == before
    assert len(kv.drain_rows()) == 0
    kv.check()


def send(kv: KvManager, signals: Iterable[Signal]) -> None:
    for signal in signals:
        kv.apply(signal)


def admit(kv: KvManager, sequence: ActiveSequence, tokens: int | None = None) -> None:
    """Allocate the first `tokens` tokens of the sequence, by default all."""
    tokens = len(sequence) if tokens is None else tokens
    signal = sequence.prepare_allocation(tokens)
    if signal is not None:
        kv.apply(signal)
    sequence.commit_allocation(tokens)


def grow(kv: KvManager, sequence: ActiveSequence) -> None:
    """Generate a token and take the block that it opens."""
    send(kv, sequence.generate())
    if not sequence.finished:
        sequence.commit_allocation(len(sequence))
