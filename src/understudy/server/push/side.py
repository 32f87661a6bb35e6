"""What the connections of one side need of its network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy._core import LiveNet, PushNet
    from understudy.server.driver import Driver
    from understudy.server.push.channel import News
    from understudy.server.push.settings import PushSettings


class Side(Protocol):
    """One side of a disaggregated server: its requests by room."""

    net: LiveNet
    pushes: PushNet
    driver: Driver
    settings: PushSettings
    page_size: int

    def enqueue(self, action: Callable[[int], object]) -> None:
        """Queue `action(now_ns)`, in order with the engine's other inputs."""

    def receive(self, worker: int, news: News, now_ns: int) -> bool:
        """Deliver news to the engine; False if it has no request of that room."""

    def fail(self, engine_id: int, reason: str, now_ns: int) -> None:
        """Fail a request of a decode server whose prefill server is not there."""

    def lose(self, worker: int, reason: str, now_ns: int) -> None:
        """Fail all requests with a far worker that is lost."""
