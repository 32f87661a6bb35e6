"""The live driver: the offline run with another notion of waiting.

Everything that comes in is stamped with the clock and happens at its stamp, in the order that the offline run has:
transfers land, steps end, requests come and go, engines that are free begin a step. A machine that is late does the
same things in the same order, later. So a live run is, to the block, the offline run of the stamps it had.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from typing import TYPE_CHECKING, Protocol

from understudy.errors import InvalidArgument
from understudy.server.lateness import Lateness

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.server.clock import Clock, ScriptedClock
    from understudy.server.core import EngineCore, LiveRequest, StepEffects

log = logging.getLogger("understudy.server")

_LAND, _END, _INPUT = range(3)  # the order of things that happen at one time


class Observer(Protocol):
    """Who is told of every step, after its requests' listeners."""

    def on_step(self, core: EngineCore, effects: StepEffects, now_ns: int) -> None:
        """A step has ended."""

    def on_landed(self, core: EngineCore) -> None:
        """Transfers have landed in an engine that computes nothing."""

    def on_rest(self, core: EngineCore) -> None:
        """Something happened to an engine that begins no step now."""


class Driver:
    """Plays engines on a clock. All its methods are called from one thread, the event loop's."""

    def __init__(self, clock: Clock, *, max_burst: int = 64) -> None:
        self.clock = clock
        self.step_lateness = Lateness()
        self.inputs: list[tuple[int, str, str]] | None = None
        """If a list: (time, kind, request name) of everything that came in, in the order in which it was played."""
        self.after_pump: Callable[[], None] | None = None
        self._max_burst = max_burst
        self._queue: list[tuple[int, int, int, EngineCore, Callable[[int], object] | None]] = []
        self._sequence = 0
        self._cores: list[EngineCore] = []
        self._observers: dict[int, Observer] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due_ns = -1
        self._soon = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: Exception | None = None  # that nobody was told of but the log
        self._known: set[tuple[str, str, str]] = set()  # failures that would be told with every step

    def observe(self, core: EngineCore, observer: Observer) -> None:
        """Tell it of every step of this engine."""
        self._cores.append(core)
        self._observers[id(core)] = observer

    # ── What comes in ──

    def submit(self, core: EngineCore, request: LiveRequest) -> None:
        """A request has come, now. InvalidArgument at once when the engine could never run it."""
        why = core.engine.never_fits(request.prompt_tokens, request.max_tokens)
        if why is not None:
            raise InvalidArgument(f"request {request.name}: {why}")
        request.arrival_ns = self.clock.now_ns()
        request.rank = core

        def come(now_ns: int) -> None:
            if request.ended:  # gone before it came
                return
            if core.failure is not None:
                core.lose(request, now_ns)
                request.tell_end(now_ns)
                return
            if request.cache_hit_threshold > 0 and core.cached_share(request) < request.cache_hit_threshold:
                request.aborted = request.turned_away = True  # others have more of it
                request.ended, request.finish_ns = "cancelled", now_ns
                request.tell_end(now_ns)
                return
            self._note(now_ns, "submit", request)
            try:
                core.submit(request)
            except Exception:
                core.lose(request, now_ns)
                request.tell_end(now_ns)
                raise

        self._put(request.arrival_ns, _INPUT, core, come)
        self._wake()

    def cancel(self, request: LiveRequest, at_ns: int | None = None) -> None:
        """Its client has gone, now: its blocks return, and its listener hears `on_end`. Nothing if it has ended.

        `at_ns` is for listeners, who may drop their request at the very step that they are told of.
        """
        core = request.rank
        if request.ended or core is None:
            return

        def go(now_ns: int) -> None:
            if request.ended:
                return
            self._note(now_ns, "cancel", request)
            try:
                if not core.cancel(request, now_ns):
                    request.ended = "cancelled"
            except Exception as failure:
                self._fail(core, failure, now_ns)
                return
            request.tell_end(now_ns)

        self._put(self.clock.now_ns() if at_ns is None else at_ns, _INPUT, core, go)
        self._wake()

    def do(self, core: EngineCore, action: Callable[[int], object]) -> None:
        """Anything else that happens to an engine from outside, now and in order."""
        self._put(self.clock.now_ns(), _INPUT, core, action)
        self._wake()

    def nudge(self) -> None:
        """Transfers may land at other times than they would have: all engines look again."""
        now_ns = self.clock.now_ns()
        for core in self._cores:
            self._put(now_ns, _INPUT, core, None)
        self._wake()

    # ── What happens ──

    def pump(self) -> None:
        """Play what is due by now. Returns early after many steps, so that the event loop can breathe."""
        now_ns = self.clock.now_ns()
        queue = self._queue
        try:
            for _ in range(self._max_burst):
                if not queue or queue[0][0] > now_ns:
                    break
                self._play(queue[0][0])
            if self.after_pump is not None:
                self.after_pump()
        finally:
            self._arm()

    def run_to(self, clock: ScriptedClock, until_ns: int | None = None) -> None:
        """Play everything that is due before `until_ns` (all there is), each at its time.

        Raises what an engine failed of, once all that happens at that time has.
        """
        while self._queue and (until_ns is None or self._queue[0][0] < until_ns):
            clock.time_ns = self._queue[0][0]
            self._play(clock.time_ns)
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure

    @property
    def idle(self) -> bool:
        """Nothing is due, ever, unless something comes in."""
        return not self._queue

    def _play(self, now_ns: int) -> None:
        """Everything of one time, in the run's order."""
        touched: dict[int, EngineCore] = {}
        landed: set[int] = set()
        while self._queue and self._queue[0][0] == now_ns:
            _, kind, _, core, action = heapq.heappop(self._queue)
            if kind == _LAND:
                core.wake_ns = -1
                if not core.engine.in_step and self._land(core, now_ns):
                    landed.add(id(core))
            elif kind == _END:
                if core.step_end_ns != now_ns:
                    continue  # of an engine that has died since
                self._end(core, now_ns)
            elif action is not None:
                self._act(core, action, now_ns)
            touched[id(core)] = core
        for core in touched.values():
            if self._begin(core, now_ns):
                self._put(core.step_end_ns, _END, core, None)
                continue
            if (
                core.failure is None
                and core.has_tiers
                and core.step_end_ns < 0
                and (core.engine.asleep or core.still_lands)
            ):
                self._put_landing(core, now_ns)  # in a step that all have left, nothing lands until it ends
            observer = self._observers.get(id(core))
            if observer is not None:
                if id(core) in landed:
                    self._tell(core, observer.on_landed, core)
                self._tell(core, observer.on_rest, core)

    def _act(self, core: EngineCore, action: Callable[[int], object], now_ns: int) -> None:
        """What is refused goes to the log and is counted, and everything else goes on."""
        try:
            action(now_ns)
        except Exception as failure:
            log.exception("%s was asked for what it cannot do", core.name)
            core.errors += 1
            self._failure = self._failure or failure

    def _tell(self, core: EngineCore, tell: Callable[..., None], *what: object) -> None:
        """Who watches is told; that it fails at it is counted, is in the log once, and stops no engine."""
        try:
            tell(*what)
        except Exception as failure:
            core.errors += 1
            self._failure = self._failure or failure
            known = (core.name, tell.__name__, type(failure).__name__)
            if known not in self._known:
                self._known.add(known)
                log.exception("%s: what it does could not be told (%s; told once)", core.name, tell.__name__)

    def _land(self, core: EngineCore, now_ns: int) -> bool:
        if core.failure is not None:
            return False
        try:
            core.engine.land(now_ns)
        except Exception as failure:
            self._fail(core, failure, now_ns)
            return False
        return True

    def _begin(self, core: EngineCore, now_ns: int) -> bool:
        try:
            return core.begin(now_ns)
        except Exception as failure:
            self._fail(core, failure, now_ns)
            return False

    def _end(self, core: EngineCore, now_ns: int) -> None:
        self.step_lateness.record((self.clock.now_ns() - now_ns) / self.clock.speed / 1e9)
        try:
            effects = core.end(now_ns)
        except Exception as failure:
            self._fail(core, failure, now_ns)
            return
        effects.tell(now_ns)
        observer = self._observers.get(id(core))
        if observer is not None:
            self._tell(core, observer.on_step, core, effects, now_ns)

    def _fail(self, core: EngineCore, failure: Exception, now_ns: int) -> None:
        """It computes nothing any more until it is killed and another takes its place; who was in it is told."""
        log.error("%s has failed: %s", core.name, failure, exc_info=failure)
        self._failure = self._failure or failure
        for request in core.fail(failure):
            request.finish_ns = now_ns
            request.tell_end(now_ns)

    def _put_landing(self, core: EngineCore, now_ns: int) -> None:
        """An engine that sleeps, or has only transfers left, looks again when one lands."""
        wake_ns = core.engine.wake_ns
        if wake_ns is not None and core.wake_ns != wake_ns:
            core.wake_ns = wake_ns
            self._put(max(wake_ns, now_ns + 1), _LAND, core, None)

    def _put(self, time_ns: int, kind: int, core: EngineCore, action: Callable[[int], object] | None) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (time_ns, kind, self._sequence, core, action))

    def _note(self, now_ns: int, kind: str, request: LiveRequest) -> None:
        if self.inputs is not None:
            self.inputs.append((now_ns, kind, request.name))

    # ── Waiting ──

    def _wake(self) -> None:
        """Something came in: play it as soon as the event loop is free."""
        if not self._soon and self._loop is not None:
            self._soon = True
            self._loop.call_soon(self._pump_soon)

    def _pump_soon(self) -> None:
        self._soon = False
        self.pump()

    def start(self) -> None:
        """Follow the clock in the running event loop from now on."""
        self._loop = asyncio.get_running_loop()
        self._arm()

    def stop(self) -> None:
        """Follow it no longer."""
        self._loop = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        loop = self._loop
        if loop is None:
            return
        due_ns = self._queue[0][0] if self._queue else -1
        if self._timer is not None:
            if due_ns == self._due_ns:
                return
            self._timer.cancel()
            self._timer = None
        self._due_ns = due_ns
        if due_ns >= 0:
            wait_s = (due_ns - self.clock.now_ns()) / self.clock.speed / 1e9
            self._timer = loop.call_later(max(wait_s, 0.0), self._pump_timed)

    def _pump_timed(self) -> None:
        self._timer = None
        self.pump()
