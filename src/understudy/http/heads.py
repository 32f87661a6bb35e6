"""Status and date lines of answers."""

from __future__ import annotations

import time
from email.utils import formatdate
from http import HTTPStatus

BODYLESS = (204, 304)
"""Statuses of answers without a body."""
_REASONS = {status.value: status.phrase for status in HTTPStatus}


def status_line(status: int) -> bytes:
    """Build the status line."""
    return f"HTTP/1.1 {status} {_REASONS.get(status, '')}\r\n".encode()


_date_cache: tuple[int, bytes] = (0, b"")


def date_lines() -> bytes:
    """Build the Date and Server headers."""
    global _date_cache
    now = int(time.time())
    if _date_cache[0] != now:
        _date_cache = (now, f"date: {formatdate(now, usegmt=True)}\r\nserver: understudy\r\n".encode())
    return _date_cache[1]
