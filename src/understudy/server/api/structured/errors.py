"""Refusals of a form, and the limit on the work that one form may cause."""

from __future__ import annotations

from understudy.server.api.errors import ApiError

MAX_STEPS = 60_000
"""Steps of search for one answer: about half a second of CPU time."""


class FormError(ApiError):
    """Refuse a form with status 400; `keyword` names the part of it that cannot be met."""

    def __init__(self, keyword: str, problem: str) -> None:
        super().__init__(f"JSON schema: {keyword}: {problem}")
        self.keyword = keyword


class OutOfSteps(Exception):
    """Stop a search that has used up its steps."""


class Steps:
    """Count the steps of one search. OutOfSteps when none are left."""

    def __init__(self, limit: int = MAX_STEPS) -> None:
        self._limit = self._left = limit

    def take(self, count: int = 1) -> None:
        """Use up `count` steps."""
        self._left -= count
        if self._left < 0:
            raise OutOfSteps

    @property
    def used(self) -> int:
        """Steps used up so far."""
        return self._limit - self._left
