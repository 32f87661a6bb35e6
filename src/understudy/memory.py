"""What a run will need of this machine's memory, known before it is taken."""

from __future__ import annotations

from pathlib import Path

from understudy import _core
from understudy.errors import ConfigError

WORKER_BYTES = 16_000
"""Of an idle worker, whatever its capacity: 12,300 as measured, and up to 14,700 where a KV router knows of it."""
ABSENT_BYTES = 400
"""Of a worker whose turn to be played has not come, where workers are played one after another."""
LIVE_BYTES = 150_000
"""Of an idle worker of a live fleet, with its server and its metrics: 112,000 as measured, and some for connections."""
TIERS_BYTES = 16_000
"""Of the tiers of an idle worker."""
SLOT_BYTES = 100
"""Of the slot of a block, on any tier, once it is used."""
SHORT_BLOCKS = 2048
"""Fewer slots on a device than that are all there at once: too few to ask the system for each page."""

_LEFT_FREE = 0.1
_ALWAYS_TRIED_BYTES = 64_000_000
"""A run this small is never refused: a machine that is full just now may have room in a moment."""
_GROUP = Path("/sys/fs/cgroup")
_GIVEN_BACK_ON_DEMAND = ("active_file", "inactive_file", "slab_reclaimable")


def available_bytes() -> int | None:
    """Memory that this process may still take: what is free on the machine, and in its control group; None: unknown."""
    found = [free for free in (_free_on_machine(), _free_in_group()) if free is not None]
    return min(found, default=None)


def require_memory(what: str, needed: int, remedy: str) -> None:
    """Raise ConfigError when `needed` bytes are more than there are; `what` needs them."""
    if needed <= _ALWAYS_TRIED_BYTES:
        return
    free = available_bytes()
    if free is not None and needed > free * (1 - _LEFT_FREE) and give_back():
        free = available_bytes()
    if free is not None and needed > free * (1 - _LEFT_FREE):
        raise ConfigError(
            f"{what} would take about {_gb(needed)} of memory, and {_gb(free)} are free: {remedy}"
        )


def give_back() -> bool:
    """Return to the system what runs that are over have left for the next one: 256 MB at most. False: nothing."""
    return _core.give_back_memory()


def _gb(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"


def _free_on_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None  # not Linux


def _free_in_group() -> int | None:
    try:
        limit = (_GROUP / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return None
        used = int((_GROUP / "memory.current").read_text(encoding="ascii"))
        # Files that the kernel keeps at hand count as used there; a compiler alone leaves gigabytes of them.
        lines = (_GROUP / "memory.stat").read_text(encoding="ascii").splitlines()
        parts = dict(line.split() for line in lines)
        kept = sum(int(parts[name]) for name in _GIVEN_BACK_ON_DEMAND if name in parts)
        return max(int(limit) - used + kept, 0)
    except (OSError, ValueError):
        return None
