"""Headers in which clients name their session, and tell what becomes of its KV."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from understudy.server.api.errors import ApiError
from understudy.server.sessions import SessionHints

if TYPE_CHECKING:
    from collections.abc import Mapping

    from understudy.run.session_kv import SessionKv

SESSION, PARENT = "x-session-id", "x-parent-session-id"
NEXT = "x-session-next-s"
"""Seconds from the end of the answer to the session's next request, such as the duration of a tool."""
END = "x-session-end"
"""`true`: no request of the session follows."""
HOLD = "x-session-hold-s"
"""Seconds after the end of the answer in which no block of the session is evicted; 0 ends a hold."""
RELEASE = "x-session-release-s"
"""Seconds of sleep after which the blocks of the session are forgotten; 0: with the end of the answer."""

MOST_NAME = 256
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)


def read_hints(headers: Mapping[str, str], session: str, settings: SessionKv | None) -> SessionHints | None:
    """Return what a request tells about its session; None without one. ApiError names a wrong header.

    `settings`: the server's; without them, times and ends are read and have no effect, and holds are refused.
    """
    given = [name for name in (NEXT, END, HOLD, RELEASE) if name in headers]
    if not session:
        if given:
            raise _wrong(given[0], f"names no session; add {SESSION}")
        return None
    next_ns = _read_ns(headers, NEXT)
    hold_ns = _read_ns(headers, HOLD)
    release_ns = _read_ns(headers, RELEASE)
    is_last = _read_flag(headers, END)
    if is_last and next_ns is not None:
        raise _wrong(NEXT, f"{END} says that no request follows; leave one of them out")
    if hold_ns is not None and release_ns is not None and release_ns < hold_ns:
        raise _wrong(RELEASE, f"is below {HOLD}; raise it")
    if settings is None:
        for name in (HOLD, RELEASE):
            if name in headers:
                raise _wrong(name, "this server keeps no KV of sessions; start it with --session-kv")
        return None
    if settings.policy is None and hold_ns is not None and hold_ns > settings.client_hold_s * 1e9:
        most = f"choose at most {settings.client_hold_s:g}" if settings.client_hold_s else "leave it out"
        raise _wrong(HOLD, f"exceeds what this server allows (--session-kv client_hold_s); {most}")
    parent = headers.get(PARENT, "")
    for name, value in ((SESSION, session), (PARENT, parent)):
        if len(value) > MOST_NAME:
            raise _wrong(name, f"has {len(value):,} characters; use at most {MOST_NAME}")
    return SessionHints(session, parent, next_ns, is_last, hold_ns, release_ns)


def _read_ns(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not _SECONDS.fullmatch(text):
        raise _wrong(name, f"must be seconds from 0 to 999999999, such as 2.5, got {text[:40]!a}")
    whole, _, part = text.partition(".")
    return int(whole) * 10**9 + int(part.ljust(9, "0"))


def _read_flag(headers: Mapping[str, str], name: str) -> bool:
    text = headers.get(name)
    if text is not None and text not in ("true", "false"):
        raise _wrong(name, f"must be true or false, got {text[:40]!a}")
    return text == "true"


def _wrong(name: str, problem: str) -> ApiError:
    return ApiError(f"{name}: {problem}", param=name)
