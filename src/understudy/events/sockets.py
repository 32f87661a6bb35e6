"""Contexts of ZMQ sockets. libzmq ends the process where it cannot open a file, so that is looked at before."""

from __future__ import annotations

import os

import zmq

from understudy.errors import ConfigError

NEEDED_FILES = 16
"""Of a context with its sockets, and some to go on with."""


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context for a publisher, or for a subscriber. ConfigError when the process has too few open files left."""
    opened: list[int] = []
    try:
        for _ in range(NEEDED_FILES):
            opened.append(os.open(os.devnull, os.O_RDONLY))  # noqa: PERF401 (those before one that fails are closed)
    except OSError as error:
        raise ConfigError(
            f"KV events cannot be sent or heard: {error.strerror}; raise the limit of open files (ulimit -n), "
            "or have fewer workers in one process"
        ) from error
    finally:
        for number in opened:
            os.close(number)
    return zmq.Context()
