"""Samples of time, taken without the garbage collector."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Clock = Callable[[], float]

P = ParamSpec("P")
T = TypeVar("T")


class Samples:
    """Seconds per item, by operation. The wall clock's seconds unless another is given."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._samples: defaultdict[str, list[float]] = defaultdict(list)

    def time(self, operation: str, items: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work`, which handles `items` items, as one sample. Its result."""
        clock = self._clock
        start = clock()
        result = work(*args, **kwargs)
        self._samples[operation].append((clock() - start) / items)
        return result

    def typical(self, *operations: str) -> float:
        """Median seconds per item, of the operations together."""
        return sum(median(self._samples[operation]) for operation in operations)

    def fastest(self, *operations: str) -> float:
        """Seconds per item of the fastest sample, of the operations together."""
        return sum(min(self._samples[operation]) for operation in operations)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """What exists is set aside, and nothing is collected inside."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def loop_turn_ns(clock: Clock) -> float:
    """A turn of `x += i` in a Python loop: how fast this interpreter is on this machine."""
    turns = 200_000
    samples = Samples(clock)

    def loop() -> int:
        x = 0
        for i in range(turns):
            x += i
        return x

    for _ in range(15):
        samples.time("turn", turns, loop)
    return samples.fastest("turn") * 1e9


def require(condition: bool, what: str) -> None:
    """A benchmark that measures something else than it says is worse than none."""
    if not condition:
        raise RuntimeError(f"expected {what}")
