"""Index of the workers' cached blocks, built only from their KV events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from understudy import _core
from understudy._core import Applied, Matches, Tier
from understudy.errors import InvalidArgument

if TYPE_CHECKING:
    from understudy.events import EventBatch, Stream
    from understudy.events.columns import EventColumns

__all__ = ["Applied", "IndexDump", "Matches", "PrefixIndex"]


class IndexDump(msgspec.Struct, frozen=True, eq=False):
    """Content of an index: one row per worker, tier and block, in order."""

    workers: npt.NDArray[np.uint64]
    dp_ranks: npt.NDArray[np.uint32]
    tiers: npt.NDArray[np.uint8]
    hashes: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.hashes)


class PrefixIndex(_core.PrefixIndex):
    """Index of which worker (and DP rank) has which blocks on which tier.

    Blocks are sequence hashes, given as buffers. With `ttl_ms`, a block expires unless it is stored again within that
    time; with `max_worker_blocks`, a worker's oldest blocks beyond that number are dropped: both for views that
    receive no Removed. With `counts_copies`, a block is removed with its last copy, which turns the raw stream of an
    engine that reports every copy into the consolidated one. Any number of threads may read while one writes.
    """

    def apply(
        self,
        worker: int,
        events: EventBatch | EventColumns,
        *,
        dp_rank: int = 0,
        stream: Stream = "consolidated",
        now_ms: float = 0,
    ) -> Applied:
        """Apply a batch of one worker's events and return counts of the result; the batch is not consumed.

        `stream` selects how to read the rows of a store, which contain both streams; columns are of one stream.
        """
        if isinstance(events, _core.EventBatch):
            return self.apply_batch(worker, events, dp_rank=dp_rank, raw=stream == "raw", now_ms=now_ms)
        return self.apply_columns(
            worker,
            events.kinds,
            events.tiers,
            events.offsets,
            events.sequence_hashes,
            dp_rank=dp_rank,
            now_ms=now_ms,
        )

    def dump(self, worker: int | None = None, dp_rank: int = 0) -> IndexDump:
        """Return the blocks of all workers, or of one."""
        columns = self.dump_columns()
        if worker is not None:
            mine = (columns[0] == worker) & (columns[1] == dp_rank)
            columns = (columns[0][mine], columns[1][mine], columns[2][mine], columns[3][mine])
        return IndexDump(*columns)

    def load(self, dump: IndexDump, *, now_ms: float = 0) -> None:
        """Replace the blocks of each worker in the dump. Other workers stay as they are."""
        if not len(dump.workers) == len(dump.dp_ranks) == len(dump.tiers) == len(dump.hashes):
            raise InvalidArgument("the columns of a dump must have the same length")
        if ((dump.tiers < min(Tier)) | (dump.tiers > max(Tier))).any():
            raise InvalidArgument(f"tiers of a dump must be from {min(Tier):d} to {max(Tier):d}")
        publishers = np.unique(np.stack([dump.workers, dump.dp_ranks.astype(np.uint64)], axis=1), axis=0)
        for worker, dp_rank in publishers.tolist():
            self.clear(worker, dp_rank=dp_rank)
            mine = (dump.workers == worker) & (dump.dp_ranks == dp_rank)
            for tier in Tier:
                self.store(
                    worker,
                    np.ascontiguousarray(dump.hashes[mine & (dump.tiers == tier)]),
                    dp_rank=dp_rank,
                    tier=tier,
                    now_ms=now_ms,
                )
