"""KV events, allocations and evictions of a run's workers."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count
from os import fspath
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from understudy.engines.kinds.registry import kind_of
from understudy.errors import InvalidArgument
from understudy.events import Consolidator, EventColumns, EventsLost, Stored, decode
from understudy.events.columns import EventKind
from understudy.events.events import FULL_ATTENTION
from understudy.events.file import write_columns
from understudy.outputs import create
from understudy.run.tier_columns import SHARED, name_tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from os import PathLike

    import numpy.typing as npt

    from understudy._core import EventTable, FleetResult, Tier, TierSummary
    from understudy.events import Removed, Stream
    from understudy.run.run_plan import RunPlan
    from understudy.workload.block_tokens import TokenSource


def can_explain_misses(plan: RunPlan) -> bool:
    """Whether the events of a run say which prompt blocks its workers had: vLLM's, with one stage per request."""
    return plan.disaggregation is None and all(
        kind_of(pool.engine).name == "vllm" and pool.engine.enable_prefix_caching for pool in plan.fleet
    )


@dataclass(frozen=True, eq=False, slots=True)
class PublishedRows:
    """First copies that arrived and last copies that left, of one publisher: a row per block, in order."""

    workers: tuple[int, ...]
    """Workers that can read these blocks: one, or those of a pool that share a tier."""
    has_groups: bool
    """Whether the engine has several KV cache groups; the rows are then those of full attention."""
    time_ns: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.uint8]
    tiers: npt.NDArray[np.uint8]
    sequence_hashes: npt.NDArray[np.uint64]


class KvLog:
    """Events and allocations of a run by worker, as far as the run kept them.

    A tier that workers share (G3, G4) is a separate publisher, one per pool.
    """

    def __init__(
        self,
        result: FleetResult,
        block_size: int,
        worker_blocks: npt.NDArray[np.int64],
        *,
        events: bool,
        kv_trace: bool,
        groups: Sequence[tuple[str, int | None, int]] = (),
    ) -> None:
        self._groups = [(kind, window) for kind, window, _ in groups]
        self._result = result
        self._workers = len(worker_blocks)
        self._block_size = block_size
        self._blocks = worker_blocks.tolist()
        self._kept = {"events": events, "kv_trace": kv_trace}

    def events(self, worker: int, stream: Stream) -> Iterator[tuple[int, Stored | Removed]]:
        """Yield (end of the step in ns, event) in order; the ids of a stream count from 0 by 1.

        InvalidArgument when the run kept no events, or has no such worker.
        """
        self._require("events")
        if not 0 <= worker < self._workers:
            raise InvalidArgument(f"worker must be from 0 to {self._workers - 1}, got {worker}")
        return self._decode(self._result.events(worker), stream)

    def shared_events(
        self, tier: Tier, stream: Stream, pool: str | None = None
    ) -> Iterator[tuple[int, Stored | Removed]]:
        """Yield the events of a shared tier as `events` does; `pool` selects one where several have such a tier.

        InvalidArgument when there is none, or more than one.
        """
        self._require("events")
        found = [s for s in self._shared() if s.tier == tier and pool in (None, s.pool)]
        if not found:
            named = "the run shares no tier" if pool is None else f"pool {pool!r} has no shared tier"
            raise InvalidArgument(f"{named} {tier.name}")
        if len(found) > 1:
            pools = ", ".join(repr(summary.pool) for summary in found)
            raise InvalidArgument(f"several pools have a tier {tier.name}; name one of {pools}")
        return self._decode(found[0].events, stream)

    def published(self) -> list[PublishedRows]:
        """Return the consolidated rows of each worker, then of each shared tier.

        InvalidArgument when the run kept no events.
        """
        self._require("events")
        pools = self._result.worker_pool.tolist()
        rows = [self._rows(self._result.events(worker), (worker,)) for worker in range(self._workers)]
        for summary in self._shared():
            pool = pools[summary.first_worker]
            rows.append(
                self._rows(summary.events, tuple(w for w in range(self._workers) if pools[w] == pool))
            )
        return rows

    def _rows(self, table: EventTable, workers: tuple[int, ...]) -> PublishedRows:
        batch, time_ns = table.rows()
        kinds = [kind for kind, _ in self._groups]
        group = kinds.index(FULL_ATTENTION) if FULL_ATTENTION in kinds else 0
        kept = batch.sole.astype(np.bool_) & (batch.groups == group) & (batch.kinds != EventKind.SKIPPED)
        return PublishedRows(
            workers,
            len(self._groups) > 1,
            time_ns[kept],
            batch.kinds[kept],
            batch.tiers[kept],
            batch.sequence_hashes[kept],
        )

    def digests(self) -> Iterator[tuple[str, int]]:
        """Yield (publisher, digest of its events and times); InvalidArgument when the run kept no events."""
        self._require("events")
        return ((name, table.digest) for name, table in self._tables().items())

    def raw_distance(self) -> dict[str, float]:
        """Compare the consolidated blocks with those of a router that applies every Removed of the raw streams.

        `second_copies` were stored in addition to another copy; each of `early_removals`, before the last copy, makes
        such a router miss a block. `wrong_blocks` counts these: mean per worker over its events, and peak.
        """
        self._require("events")
        distances = []
        for table in self._tables().values():
            heads, hashes = table.heads(raw=True), table.sequence_hashes(raw=True)
            names = np.concatenate(hashes) if hashes else np.zeros(0, np.uint64)
            if heads["groups"].any():  # equal hashes of several cache groups are different blocks
                of_blocks = np.repeat(heads["groups"].astype(np.uint64), np.diff(heads["offsets"]))
                names = names ^ of_blocks * np.uint64(0x9E3779B97F4A7C15)
            consolidator = Consolidator()
            unknown = np.zeros_like(names)
            kinds, tiers, parents, offsets = (
                heads[name] for name in ("kinds", "tiers", "parents", "offsets")
            )
            consolidator.apply(EventColumns(kinds, tiers, parents, offsets, names, unknown))  # type: ignore[arg-type]
            distances.append(consolidator.distance)
        return {
            "second_copies": sum(distance.second_copies for distance in distances),
            "early_removals": sum(distance.early_removals for distance in distances),
            "wrong_blocks_mean": float(np.mean([distance.wrong_mean for distance in distances])),
            "wrong_blocks_peak": max(distance.wrong_peak for distance in distances),
        }

    def _require(self, *what: Literal["events", "kv_trace"]) -> None:
        for name in what:
            if not self._kept[name]:
                raise InvalidArgument(f"the run kept no {name}; run it with {name}=True")

    def _tables(self) -> dict[str, EventTable]:
        tables = {f"worker {worker}": self._result.events(worker) for worker in range(self._workers)}
        return tables | {name_tier(summary): summary.events for summary in self._shared()}

    def _shared(self) -> list[TierSummary]:
        shared = [summary for summary in self._result.tiers if summary.tier in SHARED]
        return sorted(shared, key=lambda summary: (summary.first_worker, int(summary.tier)))

    def _decode(self, table: EventTable, stream: Stream) -> Iterator[tuple[int, Stored | Removed]]:
        ids = count()
        batch, times = table.rows()
        for event in decode(
            batch, dp_rank=0, block_size=self._block_size, stream=stream, groups=self._groups
        ):
            assert not isinstance(event, EventsLost)  # an engine's events are unbounded
            yield int(times[event.event_id]), msgspec.structs.replace(event, event_id=next(ids))

    def write(
        self,
        *,
        events: str | PathLike[str] | None = None,
        raw_events: str | PathLike[str] | None = None,
        kv_trace: str | PathLike[str] | None = None,
        tokens: TokenSource | None = None,
    ) -> None:
        """Write the given files; with `tokens`, event lines have token ids and their local hashes.

        InvalidArgument, with no file written, when the run did not keep one of them.
        """
        if events is not None or raw_events is not None:
            self._require("events")
        if kv_trace is not None:
            self._require("kv_trace")
        if events is not None:
            self.write_events(events, "consolidated", tokens)
        if raw_events is not None:
            self.write_events(raw_events, "raw", tokens)
        if kv_trace is not None:
            self.write_trace(kv_trace)

    def write_events(
        self, path: str | PathLike[str], stream: Stream, tokens: TokenSource | None = None
    ) -> None:
        """Write the events of all publishers: columns if the name ends in .npz, else one JSON line per event, by time.

        InvalidArgument when the file cannot be written.
        """
        self._require("events")
        if stream not in ("raw", "consolidated"):
            raise InvalidArgument(f"stream must be 'raw' or 'consolidated', got {stream!r}")
        if fspath(path).endswith(".npz"):
            write_columns(path, self._tables(), stream=stream, block_size=self._block_size)
            return

        def with_tokens(
            events: Iterator[tuple[int, Stored | Removed]],
        ) -> Iterator[tuple[int, Stored | Removed]]:
            return events if tokens is None else tokens.add_tokens(events)

        workers = [
            _event_lines(
                {"worker": worker}, with_tokens(self.events(worker, stream)), has_groups=bool(self._groups)
            )
            for worker in range(self._workers)
        ]
        tiers = [
            _event_lines({"publisher": name_tier(summary)}, with_tokens(self._decode(summary.events, stream)))
            for summary in self._shared()
        ]
        _write(path, heapq.merge(*workers, *tiers, key=_time))

    def write_trace(self, path: str | PathLike[str]) -> None:
        """Write one JSON line per allocation or eviction, by time, then worker. Errors as `write_events`."""
        self._require("kv_trace")
        _write(path, heapq.merge(*map(self._trace_lines, range(self._workers)), key=_time))

    def _trace_lines(self, worker: int) -> Iterator[dict[str, Any]]:
        for time_ns, eviction, blocks, free, active, inactive in self._result.kv_trace(worker):
            yield {
                "time_ns": time_ns,
                "worker": worker,
                "event": "eviction" if eviction else "allocation",
                "blocks": blocks,
                "block_size": self._block_size,
                "free_blocks": free,
                "active_blocks": active,
                "inactive_blocks": inactive,
                "total_blocks": self._blocks[worker],
                "utilization": (active + inactive) / self._blocks[worker],
            }


def _event_lines(
    publisher: dict[str, Any], events: Iterable[tuple[int, Stored | Removed]], *, has_groups: bool = False
) -> Iterator[dict[str, Any]]:
    for time_ns, event in events:
        line: dict[str, Any] = {"time_ns": time_ns, **publisher, "event_id": event.event_id}
        if has_groups:
            line["group"] = event.group
            if isinstance(event, Stored):
                line |= {"attention": event.attention, "window": event.window}
        if isinstance(event, Stored):
            line |= {"type": "stored", "tier": event.tier.name, "parent_hash": event.parent_hash}
            line["blocks"] = [
                {
                    "sequence_hash": block.sequence_hash,
                    "local_hash": block.local_hash,
                    "position": block.position,
                    "generation": block.generation,
                    **({} if block.token_ids is None else {"token_ids": block.token_ids}),
                }
                for block in event.blocks
            ]
        else:
            line |= {"type": "removed", "tier": event.tier.name}
            line["blocks"] = [msgspec.to_builtins(block) for block in event.blocks]
        yield line


def _time(line: dict[str, Any]) -> int:
    """Return the sort key of a line; the merge keeps the order of publishers at equal times."""
    time_ns: int = line["time_ns"]
    return time_ns


def _write(path: str | PathLike[str], lines: Iterable[dict[str, Any]]) -> None:
    encoder = msgspec.json.Encoder()
    with create(path) as file:
        file.writelines(encoder.encode(line) + b"\n" for line in lines)
