"""What a session policy reads of a live session."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSleep:
    """A session between two requests: what a replay shows as `understudy._core.SessionSleep`, and what clients ask."""

    now_ns: int
    row: int
    """Number of the request that has ended."""
    session: int
    parent_session: int | None
    worker: int
    prompt_tokens: int
    output_tokens: int
    first_cached_tokens: int
    asleep_ns: int = 0
    last_gap_ns: int | None = None
    is_last: bool = False
    told_ns: int | None = None
    hold_ns: int | None = None
    """For how long its client asks to hold its blocks; None: it does not ask."""
    release_ns: int | None = None
    """After how much sleep its client gives its blocks up; None: it does not say."""
