"""Interface of user-defined routers in Python."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy._core import FleetView, KvEventBatch, RouteRequest


F = TypeVar("F", bound="Callable[..., None]")


def _does_nothing(method: F) -> F:
    method.does_nothing = True  # type: ignore[attr-defined]
    return method


def has_own(router: object, method: str) -> bool:
    """Return whether a router has a method that does something."""
    own = getattr(router, method, None)
    return own is not None and not hasattr(own, "does_nothing")


class Router(ABC):
    """Choose a worker for each request of a fleet.

    A replay makes calls in order of time: `observe` with events that have been delivered by then, and `choose` when a
    request arrives. An exception ends the replay and is raised to its caller.
    """

    @abstractmethod
    def choose(self, request: RouteRequest, view: FleetView) -> int:
        """Return the id of the worker that gets the request, out of `view.ready`.

        `view` is valid during this call only. Its columns are by id; a worker that leaves the fleet keeps its id, and
        no other worker gets it. Work sent to each worker that has not ended (`outstanding_requests`,
        `outstanding_tokens`) is cheap to read; `running`, `waiting` and `used_blocks` are the workers' own current
        counts, and make the replay advance every worker to this time.
        """

    @_does_nothing  # noqa: B027
    def observe(self, batch: KvEventBatch) -> None:
        """Receive the blocks stored or removed in a step of `batch.worker`, or on a tier of pool `batch.pool` (None).

        Workers keep events only for a router that overrides this method. `batch.events` has one row per block, as in
        a `BlockManager`'s events.
        """

    @_does_nothing  # noqa: B027
    def first_token(self, row: int) -> None:
        """Receive the row of a request that has its first token. Called before the next `choose`."""

    @_does_nothing  # noqa: B027
    def ended(self, row: int) -> None:
        """Receive the row of a request that ended or was rejected by its worker. Called before the next `choose`."""
