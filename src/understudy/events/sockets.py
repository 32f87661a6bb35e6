"""ZMQ sockets of publishers and subscribers, in one context per process, because each context has two threads.

libzmq aborts the process when it cannot open a file, so file descriptors are checked first.
"""

from __future__ import annotations

import itertools
import os
import threading

import zmq

from understudy.errors import ConfigError

NEEDED_FILES = 16
"""File descriptors of a context and the sockets of one publisher or subscriber, with some spare."""
_MONITOR_FILES = 4
_UNBIND_MS = 1000  # usually microseconds
_monitor_numbers = itertools.count()


class _SharedContext:
    """The process's ZMQ context with a reference count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._context: zmq.Context[zmq.Socket[bytes]]

    def acquire(self) -> zmq.Context[zmq.Socket[bytes]]:
        with self._lock:
            if self._users == 0:
                self._context = zmq.Context()
                self._context.set(zmq.MAX_SOCKETS, int(self._context.get(zmq.SOCKET_LIMIT)))
            self._users += 1
            return self._context

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            context = self._context
        context.term()  # outside the lock: it waits for lingering messages, and a new context may be created meanwhile


_shared = _SharedContext()


def _reset_after_fork() -> None:
    """Replace the context in a forked process, which does not have the context's threads."""
    global _shared
    _shared = _SharedContext()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


class Sockets:
    """Sockets of one publisher or subscriber. Closing the last ones in the process ends the context.

    ConfigError when the process has too few open files left.
    """

    def __init__(self) -> None:
        _check_free_descriptors(NEEDED_FILES)
        self._shared = _shared
        self.context = self._shared.acquire()
        self._opened: list[zmq.Socket[bytes]] = []
        self._bound: list[zmq.Socket[bytes]] = []
        self._monitors: list[zmq.Socket[bytes]] = []
        self._closed = False

    def open(self, kind: int, hwm: int) -> zmq.Socket[bytes]:
        """Open a socket that queues at most `hwm` messages each way and discards them on close."""
        socket: zmq.Socket[bytes] = self.context.socket(kind)
        self._opened.append(socket)
        socket.set_hwm(hwm)
        socket.linger = 0
        return socket

    def bind(self, socket: zmq.Socket[bytes], endpoint: str) -> str:
        """Bind a socket and return its address with the actual port."""
        socket.bind(endpoint)
        self._bound.append(socket)
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def monitor(self, socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
        """Return a socket that reports these connection events of `socket`."""
        # pyzmq's own address has the file descriptor, which another socket may have had a moment ago.
        address = f"inproc://understudy-monitor-{next(_monitor_numbers)}"
        self._monitors.append(socket.get_monitor_socket(events, address))
        return self._monitors[-1]

    def close(self) -> None:
        """Close all sockets, from a thread that may use them. Their addresses can then be bound again."""
        if self._closed or self._shared is not _shared:  # in a forked process, they belong to the parent
            return
        self._closed = True
        for socket in self._opened:
            socket.disable_monitor()
        for socket in self._bound:
            self._unbind(socket)
        for socket in self._opened + self._monitors:
            socket.close()
        self._shared.release()

    def _unbind(self, socket: zmq.Socket[bytes]) -> None:
        """Unbind the address and wait until the context's thread has released it."""
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if endpoint.startswith("inproc:"):
            socket.unbind(endpoint)  # immediate
            return
        try:
            _check_free_descriptors(_MONITOR_FILES)
        except ConfigError:
            return  # closing the socket releases the address, a moment later
        monitor = self.monitor(socket, zmq.EVENT_CLOSED)
        socket.unbind(endpoint)
        monitor.poll(_UNBIND_MS)
        socket.disable_monitor()


def _check_free_descriptors(count: int) -> None:
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY))  # noqa: PERF401 (after a failure, the ones before are closed)
    except OSError as error:
        raise ConfigError(
            f"KV events: cannot open a socket ({error.strerror}); raise the limit of open files (ulimit -n), "
            "or run fewer workers in one process"
        ) from error
    finally:
        for number in opened:
            os.close(number)
