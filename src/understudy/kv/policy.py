"""Eviction policies written in Python."""

from __future__ import annotations

from abc import ABC, abstractmethod
from inspect import isabstract
from typing import TYPE_CHECKING

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt


BUILT_IN_POLICIES = ("lineage", "lineage_fifo", "lru", "multi_lru", "fifo", "vllm", "vllm_append")
"""By name, for the embeddable manager, every tier and the pool of a simulated device alike."""


def check_policy(field: str, policy: object) -> None:
    """ConfigError unless `policy` is a built-in policy's name or makes an `EvictionPolicy` when it is called."""
    if isinstance(policy, str):
        if policy not in BUILT_IN_POLICIES:
            raise ConfigError(
                f"{field} {policy!r} is not known; choose one of {', '.join(BUILT_IN_POLICIES)}, or pass a class that "
                "makes an EvictionPolicy"
            )
    elif isabstract(policy):
        raise ConfigError(
            f"{field} must be a class of yours that makes an EvictionPolicy, got {policy!r} itself"
        )
    elif not callable(policy):
        raise ConfigError(
            f"{field} must be a name or a class that makes an EvictionPolicy (every worker gets one of its own), "
            f"got {policy!r}"
        )


class EvictionPolicy(ABC):
    """Owns one order over all unreferenced blocks of a pool, cached or empty, and says which go next.

    The manager calls it for every allocation, never while it holds its lock: first with what happened since the last
    call, in order, then with `select` (again, if another thread took a selected block meanwhile). Calls never overlap,
    but may come from any thread that allocates. An exception propagates to that caller and the allocation changes
    nothing; news whose call raised are told again next time.
    """

    @abstractmethod
    def on_freed(self, blocks: npt.NDArray[np.int32], lineage_hashes: list[int | None]) -> None:
        """`blocks` became unreferenced, in this order. A lineage hash is given where the block is cached.

        At first every block of the pool is freed, empty.
        """

    @abstractmethod
    def on_taken(self, blocks: npt.NDArray[np.int32]) -> None:
        """`blocks` left the order: handed out as selected, matched again, or emptied."""

    @abstractmethod
    def select(self, count: int) -> Sequence[int] | npt.NDArray[np.integer]:
        """Name `count` distinct blocks of the order to hand out next. `on_taken` follows for those that went."""
