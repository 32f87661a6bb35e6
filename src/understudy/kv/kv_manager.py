"""The KV manager of a simulated worker: its blocks, their references and their events.

Two backends use the same block store:

- **kvbm**: one physical block per hash. Blocks are acquired and released by name; a full block can be matched as soon
  as it is acquired; the eviction order is lineage (leaves first) or another built-in policy.
- **native**: as in vLLM. A request has a `BlockLease`; a block can be matched once it is computed, several copies of a
  hash may exist, and all unreferenced blocks are in vLLM's free list.

A manager belongs to one thread at a time. Every call checks its arguments first and raises with nothing changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias

from understudy import _core
from understudy._core import BlockLease, Tier
from understudy.events import KvEvent, Removed, RemovedBlock, Stored, StoredBlock
from understudy.kv.sequence import Acquire, ActiveSequence, Block, Release, Seal, Signal
from understudy.tokens import Identities

if TYPE_CHECKING:
    from understudy._core import KvEventRows

__all__ = ["BlockLease", "Blocks", "KvEvents", "KvManager", "KvTraceRecord", "PrefillCost"]

Blocks: TypeAlias = Identities | Sequence[Block]


@dataclass(frozen=True)
class PrefillCost:
    """Cost of prefilling a request, in blocks and in tokens."""

    overlap: int  # leading blocks that are resident
    active_overlap: int  # of them, referenced
    cached_tokens: int
    active_cached_tokens: int
    new_tokens: int
    new_blocks: int


@dataclass(frozen=True)
class KvTraceRecord:
    """Blocks that one call allocated or evicted, and the pool after that call."""

    event: Literal["allocation", "eviction"]
    blocks: int
    block_size: int
    free_blocks: int
    active_blocks: int
    inactive_blocks: int
    total_blocks: int
    dp_rank: int

    @property
    def utilization(self) -> float:
        """Share of the pool's blocks that are in use or cached, from 0 to 1."""
        return (self.active_blocks + self.inactive_blocks) / self.total_blocks


class KvEvents:
    """Events since the previous drain, as two streams. Event ids count from 0 by 1 in each."""

    def __init__(self, rows: KvEventRows, dp_rank: int) -> None:
        self._rows = rows
        self._dp_rank = dp_rank

    @cached_property
    def raw(self) -> list[KvEvent]:
        """Events as such an engine publishes them.

        kvbm: for each call, a Stored for every run of new blocks (split at existing blocks; the parent is the full
        block before it), then one Removed with all evicted blocks. native: as vLLM, one event per copy; removals when
        blocks are allocated, before the Stored of their new content.
        """
        return self._events(consolidated=False)

    @cached_property
    def consolidated(self) -> list[KvEvent]:
        """Consolidated events: a hash is Stored with its first copy and Removed with its last."""
        return self._events(consolidated=True)

    def _events(self, *, consolidated: bool) -> list[KvEvent]:
        events: list[KvEvent] = []
        for event_id, stored, parent, blocks in self._rows.grouped(consolidated):
            if stored:
                events.append(
                    Stored(event_id, parent, tuple(StoredBlock(*b) for b in blocks), Tier.G1, self._dp_rank)
                )
            else:
                removed = tuple(RemovedBlock(b[0], b[2], b[3]) for b in blocks)
                events.append(Removed(event_id, removed, Tier.G1, self._dp_rank))
        return events


class KvManager(_core.KvManager):
    """Manage the KV blocks of one worker.

    A block is an `Identity` (full) or an int (partial: an id that the caller chooses, unique among acquired ones).
    `num_gpu_blocks` blocks of `block_size` tokens. `backend` is "kvbm" or "native"; `eviction` is a
    built-in policy by name (default "lineage"), for kvbm only. `events` keeps events for `drain_events`, with
    token ids under `event_token_ids`; `trace` keeps records for `drain_trace`. Both grow until they are drained.

    Without `enable_prefix_caching`, `overlap` and `prefill_cost` find no blocks. native then registers no block and
    publishes no event; kvbm registers blocks as given, which should have identities that no two requests share
    (`ActiveSequence` creates such), and publishes them if events are on.

    kvbm only (native raises WrongState):

    - `acquire(blocks, token_ids=None, partial=False)`: add a reference to each block, which is reused if it is resident
      (even after a miss) and otherwise allocated, evicting as needed; full blocks can be matched immediately. A
      hash that is given twice is one block with two references. Returns how many blocks were acquired: all, or
      CapacityExhausted; with `partial`, the longest prefix that fits. `token_ids` are the tokens of all full blocks,
      concatenated.
    - `release(blocks)`: drop a reference to each, in this order. Without references a full block is inactive: cached
      until evicted. A partial block is free again. UnknownBlock or WrongState when a block has no reference to drop.
    - `seal(partial, identity, token_ids=None)`: turn an acquired partial block into that full block; if it
      is resident already, the caller's reference moves to it and the slot is freed. UnknownBlock when not acquired.
    - `discard(blocks)`: release blocks and make them unmatchable; acquiring one again stores it anew. Other
      callers keep theirs until they release; their references are the first that a release of that hash drops.

    Both backends: `probe_new_blocks(blocks)` counts those neither active nor inactive; `overlap(blocks)` is (leading
    blocks that are resident, of them active); `is_resident(block)`, `references(block)`, `active_blocks`,
    `inactive_blocks`, `free_blocks`, `active_references` (partial blocks included), `metrics()`; `check()` raises
    InvariantViolated when the state is inconsistent.
    """

    def lease(self) -> BlockLease:
        """Create an empty lease for one request. WrongState unless the backend is native."""
        return BlockLease(self)

    def apply(self, signal: Signal) -> None:
        """Apply a sequence's signal, all or nothing. Errors as `acquire`, `release` and `seal`."""
        match signal:
            case Acquire(blocks, token_ids):
                self.acquire(blocks, token_ids=token_ids)
            case Release(blocks):
                self.release(blocks)
            case Seal(partial, identity, token_ids):
                self.seal(partial, identity, token_ids=token_ids)

    def prefill_cost(self, sequence: ActiveSequence) -> PrefillCost:
        """Return the cost of admitting the sequence now, with its generated tokens. Changes nothing.

        Counts resident blocks from the start up to the first missing or partial one. Without prefix caching, in the
        sequence or the manager, there is no overlap.
        """
        blocks = sequence.blocks
        overlap, active = self.overlap(blocks) if sequence.enable_prefix_caching else (0, 0)
        cached = min(overlap * self.block_size, len(sequence))
        return PrefillCost(
            overlap=overlap,
            active_overlap=active,
            cached_tokens=cached,
            active_cached_tokens=min(active * self.block_size, len(sequence)),
            new_tokens=len(sequence) - cached,
            new_blocks=len(blocks) - overlap,
        )

    def drain_events(self) -> KvEvents:
        """Take the events since the previous drain; empty unless the manager was created with `events`."""
        return KvEvents(self.drain_rows(), self.dp_rank)

    def drain_trace(self) -> list[KvTraceRecord]:
        """Take the records since the previous drain; empty unless the manager was created with `trace`."""
        return [
            KvTraceRecord(
                "eviction" if eviction else "allocation",
                blocks,
                self.block_size,
                free,
                active,
                inactive,
                self.num_gpu_blocks,
                self.dp_rank,
            )
            for eviction, blocks, free, active, inactive in self.drain_trace_rows()
        ]
