"""The KV manager of a simulated worker: which blocks it holds, who references them, and what it says about them.

Two backends over the one block store:

- **kvbm**: one physical block a hash. Blocks are acquired and released by name, a full one as soon as it is acquired is
  found by others, and the eviction order is lineage (leaves first) or another of the built-in ones.
- **native**: vLLM's. A request holds a `BlockLease`; a block is found by others once it is computed, copies of one
  hash live side by side, and all unreferenced blocks wait in vLLM's free list.

A manager belongs to one thread at a time. Every call checks its arguments and then acts, or raises with nothing
changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias

from understudy import _core
from understudy._core import BlockLease, Tier
from understudy.engines.sequence import Acquire, ActiveSequence, Block, Release, Seal, Signal
from understudy.events import KvEvent, Removed, RemovedBlock, Stored, StoredBlock
from understudy.tokens import Identities

if TYPE_CHECKING:
    from understudy._core import KvEventRows

__all__ = ["BlockLease", "Blocks", "KvEvents", "KvManager", "KvTraceRecord", "PrefillCost"]

Blocks: TypeAlias = Identities | Sequence[Block]


@dataclass(frozen=True)
class PrefillCost:
    """What prefilling a request would take, by blocks and by tokens."""

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
        """The part of the pool that holds something, from 0 to 1."""
        return (self.active_blocks + self.inactive_blocks) / self.total_blocks


class KvEvents:
    """What happened since the drain before, as two streams. Event ids count from 0 in each, by 1."""

    def __init__(self, rows: KvEventRows, dp_rank: int) -> None:
        self._rows = rows
        self._dp_rank = dp_rank

    @cached_property
    def raw(self) -> list[KvEvent]:
        """What such an engine says.

        kvbm: for each call, a Stored for every run of new blocks (cut where a block was there already, anchored at
        the full block in front), then one Removed with everything evicted, in that order. native: as vLLM, every
        copy, removals when blocks are allocated, before the Stored of their new content.
        """
        return self._events(consolidated=False)

    @cached_property
    def consolidated(self) -> list[KvEvent]:
        """The truth: a hash is Stored with its first copy and Removed with its last."""
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
    """The KV blocks of one worker.

    A block is an `Identity` (full) or an int (partial: an id of the caller's choosing, unique among those held).
    `num_gpu_blocks` blocks of `block_size` tokens. `backend` is "kvbm" or "native"; `eviction` is a
    built-in policy by name ("lineage" unless told), for kvbm only. `events` keeps events for `drain_events`, with
    token ids under `event_token_ids`; `trace` keeps records for `drain_trace`. Both grow until they are drained.

    Without `enable_prefix_caching`, `overlap` and `prefill_cost` find nothing. native then registers nothing, and is
    silent; kvbm registers what it is given, which should be identities that no two requests share (`ActiveSequence`
    makes such), and says so if events are on.

    kvbm only (native raises WrongState):

    - `acquire(blocks, token_ids=None, partial=False)`: one more reference to each block, which is reused if it is here
      (even behind a miss) and otherwise allocated, evicting as needed; full blocks can be found by others at once. A
      hash that is named twice is one block with two references. Returns how many blocks were acquired: all, or
      CapacityExhausted; with `partial`, the longest prefix that fits. `token_ids` hold the tokens of all full blocks,
      one after the other.
    - `release(blocks)`: one reference less, in this order. Without references a full block is inactive: cached until
      evicted. A partial block is free again. UnknownBlock or WrongState when the caller cannot hold one of them.
    - `seal(partial, identity, token_ids=None)`: the held partial block is complete and becomes that full block; if it
      is here already, the caller's reference moves to it and the slot is free. UnknownBlock when it is not held.
    - `discard(blocks)`: as release, but nobody finds the blocks any more; acquiring one again stores it anew. Other
      holders keep theirs until they release; their references are the first that a release of that hash drops.

    Both backends: `probe_new_blocks(blocks)` counts those neither active nor inactive; `overlap(blocks)` is (leading
    blocks that are resident, of them active); `is_resident(block)`, `references(block)`, `active_blocks`,
    `inactive_blocks`, `free_blocks`, `active_references` (partial blocks included), `metrics()`; `check()` raises
    InvariantViolated when the state is inconsistent.
    """

    def lease(self) -> BlockLease:
        """An empty lease for one request. WrongState unless the backend is native."""
        return BlockLease(self)

    def apply(self, signal: Signal) -> None:
        """Do what a sequence asks for, all or nothing. Errors as `acquire`, `release` and `seal`."""
        match signal:
            case Acquire(blocks, token_ids):
                self.acquire(blocks, token_ids=token_ids)
            case Release(blocks):
                self.release(blocks)
            case Seal(partial, identity, token_ids):
                self.seal(partial, identity, token_ids=token_ids)

    def prefill_cost(self, sequence: ActiveSequence) -> PrefillCost:
        """What admitting the sequence would take now, prompt and generated tokens alike. Changes nothing.

        Counts resident blocks from the start up to the first that is missing or partial. A sequence, or a manager,
        without prefix caching has no overlap.
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
        """Take the events since the drain before; none unless the manager was made with `events`."""
        return KvEvents(self.drain_rows(), self.dp_rank)

    def drain_trace(self) -> list[KvTraceRecord]:
        """Take the records since the drain before; none unless the manager was made with `trace`."""
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
