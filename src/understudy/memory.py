"""Estimate the memory of a run and reject it before it starts if this machine has too little."""

from __future__ import annotations

from pathlib import Path

from understudy import _core
from understudy.errors import ConfigError

WORKER_BYTES = 16_000
"""Bytes of an idle worker, independent of its capacity: 12,300 measured, up to 14,700 with a KV router."""
ABSENT_BYTES = 420
"""Bytes of a worker that is not started yet, in runs that simulate workers one after another."""
LIVE_BYTES = 150_000
"""Bytes of an idle live worker with its server and metrics: 112,000 measured, plus some for connections."""
TIERS_BYTES = 16_000
"""Bytes of an idle worker's tiers."""
SLOT_BYTES = 100
"""Bytes per block slot, on any tier, once it is used."""
SHORT_BLOCKS = 2048
"""Device pools with fewer slots are allocated whole instead of page by page."""

_SHARE_KEPT_FREE = 0.1
_ALWAYS_ALLOWED_BYTES = 64_000_000
"""A run this small is never rejected: memory may become free at any moment."""
_CGROUP = Path("/sys/fs/cgroup")
_RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")


def available_bytes() -> int | None:
    """Return the bytes that are free on the machine and in this process's control group; None if unknown."""
    found = [free for free in (_free_on_machine(), _free_in_cgroup()) if free is not None]
    return min(found, default=None)


def require_memory(what: str, needed: int, remedy: str) -> None:
    """Raise ConfigError if `what` needs more bytes than are free."""
    if needed <= _ALWAYS_ALLOWED_BYTES:
        return
    free = available_bytes()
    if free is not None and needed > free * (1 - _SHARE_KEPT_FREE) and release_spare_memory():
        free = available_bytes()
    if free is not None and needed > free * (1 - _SHARE_KEPT_FREE):
        raise ConfigError(
            f"{what} would take about {_gb(needed)} of memory, and {_gb(free)} are free; {remedy}"
        )


def release_spare_memory() -> bool:
    """Return memory that earlier runs left for reuse (at most 256 MB) to the system; False if there is none."""
    return _core.give_back_memory()


def _gb(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"


def _free_on_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None  # not Linux


def _free_in_cgroup() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return None
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        # memory.current includes the page cache, which the kernel reclaims on demand.
        lines = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
        parts = dict(line.split() for line in lines)
        reclaimable = sum(int(parts[name]) for name in _RECLAIMABLE if name in parts)
        return max(int(limit) - used + reclaimable, 0)
    except (OSError, ValueError):
        return None
