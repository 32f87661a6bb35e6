"""Digests of runs; equal runs have equal digests on every machine."""

from __future__ import annotations

import struct
from itertools import chain
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from understudy._core import xxh3_64
from understudy.run.schema import list_columns, list_totals
from understudy.run.tier_columns import name_tier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from understudy.run.handoff_columns import HandOffColumns
    from understudy.run.kv_log import KvLog
    from understudy.run.losses import RequestLosses
    from understudy.run.tier_columns import TierColumns
    from understudy.run.timeline import Timeline
    from understudy.run.worker_lives import WorkerLives

    Item = tuple[str, NDArray[Any] | int | float | str]


class Digests(TypedDict):
    """Digests of a run, as `RunFacts` names them."""

    digest: str
    digests: dict[str, str]


OF_TIER = ("capacity_blocks", "resident_blocks", "stored_blocks", "evicted_blocks")
OF_LINK = (
    "transfers_started",
    "transfers_finished",
    "bytes_started",
    "bytes_finished",
    "busy_ns",
    "bucket_ns",
)
OF_LEASES = ("expired_leases", "late_notifications")
OF_VLLM_OFFLOAD = ("deferred_lookups", "flushed_copies", "refused_stores")


def digests(timeline: Timeline, kv: KvLog | None = None) -> Digests:
    """Compute the digest of the whole timeline, and those of its parts, which show where runs differ.

    Covered are all declared columns (requests, gaps, samples; with tiers loads) without `digested=False`, all whole
    numbers and, with tiers, their totals, residency and links. Not covered are `queued_ns`, the names of requests, the
    wording of rejections and the blocks of single workers (docs/metrics.md lists them). Events are not in `digest`,
    because a run may not keep them; where `kv` has them, they are a separate part.
    """
    parts = {
        "requests": _hash(_columns(timeline, "request")),
        "gaps": _hash(_columns(timeline, "gap")),
        "samples": _hash(_columns(timeline, "sample")),
        "totals": _hash(_totals(timeline)),
    }
    if (tiers := timeline.tiers) is not None:
        parts["tier_requests"] = _hash(_columns(tiers, "request"))
        parts["tier_samples"] = _hash(_columns(tiers, "sample"))
        parts["loads"] = _hash(_columns(tiers, "load"))
        parts["tiers"] = _hash(_tiers(tiers))
        parts["links"] = _hash(_links(tiers))
    if (handoff := timeline.handoff) is not None:
        parts["handoffs"] = _hash(_columns(handoff, "request"))
        parts["kept_blocks"] = _hash(_columns(handoff, "sample"))
    if (lives := timeline.lives) is not None:
        parts["lives"] = _hash(chain(_columns(lives, "life"), _columns(lives, "worker")))
    if (losses := timeline.losses) is not None:
        parts["losses"] = _hash(chain(_columns(losses, "loss"), _columns(losses, "fault")))
    whole = _hash(iter(parts.items()))
    if kv is not None:
        parts["events"] = _hash(kv.digests())
    return {"digest": f"{whole:016x}", "digests": {name: f"{value:016x}" for name, value in parts.items()}}


def _hash(items: Iterator[Item]) -> int:
    value = 0
    for name, item in items:
        value = xxh3_64(name.encode(), value)
        value = xxh3_64(_bytes(item), value)
    return value


def _bytes(item: NDArray[Any] | int | float | str) -> bytes:
    if isinstance(item, np.ndarray):
        return np.ascontiguousarray(item, item.dtype.newbyteorder("<")).tobytes()
    if isinstance(item, str):
        return item.encode()
    if isinstance(item, float):
        return struct.pack("<d", item)
    return item.to_bytes(16, "little")


def _columns(
    record: Timeline | TierColumns | HandOffColumns | WorkerLives | RequestLosses, per: str
) -> Iterator[Item]:
    for declared in list_columns(type(record)):
        if declared.about.per == per and declared.about.digested:
            for array in declared.arrays(record):
                yield declared.name, array


def _totals(timeline: Timeline) -> Iterator[Item]:
    for name in list_totals(type(timeline)):
        # Leases are of prefill workers: digests of other runs stay equal.
        if name not in OF_LEASES or getattr(timeline, name):
            yield name, getattr(timeline, name)


def _tiers(tiers: TierColumns) -> Iterator[Item]:
    totals = tiers.totals
    for name in dir(type(totals)):
        # Counters of vLLM's offload are added only if not 0, so that digests of other runs stay equal.
        if not name.startswith("_") and (name not in OF_VLLM_OFFLOAD or getattr(totals, name)):
            yield name, getattr(totals, name)
    for summary in tiers.tiers:
        yield "tier", name_tier(summary)
        for name in OF_TIER:
            yield name, getattr(summary, name)
        for array in summary.residency:
            yield "residency", array


def _links(tiers: TierColumns) -> Iterator[Item]:
    for link in tiers.links:
        yield "link", link.name
        yield "bandwidth_gbps", link.bandwidth_gbps
        for name in OF_LINK:
            yield name, getattr(link, name)
        yield "bucket_bytes", link.bucket_bytes
