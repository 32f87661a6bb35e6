"""The real engine behind the interface of all engines: the end of a step is unknown, and `end_step` computes it."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from understudy._core import AdmittedRequest, Effects, EngineSnapshot, Phase, RequestRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from understudy._core import EventBatch, Identities
    from understudy.qwen3.engine import Engine
    from understudy.qwen3.plan import Plan
    from understudy.qwen3.request import Output, Request

_REASONS = {"length": "length", "stop": "stop", "abort": "cancelled"}


class LiveEngine:
    """Implement `engines.interface.Engine`. Calls other than `end_step` take effect just before the next step begins.

    A step both begins and ends in the thread of `end_step`, as the device requires.
    """

    def __init__(self, engine: Engine, *, events: bool) -> None:
        self.real = engine
        self.outputs: list[Output] = []
        """Outputs of the last `end_step`, with the tokens that its effects only count."""
        self._keeps_events = events
        self._events: EventBatch | None = None
        self._calls: deque[Callable[[], object]] = deque()  # for the thread of end_step
        self._present: set[int] = set()  # requests that have not ended
        self._held: dict[int, Request] = {}  # part of them, submitted while admission is off
        self._admits = True
        self._admitted: list[AdmittedRequest] = []
        self._batch_tokens = 0
        self._landed = False
        self.on_poll: Callable[[], None] | None = None
        """Callback just before the calls since the last step take effect."""
        engine.on_step = self._record_step

    def submit(self, spec: Request, now_ns: int) -> Effects:  # noqa: ARG002
        """Queue a request whose id is a number."""
        self._present.add(int(spec.id))
        if self._admits:
            self._calls.append(partial(self.real.submit, spec))
        else:
            self._held[int(spec.id)] = spec
        return Effects(self._phase)

    def cancel(self, request: int, now_ns: int) -> Effects:
        """Cancel a request: its blocks are free before the next step begins."""
        if request not in self._present:
            return Effects(self._phase)
        self._present.discard(request)
        if self._held.pop(request, None) is None:
            self._calls.append(partial(self.real.cancel, f"{request}"))
        record = RequestRecord(request, "cancelled", finish_ns=now_ns)
        return Effects(self._phase, finished=[record])

    def begin_step(self, now_ns: int) -> Effects:  # noqa: ARG002
        """Return an unknown end if there is work; `end_step` begins and computes the step."""
        if self._phase == Phase.IDLE:
            return Effects(Phase.IDLE)
        if not self._calls and not self._landed and self.next_landing_ns() is not None:
            return Effects(Phase.READY)
        self._landed = False
        return Effects(Phase.IN_STEP, Effects.UNKNOWN)

    def end_step(self, now_ns: int) -> Effects:
        """Compute the step. Its end is known to the driver only, so records have no time."""
        del now_ns
        self.outputs = self.real.step(self._poll)
        finished = [output for output in self.outputs if output.finish_reason is not None]
        self._present.difference_update(int(output.request_id) for output in finished)
        admitted, self._admitted = self._admitted, []
        tokens, self._batch_tokens = self._batch_tokens, 0
        if self._keeps_events:
            self._events = self.real.scheduler.manager.blocks.store.drain_events()
        return Effects(
            self._phase,
            tokens=[(int(output.request_id), 1) for output in self.outputs if output.token is not None],
            finished=[
                RequestRecord(int(output.request_id), _REASONS.get(output.finish_reason or "", "failed"))
                for output in finished
            ],
            admitted=admitted,
            batch_tokens=tokens,
        )

    def snapshot(self) -> EngineSnapshot:
        """Return the state of the scheduler, and requests that it has not received as waiting."""
        scheduler, metrics = self.real.scheduler, self.real.scheduler.manager.blocks.metrics()
        loading = 0 if scheduler.restores is None else len(scheduler.restores.loading)
        return EngineSnapshot(
            self._phase,
            running=len(scheduler.prefilling) + len(scheduler.decoding),
            waiting=len(scheduler.waiting) + loading + len(self._calls) + len(self._held),
            loading=loading,
            active_blocks=metrics.total_blocks - metrics.reset_blocks - metrics.inactive_blocks,
        )

    def never_fits(self, prompt_tokens: int, max_tokens: int) -> str | None:
        """Return why a request of this size could never run, or None."""
        return self.real.scheduler.refusal(prompt_tokens, max_tokens)

    def next_landing_ns(self) -> int | None:
        """Return the end of the next copy from the host if all requests wait for one and it is known."""
        restores = self.real.scheduler.restores
        return None if restores is None or not self.real.waits_for_pages else restores.host.copier.next_ns

    def land(self, now_ns: int) -> Effects:  # noqa: ARG002
        """Begin a step next; it applies the copies that have ended."""
        self._landed = True
        return Effects(self._phase)

    def set_admitting(self, on: bool) -> None:
        """While off, keep new requests from the scheduler; requests in the scheduler run to their end."""
        self._admits = on
        if on:
            self._calls.extend(partial(self.real.submit, request) for request in self._held.values())
            self._held.clear()

    @property
    def drained(self) -> bool:
        """True if no request is in the scheduler."""
        return len(self._present) == len(self._held)

    def forget_cache(self, now_ns: int) -> None:  # noqa: ARG002
        """Empty all blocks without references."""
        self._calls.append(self.real.scheduler.manager.blocks.clear_inactive)

    def cached_prefix(self, identities: Identities) -> int:  # noqa: ARG002
        """Return 0: the server refuses requests that ask for it."""
        return 0

    def take_events(self) -> tuple[EventBatch, npt.NDArray[np.int64]]:
        """Take the events of the last step; their times are not known."""
        events, self._events = self._events, None
        if events is None:
            events = self.real.scheduler.manager.blocks.store.drain_events()
        return events, np.zeros(len(events), np.int64)

    def reset(self) -> None:
        """Cancel every request and empty the cache."""
        for request in tuple(self._present):
            self.cancel(request, -1)
        self.forget_cache(-1)

    @property
    def _phase(self) -> Phase:
        return Phase.READY if self._calls or not self.real.idle else Phase.IDLE

    def _poll(self) -> None:
        if self.on_poll is not None:
            self.on_poll()
        while self._calls:
            self._calls.popleft()()

    def _record_step(self, plan: Plan) -> None:
        self._batch_tokens += sum(len(chunk.tokens) for chunk in plan.step.chunks) + len(plan.decodes)
        self._admitted += [
            AdmittedRequest(int(request.id), request.cached_tokens)
            for request, chunk in zip(plan.chunks, plan.step.chunks, strict=True)
            if chunk.view.seq_len - len(chunk.tokens) == request.cached_tokens
        ]
