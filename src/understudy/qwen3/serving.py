"""Serve the real engine with the same HTTP API, metrics and KV events as simulated engines."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

from understudy.errors import InvalidArgument
from understudy.qwen3.core import Qwen3Core
from understudy.server.api.errors import ApiError
from understudy.server.api.growing import GrowingPlan
from understudy.server.driver import Driver

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.qwen3.config import Qwen3Config
    from understudy.qwen3.engine import Engine
    from understudy.server.api.sampling import Sampling
    from understudy.server.api.texts import TokenTexts
    from understudy.server.clock import Clock
    from understudy.server.core import EngineCore, LiveRequest
    from understudy.server.kv_events import KvEventSender


class Qwen3Serving:
    """Implement `GivenEngine` for the real engine, which it owns; `close` ends it."""

    def __init__(self, engine: Engine, config: Qwen3Config, end_ids: frozenset[int]) -> None:
        self.engine = engine
        self.config = config
        self.end_ids = end_ids
        self._core: Qwen3Core | None = None

    def driver(self, clock: Clock) -> Driver:
        """Implement `GivenEngine`."""
        return Qwen3Driver(clock)

    def core(self, name: str, *, events: bool) -> EngineCore:
        """Implement `GivenEngine`."""
        assert self._core is None, "one engine serves one worker"
        self._core = Qwen3Core(self.engine, self.config, name, events=events)
        return self._core

    def plan(self, sampling: Sampling, texts: TokenTexts, limit: int) -> GrowingPlan:
        """Implement `GivenEngine`."""
        for name, asked in (
            ("structured outputs and forced tools", sampling.structure is not None),
            ("prompt_logprobs", sampling.prompt_logprobs is not None),
            ("penalties, min_p and logit_bias", sampling.steered),
            ("cache_hit_threshold", sampling.cache_hit_threshold is not None),
        ):
            if asked:
                raise ApiError(f"the engine qwen3 has no {name}; leave them out")
        return GrowingPlan(sampling, texts, limit, self.end_ids)

    def connect_events(self, sender: KvEventSender) -> None:
        """Implement `GivenEngine`."""
        assert self._core is not None
        self._core.sender = sender

    def close(self) -> None:
        """End the engine. Idempotent."""
        self.engine.close()


class Qwen3Driver(Driver):
    """Step the engine in its own thread without delay, and publish every step on the event loop."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._thread = ThreadPoolExecutor(1, "qwen3")
        self._core: Qwen3Core | None = None
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def observe(self, core: EngineCore, observer: Any) -> None:
        """Notify the observer of every step."""
        super().observe(core, observer)
        self._core = cast("Qwen3Core", core)

    def submit(self, core: EngineCore, request: LiveRequest) -> None:
        """Submit a request. InvalidArgument when the engine can never run it."""
        why = cast("Qwen3Core", core).refusal(request)
        if why is not None:
            raise InvalidArgument(f"request {request.name}: {why}")
        request.arrival_ns = self.clock.now_ns()
        self._note(request.arrival_ns, "submit", request)
        core.submit(request)
        self._woken.set()

    def cancel(self, request: LiveRequest, at_ns: int | None = None) -> None:
        """Cancel a request; its listener receives `on_end` from the event loop."""
        core = request.rank
        now_ns = self.clock.now_ns() if at_ns is None else at_ns
        if request.ended or core is None:
            return
        self._note(now_ns, "cancel", request)
        core.cancel(request, now_ns)
        self._woken.set()
        if self._loop is not None:
            self._loop.call_soon(self._ended, request, now_ns)

    def enqueue(self, core: EngineCore, action: Callable[[int], object]) -> None:  # noqa: ARG002
        """Run an action on the engine now."""
        action(self.clock.now_ns())
        self._woken.set()

    def start(self) -> None:
        """Start stepping whenever there is work."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run())

    def stop(self) -> None:
        """Stop stepping."""
        super().stop()
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._thread.shutdown()

    async def _run(self) -> None:
        loop, core = asyncio.get_running_loop(), self._core
        assert core is not None
        while True:
            if core.is_idle:
                self._woken.clear()
                observer = self._observers.get(id(core))
                if observer is not None:
                    self._notify(core, observer.on_idle, core)
                await self._woken.wait()
                continue
            step = await loop.run_in_executor(self._thread, core.advance)
            now_ns = self.clock.now_ns()
            effects = core.publish_step(step, now_ns)
            effects.notify_listeners(now_ns)
            observer = self._observers.get(id(core))
            if observer is not None:
                self._notify(core, observer.on_step, core, effects, now_ns)
            if self.after_pump is not None:
                self.after_pump()

    def _ended(self, request: LiveRequest, now_ns: int) -> None:
        request.notify_end(now_ns)
        if self.after_pump is not None:
            self.after_pump()
