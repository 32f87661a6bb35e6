"""Pause and sleep of a worker, as in vLLM.

New requests queue; since vLLM 0.33 those that arrive during a pause of mode "abort" or "wait" are rejected instead,
but not during sleep. Running requests are aborted ("abort"), finished first ("wait"; queued ones stay queued) or frozen
("keep"). The call returns once the engines are idle.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.server.core import EngineCore
    from understudy.server.driver import Driver
    from understudy.server.live_request import LiveRequest
    from understudy.server.metrics.features import SleepMetrics
    from understudy.server.metrics.vllm import VllmMetrics

MEMORY = frozenset(("weights", "kv_cache"))
"""Tags of the memory that a sleeping engine has released; `wake` takes them."""
_STATES = {1: "weights_offloaded", 2: "discard_all"}


class _PendingPause(NamedTuple):
    """A call that returns once all engines are idle."""

    clear_cache: bool
    then: Callable[[], None]
    on_resumed: Callable[[], None] | None = None
    """Called instead of `then` if the engines resume before they are idle. None: `then` is called even so."""


class Engines(Protocol):
    """The engines that are paused: those of a worker."""

    cores: list[EngineCore]
    metrics: list[VllmMetrics]
    driver: Driver

    def live(self) -> list[LiveRequest]:
        """List the requests in flight."""

    def abort(self, requests: list[LiveRequest]) -> None:
        """End requests now."""

    def reset_prefix_cache(self) -> bool:
        """Clear every cached block."""

    def clear_cache(self, core: EngineCore) -> None:
        """Clear an engine's cache."""


class Pauses:
    """Pauses and wakes the engines of one worker."""

    def __init__(self, worker: Engines, metrics: SleepMetrics) -> None:
        self._worker = worker
        self._metrics = metrics
        self._pending: list[_PendingPause] = []
        self._released: set[str] = set()
        self.paused = False
        """True while no new request starts."""
        self.rejects = False
        """True while new requests are rejected; set by the caller of `pause`, and reset by `resume`."""

    @property
    def asleep(self) -> bool:
        """True while requests are accepted but wait; vLLM counts a pause as sleep too."""
        return self.paused or bool(self._released)

    def pause(
        self,
        mode: str,
        *,
        clear_cache: bool,
        then: Callable[[], None],
        on_resumed: Callable[[], None] | None = None,
    ) -> None:
        """Stop admission and call `then` once the engines are idle (`on_resumed`: see `_PendingPause`)."""
        worker = self._worker
        self.paused = True
        if mode == "abort":
            worker.abort(worker.live())
        self._pending.append(_PendingPause(clear_cache, then, on_resumed))
        for core in worker.cores:
            core.paused = mode == "keep"
            core.pause_admission(True)
            worker.driver.enqueue(core, lambda _: None)

    def resume(self) -> None:
        """Resume admission. Pending pauses still wait until the engines are idle; a pending sleep is cancelled."""
        self.paused = self.rejects = False
        cancelled = [pause.on_resumed for pause in self._pending if pause.on_resumed is not None]
        self._pending = [pause for pause in self._pending if pause.on_resumed is None]
        for core in self._worker.cores:
            core.paused = False
            core.pause_admission(False)
            self._worker.driver.enqueue(core, lambda _: None)
        for notify in cancelled:
            notify()

    def sleep(self, level: int, mode: str, *, then: Callable[[bool], None]) -> None:
        """Pause, then release memory (`level` 0: none; 1: all, weights offloaded; 2: all, weights discarded).

        `then` receives True, or False when the worker was woken or resumed before it was idle.
        """
        began_s = time.perf_counter()

        def on_idle() -> None:
            if level > 0:
                self._released |= MEMORY
            self._set_sleep_state(_STATES.get(level, "paused"))
            self._metrics.done("sleep", time.perf_counter() - began_s)
            then(True)

        self.pause(mode, clear_cache=level > 0, then=on_idle, on_resumed=lambda: then(False))

    def release_cache(self) -> None:
        """Release the memory of the KV cache: here, clear it."""
        began_s = time.perf_counter()
        self._worker.reset_prefix_cache()
        if self.paused:
            self._released.add("kv_cache")
            self._set_sleep_state("paused")
        self._metrics.done("release_kv_cache_memory", time.perf_counter() - began_s)

    def wake(self, tags: list[str] | None) -> bool:
        """Reallocate memory, all (None) or by tag; once all is there, resume and return True."""
        began_s = time.perf_counter()
        wanted = None if tags is None else [tag for tag in tags if tag != "scheduling"]
        if wanted is None:
            self._released.clear()
        elif self._released.issuperset(wanted):  # one tag that is not released makes the call a no-op
            self._released.difference_update(wanted)
        awake = not self._released
        if awake:
            self._set_sleep_state("awake")
            self.resume()
        self._metrics.done("wake", time.perf_counter() - began_s)
        return awake

    def complete_pending(self) -> None:
        """Complete the pending pauses if all engines are idle."""
        worker = self._worker
        if not self._pending or not all(core.is_idle for core in worker.cores):
            return
        pending, self._pending = self._pending, []
        for pause in pending:
            if pause.clear_cache:
                for core in worker.cores:
                    worker.clear_cache(core)
            pause.then()

    def _set_sleep_state(self, state: str) -> None:
        for metrics in self._worker.metrics:
            metrics.asleep = state
