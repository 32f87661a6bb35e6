"""The event loop of live servers. Who sleeps until a step ends wants to wake then, and not at the next millisecond."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import select
import selectors
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

_Result = TypeVar("_Result")

LARGEST_FD = 1024
"""select() can watch files with lower numbers only."""


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop whose timers are good to some ten microseconds where the system can."""
    return asyncio.SelectorEventLoop(new_selector())


def run(main: Coroutine[object, object, _Result]) -> _Result:
    """As `asyncio.run`, on such a loop."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)


@contextlib.contextmanager
def heap_frozen() -> Iterator[None]:
    """The process has started: what there is now stays, and the collector need not look at it until this ends.

    Each full collection of a freshly started server would stop it for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def new_selector() -> selectors.BaseSelector:
    """What such a loop waits with."""
    epoll = getattr(selectors, "EpollSelector", None)
    if epoll is None:
        return selectors.DefaultSelector()  # kqueue waits for nanoseconds

    class FineSelector(epoll):  # type: ignore[misc, valid-type]
        """Waits with select(), which knows microseconds: epoll's own timeout is rounded up to milliseconds."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            number = self.fileno()
            if timeout is not None and timeout > 0 and number < LARGEST_FD:
                select.select((number,), (), (), timeout)
                timeout = 0
            ready: list[tuple[selectors.SelectorKey, int]] = super().select(timeout)
            return ready

    selector: selectors.BaseSelector = FineSelector()
    return selector
