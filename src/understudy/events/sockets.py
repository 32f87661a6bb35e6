"""ZMQ sockets of publishers and subscribers, in one context for all of a process: each has two threads and files.

libzmq ends the process where it cannot open a file, so that is looked at before.
"""

from __future__ import annotations

import os
import threading

import zmq

from understudy.errors import ConfigError

NEEDED_FILES = 16
"""Of a context with the sockets of a publisher or a subscriber, and some to go on with."""
_MONITOR_FILES = 4
_UNBIND_MS = 1000  # it takes microseconds, unless the machine stands still


class _Shared:
    """The context of all, and how many use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._context: zmq.Context[zmq.Socket[bytes]]

    def join(self) -> zmq.Context[zmq.Socket[bytes]]:
        with self._lock:
            if self._users == 0:
                self._context = zmq.Context()
                self._context.set(zmq.MAX_SOCKETS, int(self._context.get(zmq.SOCKET_LIMIT)))
            self._users += 1
            return self._context

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            context = self._context
        context.term()  # outside of the lock: it waits for what lingers, and others may begin anew meanwhile


_shared = _Shared()


def _begin_anew() -> None:
    """A forked process has no threads of a context: those of its parent are not for it."""
    global _shared
    _shared = _Shared()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


class Sockets:
    """The sockets of one publisher or subscriber. The last in the process that closes takes the context along.

    ConfigError when the process has too few open files left.
    """

    def __init__(self) -> None:
        _need_files(NEEDED_FILES)
        self._shared = _shared
        self.context = self._shared.join()
        self._opened: list[zmq.Socket[bytes]] = []
        self._bound: list[zmq.Socket[bytes]] = []
        self._monitors: list[zmq.Socket[bytes]] = []
        self._closed = False

    def open(self, kind: int, hwm: int) -> zmq.Socket[bytes]:
        """A socket that waits for nobody when it is closed; `hwm` messages wait in it at most, either way."""
        socket: zmq.Socket[bytes] = self.context.socket(kind)
        self._opened.append(socket)
        socket.set_hwm(hwm)
        socket.linger = 0
        return socket

    def bind(self, socket: zmq.Socket[bytes], endpoint: str) -> str:
        """Bind it; the address that it has, with the port that was picked."""
        socket.bind(endpoint)
        self._bound.append(socket)
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def monitor(self, socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
        """A socket that tells what happens to that one."""
        self._monitors.append(socket.get_monitor_socket(events))
        return self._monitors[-1]

    def close(self) -> None:
        """Close all, from a thread that may use them. Their addresses can be bound again."""
        if self._closed or self._shared is not _shared:  # in a fork, they are its parent's
            return
        self._closed = True
        for socket in self._opened:
            socket.disable_monitor()
        for socket in self._bound:
            self._unbind(socket)
        for socket in self._opened + self._monitors:
            socket.close()
        self._shared.leave()

    def _unbind(self, socket: zmq.Socket[bytes]) -> None:
        """A thread of the context lets go of an address; it is waited for."""
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if endpoint.startswith("inproc:"):
            socket.unbind(endpoint)  # at once
            return
        try:
            _need_files(_MONITOR_FILES)
        except ConfigError:
            return  # it goes with the socket, a moment later
        monitor = self.monitor(socket, zmq.EVENT_CLOSED)
        socket.unbind(endpoint)
        monitor.poll(_UNBIND_MS)
        socket.disable_monitor()


def _need_files(count: int) -> None:
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY))  # noqa: PERF401 (those before one that fails are closed)
    except OSError as error:
        raise ConfigError(
            f"KV events cannot be sent or heard: {error.strerror}; raise the limit of open files (ulimit -n), "
            "or have fewer workers in one process"
        ) from error
    finally:
        for number in opened:
            os.close(number)
