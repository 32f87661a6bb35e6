"""Interface between a server and a real engine, which computes its answers."""

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
        """Make the driver that steps the engine."""

    def core(self, name: str, *, events: bool) -> EngineCore:
        """Return the engine behind the worker's only rank."""

    def plan(self, sampling: Sampling, texts: TokenTexts, limit: int) -> GrowingPlan:
        """Plan an answer. ApiError for options that the engine does not support."""

    def connect_events(self, sender: KvEventSender) -> None:
        """Send the tokens of published blocks to `sender`."""
