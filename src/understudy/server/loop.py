"""The event loop of live servers, with timers finer than a millisecond."""

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
LOG_INTERVAL_S = 10.0
LARGEST_FD = 1024
"""select() accepts lower file descriptors only."""


def new_loop() -> asyncio.AbstractEventLoop:
    """Make a loop whose timers are accurate to about ten microseconds where the system allows."""
    return asyncio.SelectorEventLoop(new_selector())


def run(main: Coroutine[object, object, _Result]) -> _Result:
    """Run like `asyncio.run`, on `new_loop`, with the largest limit of open files."""
    allow_many_files()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.get_loop().set_exception_handler(RateLimitedErrorHandler())
        return runner.run(main)


def allow_many_files() -> None:
    """Raise the limit of open files; each connection is one."""
    try:
        import resource
    except ImportError:  # not on this system
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class RateLimitedErrorHandler:
    """Logs unhandled exceptions of the loop; failed accepts at most once per `LOG_INTERVAL_S`."""

    def __init__(self) -> None:
        self._logged_s = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an exception (see `loop.set_exception_handler`)."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
            return
        if time.monotonic() - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = time.monotonic()
            log.error("connections wait: %s; raise the limit of open files (ulimit -n)", error)


@contextlib.contextmanager
def heap_frozen() -> Iterator[None]:
    """Exclude all current objects from garbage collection within this context.

    A full collection of a freshly started server would stop it for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def new_selector() -> selectors.BaseSelector:
    """Make the selector of `new_loop`."""
    epoll = getattr(selectors, "EpollSelector", None)
    if epoll is None:
        return selectors.DefaultSelector()  # kqueue waits for nanoseconds

    class FineSelector(epoll):  # type: ignore[misc, valid-type]
        """Waits with select(), which takes microseconds; epoll rounds timeouts up to milliseconds."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            number = self.fileno()
            if timeout is not None and timeout > 0 and number < LARGEST_FD:
                select.select((number,), (), (), timeout)
                timeout = 0
            ready: list[tuple[selectors.SelectorKey, int]] = super().select(timeout)
            return ready

    selector: selectors.BaseSelector = FineSelector()
    return selector
