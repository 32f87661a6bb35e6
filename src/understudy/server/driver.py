"""The live driver: runs engines in simulated time against a clock.

Each input gets a timestamp from the clock and is processed at that time, in the order of the offline run: transfers
land, steps end, requests are submitted and cancelled, free engines begin a step (`EventClass`). A machine that is late
processes the same events in the same order, later. So a live run equals, to the block, the offline run of its
timestamps. A step whose end is unknown is computed in a thread, or offline in the caller's, and ends when that is done.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from understudy._core import Effects, EventClass
from understudy.errors import InvalidArgument
from understudy.lateness import Lateness
from understudy.server.core import EngineCore

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.clock import Clock
    from understudy.server.live_request import LiveRequest, StepEffects

    _Action = Callable[[int], object]
    _Computed = Future[Effects] | asyncio.Future[Effects]

log = logging.getLogger("understudy.server")


class Observer(Protocol):
    """Receives every step of an engine, after the listeners of its requests."""

    def on_step(self, core: EngineCore, effects: StepEffects, now_ns: int) -> None:
        """Handle the end of a step."""

    def on_landed(self, core: EngineCore) -> None:
        """Handle transfers that landed in an engine without a step."""

    def on_idle(self, core: EngineCore) -> None:
        """Handle an event of an engine that begins no step after it."""


class Network(Protocol):
    """Carries transfers between engines. The driver runs it before the events of each time."""

    @property
    def next_wake_ns(self) -> int | None:
        """When a transfer next ends; None without one."""

    def run_until(self, now_ns: int) -> None:
        """Finish the transfers that end by then."""

    def settle(self) -> list[EngineCore]:
        """Send messages, and return the engines for which something has arrived."""


class Driver:
    """Runs engines on a clock. Call all methods from one thread, the event loop's."""

    def __init__(self, clock: Clock, *, max_burst: int = 64) -> None:
        self.clock = clock
        self.step_lateness = Lateness()
        self.inputs: list[tuple[int, str, str]] | None = None
        """If a list: (time, kind, request name) of every input, in the order of processing."""
        self.after_pump: Callable[[], None] | None = None
        self.network: Network | None = None
        """Carries hand-offs between engines; None: there are none."""
        self._network_wake_ns = -1
        self._max_burst = max_burst
        self._queue: list[tuple[int, int, int, EngineCore | None, Callable[[int], object] | None]] = []
        self._sequence = 0
        self._cores: list[EngineCore] = []
        self._observers: dict[int, Observer] = {}
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due_ns = -1
        self._soon = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: Exception | None = None  # the first that was only logged
        self._logged_failures: set[tuple[str, str, str]] = set()  # so that each is logged once

    def observe(self, core: EngineCore, observer: Observer) -> None:
        """Notify `observer` of every step of this engine."""
        self._cores.append(core)
        self._observers[id(core)] = observer

    # ── Inputs ──

    def submit(self, core: EngineCore, request: LiveRequest) -> None:
        """Submit a request now. InvalidArgument when the engine could never run it."""
        why = core.find_refusal(request)
        if why is not None:
            raise InvalidArgument(f"request {request.name}: {why}")
        request.arrival_ns = self.clock.now_ns()
        request.rank = core

        def submit_now(now_ns: int) -> None:
            if request.ended:  # cancelled before
                return
            if core.failure is not None:
                core.mark_lost(request, now_ns)
                request.notify_end(now_ns)
                return
            if (
                request.cache_hit_threshold > 0
                and core.compute_cached_share(request) < request.cache_hit_threshold
            ):
                request.aborted = request.below_cache_threshold = True
                request.ended, request.finish_ns = "cancelled", now_ns
                request.notify_end(now_ns)
                return
            self.note(now_ns, "submit", request.name)
            try:
                core.submit(request, now_ns).notify_listeners(now_ns)
            except Exception:
                core.mark_lost(request, now_ns)
                request.notify_end(now_ns)
                raise

        self._enqueue(request.arrival_ns, EventClass.ARRIVAL, core, submit_now)
        self._wake()

    def cancel(self, request: LiveRequest, at_ns: int | None = None) -> None:
        """Cancel a request now: free its blocks and call its listener's `on_end`. No effect if it has ended.

        Listeners pass `at_ns` to cancel their request at the step that they are notified of.
        """
        core = request.rank
        if request.ended or core is None:
            return
        assert isinstance(core, EngineCore), "an engine of this driver serves the request"

        def cancel_now(now_ns: int) -> None:
            if request.ended:
                return
            self.note(now_ns, "cancel", request.name)
            try:
                effects = core.cancel(request, now_ns)
            except Exception as failure:
                self._fail_engine(core, failure, now_ns)
                return
            effects.notify_listeners(now_ns)
            if not request.ended:  # the engine never had it
                request.ended = "cancelled"
                request.notify_end(now_ns)

        self._enqueue(self.clock.now_ns() if at_ns is None else at_ns, EventClass.ARRIVAL, core, cancel_now)
        self._wake()

    def enqueue(
        self, core: EngineCore, action: _Action, at_ns: int | None = None, kind: int = EventClass.ARRIVAL
    ) -> None:
        """Queue `action(now_ns)` on an engine now or at `at_ns`, in order with its other inputs."""
        self._enqueue(self.clock.now_ns() if at_ns is None else at_ns, kind, core, action)
        self._wake()

    def poll_all(self) -> None:
        """Poll all engines again, because the end times of transfers have changed."""
        now_ns = self.clock.now_ns()
        for core in self._cores:
            self._enqueue(now_ns, EventClass.ARRIVAL, core, None)
        self._wake()

    # ── Events ──

    def pump(self) -> None:
        """Process the events that are due. Returns early after `max_burst` times, to yield to the event loop."""
        now_ns = self.clock.now_ns()
        queue = self._queue
        try:
            for _ in range(self._max_burst):
                if not queue or queue[0][0] > now_ns:
                    break
                self._process(queue[0][0])
            if self.after_pump is not None:
                self.after_pump()
        finally:
            self._schedule_timer()

    def run_until(self, until_ns: int | None = None) -> None:
        """Process every event before `until_ns` (default: all), each at its time, without an event loop.

        An engine that computes may call this for the inputs that are due. Raises an engine's failure after all events
        of that time.
        """
        while self._queue and (until_ns is None or self._queue[0][0] < until_ns):
            time_ns = self._queue[0][0]
            self.clock.wait_until(time_ns)
            self._process(time_ns)
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure

    @property
    def idle(self) -> bool:
        """True when no event is queued."""
        return not self._queue

    def _process(self, now_ns: int) -> None:
        """Process all events of one time, in the order of the offline run."""
        touched: dict[int, EngineCore] = {}
        landed: set[int] = set()
        if self.network is not None:
            self.network.run_until(now_ns)
        while self._queue and self._queue[0][0] == now_ns:
            _, kind, _, core, action = heapq.heappop(self._queue)
            if core is None:  # the network's
                self._network_wake_ns = -1
                continue
            if kind == EventClass.LANDING:
                core.wake_ns = -1
                if core.step_end_ns < 0 and self._land(core, now_ns):
                    landed.add(id(core))
            elif kind == EventClass.STEP_END and action is None:
                if core.step_end_ns != now_ns:
                    continue  # the engine was replaced since
                self._end(core, now_ns)
            elif action is not None:
                self._run_action(core, action, now_ns)
            touched[id(core)] = core
        for core in touched.values():
            if self._begin(core, now_ns):
                if core.step_end_ns == Effects.UNKNOWN:
                    self._compute(core, now_ns)
                else:
                    self._enqueue(core.step_end_ns, EventClass.STEP_END, core, None)
                continue
            if core.failure is None and core.waits_for_transfers and core.step_end_ns < 0:
                self._enqueue_landing(core, now_ns)  # within a step nothing lands until its end
            observer = self._observers.get(id(core))
            if observer is not None:
                if id(core) in landed:
                    self._notify(core, observer.on_landed, core)
                self._notify(core, observer.on_idle, core)
        if self.network is not None:
            self._settle_network(self.network, now_ns)

    def _settle_network(self, network: Network, now_ns: int) -> None:
        """Deliver the messages of this time; queue the network's next event, and polls of engines that it reached."""
        for core in network.settle():
            if core.failure is None and core.step_end_ns < 0:
                self._enqueue_landing(core, now_ns)
        wake_ns = network.next_wake_ns
        if wake_ns is not None and wake_ns != self._network_wake_ns:
            self._network_wake_ns = wake_ns
            self._enqueue(max(wake_ns, now_ns + 1), EventClass.LANDING, None, None)

    def _run_action(self, core: EngineCore, action: Callable[[int], object], now_ns: int) -> None:
        """Run an action; log and count its exception."""
        try:
            action(now_ns)
        except Exception as failure:
            log.exception("%s: an action failed", core.name)
            core.errors += 1
            self._failure = self._failure or failure

    def _notify(self, core: EngineCore, method: Callable[..., None], *arguments: object) -> None:
        """Call an observer's method; count its exception, and log it once."""
        try:
            method(*arguments)
        except Exception as failure:
            core.errors += 1
            self._failure = self._failure or failure
            key = (core.name, method.__name__, type(failure).__name__)
            if key not in self._logged_failures:
                self._logged_failures.add(key)
                log.exception("%s: an observer failed in %s (logged once)", core.name, method.__name__)

    def _land(self, core: EngineCore, now_ns: int) -> bool:
        if core.failure is not None:
            return False
        try:
            core.land(now_ns)
        except Exception as failure:
            self._fail_engine(core, failure, now_ns)
            return False
        return True

    def _begin(self, core: EngineCore, now_ns: int) -> bool:
        try:
            return core.begin(now_ns)
        except Exception as failure:
            self._fail_engine(core, failure, now_ns)
            return False

    def _compute(self, core: EngineCore, now_ns: int) -> None:
        """Compute a step in the engine's thread, offline in this one; it ends when that is done."""
        core.computing = True

        def enqueue_end(computed: _Computed) -> None:
            def end(end_ns: int) -> None:
                self._end(core, end_ns, computed)
                core.computing = False

            self._enqueue(self.clock.now_ns(), EventClass.STEP_END, core, end)

        def on_computed(computed: asyncio.Future[Effects]) -> None:
            if self._loop is not None:
                enqueue_end(computed)
                self.pump()

        if self._loop is None:
            computed: Future[Effects] = Future()
            try:
                computed.set_result(core.engine.end_step(now_ns))
            except Exception as failure:
                computed.set_exception(failure)
            enqueue_end(computed)
            return
        if id(core) not in self._threads:
            self._threads[id(core)] = ThreadPoolExecutor(1, core.name)
        thread = self._threads[id(core)]
        self._loop.run_in_executor(thread, core.engine.end_step, now_ns).add_done_callback(on_computed)

    def _end(self, core: EngineCore, now_ns: int, computed: _Computed | None = None) -> None:
        self.step_lateness.record((self.clock.now_ns() - now_ns) / self.clock.speed / 1e9)
        try:
            ended = core.engine.end_step(now_ns) if computed is None else computed.result()
            effects = core.end(ended, now_ns)
        except Exception as failure:
            self._fail_engine(core, failure, now_ns)
            return
        effects.notify_listeners(now_ns)
        observer = self._observers.get(id(core))
        if observer is not None:
            self._notify(core, observer.on_step, core, effects, now_ns)

    def _fail_engine(self, core: EngineCore, failure: Exception, now_ns: int) -> None:
        """Stop an engine until it is replaced, and end its requests."""
        log.error("%s has failed: %s", core.name, failure, exc_info=failure)
        self._failure = self._failure or failure
        for request in core.fail(failure):
            request.finish_ns = now_ns
            request.notify_end(now_ns)

    def _enqueue_landing(self, core: EngineCore, now_ns: int) -> None:
        """Queue a poll of an engine that waits for transfers, at the next one's end."""
        wake_ns = core.engine.next_landing_ns()
        if wake_ns is not None and core.wake_ns != wake_ns:
            core.wake_ns = wake_ns
            self._enqueue(max(wake_ns, now_ns + 1), EventClass.LANDING, core, None)

    def _enqueue(self, time_ns: int, kind: int, core: EngineCore | None, action: _Action | None) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (time_ns, kind, self._sequence, core, action))

    def note(self, now_ns: int, kind: str, name: str) -> None:
        """Add an input to `inputs`, if they are kept."""
        if self.inputs is not None:
            self.inputs.append((now_ns, kind, name))

    # ── Timers ──

    def _wake(self) -> None:
        """Process new inputs as soon as the event loop is free."""
        if not self._soon and self._loop is not None:
            self._soon = True
            self._loop.call_soon(self._pump_soon)

    def _pump_soon(self) -> None:
        self._soon = False
        self.pump()

    def start(self) -> None:
        """Process events in the running event loop as they become due."""
        self._loop = asyncio.get_running_loop()
        self._schedule_timer()

    def stop(self) -> None:
        """Stop processing events."""
        self._loop = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for thread in self._threads.values():
            thread.shutdown()

    def _schedule_timer(self) -> None:
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
