"""Interface of eviction policies written in Python."""

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
"""Names of the built-in policies, for the embeddable manager, all tiers and simulated devices."""


def check_policy(field: str, policy: object) -> None:
    """Raise ConfigError unless `policy` is a built-in name or a callable that returns an `EvictionPolicy`."""
    if isinstance(policy, str):
        if policy not in BUILT_IN_POLICIES:
            raise ConfigError(
                f"{field} {policy!r} is not known; choose one of {', '.join(BUILT_IN_POLICIES)}, or pass a subclass of "
                "EvictionPolicy"
            )
    elif isabstract(policy):
        raise ConfigError(
            f"{field} must be a user-defined subclass of EvictionPolicy, got the abstract {policy!r}"
        )
    elif not callable(policy):
        raise ConfigError(
            f"{field} must be a name or a subclass of EvictionPolicy (every worker creates its own object), "
            f"got {policy!r}"
        )


class EvictionPolicy(ABC):
    """Orders the unreferenced blocks of a pool, cached or empty, and selects the blocks to evict.

    The manager calls it on every allocation, without holding its lock: first `on_freed` and `on_taken` with the changes
    since the last call, in order, then `select` (again if another thread took a selected block meanwhile). Calls never
    overlap, but may come from any thread that allocates. An exception propagates to that caller and the allocation
    changes nothing; the call that raised is repeated next time.
    """

    @abstractmethod
    def on_freed(self, blocks: npt.NDArray[np.int32], lineage_hashes: list[int | None]) -> None:
        """Add `blocks`, which became unreferenced in this order; cached blocks have a lineage hash.

        The first call has all blocks of the pool, empty.
        """

    @abstractmethod
    def on_taken(self, blocks: npt.NDArray[np.int32]) -> None:
        """Remove `blocks` from the order: they were allocated, matched again, or reset."""

    @abstractmethod
    def select(self, count: int) -> Sequence[int] | npt.NDArray[np.integer]:
        """Return `count` distinct blocks to evict next. `on_taken` follows for those that were allocated."""
