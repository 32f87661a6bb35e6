"""The engine: a scheduler and an executor, one step after another. Drivers (a server, a benchmark) own the clock."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from understudy.errors import WrongState
from understudy.qwen3.request import Output, Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.qwen3.executor import Computed, Executor
    from understudy.qwen3.plan import Plan
    from understudy.qwen3.scheduler import Scheduler


class Engine:
    """Requests in, outputs out. One thread at a time.

    `step` ends the step that is under way, applies it, and begins the next one before it returns: while the device
    computes, the caller delivers what it got and takes in what came. Then the next step is prepared as far as it can be
    foreseen; if it comes so, the device gets it first, and what was computed is applied meanwhile. Copies between
    device and host memory are set off then, too.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.steps = 0
        self.on_step: Callable[[Plan], None] | None = None
        """Told of every step that succeeded, before it is applied."""
        self._running: Plan | None = None
        self._computed: tuple[Plan, Computed] | None = None  # and not yet applied
        self._outputs: list[Output] = []
        self._closed = False

    def submit(self, request: Request) -> None:
        """Queue a request; if it can never run, the next step says so. InvalidArgument for an id that is under way."""
        if self._closed:
            raise WrongState("this engine is closed")
        if (refused := self.scheduler.add(request)) is not None:
            self._outputs.append(refused)

    def cancel(self, request_id: str) -> bool:
        """End a request wherever it is; its blocks are free at once. False when it is not under way.

        What was computed for it before is heard first, and if that ends it, it has ended so.
        """
        self._apply()
        if not self.scheduler.cancel(request_id):
            return False
        self._outputs.append(Output(request_id, finish_reason="abort"))
        return True

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or has something to say."""
        return self._running is None and self.scheduler.idle and not self._outputs

    @property
    def running(self) -> bool:
        """A step is under way."""
        return self._running is not None

    @property
    def waits(self) -> bool:
        """Requests are there, and none can be computed before pages have come from the host."""
        return self._running is None and not self._outputs and not self.scheduler.idle

    def step(self, poll: Callable[[], None] | None = None) -> list[Output]:
        """What requests hear of the step that ends now. `poll` may submit and cancel, right before the next begins."""
        if self._running is None:
            self._begin(poll)
        self._set_off_copies()
        if (plan := self._running) is not None:
            foreseen = self._prepare(plan)
            self._running = None
            try:
                computed = self.executor.finish()
            except Exception as error:  # the step did not happen; only its culprit ends
                self._outputs += self.scheduler.fail(plan, error)
                self._begin(poll)
            else:
                self.steps += 1
                if self.on_step is not None:
                    self.on_step(plan)
                self._go_on(plan, computed, foreseen, poll)
        if self._running is None:  # nothing to wait for: whoever waits for pages waits for these
            self._set_off_copies()
        outputs, self._outputs = self._outputs, []
        return outputs

    def run(self) -> list[Output]:
        """Step until nothing is left to do."""
        outputs: list[Output] = []
        while not self.idle:
            outputs += self.step()
        return outputs

    def close(self) -> None:
        """End every request and give the device back. Idempotent."""
        if self._closed:
            return
        if self._running is not None:
            with suppress(Exception):  # it ends one way or the other
                self.executor.finish()
            self._running = None
        for request in self.scheduler.live():
            self.scheduler.cancel(request.id)
        self._closed = True
        self.executor.close()
        if self.scheduler.restores is not None:
            self.scheduler.restores.host.close()
        self.scheduler.manager.close()

    def _set_off_copies(self) -> None:
        if self.scheduler.restores is not None:
            self.scheduler.restores.host.set_off()

    def _prepare(self, plan: Plan) -> Plan | None:
        foreseen = self.scheduler.foresee(plan)
        if foreseen is not None:
            try:
                self.executor.prepare(foreseen.step)
            except Exception:  # whatever is wrong with it is found again, and told, when it is begun
                return None
        return foreseen

    def _go_on(
        self, plan: Plan, computed: Computed, foreseen: Plan | None, poll: Callable[[], None] | None
    ) -> None:
        """Apply what was computed and begin the next step, in this order only where the next one depends on it."""
        self._computed = (plan, computed)
        if foreseen is None or self.scheduler.stops(plan, computed):
            self._apply()
            self._begin(poll)
            return
        confirmed, failure = False, None
        try:
            if poll is not None:
                poll()
            if self._computed is not None and (confirmed := self.scheduler.confirm(foreseen, computed)):
                self._running = foreseen
                self.executor.begin(foreseen.step)
        except Exception as error:
            if not confirmed:
                raise
            failure = error
        finally:
            self._apply()
        if confirmed:
            self.scheduler.adopt(foreseen)
        if failure is not None:
            self._running = None
            self._outputs += self.scheduler.fail(foreseen, failure)
        if self._running is None:
            self._begin(None)

    def _apply(self) -> None:
        if self._computed is not None:
            (plan, computed), self._computed = self._computed, None
            self._outputs += self.scheduler.apply(plan, computed)

    def _begin(self, poll: Callable[[], None] | None) -> None:
        if poll is not None:
            poll()
        while (plan := self.scheduler.schedule()) is not None:
            try:
                self.executor.begin(plan.step)
            except Exception as error:
                self._outputs += self.scheduler.fail(plan, error)
                continue
            self._running = plan
            return
