"""The GIL is free while the core works on a long batch. Progress is counted, not time."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from threads import switching_every
from understudy.kv import BlockManager
from understudy.tokens import Identities

if TYPE_CHECKING:
    from collections.abc import Callable

BIG = 200_000
LONG_CALLS: dict[str, Callable[[BlockManager, Identities], object]] = {
    "has_blocks": lambda manager, run: manager.has_blocks(run),
    "prefix_length": lambda manager, run: manager.prefix_length(run),
    "touch": lambda manager, run: manager.touch(run),
    "match and release": lambda manager, run: manager.match_prefix(run).release(),
    "allocate, register and release": lambda manager, run: manager.allocate(BIG).register(run).release(),
}


@pytest.mark.parametrize("call", LONG_CALLS.values(), ids=LONG_CALLS.keys())
def test_another_python_thread_goes_on_during_a_long_call(
    call: Callable[[BlockManager, Identities], object],
) -> None:
    run = Identities.from_local_hashes(np.arange(1, BIG + 1, dtype=np.uint64))
    manager = BlockManager(BIG, policy="lru")
    manager.allocate(BIG).register(run).release()
    progress: list[None] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            progress.append(None)
            time.sleep(0)  # lets go of the GIL, which nobody takes away below

    with switching_every(1e6):
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        # With switching off, the thread moves only while the call itself lets go of the GIL.
        moved = False
        for _ in range(200):
            before = len(progress)
            call(manager, run)
            moved = len(progress) > before
            if moved:
                break
        stop.set()
    thread.join(60)
    assert not thread.is_alive()
    assert moved


def test_with_switching_off_python_alone_lets_no_other_thread_go_on() -> None:
    """What the test above leans on."""
    progress: list[None] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            progress.append(None)
            time.sleep(0)

    with switching_every(1e6):
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        before = len(progress)
        assert sum(i * i for i in range(100_000)) > 0
        after = len(progress)
        stop.set()
    thread.join(60)
    assert after == before
