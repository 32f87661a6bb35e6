"""Which blocks are referenced, and which are cached for nobody."""

from __future__ import annotations

from typing import Literal

import pytest

from understudy.kv import BlockManager
from understudy.tokens import Identities


def hashes(identities: Identities) -> list[int]:
    return sorted(identity.lineage_hash for identity in identities)


def test_keys_are_active_while_somebody_references_them() -> None:
    blocks = Identities.from_local_hashes([1, 2, 3])
    manager = BlockManager(8, block_size=4)
    assert hashes(manager.active_keys()) == hashes(manager.inactive_keys()) == []
    held = manager.allocate(3).register(blocks)
    assert hashes(manager.active_keys()) == hashes(blocks)
    assert len(manager.inactive_keys()) == 0
    held.release()
    assert len(manager.active_keys()) == 0
    assert hashes(manager.inactive_keys()) == hashes(blocks)
    with manager.match_prefix(blocks[:1]):
        assert hashes(manager.active_keys()) == hashes(blocks[:1])
        assert hashes(manager.inactive_keys()) == hashes(blocks[1:])


@pytest.mark.parametrize("duplicates", ["allow", "reject", "keep"])
def test_a_hash_with_several_copies_is_listed_once_and_active_if_any_is(
    duplicates: Literal["allow", "reject", "keep"],
) -> None:
    blocks = Identities.from_local_hashes([1])
    manager = BlockManager(4, block_size=4, duplicates=duplicates)
    first = manager.allocate(1).register(blocks)
    second = manager.allocate(1).register(blocks)
    first.release()
    assert hashes(manager.active_keys()) == hashes(blocks)
    assert len(manager.inactive_keys()) == 0
    second.release()
    assert len(manager.active_keys()) == 0
    assert hashes(manager.inactive_keys()) == hashes(blocks)


def test_blocks_that_are_being_written_have_no_key_yet() -> None:
    manager = BlockManager(4, block_size=4)
    with manager.allocate(2):
        assert len(manager.active_keys()) == len(manager.inactive_keys()) == 0
