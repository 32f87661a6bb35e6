"""The event loop of live servers: sleeps for fractions of a millisecond, and hears what happens meanwhile."""

from __future__ import annotations

import contextlib
import errno
import gc
import select
import selectors
import socket
import sys
from typing import Any

import pytest

from understudy.server import loop

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="epoll is Linux's")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float | None]]:
    """(who waits, for how long) of a selector's calls to the system, none of which really waits."""
    calls: list[tuple[str, float | None]] = []

    def wait(*args: Any) -> tuple[list[int], list[int], list[int]]:
        calls.append(("select", args[3]))
        return [], [], []

    def poll(_: object, timeout: float | None = None) -> list[Any]:
        calls.append(("epoll", timeout))
        return []

    monkeypatch.setattr(select, "select", wait)
    monkeypatch.setattr(selectors.EpollSelector, "select", poll)
    return calls


@on_linux
def test_a_wait_of_a_fraction_of_a_millisecond_is_not_rounded(
    waits: list[tuple[str, float | None]],
) -> None:
    with contextlib.closing(loop.new_selector()) as selector:
        selector.select(0.0004)
        selector.select(0)
        selector.select(None)

    # epoll's own timeout is rounded up to milliseconds: it looks at once, or waits for ever.
    assert waits == [("select", 0.0004), ("epoll", 0), ("epoll", 0), ("epoll", None)]


@on_linux
def test_a_file_with_a_number_too_high_for_select_is_waited_for_by_epoll(
    monkeypatch: pytest.MonkeyPatch, waits: list[tuple[str, float | None]]
) -> None:
    monkeypatch.setattr(loop, "LARGEST_FD", 0)

    with contextlib.closing(loop.new_selector()) as selector:
        selector.select(0.0004)

    assert waits == [("epoll", 0.0004)]


def test_what_becomes_ready_ends_the_wait() -> None:
    selector = loop.new_selector()
    ours, theirs = socket.socketpair()
    selector.register(ours, selectors.EVENT_READ, "ours")
    theirs.send(b"x")

    ready = selector.select(3600)

    assert [key.data for key, _ in ready] == ["ours"]
    for one in (selector, ours, theirs):
        one.close()


def test_a_frozen_heap_is_collected_again_when_it_ends() -> None:
    before = gc.get_freeze_count()
    with loop.heap_frozen():
        assert gc.get_freeze_count() > before
    assert gc.get_freeze_count() == 0


def test_a_flood_of_the_same_trouble_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    hears = loop.RateLimitedErrorHandler()
    with contextlib.closing(loop.new_loop()) as other:
        for _ in range(50):
            hears(other, {"message": "accept", "exception": OSError(errno.EMFILE, "Too many open files")})
        assert caplog.text.count("Too many open files") == 1
        for _ in range(2):  # others are nobody's to keep quiet
            hears(other, {"message": "else", "exception": OSError(errno.EPERM, "not that")})
        assert caplog.text.count("not that") >= 2


def test_as_many_files_may_be_open_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    limits = [(256, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.append(both))
    loop.allow_many_files()
    loop.allow_many_files()
    assert limits == [(256, 4096), (4096, 4096)]
    limits[:] = [(256, resource.RLIM_INFINITY)]
    loop.allow_many_files()
    assert limits[-1] == (loop.MANY_FILES, resource.RLIM_INFINITY)
