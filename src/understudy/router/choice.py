"""A router's choice with its score and reason."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from understudy.errors import InvalidArgument
from understudy.router.router import has_own

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy._core import FleetView, RouteRequest
    from understudy.router.delayed import LateRouter
    from understudy.router.router import Router

MAX_REASON = 300
"""Characters of a reason that are kept."""


class Choice(int):
    """The id of a worker, with why it was chosen: what `choose` of a user-defined router may return.

    `--decisions`, `explain` and the page of a live fleet show `score` (a finite number) and `reason` (a line of text).

    Example:
        return Choice(worker, score=cost, reason=f"{hits} blocks cached, {load} tokens to compute")
    """

    score: float | None
    reason: str | None

    def __new__(cls, worker: int, *, score: float | None = None, reason: str | None = None) -> Choice:
        """Make the choice. InvalidArgument for a score that is no number and a reason that is no text."""
        choice = super().__new__(cls, worker)
        if score is not None and not math.isfinite(score):
            raise InvalidArgument(f"score must be a finite number, got {score!r}")
        if reason is not None and not isinstance(reason, str):
            raise InvalidArgument(f"reason must be text, got {reason!r}")
        choice.score = None if score is None else float(score)
        choice.reason = None if reason is None else " ".join(reason.split())[:MAX_REASON]
        return choice


class NotedRouter:
    """Passes every call on to a router, and keeps score and reason of each choice."""

    observe: Callable[[Any], None]
    first_token: Callable[[int], None]
    ended: Callable[[int], None]

    def __init__(self, router: Router | LateRouter) -> None:
        """Wrap a router; methods that it does not override are absent here, so that they are not called."""
        self._router = router
        self.scores: list[float | None] = []
        self.reasons: list[str | None] = []
        for name in ("observe", "first_token", "ended"):
            if has_own(router, name):
                setattr(self, name, getattr(router, name))

    def choose(self, request: RouteRequest, view: FleetView) -> int:
        """Return the router's choice."""
        choice = self._router.choose(request, view)
        self.scores.append(getattr(choice, "score", None))
        self.reasons.append(getattr(choice, "reason", None))
        return choice
