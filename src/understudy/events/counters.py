"""Counters of a stream's messages and faults, with rate-limited log lines."""

from __future__ import annotations

import logging

import msgspec

log = logging.getLogger("understudy.events")


class Counters(msgspec.Struct):
    """Counts of a reader. The first group counts successes, the second faults."""

    messages: int = 0
    events: int = 0
    blocks: int = 0
    replayed_messages: int = 0
    dumped_messages: int = 0

    bad_frames: int = 0  # not three frames, no sequence number, or another topic
    malformed_batches: int = 0  # payloads that are not a batch
    bad_events: int = 0  # unreadable events in readable batches
    ignored_events: int = 0  # events of another cache group, owner or locality
    duplicates: int = 0  # messages that were received before
    gaps: int = 0  # times that sequence numbers were missing
    restarts: int = 0  # times that a publisher restarted
    conflicts: int = 0  # times that two publishers used one name
    partial_views: int = 0  # times that missed messages could not be replayed

    def note(self, name: str, reason: str, *, times: int = 1) -> None:
        """Add `times` to a counter; log the first ten times, then each power of ten."""
        before = getattr(self, name)
        setattr(self, name, before + times)
        if before < 10 or len(str(before)) < len(str(before + times)):
            log.warning("kv events: %s (%s: %d)", reason, name, before + times)
