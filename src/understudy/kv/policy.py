"""Interface of eviction policies written in Python."""

from __future__ import annotations

from abc import ABC, abstractmethod
from inspect import isabstract
from typing import TYPE_CHECKING

from understudy.errors import ConfigError
from understudy.user_code import describe_user_failure, load_class, names_file_and_class

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt


BUILT_IN_POLICIES = ("lineage", "lineage_fifo", "lru", "multi_lru", "fifo", "vllm", "vllm_append")
"""Names of the built-in policies, for the embeddable manager, all tiers and simulated devices."""


def read_policy(field: str, policy: object) -> object:
    """Return a built-in name, or a callable that creates a policy; `FILE.py:CLASS` is loaded.

    Errors: ConfigError names `field`.
    """
    if isinstance(policy, str):
        if names_file_and_class(policy):
            return PolicyFile(field, policy)
        if policy not in BUILT_IN_POLICIES:
            raise ConfigError(
                f"{field} {policy!r} is not known; choose one of {', '.join(BUILT_IN_POLICIES)}, FILE.py:CLASS, or "
                "pass a subclass of EvictionPolicy"
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
    return policy


class PolicyFile:
    """Creates policies of the class at `FILE.py:CLASS`. Copies and other processes load the file again."""

    def __init__(self, field: str, place: str) -> None:
        self.place = self.__qualname__ = place
        self._field = field
        self._policy = load_class(
            field, place, ("on_freed(blocks, lineage_hashes)", "on_taken(blocks)", "select(count)")
        )

    def __call__(self) -> EvictionPolicy:
        """Create a policy for one pool of blocks."""
        try:
            policy: EvictionPolicy = self._policy()
        except ConfigError:
            raise
        except Exception as error:  # the user's code
            raise describe_user_failure(self._field, self.place, error) from error
        return policy

    def __repr__(self) -> str:
        return self.place

    def __reduce__(self) -> tuple[type[PolicyFile], tuple[str, str]]:
        return PolicyFile, (self._field, self.place)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PolicyFile) and other.place == self.place

    def __hash__(self) -> int:
        return hash(self.place)


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
