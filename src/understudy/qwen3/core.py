"""The real engine as the server sees an engine: requests of its API in, what each step did out."""

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


class _Seen:
    """The numbers of the engine under the names that metrics ask a simulated one by."""

    def __init__(self, engine: Engine) -> None:
        self._scheduler = engine.scheduler
        self.parked = 0

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting) + len(self.loading)

    @property
    def loading(self) -> list[Any]:
        """Requests whose pages are being restored."""
        restores = self._scheduler.restores
        return [] if restores is None else list(restores.loading)

    @property
    def running(self) -> list[Any]:
        return [*self._scheduler.prefilling, *self._scheduler.decoding]

    @property
    def pool(self) -> tuple[int, int, int]:
        """Free, held and cached blocks."""
        told = self._scheduler.manager.blocks.metrics()
        held = told.total_blocks - told.reset_blocks - told.inactive_blocks
        return told.reset_blocks, held, told.inactive_blocks


class Qwen3Core(EngineCore):
    """The engine behind the rank. Its steps run in the driver's thread; requests come and go between them."""

    def __init__(self, engine: Engine, config: Qwen3Config, name: str, *, events: bool) -> None:
        self.real = engine
        self.model = config
        self.name = name
        self.engine = _Seen(engine)  # type: ignore[assignment]
        self.has_tiers = False
        self.offload = None
        self.stay_sample = 0.0
        self.draft_tokens = 0
        self.has_events = events
        self.live = {}
        self.paused = self.holding = False
        self._held: dict[int, Callable[[], object]] = {}
        self.preemptions = self.steps = 0
        self.step_end_ns = self.wake_ns = -1
        self.sender: KvEventSender | None = None
        self._asked: deque[Callable[[], object]] = deque()  # by the event loop, done in the driver's thread
        self._number = 0
        self._admitted: list[tuple[int, int]] = []
        self._step_tokens = 0
        self._chains: dict[int, TokenBlocks] = {}
        self._events: EventBatch | None = None
        engine.on_step = self._note

    # ── From the event loop ──

    def refusal(self, request: LiveRequest) -> str | None:
        """Why the engine could never run it."""
        prompt = _choice(request).prompt
        if len(prompt) and int(prompt.max()) >= self.model.vocab_size:
            return f"token {int(prompt.max())} is not one of the model's {self.model.vocab_size}"
        return self.real.scheduler.refusal(len(prompt), request.max_tokens)

    def submit(self, request: LiveRequest) -> None:
        """It is queued before the next step begins."""
        self._number += 1
        request.engine_id, request.rank = self._number, self
        self.live[request.engine_id] = request
        choice, sampling = _choice(request), _choice(request).generation.sampling
        lora = choice.generation.model if choice.generation.model in choice.generation.worker.loras else ""
        asked = Request(
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
        if self.holding:
            self._held[request.engine_id] = lambda: self.real.submit(asked)
        else:
            self._asked.append(lambda: self.real.submit(asked))

    def cancel(self, request: LiveRequest, now_ns: int) -> bool:
        """It hears nothing more, and its blocks are free before the next step begins."""
        if self.live.pop(request.engine_id, None) is None:
            return False
        self._chains.pop(request.engine_id, None)
        name = f"{request.engine_id}"
        if self._held.pop(request.engine_id, None) is None:
            self._asked.append(lambda: self.real.cancel(name))
        request.finish_ns, request.ended = now_ns, "cancelled"
        return True

    def hold(self, on: bool) -> None:
        """While on, who comes is not handed to the engine; who is there goes on to its end."""
        self.holding = on
        if not on:
            self._asked.extend(self._held.values())
            self._held.clear()

    @property
    def quiet(self) -> bool:
        """There is nothing to do."""
        return self.paused or (not self._asked and self.real.idle)

    @property
    def holds_blocks(self) -> bool:
        """Requests hold some of its blocks."""
        return len(self.live) > len(self._held)

    def restart(self) -> list[LiveRequest]:
        """Every request is lost, and nothing is cached."""
        lost = list(self.live.values())
        for request in lost:
            self.cancel(request, -1)
            request.ended = "lost"
        self.forget_cache(-1)
        return lost

    def forget_cache(self, now_ns: int) -> bool:  # noqa: ARG002
        """Every block that nobody holds is empty. Whether that is all of them."""
        self._asked.append(lambda: self.real.scheduler.manager.blocks.clear_inactive())
        return not self.holds_blocks

    def take_events(self) -> tuple[EventBatch, Any]:
        """Of the step that was told last."""
        events, self._events = self._events, None
        assert events is not None
        return events, np.zeros(len(events), np.int64)

    @property
    def num_running(self) -> int:
        """Requests that the scheduler runs."""
        return len(self.engine.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self.engine.num_waiting + len(self._asked) + len(self._held)

    @property
    def usage(self) -> float:
        """The share of blocks that requests hold."""
        return self.engine.pool[1] / self.real.scheduler.manager.total_blocks

    # ── From the driver ──

    def advance(self) -> tuple[list[Output], list[tuple[int, int]], int, EventBatch | None]:
        """One step, in the driver's thread: outputs, (request, cached tokens) of the admitted, tokens, events."""
        outputs = self.real.step(self._poll)
        admitted, self._admitted = self._admitted, []
        tokens, self._step_tokens = self._step_tokens, 0
        store = self.real.scheduler.manager.blocks.store
        return outputs, admitted, tokens, store.drain_events() if self.has_events else None

    def tell(
        self,
        told: tuple[list[Output], list[tuple[int, int]], int, EventBatch | None],
        now_ns: int,
    ) -> StepEffects:
        """What a step did, on the event loop."""
        outputs, admitted, batch_tokens, self._events = told
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
            if request is None:  # its client has gone
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
        while self._asked:
            self._asked.popleft()()

    def _note(self, plan: Plan) -> None:
        self._step_tokens += sum(len(chunk.tokens) for chunk in plan.step.chunks) + len(plan.decodes)
        self._admitted += [
            (int(request.id), request.cached_tokens)
            for request, chunk in zip(plan.chunks, plan.step.chunks, strict=True)
            if chunk.view.seq_len - len(chunk.tokens) == request.cached_tokens
        ]

    def _remember(self, request: LiveRequest, token: int) -> None:
        """A block that the answer fills is spoken of by its tokens."""
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
    """A request of the server's is listened to by one choice of its answer."""
    return cast("Choice", request.listener)
