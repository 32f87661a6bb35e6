"""A driver that plays an engine as a live one would: it knows the time, and things happen in the middle of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from understudy import _core

Action = Callable[["LiveDriver"], None]


@dataclass
class Seen:
    """What an observer outside saw of a request, by the time it was visible; −1: not yet."""

    admitted_ns: int = -1
    cached_tokens: int = -1
    token_ns: list[int] = field(default_factory=list)
    finished_ns: int = -1


class LiveDriver:
    """Calls the engine at the times of a script, and between them whenever a step begins or ends.

    At one time: the step in progress ends, then the script acts, then an idle engine begins a step.
    """

    def __init__(self, engine: _core.VllmEngine) -> None:
        self.engine = engine
        self.now_ns = 0
        self.seen: list[Seen] = []
        self.step_starts_ns: list[int] = []
        self._end_ns = 0
        self._script: list[tuple[int, int, Action]] = []

    def at(self, time_ns: int, action: Action) -> None:
        """Add to the script; at one time, in the order in which they were added."""
        self._script.append((time_ns, len(self._script), action))

    def submit(
        self,
        prompt_tokens: int,
        max_tokens: int,
        identities: _core.Identities | None = None,
        name: str = "",
        priority: int = 0,
    ) -> int:
        """Queue a request now."""
        request = self.engine.submit(
            name or str(len(self.seen)),
            prompt_tokens,
            max_tokens,
            identities,
            priority=priority,
            arrival_time=float(self.now_ns),
        )
        self.seen.append(Seen())
        return request

    def run(self, until_ns: int | None = None) -> None:
        """Play to the end of the script and of the work, or to a time."""
        self._script.sort(key=lambda entry: entry[:2])
        while True:
            times = [self._script[0][0]] if self._script else []
            times += [self._end_ns] if self.engine.in_step else []
            if not times or (until_ns is not None and min(times) > until_ns):
                return
            self.now_ns = min(times)
            if self.engine.in_step and self._end_ns == self.now_ns:
                self._look(self.engine.end_step(self.now_ns))
            while self._script and self._script[0][0] == self.now_ns:
                self._script.pop(0)[2](self)
            if not self.engine.in_step and not self.engine.idle:
                self._begin()

    def _begin(self) -> None:
        self.step_starts_ns.append(self.now_ns)
        self.engine.begin_step(self.now_ns)
        self._end_ns = self.engine.now_ns
        assert not self.engine.stuck

    def _look(self, effects: _core.Effects) -> None:
        for request, fresh in effects.tokens:
            assert 1 <= fresh <= 6  # a token, and a burst of at most five
            self.seen[request].token_ns += [self.now_ns] * fresh
        for record in effects.finished:
            seen = self.seen[record.id]
            assert (seen.finished_ns, record.finish_ns) == (-1, self.now_ns)
            seen.finished_ns = self.now_ns
            seen.admitted_ns = record.first_admit_ns
            seen.cached_tokens = record.cached_first
            assert record.output_tokens == len(seen.token_ns)
