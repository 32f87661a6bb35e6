"""The event loop of live servers. Who sleeps until a step ends wants to wake then, and not at the next millisecond."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import math
import select
import selectors
import time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

_Result = TypeVar("_Result")

log = logging.getLogger("understudy.server")

MANY_FILES = 1 << 16
TELL_EVERY_S = 10.0
LARGEST_FD = 1024
"""select() can watch files with lower numbers only."""


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop whose timers are good to some ten microseconds where the system can."""
    return asyncio.SelectorEventLoop(new_selector())


def run(main: Coroutine[object, object, _Result]) -> _Result:
    """As `asyncio.run`, on such a loop, with as many open files as the system lets us have."""
    allow_many_files()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.get_loop().set_exception_handler(FewerWords())
        return runner.run(main)


def allow_many_files() -> None:
    """A connection is an open file, and the usual limit is there for programs that have few."""
    try:
        import resource
    except ImportError:  # not on this system
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class FewerWords:
    """Hears of errors that nobody caught. That no connection can be accepted is told now and then, not each time."""

    def __init__(self) -> None:
        self._told_s = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """See `loop.set_exception_handler`."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
            return
        if time.monotonic() - self._told_s >= TELL_EVERY_S:
            self._told_s = time.monotonic()
            log.error("connections wait: %s; raise the limit of open files (ulimit -n)", error)


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
