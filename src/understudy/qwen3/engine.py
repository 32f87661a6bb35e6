"""The engine: a scheduler and an executor that run step by step. Drivers (a server, a benchmark) own the clock."""

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
    """Run requests and return outputs. One thread at a time.

    `step` ends the current step, applies it, and begins the next one before it returns: while the device computes, the
    caller delivers outputs and reads new requests. The next step is then prepared by lookahead; if the prediction is
    right, the device gets it first, and the results of the last step are applied meanwhile. Copies between device and
    host memory also begin then.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.steps = 0
        self.on_step: Callable[[Plan], None] | None = None
        """Callback for every successful step, before it is applied."""
        self._running: Plan | None = None
        self._computed: tuple[Plan, Computed] | None = None  # not yet applied
        self._outputs: list[Output] = []
        self._closed = False

    def submit(self, request: Request) -> None:
        """Queue a request; if it can never run, the next step reports that. InvalidArgument for an id in use."""
        if self._closed:
            raise WrongState("this engine is closed")
        if (refused := self.scheduler.add(request)) is not None:
            self._outputs.append(refused)

    def cancel(self, request_id: str) -> bool:
        """End a request in any state and free its blocks. False when there is no such request.

        Tokens computed before are reported first; if they end the request, that is its finish reason.
        """
        self._apply()
        if not self.scheduler.cancel(request_id):
            return False
        self._outputs.append(Output(request_id, finish_reason="abort"))
        return True

    @property
    def idle(self) -> bool:
        """Whether there are no requests and no outputs."""
        return self._running is None and self.scheduler.idle and not self._outputs

    @property
    def running(self) -> bool:
        """Whether a step is in progress."""
        return self._running is not None

    @property
    def waits_for_pages(self) -> bool:
        """Whether all requests wait for pages from the host."""
        return self._running is None and not self._outputs and not self.scheduler.idle

    def step(self, poll: Callable[[], None] | None = None) -> list[Output]:
        """End the current step and return its outputs. `poll` may submit and cancel just before the next begins."""
        if self._running is None:
            self._begin(poll)
        self._begin_copies()
        if (plan := self._running) is not None:
            predicted = self._prepare(plan)
            self._running = None
            try:
                computed = self.executor.finish()
            except Exception as error:  # the step is rolled back; only the failing request ends
                self._outputs += self.scheduler.fail(plan, error)
                self._begin(poll)
            else:
                self.steps += 1
                if self.on_step is not None:
                    self.on_step(plan)
                self._apply_and_begin_next(plan, computed, predicted, poll)
        if self._running is None:  # no step runs: requests may wait for these copies
            self._begin_copies()
        outputs, self._outputs = self._outputs, []
        return outputs

    def run(self) -> list[Output]:
        """Step until all requests have ended; return all outputs."""
        outputs: list[Output] = []
        while not self.idle:
            outputs += self.step()
        return outputs

    def close(self) -> None:
        """End every request and release the device. Idempotent."""
        if self._closed:
            return
        if self._running is not None:
            with suppress(Exception):  # its result is not needed
                self.executor.finish()
            self._running = None
        for request in self.scheduler.live():
            self.scheduler.cancel(request.id)
        self._closed = True
        self.executor.close()
        if self.scheduler.restores is not None:
            self.scheduler.restores.host.close()
        self.scheduler.manager.close()

    def _begin_copies(self) -> None:
        if self.scheduler.restores is not None:
            self.scheduler.restores.host.begin_copies()

    def _prepare(self, plan: Plan) -> Plan | None:
        predicted = self.scheduler.predict_next(plan)
        if predicted is not None:
            try:
                self.executor.prepare(predicted.step)
            except Exception:  # the same error is raised and reported when the step begins
                return None
        return predicted

    def _apply_and_begin_next(
        self, plan: Plan, computed: Computed, predicted: Plan | None, poll: Callable[[], None] | None
    ) -> None:
        """Apply the results and begin the next step, in this order only if the next step depends on them."""
        self._computed = (plan, computed)
        if predicted is None or self.scheduler.has_stop_token(plan, computed):
            self._apply()
            self._begin(poll)
            return
        confirmed, failure = False, None
        try:
            if poll is not None:
                poll()
            if self._computed is not None and (confirmed := self.scheduler.confirm(predicted, computed)):
                self._running = predicted
                self.executor.begin(predicted.step)
        except Exception as error:
            if not confirmed:
                raise
            failure = error
        finally:
            self._apply()
        if confirmed:
            self.scheduler.schedule_confirmed(predicted)
        if failure is not None:
            self._running = None
            self._outputs += self.scheduler.fail(predicted, failure)
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
