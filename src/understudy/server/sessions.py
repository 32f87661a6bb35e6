"""Sessions of live requests: what happens to their KV between two requests. The rules are those of a replay."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from understudy._core import EventClass, Identities, VllmEngine
from understudy.errors import ConfigError, WrongState
from understudy.run.live_sleep import LiveSleep
from understudy.run.session_kv import SessionDriver
from understudy.server.metrics.session_kv import add_session_kv
from understudy.server.session_keeper import SessionKeeper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.run.session_kv import SessionKv
    from understudy.server.core import EngineCore
    from understudy.server.driver import Driver
    from understudy.server.live_request import LiveRequest
    from understudy.server.metrics.families import Registry

MOST_SESSIONS = 1 << 16
"""Sessions that are remembered; the one that was used longest ago is forgotten first."""
MOST_BLOCKS = 1 << 24
"""Block identities that are kept of sessions whose policy will be asked again."""


class SessionHints(NamedTuple):
    """What a client tells with a request of its session."""

    name: str
    parent: str = ""
    told_ns: int | None = None
    """From the end of the request to the next one."""
    is_last: bool = False
    hold_ns: int | None = None
    release_ns: int | None = None


class Session:
    """One session of a client."""

    __slots__ = (
        "cached",
        "core",
        "due_ns",
        "identities",
        "in_flight",
        "name",
        "number",
        "queued_ns",
        "sleep",
        "tokens",
    )

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.in_flight = 0
        self.core: EngineCore | None = None
        """Engine of its last request."""
        self.identities: Identities | None = None
        """Blocks of its last request, while its policy may ask for them."""
        self.tokens = 0
        self.cached = 0
        self.sleep = 0
        """Number of its last falling asleep."""
        self.due_ns = -1
        """When the policy is asked again; −1: not."""
        self.queued_ns = -1
        """Time of the event that is queued for that, perhaps an earlier one; −1: none."""


class SessionUse:
    """A live request of a session."""

    __slots__ = ("has_arrived", "hints", "identities", "session", "sessions")

    def __init__(
        self, sessions: LiveSessions, session: Session, hints: SessionHints, identities: Identities | None
    ) -> None:
        self.sessions = sessions
        self.session = session
        self.hints = hints
        self.identities = identities
        self.has_arrived = False

    def on_submit(self, core: EngineCore, request: LiveRequest) -> None:
        """Wake the session when the engine gets the request."""
        self.sessions.on_submit(self, core, request)

    def on_end(self, request: LiveRequest, now_ns: int) -> None:
        """Put the session to sleep, unless other requests of it run."""
        self.sessions.on_end(self, request, now_ns)


class LiveSessions:
    """The sessions of the workers that share a driver."""

    def __init__(self, settings: SessionKv, driver: Driver) -> None:
        self.settings = settings
        self.forgotten = 0
        """Sessions that were forgotten because there were too many."""
        self._driver = driver
        self._policy = SessionDriver(settings)
        self._keeper = SessionKeeper(self._policy)
        self._sessions: dict[str, Session] = {}  # the one that was used longest ago first
        self._cores: list[EngineCore] = []
        self._next_number = 0
        self._requests = 0
        self._kept_blocks = 0

    def join(self, cores: Sequence[EngineCore], registry: Registry) -> None:
        """Add the engine of a worker. ConfigError where it cannot keep the KV of sessions."""
        if len(cores) > 1:
            raise ConfigError("session_kv does not work with ranks yet; leave data_parallel_size at 1")
        core, engine = cores[0], cores[0].engine
        why = "the engine does not keep KV of sessions"
        if isinstance(engine, VllmEngine):
            why = ""
            try:  # without an effect: there is no hold
                engine.keep_prefix("unhold", 0, Identities.from_local_hashes([]), 0, 0, 0)
            except WrongState as error:
                why = str(error).removeprefix("keep_prefix: ")
        if why:
            raise ConfigError(f"session_kv: {why}; leave it out, or change the engine")
        self.settings.require_tier(has_tier=core.has_tiers)
        self._cores.append(core)
        add_session_kv(registry, core, self._driver.clock, lambda: self.forgotten)

    def open(self, hints: SessionHints, identities: Identities | None) -> SessionUse:
        """Return the use of a session by a new request, before its submission."""
        session = self._sessions.pop(hints.name, None)
        if session is None:
            session = Session(hints.name, self._next_number)
            self._next_number += 1
        self._sessions[hints.name] = session
        return SessionUse(self, session, hints, identities)

    def on_submit(self, use: SessionUse, core: EngineCore, request: LiveRequest) -> None:
        """Wake a session at the time of a request's arrival, behind the arrival."""

        def wake(now_ns: int) -> None:
            if request.ended or use.has_arrived:  # ended at once, or moved from a worker that was lost
                return
            use.has_arrived = True
            use.session.in_flight += 1
            self._keeper.wake(use.session.number, now_ns)

        self._driver.enqueue(core, wake, request.arrival_ns if request.arrival_ns >= 0 else None)

    def on_end(self, use: SessionUse, request: LiveRequest, now_ns: int) -> None:
        """Put a session to sleep; its policy is asked at this time, after everything else that ends now."""
        if not use.has_arrived:
            return
        use.has_arrived = False
        session, core = use.session, request.rank
        session.in_flight -= 1
        if request.admitted_ns < 0 or core not in self._cores:
            self._keeper.reject(session.number)
            return
        parent = self._sessions.get(use.hints.parent)
        session.core = self._cores[self._cores.index(core)]
        session.tokens = request.prompt_tokens + request.emitted
        self._keep(session, use.identities)
        self._requests += 1
        hints = use.hints
        number = self._keeper.put_to_sleep(
            LiveSleep(
                now_ns=now_ns,
                row=self._requests - 1,
                session=session.number,
                parent_session=None if parent is None else parent.number,
                worker=self._cores.index(session.core),
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.emitted,
                first_cached_tokens=request.cached_tokens,
                is_last=hints.is_last,
                told_ns=hints.told_ns,
                hold_ns=hints.hold_ns,
                release_ns=hints.release_ns,
            )
        )
        if number is None:
            return
        session.sleep, session.due_ns = number, -1
        is_last = use.hints.is_last
        self._driver.enqueue(
            session.core, lambda at_ns: self._ask(session, number, at_ns, is_last), now_ns, EventClass.SESSION
        )
        self._forget_surplus(now_ns)

    def _keep(self, session: Session, identities: Identities | None) -> None:
        """Keep the blocks of a session's last request, in place of those of the one before."""
        self._kept_blocks -= 0 if session.identities is None else len(session.identities)
        self._kept_blocks += 0 if identities is None else len(identities)
        session.identities = identities

    def _ask(self, session: Session, number: int, now_ns: int, is_last: bool = False) -> None:
        if session.in_flight or session.sleep != number:
            return
        calls, again_ns = self._keeper.ask(session.number, number, now_ns)
        for worker, action in calls:
            self._call(session, self._cores[worker], action, now_ns)
        if again_ns is not None:
            session.due_ns = now_ns + again_ns
            self._queue(session)
            return
        self._keep(session, None)
        if is_last:
            self._forget(session, now_ns)

    def _call(self, session: Session, core: EngineCore, action: str, now_ns: int) -> None:
        if core.failure is not None:
            return
        blocks = session.identities or Identities.from_local_hashes([])
        kept = self._keeper.first_cached_tokens(session.number)
        effects = core.vllm.keep_prefix(action, session.number, blocks, session.tokens, kept, now_ns)
        core.apply(effects, now_ns).notify_listeners(now_ns)
        if core is not session.core:  # the driver polls that one
            self._driver.enqueue(core, lambda _: None, now_ns, EventClass.SESSION)

    def _queue(self, session: Session) -> None:
        """Queue the next call of the policy; an event that is queued for an earlier time does it too."""
        if 0 <= session.queued_ns <= session.due_ns:
            return
        assert session.core is not None
        session.queued_ns = session.due_ns
        self._driver.enqueue(session.core, partial(self._on_due, session), session.due_ns, EventClass.SESSION)

    def _on_due(self, session: Session, now_ns: int) -> None:
        if session.queued_ns != now_ns:
            return
        session.queued_ns = -1
        if session.due_ns > now_ns:
            self._queue(session)
        elif session.due_ns == now_ns:
            session.due_ns = -1
            self._ask(session, session.sleep, now_ns)

    def _forget_surplus(self, now_ns: int) -> None:
        while len(self._sessions) > MOST_SESSIONS or self._kept_blocks > MOST_BLOCKS:
            oldest = next((one for one in self._sessions.values() if not one.in_flight), None)
            if oldest is None:
                return
            self.forgotten += 1
            self._forget(oldest, now_ns)

    def _forget(self, session: Session, now_ns: int) -> None:
        for worker, action in self._keeper.forget(session.number):
            self._call(session, self._cores[worker], action, now_ns)
        self._policy.forget(session.number)
        self._keep(session, None)
        session.due_ns = -1
        session.sleep = -1
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]
