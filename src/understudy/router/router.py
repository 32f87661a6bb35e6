"""Routers written in Python."""

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


class Router(ABC):
    """Sends each request of a fleet to a worker.

    A replay calls it in the order of time: `observe` with what has reached it by then, and `choose` when a request
    arrives. An exception ends the replay and reaches its caller.
    """

    @abstractmethod
    def choose(self, request: RouteRequest, view: FleetView) -> int:
        """The worker of the request, from 0 to `len(view) - 1`.

        `view` is good for this call: what was sent to each worker and has not ended (`outstanding_requests`,
        `outstanding_tokens`) costs nothing to read; `running`, `waiting` and `used_blocks` are the workers' own, as of
        now, and make the replay play every worker up to this moment.
        """

    @_does_nothing  # noqa: B027
    def observe(self, batch: KvEventBatch) -> None:
        """Blocks were stored or removed in a step of `batch.worker`, or on a tier of pool `batch.pool` (None).

        Only a router that overrides it is told; workers then keep events for it. `batch.events` has a row for each
        block, as a `BlockManager` tells them.
        """

    @_does_nothing  # noqa: B027
    def first_token(self, row: int) -> None:
        """The request of this row has its first token. Told before `choose` is asked again."""

    @_does_nothing  # noqa: B027
    def ended(self, row: int) -> None:
        """The request of this row has ended, or was rejected where it was sent. Told before `choose` is asked again."""
