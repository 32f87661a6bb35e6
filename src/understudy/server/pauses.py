"""A worker at rest: paused or asleep, as vLLM's schedulers are.

Who comes meanwhile is queued. Who is here is aborted, goes on to its end ("wait": those in progress; the queue stays)
or is kept as it is ("keep"). The answer to who asked for it waits until nothing moves any more.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.server.metrics.features import SleepMetrics
    from understudy.server.worker import Worker

MEMORY = frozenset(("weights", "kv_cache"))
"""What a sleeping engine has given back, by the names under which it can be woken."""
_STATES = {1: "weights_offloaded", 2: "discard_all"}


class _Wish(NamedTuple):
    """Somebody waits until nothing moves any more."""

    clear_cache: bool
    then: Callable[[], None]
    instead: Callable[[], None] | None = None
    """Called where the engines go on before that: it is no longer wanted. Without it, it is."""


class Pauses:
    """Pauses and wakes the engines of one worker."""

    def __init__(self, worker: Worker, metrics: SleepMetrics) -> None:
        self._worker = worker
        self._metrics = metrics
        self._wishes: list[_Wish] = []
        self._gone: set[str] = set()
        self.paused = False
        """Nobody new begins."""

    @property
    def asleep(self) -> bool:
        """Requests are accepted and wait; as vLLM tells it, a pause is a sleep too."""
        return self.paused or bool(self._gone)

    def pause(
        self,
        mode: str,
        *,
        clear_cache: bool,
        then: Callable[[], None],
        instead: Callable[[], None] | None = None,
    ) -> None:
        """Begin nothing new from now on; `then` is called when nothing moves any more (`instead`: see `_Wish`)."""
        worker = self._worker
        self.paused = True
        if mode == "abort":
            worker.abort(worker.live())
        self._wishes.append(_Wish(clear_cache, then, instead))
        for core in worker.cores:
            core.paused = mode == "keep"
            core.hold(True)
            worker.driver.do(core, lambda _: None)

    def resume(self) -> None:
        """Begin again. Who waits for a pause waits until nothing moves; a sleep that has not begun is off."""
        self.paused = False
        given_up = [wish.instead for wish in self._wishes if wish.instead is not None]
        self._wishes = [wish for wish in self._wishes if wish.instead is None]
        for core in self._worker.cores:
            core.paused = False
            core.hold(False)
            self._worker.driver.do(core, lambda _: None)
        for tell in given_up:
            tell()

    def sleep(self, level: int, mode: str, *, then: Callable[[bool], None]) -> None:
        """Pause; then give memory back (`level` 1: the weights are kept elsewhere, 2: nothing is; 0: keep all).

        `then` is told whether it sleeps: not where it was woken, or resumed, before it came to rest.
        """
        began_s = time.perf_counter()

        def sleeping() -> None:
            if level > 0:
                self._gone |= MEMORY
            self._tell(_STATES.get(level, "paused"))
            self._metrics.done("sleep", time.perf_counter() - began_s)
            then(True)

        self.pause(mode, clear_cache=level > 0, then=sleeping, instead=lambda: then(False))

    def release_cache(self) -> None:
        """Give the memory of the KV cache back, which here is to forget it."""
        began_s = time.perf_counter()
        self._worker.reset_prefix_cache()
        if self.paused:
            self._gone.add("kv_cache")
            self._tell("paused")
        self._metrics.done("release_kv_cache_memory", time.perf_counter() - began_s)

    def wake(self, tags: list[str] | None) -> bool:
        """Take memory back, all of it or by name; with all of it there, go on. Whether it is."""
        began_s = time.perf_counter()
        wanted = None if tags is None else [tag for tag in tags if tag != "scheduling"]
        if wanted is None:
            self._gone.clear()
        elif self._gone.issuperset(wanted):  # with one that is not, nothing is
            self._gone.difference_update(wanted)
        awake = not self._gone
        if awake:
            self._tell("awake")
            self.resume()
        self._metrics.done("wake", time.perf_counter() - began_s)
        return awake

    def look(self) -> None:
        """An engine has come to rest: if all have, whoever waits for that is told."""
        worker = self._worker
        if not self._wishes or not all(core.quiet for core in worker.cores):
            return
        wishes, self._wishes = self._wishes, []
        for wish in wishes:
            if wish.clear_cache:
                for core in worker.cores:
                    worker.forget(core)
            wish.then()

    def _tell(self, state: str) -> None:
        for metrics in self._worker.metrics:
            metrics.asleep = state
