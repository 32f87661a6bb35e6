"""An LRU in Python that checks what the manager tells it, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.kv import EvictionPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt


OWN_ORDER = object()


class StrictLru(EvictionPolicy):
    """Empty blocks first, then the least recently freed. Any news that contradicts the old fails the caller.

    `answer`, when set, replaces the answer of `select`; `hook` is called with the name of each method first.
    """

    def __init__(self) -> None:
        self.order: dict[int, int | None] = {}
        self.calls: list[tuple[str, int]] = []
        self.answer: object = OWN_ORDER
        self.hook: Callable[[str], None] = lambda _name: None

    def on_freed(self, blocks: npt.NDArray[np.int32], lineage_hashes: list[int | None]) -> None:
        self.hook("on_freed")
        self.calls.append(("on_freed", len(blocks)))
        for block, plh in zip(blocks.tolist(), lineage_hashes, strict=True):
            assert block not in self.order, f"block {block} is freed, but it was free"
            self.order[block] = plh

    def on_taken(self, blocks: npt.NDArray[np.int32]) -> None:
        self.hook("on_taken")
        self.calls.append(("on_taken", len(blocks)))
        for block in blocks.tolist():
            assert block in self.order, f"block {block} is taken, but it was not free"
            del self.order[block]

    def select(self, count: int) -> Sequence[int]:
        self.hook("select")
        self.calls.append(("select", count))
        if self.answer is not OWN_ORDER:
            return self.answer  # type: ignore[return-value]  # wrong on purpose
        empty = [block for block, plh in self.order.items() if plh is None]
        cached = [block for block, plh in self.order.items() if plh is not None]
        return (empty + cached)[:count]
