"""What went wrong on a stream, counted, and said once rather than ten thousand times."""

from __future__ import annotations

import logging

import msgspec

log = logging.getLogger("understudy.events")


class Counters(msgspec.Struct):
    """What a reader met. The first group is the good news."""

    messages: int = 0
    events: int = 0
    blocks: int = 0
    replayed_messages: int = 0
    dumped_messages: int = 0

    bad_frames: int = 0  # not three frames, no sequence number, or another topic
    malformed_batches: int = 0  # a payload that is no batch
    bad_events: int = 0  # events that could not be read, in batches that could
    ignored_events: int = 0  # of another cache group, another owner or another place
    duplicates: int = 0  # messages that were there already
    gaps: int = 0  # times that messages were missing
    restarts: int = 0  # times that a publisher began anew
    conflicts: int = 0  # times that two publishers spoke under one name
    partial_views: int = 0  # times that what was missed could not be asked for

    def note(self, name: str, reason: str, *, times: int = 1) -> None:
        """Count, and write a log line: for the first ten, then for every power of ten."""
        before = getattr(self, name)
        setattr(self, name, before + times)
        if before < 10 or len(str(before)) < len(str(before + times)):
            log.warning("kv events: %s (%s: %d)", reason, name, before + times)
