"""What a router knows of its workers' caches, built from their KV events alone."""

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
    """What an index holds, a row for each block that a worker holds on a tier, in order."""

    workers: npt.NDArray[np.uint64]
    dp_ranks: npt.NDArray[np.uint32]
    tiers: npt.NDArray[np.uint8]
    hashes: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.hashes)


class PrefixIndex(_core.PrefixIndex):
    """Which worker (and DP rank) holds which blocks on which tier.

    Blocks are sequence hashes, given as buffers. With `ttl_ms`, what was not told again for so long goes by itself;
    with `max_worker_blocks`, the oldest of a worker's blocks go beyond that number: for views that no Removed ever
    corrects. With `counts_copies` a block goes with its last copy: the raw stream of an engine that announces every
    one becomes the truth. Any number of threads may ask while one tells.
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
        """Take a batch of one worker's events, and say what became of it; the batch is not consumed.

        `stream` says how to read the rows of a store, which tell both streams; columns are one already.
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
        """Everything that is held, or what one worker holds."""
        columns = self.dump_columns()
        if worker is not None:
            mine = (columns[0] == worker) & (columns[1] == dp_rank)
            columns = (columns[0][mine], columns[1][mine], columns[2][mine], columns[3][mine])
        return IndexDump(*columns)

    def load(self, dump: IndexDump, *, now_ms: float = 0) -> None:
        """Each worker of the dump holds what it says, and nothing else. Other workers stay as they are."""
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
