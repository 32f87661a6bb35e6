"""Define an LRU eviction policy that keeps some blocks, such as a system prompt, until no other block is left.

Run it: `python examples/python_policy.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain, islice
from typing import TYPE_CHECKING

from understudy.kv import BlockManager, EvictionPolicy
from understudy.tokens import TokenBlocks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    import numpy as np
    import numpy.typing as npt


class ProtectedLru(EvictionPolicy):
    """Evict empty blocks first, then cached ones, then those in `protected`; the least recently used first.

    `protected` contains lineage hashes. It is read when a block is released, so it may change between calls.
    """

    def __init__(self, protected: AbstractSet[int] = frozenset()) -> None:
        self.protected = protected
        # Block ids, the least recently used first. Every method takes O(1) per block.
        self._empty: OrderedDict[int, None] = OrderedDict()
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()

    def on_freed(self, blocks: npt.NDArray[np.int32], lineage_hashes: list[int | None]) -> None:
        """Append each block to its order."""
        for block, lineage_hash in zip(blocks.tolist(), lineage_hashes, strict=True):
            if lineage_hash is None:
                self._empty[block] = None
            elif lineage_hash in self.protected:
                self._kept[block] = None
            else:
                self._cached[block] = None

    def on_taken(self, blocks: npt.NDArray[np.int32]) -> None:
        """Remove blocks that were allocated or matched."""
        for block in blocks.tolist():
            for order in (self._empty, self._cached, self._kept):
                order.pop(block, None)

    def select(self, count: int) -> Sequence[int]:
        """Return the first `count` blocks; the manager reports in `on_taken` which ones left."""
        return list(islice(chain(self._empty, self._cached, self._kept), count))


def main() -> None:
    """Cache two prompts in a pool of six blocks, allocate two more, and print which prompt was evicted."""
    system_prompt = TokenBlocks(range(64), block_size=16).identities
    other_prompt = TokenBlocks(range(1000, 1032), block_size=16).identities
    manager = BlockManager(6, block_size=16, policy=ProtectedLru(set(system_prompt.lineage_hashes)))

    manager.allocate(4).register(system_prompt).release()
    manager.allocate(2).register(other_prompt).release()
    with manager.allocate(2) as blocks:
        print(f"evicted {len(blocks.evicted)} blocks to make room for {len(blocks)}")
    print(f"system prompt: {manager.prefix_length(system_prompt)} of {len(system_prompt)} blocks cached")
    print(f"other prompt: {manager.prefix_length(other_prompt)} of {len(other_prompt)} blocks cached")


if __name__ == "__main__":
    main()
