"""Runs functions in threads at the same time, and fails instead of hanging."""

from __future__ import annotations

import faulthandler
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HANG_SECONDS = 120.0


@contextmanager
def switching_every(seconds: float) -> Iterator[None]:
    """How long a thread keeps the GIL when others want it: short for many interleavings, long for none."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def run_together(*works: Callable[[], object]) -> None:
    """Starts each work in a thread of its own, at one moment, and waits for all. The first failure is raised.

    A thread that does not end fails the test with a trace of all threads on stderr; it is left behind, as a daemon.
    """
    failures: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def guarded(work: Callable[[], object]) -> None:
        try:
            barrier.wait(HANG_SECONDS)
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    faulthandler.dump_traceback_later(HANG_SECONDS * 0.9, exit=False)
    try:
        with switching_every(1e-5):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(HANG_SECONDS)
    finally:
        faulthandler.cancel_dump_traceback_later()
    stuck = sum(thread.is_alive() for thread in threads)
    assert stuck == 0, f"{stuck} of {len(threads)} threads hang"
    if failures:
        raise failures[0]
