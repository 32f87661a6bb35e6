"""Adapter of the real engine for the server: API requests in, effects of each step out."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from understudy.qwen3.request import Request
from understudy.qwen3.sampling import SamplingParams
from understudy.server.core import EngineCore, LiveRequest, StepEffects
from understudy.tokens import TokenBlocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy._core import EventBatch
    from understudy.qwen3.config import Qwen3Config
    from understudy.qwen3.engine import Engine
    from understudy.qwen3.plan import Plan
    from understudy.qwen3.request import Output
    from understudy.server.api.generation import Choice
    from understudy.server.api.growing import GrowingPlan
    from understudy.server.kv_events import KvEventSender


class _MetricsView:
    """The engine's numbers under the names that metrics read from a simulated engine."""

    def __init__(self, engine: Engine) -> None:
        self._scheduler = engine.scheduler
        self.parked = 0

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting) + len(self.loading)

    @property
    def loading(self) -> list[Any]:
        """Requests whose pages are being loaded."""
        restores = self._scheduler.restores
        return [] if restores is None else list(restores.loading)

    @property
    def running(self) -> list[Any]:
        return [*self._scheduler.prefilling, *self._scheduler.decoding]

    @property
    def pool(self) -> tuple[int, int, int]:
        """Free, used and cached blocks."""
        metrics = self._scheduler.manager.blocks.metrics()
        used = metrics.total_blocks - metrics.reset_blocks - metrics.inactive_blocks
        return metrics.reset_blocks, used, metrics.inactive_blocks


class Qwen3Core(EngineCore):
    """The real engine of a rank. Steps run in the driver's thread; requests are added and cancelled between them."""

    def __init__(self, engine: Engine, config: Qwen3Config, name: str, *, events: bool) -> None:
        self.real = engine
        self.model = config
        self.name = name
        self.engine = _MetricsView(engine)  # type: ignore[assignment]
        self.has_tiers = False
        self.offload = None
        self.stay_sample = 0.0
        self.draft_tokens = 0
        self.has_events = events
        self.live = {}
        self.paused = self.admission_paused = False
        self._held: dict[int, Callable[[], object]] = {}
        self.preemptions = self.steps = 0
        self.step_end_ns = self.wake_ns = -1
        self.sender: KvEventSender | None = None
        self._pending_calls: deque[Callable[[], object]] = deque()  # run in the driver's thread
        self._number = 0
        self._admitted: list[tuple[int, int]] = []
        self._step_tokens = 0
        self._chains: dict[int, TokenBlocks] = {}
        self._events: EventBatch | None = None
        engine.on_step = self._record_step

    # ── From the event loop ──

    def refusal(self, request: LiveRequest) -> str | None:
        """Return why the engine can never run the request; None if it can."""
        prompt = _choice(request).prompt
        if len(prompt) and int(prompt.max()) >= self.model.vocab_size:
            return f"token {int(prompt.max())} is not one of the model's {self.model.vocab_size}"
        return self.real.scheduler.refusal(len(prompt), request.max_tokens)

    def submit(self, request: LiveRequest) -> None:
        """Queue the request before the next step begins."""
        self._number += 1
        request.engine_id, request.rank = self._number, self
        self.live[request.engine_id] = request
        choice, sampling = _choice(request), _choice(request).generation.sampling
        lora = choice.generation.model if choice.generation.model in choice.generation.worker.loras else ""
        engine_request = Request(
            f"{request.engine_id}",
            choice.prompt,  # type: ignore[arg-type]
            request.max_tokens,
            SamplingParams(
                temperature=sampling.temperature,
                top_k=max(sampling.top_k, 0),
                top_p=sampling.top_p,
                seed=None if sampling.seed is None else sampling.seed + choice.index,
                logprobs=sampling.logprobs if sampling.logprobs is None else max(sampling.logprobs, 0),
            ),
            priority=request.priority,
            salt=sampling.cache_salt,
            lora=lora,
        )
        if self.sender is not None:
            size = self.real.scheduler.manager.layout.page_size
            self._chains[request.engine_id] = TokenBlocks(
                choice.prompt, size, salt=sampling.cache_salt, lora=lora
            )
        if self.admission_paused:
            self._held[request.engine_id] = lambda: self.real.submit(engine_request)
        else:
            self._pending_calls.append(lambda: self.real.submit(engine_request))

    def cancel(self, request: LiveRequest, now_ns: int) -> bool:
        """Cancel the request: no more notifications, and its blocks are free before the next step begins."""
        if self.live.pop(request.engine_id, None) is None:
            return False
        self._chains.pop(request.engine_id, None)
        name = f"{request.engine_id}"
        if self._held.pop(request.engine_id, None) is None:
            self._pending_calls.append(lambda: self.real.cancel(name))
        request.finish_ns, request.ended = now_ns, "cancelled"
        return True

    def pause_admission(self, on: bool) -> None:
        """While on, keep new requests from the engine; requests in the engine run to their end."""
        self.admission_paused = on
        if not on:
            self._pending_calls.extend(self._held.values())
            self._held.clear()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.paused or (not self._pending_calls and self.real.idle)

    @property
    def holds_blocks(self) -> bool:
        """Whether requests use some of its blocks."""
        return len(self.live) > len(self._held)

    def restart(self) -> list[LiveRequest]:
        """Cancel every request as lost, empty the cache, and return the lost requests."""
        lost = list(self.live.values())
        for request in lost:
            self.cancel(request, -1)
            request.ended = "lost"
        self.forget_cache(-1)
        return lost

    def forget_cache(self, now_ns: int) -> bool:  # noqa: ARG002
        """Empty all blocks without references; return whether those are all blocks."""
        self._pending_calls.append(lambda: self.real.scheduler.manager.blocks.clear_inactive())
        return not self.holds_blocks

    def take_events(self) -> tuple[EventBatch, Any]:
        """Return the events of the last published step, with their times."""
        events, self._events = self._events, None
        assert events is not None
        return events, np.zeros(len(events), np.int64)

    @property
    def num_running(self) -> int:
        """Number of requests that the scheduler runs."""
        return len(self.engine.running)

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue."""
        return self.engine.num_waiting + len(self._pending_calls) + len(self._held)

    @property
    def usage(self) -> float:
        """Share of blocks that requests use."""
        return self.engine.pool[1] / self.real.scheduler.manager.total_blocks

    # ── From the driver ──

    def advance(self) -> tuple[list[Output], list[tuple[int, int]], int, EventBatch | None]:
        """Run a step in the driver's thread; return outputs, admitted (request, cached tokens), tokens and events."""
        outputs = self.real.step(self._poll)
        admitted, self._admitted = self._admitted, []
        tokens, self._step_tokens = self._step_tokens, 0
        store = self.real.scheduler.manager.blocks.store
        return outputs, admitted, tokens, store.drain_events() if self.has_events else None

    def publish_step(
        self,
        step: tuple[list[Output], list[tuple[int, int]], int, EventBatch | None],
        now_ns: int,
    ) -> StepEffects:
        """Apply a step's results to live requests on the event loop; return its effects."""
        outputs, admitted, batch_tokens, self._events = step
        self.steps += 1
        for engine_id, cached in admitted:
            request = self.live.get(engine_id)
            if request is not None:
                request.admitted_ns, request.cached_tokens = now_ns, cached
                request.listener.on_admitted(request, now_ns)
        tokens: list[tuple[LiveRequest, int, int]] = []
        finished: list[LiveRequest] = []
        for output in outputs:
            request = self.live.get(int(output.request_id))
            if request is None:  # its client disconnected
                continue
            if output.token is not None:
                last = output.finish_reason is not None
                logprobs = None if output.logprobs is None else tuple(output.logprobs)
                cast("GrowingPlan", _choice(request).plan).take(output.token, logprobs, last=last)  # type: ignore[arg-type]
                self._remember(request, output.token)
                tokens.append((request, request.emitted, 1))
                request.emitted += 1
                if request.first_token_ns < 0:
                    request.first_token_ns = now_ns
            if output.finish_reason is not None:
                del self.live[request.engine_id]
                self._chains.pop(request.engine_id, None)
                request.finish_ns = now_ns
                request.ended = "finished" if output.finish_reason in ("length", "stop") else "lost"
                finished.append(request)
        return StepEffects(tokens, finished, batch_tokens)

    def _poll(self) -> None:
        while self._pending_calls:
            self._pending_calls.popleft()()

    def _record_step(self, plan: Plan) -> None:
        self._step_tokens += sum(len(chunk.tokens) for chunk in plan.step.chunks) + len(plan.decodes)
        self._admitted += [
            (int(request.id), request.cached_tokens)
            for request, chunk in zip(plan.chunks, plan.step.chunks, strict=True)
            if chunk.view.seq_len - len(chunk.tokens) == request.cached_tokens
        ]

    def _remember(self, request: LiveRequest, token: int) -> None:
        """Report the tokens of a block that the answer has filled to the event sender."""
        chain = self._chains.get(request.engine_id)
        if chain is None or self.sender is None:
            return
        size, before = self.real.scheduler.manager.layout.page_size, len(chain.identities)
        chain.append(token)
        if len(chain.identities) > before:
            sampling = _choice(request).generation.sampling
            self.sender.remember(
                chain.identities[before:],
                np.asarray(chain.tokens[before * size : (before + 1) * size], np.uint32),
                salt=sampling.cache_salt,
                session=sampling.session_id,
            )


def _choice(request: LiveRequest) -> Choice:
    """Return the listener of a server request, which is one choice of its answer."""
    return cast("Choice", request.listener)
