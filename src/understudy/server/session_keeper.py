"""Sessions between their requests: asks a policy about each that sleeps, and names calls of engines for its answers.

The rules are those of a replay (`core/replay/fleet_sessions.cpp`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from understudy.run.live_sleep import LiveSleep
    from understudy.run.session_kv import SessionDriver

Call = tuple[int, str]
"""Number of an engine, and an action for the blocks of a session there."""


@dataclass(slots=True)
class _Session:
    sleep: LiveSleep | None = None
    since_ns: int = 0
    gap_ns: int | None = None
    holder: int | None = None
    """Engine with its hold."""
    number: int = 0
    """Of its last waking or falling asleep."""
    first_cached: int | None = None
    in_flight: int = 0
    is_asleep: bool = False


class SessionKeeper:
    """The sessions of one driver, by their numbers."""

    def __init__(self, policy: SessionDriver) -> None:
        self._policy = policy
        self._sessions: dict[int, _Session] = {}

    def wake(self, session: int, now_ns: int) -> None:
        """Note that a request of the session arrives. A hold stays until the request has ended."""
        one = self._sessions.setdefault(session, _Session())
        if one.is_asleep:
            one.gap_ns = now_ns - one.since_ns
        elif not one.in_flight:
            one.gap_ns = None
        one.is_asleep = False
        one.in_flight += 1
        one.number += 1

    def put_to_sleep(self, ended: LiveSleep) -> int | None:
        """Note that a request has ended. Returns the number with which to ask at this time; None while others run."""
        one = self._sessions[ended.session]
        one.in_flight -= 1
        if one.first_cached is None:
            one.first_cached = ended.first_cached_tokens
        one.sleep = replace(ended, first_cached_tokens=one.first_cached, last_gap_ns=one.gap_ns)
        one.since_ns = ended.now_ns
        if one.in_flight:
            return None
        one.is_asleep = True
        one.number += 1
        return one.number

    def reject(self, session: int) -> None:
        """Note that no engine took a request that arrived."""
        self._sessions[session].in_flight -= 1

    def ask(self, session: int, number: int, now_ns: int) -> tuple[list[Call], int | None]:
        """Ask the policy: calls, and the time after which to ask again. Nothing if the session has woken."""
        one = self._sessions.get(session)
        if one is None or one.sleep is None or not one.is_asleep or one.number != number:
            return [], None
        sleep = replace(one.sleep, now_ns=now_ns, asleep_ns=now_ns - one.since_ns)
        has_just_ended = sleep.asleep_ns == 0
        calls: list[Call] = []
        if has_just_ended and one.holder is not None and one.holder != sleep.worker:
            self._add(one, "unhold", calls)  # it has moved
        actions, again_ns = self._policy.on_sleep(sleep)
        if has_just_ended and "hold" not in actions and "drop" not in actions:
            self._add(one, "unhold", calls)  # a hold ends with the next request, unless it is renewed
        for action in actions:
            self._add(one, action, calls)
        return calls, again_ns

    def forget(self, session: int) -> list[Call]:
        """Forget a session. Returns the calls that end its hold."""
        calls: list[Call] = []
        one = self._sessions.pop(session, None)
        if one is not None:
            self._add(one, "unhold", calls)
        return calls

    def first_cached_tokens(self, session: int) -> int:
        """Return the cached tokens of the session's first request: they were there before it."""
        one = self._sessions.get(session)
        return 0 if one is None or one.first_cached is None else one.first_cached

    @staticmethod
    def _add(one: _Session, action: str, calls: list[Call]) -> None:
        """Add a call: a hold is ended where it is, other calls go to the engine of the last request."""
        ends = action == "unhold" or (action == "drop" and one.holder is not None)
        if ends:
            if one.holder is not None:
                calls.append((one.holder, action))
            one.holder = None
            return
        assert one.sleep is not None
        calls.append((one.sleep.worker, action))
        if action == "hold":
            one.holder = one.sleep.worker
