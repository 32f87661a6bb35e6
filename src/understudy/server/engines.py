"""What a server needs of an engine that it did not make itself: one that computes its answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from understudy.server.api.growing import GrowingPlan
    from understudy.server.api.sampling import Sampling
    from understudy.server.api.texts import TokenTexts
    from understudy.server.clock import Clock
    from understudy.server.core import EngineCore
    from understudy.server.driver import Driver
    from understudy.server.kv_events import KvEventSender


class GivenEngine(Protocol):
    """A real engine in place of the simulated ones. It serves one worker."""

    def driver(self, clock: Clock) -> Driver:
        """Who plays it."""

    def core(self, name: str, *, events: bool) -> EngineCore:
        """The engine behind the worker's only rank."""

    def plan(self, sampling: Sampling, texts: TokenTexts, limit: int) -> GrowingPlan:
        """An answer to come. ApiError for what the engine cannot do."""

    def tell(self, sender: KvEventSender) -> None:
        """Tokens of the blocks that the engine will speak of go there."""
