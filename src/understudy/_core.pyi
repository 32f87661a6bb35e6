# Written by tools/write_stub.py with nanobind 3.1.0; not to be edited.
"""
The native core of Understudy. Use the typed modules of the package, which re-export what is public.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import enum
from typing import Literal, Self, overload

import numpy
import numpy.typing
from numpy.typing import NDArray

from understudy.core_types import (
    Block,
    Blocks,
    DuplicatePolicyName,
    EventBlock,
    HandOffLine,
    Ints,
    MultiLine,
    OffloadFilter,
    PlainRows,
    Policy,
    PolicyName,
    RequestKvState,
    Router,
    Run,
    SglangComponent,
    SglangEvent,
    SglangHost,
    SglangLog,
    SglangSide,
    SglangState,
    SglangStep,
    StepTimingModel,
    TimingModel,
    TrtCacheEvent,
    TrtPass,
    UserDecider,
)


def lineage_hash(current: int, parent: int | None, position: int) -> int:
    """
    Pack a lineage hash from a block's sequence hash, its parent's (None at a root) and its position.
    """

def lineage_parts(plh: int) -> tuple[int, int, int, int]:
    """
    Unpack a lineage hash into (mode, position, sequence hash, parent fragment).
    """

def lineage_extend(plh: int, local_hash: int) -> int:
    """
    The lineage hash of the next block, given the hash of its content alone.
    """

def lineage_text(plh: int) -> str:
    """
    Readable form: position, sequence hash and (behind a root) parent fragment, the hashes in base58.
    """

def lineage_bytes(plh: int) -> bytes:
    """The 16 big-endian bytes that travel on the wire."""

def lineage_from_bytes(data: bytes | Sequence[int]) -> int:
    """
    Read a lineage hash from 16 big-endian bytes, or from a sequence of 16 ints.
    """

def lineage_sort_key(plh: int) -> tuple[int, int, int]:
    """
    The total order of lineage hashes: position, then sequence hash, then the raw value.
    """

def positional_sequence_hash(sequence_hash: int, local_hash: int, position: int) -> int:
    """
    128 bits: a sequence hash with its position and the low bits of the block's local hash.
    """

class Identity:
    """Identity of a block: its hashes and its position. Read-only."""

    @property
    def lineage_hash(self) -> int:
        """
        The 128-bit identity: position, sequence hash and a fragment of the parent's.
        """

    @property
    def sequence_hash(self) -> int:
        """Content of this block and all before it."""

    @property
    def local_hash(self) -> int:
        """Content of this block alone; 0 when not known."""

    @property
    def parent_hash(self) -> int | None:
        """Sequence hash of the block before; None at a root or when not known."""

    @property
    def position(self) -> int:
        """Index of the block in its sequence."""

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class Identities:
    """
    An immutable sequence of block identities. Slices share its storage and cost O(1).
    """

    def __init__(self) -> None: ...

    @staticmethod
    def from_local_hashes(local_hashes: Ints, *, parent: Identities | None = None) -> Identities:
        """
        Chain the hashes of blocks' contents, behind the last block of `parent` or from a root.
        """

    @staticmethod
    def from_sequence_hashes(sequence_hashes: Ints, *, local_hashes: Ints | None = None, parent_hash: int | None = None, start_position: int = 0) -> Identities:
        """
        Take sequence hashes as they are; each block is the parent of the next. Hash 0 is refused.
        """

    @staticmethod
    def from_lineage_hashes(lineage_hashes: Sequence[int]) -> Identities:
        """Take 128-bit lineage hashes as they are; local hashes are not known."""

    def hash_ahead(self, tokens: Ints, ahead: int) -> Identities:
        """
        Blocks whose identity covers the `ahead` tokens behind them too; without the last, if it has none.
        """

    def __len__(self) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Identities: ...

    @overload
    def __getitem__(self, index: int) -> Identity: ...

    def __iter__(self) -> Iterator[Identity]: ...

    def __add__(self, other: Identities) -> Identities: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __repr__(self) -> str: ...

    @property
    def lineage_hashes(self) -> list[int]:
        """128-bit lineage hashes, one int per block."""

    @property
    def block_size(self) -> int | None:
        """Tokens of each block; None where only hashes are known."""

    @property
    def sequence_hashes(self) -> NDArray[numpy.uint64]:
        """Sequence hashes as a new uint64 array."""

    @property
    def local_hashes(self) -> NDArray[numpy.uint64]:
        """Local hashes as a new uint64 array; 0 where not known."""

    @property
    def positions(self) -> NDArray[numpy.uint32]:
        """Block positions as a new uint32 array."""

    __hash__: None  # type: ignore[assignment]

def xxh3_64(data: bytes, seed: int = 0) -> int:
    """XXH3-64 of `data` with a 64-bit seed."""

def salt_hash(salt: str = '', lora: str = '') -> int:
    """
    The seed of a request's block hashes: 1337, plus a term for its cache salt, plus one for its LoRA adapter.
    """

class TokenBlocks:
    """
    A request's tokens cut into blocks, with the identity of every complete block. Bad input raises InvalidArgument and changes nothing.
    """

    def __init__(self, tokens: Ints = (), block_size: int = 16, *, salt: str = '', lora: str = '', salt_hash: int | None = None, mm_runs: Sequence[Run] = ()) -> None: ...

    def append(self, token: int) -> int | None:
        """
        Add one token; return the index of the block that it completed, or None.
        """

    def extend(self, tokens: Ints, mm_runs: Sequence[Run] = ()) -> range:
        """
        Add tokens, with multimodal runs whose offsets count from the first of them; return the range of blocks completed.
        """

    def truncate(self, length: int) -> None:
        """
        Keep the first `length` tokens (all, when there are fewer); runs are trimmed with them.
        """

    def pop(self) -> int | None:
        """Drop the last token and return it, or return None."""

    def tokens_at(self, start: int, stop: int) -> NDArray[numpy.uint32]:
        """
        Tokens [start, stop) as a new uint32 array; empty when the range is reversed or not inside.
        """

    def __len__(self) -> int: ...

    def __repr__(self) -> str: ...

    @property
    def tokens(self) -> NDArray[numpy.uint32]:
        """All tokens as a new uint32 array."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    @property
    def salt_hash(self) -> int:
        """The seed of the block hashes."""

    @property
    def mm_runs(self) -> list[Run]:
        """Multimodal runs as (mm_hash, offset, length), sorted by offset."""

    @property
    def num_blocks(self) -> int:
        """Number of complete blocks."""

    @property
    def identities(self) -> Identities:
        """
        Identities of the complete blocks as they are now; later changes do not show. O(1).
        """

class Tier(enum.IntEnum):
    """Where a block lives: device, host, disk, object store."""

    G1 = 1

    G2 = 2

    G3 = 3

    G4 = 4

class PoolMetrics:
    """Exact counters and gauges of one pool, read at one instant."""

    @property
    def allocations(self) -> int: ...

    @property
    def allocations_from_reset(self) -> int: ...

    @property
    def evictions(self) -> int: ...

    @property
    def stagings(self) -> int: ...

    @property
    def registrations(self) -> int: ...

    @property
    def duplicate_blocks(self) -> int: ...

    @property
    def registration_dedup(self) -> int: ...

    @property
    def match_hashes_requested(self) -> int: ...

    @property
    def match_blocks_returned(self) -> int: ...

    @property
    def scan_hashes_requested(self) -> int: ...

    @property
    def scan_blocks_returned(self) -> int: ...

    @property
    def leaked_guards(self) -> int: ...

    @property
    def total_blocks(self) -> int: ...

    @property
    def reset_blocks(self) -> int: ...

    @property
    def mutable_blocks(self) -> int: ...

    @property
    def staged_blocks(self) -> int: ...

    @property
    def active_blocks(self) -> int: ...

    @property
    def inactive_blocks(self) -> int: ...

    @property
    def active_references(self) -> int: ...

    def as_dict(self) -> dict[str, int]:
        """Return all of them by name."""

    def __repr__(self) -> str: ...

class PoolConfig:
    """One tier of a store."""

    def __init__(self, num_blocks: int, *, tier: Tier = Tier.G1, policy: PolicyName | Policy = 'lineage', thresholds: Sequence[int] | None = None, duplicates: DuplicatePolicyName = 'allow', reset_on_release: bool = False) -> None: ...

class BlockStore:
    """All blocks of one worker, on all its tiers, behind one lock."""

    def __init__(self, pools: Sequence[PoolConfig], *, block_size: int = 16, dp_rank: int = 0, events: bool = False, event_capacity: int | None = None, event_token_ids: bool = False, sketch_capacity: int | None = None) -> None: ...

    def manager(self, tier: Tier = Tier.G1) -> BlockManager:
        """The manager of one tier. ConfigError when the store has none."""

    @property
    def block_size(self) -> int: ...

    @property
    def dp_rank(self) -> int: ...

    def drain_events(self, limit: int | None = None) -> EventBatch:
        """Take up to `limit` events (all by default), oldest first."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of slots, index, policies and sketch."""

    @property
    def operations(self) -> int:
        """Index probes and policy steps so far."""

    def dump(self) -> str:
        """Every observable bit of state, as text."""

    def check(self) -> None:
        """Raise InvariantViolated if the state is inconsistent. O(blocks)."""

class BlockManager:
    """
    The blocks of one tier: allocate, register, match, release.

    `num_blocks` blocks of `block_size` tokens. `policy` is the eviction order: a name, or an EvictionPolicy; `thresholds` are the uses that move a block up in multi_lru. `duplicates`: allow copies of a block, or reject them. `reset_on_release` empties blocks without references instead of caching them. `tier` and `dp_rank` are named in events; `events` keeps them, at most `event_capacity`, with their token ids under `event_token_ids`. `sketch_capacity` counts recent uses of so many hashes, for `frequency`.
    """

    def __init__(self, num_blocks: int, *, block_size: int = 16, policy: PolicyName | Policy = 'lineage', thresholds: Sequence[int] | None = None, duplicates: DuplicatePolicyName = 'allow', reset_on_release: bool = False, tier: Tier = Tier.G1, dp_rank: int = 0, events: bool = False, event_capacity: int | None = None, event_token_ids: bool = False, sketch_capacity: int | None = None) -> None: ...

    def __repr__(self) -> str: ...

    def allocate(self, count: int) -> MutableBlocks:
        """
        `count` mutable blocks, all or none; CapacityExhausted when fewer are available.
        """

    def match_prefix(self, identities: Identities) -> RegisteredBlocks:
        """References to the longest run of leading hits."""

    def match_scattered(self, identities: Identities) -> tuple[RegisteredBlocks, NDArray[numpy.bool_]]:
        """
        (references to every hit, mask of the hits). A repeated hash is referenced once for each occurrence.
        """

    def scan(self, identities: Identities, *, touch: bool = True) -> RegisteredBlocks:
        """
        References to the distinct blocks among `identities` that are resident.
        """

    def prefix_length(self, identities: Identities) -> int:
        """Number of leading resident blocks. Changes nothing."""

    def has_blocks(self, identities: Identities) -> NDArray[numpy.bool_]:
        """Whether each block is resident. Changes nothing."""

    def touch(self, identities: Identities) -> None:
        """Count a use of the resident blocks, without referencing them."""

    def clear_inactive(self) -> int:
        """Remove every unreferenced cached block; returns how many."""

    @property
    def available(self) -> int:
        """Blocks that an allocation can get: empty ones and cached ones."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    @property
    def tier(self) -> Tier:
        """Tier of the blocks."""

    @property
    def duplicates(self) -> DuplicatePolicyName:
        """Whether copies of a block are allowed or rejected."""

    @property
    def store(self) -> BlockStore:
        """Store of all tiers of this worker."""

    def metrics(self) -> PoolMetrics:
        """All counters and gauges at one instant."""

    def eviction_order(self, limit: int | None = None) -> NDArray[numpy.int32]:
        """
        Ids in the order in which the policy would hand them out. WrongState for a policy written in Python.
        """

    def frequency(self, lineage_hash: int) -> int:
        """Estimated recent uses of a hash, 0..15; 0 without a sketch."""

class EventTable:
    """
    Events of a publisher in a run, one row per block, in columns by parts.
    """

    def __init__(self) -> None: ...

    def append(self, rows: EventBatch, time_ns: int) -> None:
        """Append rows published at that time."""

    def __len__(self) -> int: ...

    @property
    def digest(self) -> int:
        """Equal for equal tables; different otherwise, up to collisions."""

    def rows(self) -> tuple[EventBatch, NDArray[numpy.int64]]:
        """All rows, with the time of each in ns."""

    def heads(self, raw: bool) -> dict[str, NDArray[numpy.generic]]:
        """
        The events of a stream, as `understudy.events.file` has them, without their hashes.
        """

    def sequence_hashes(self, raw: bool) -> list[NDArray[numpy.uint64]]:
        """Sequence hashes of every block of those events, by parts."""

    def stored_local_hashes(self, raw: bool) -> list[NDArray[numpy.uint64]]:
        """The same of blocks that were stored."""

class EventBatch:
    """Events taken from a store, as columns with one row a block."""

    def __len__(self) -> int: ...

    @staticmethod
    def from_columns(kinds: NDArray[numpy.uint8], tiers: NDArray[numpy.uint8], parents: NDArray[numpy.uint64], offsets: NDArray[numpy.int64], sequence_hashes: NDArray[numpy.uint64], local_hashes: NDArray[numpy.uint64]) -> EventBatch:
        """
        Build the rows of `EventColumns`, which are of the consolidated stream. Positions are 0 where the columns do not give them.
        """

    def event_columns(self, raw: bool) -> tuple[NDArray[numpy.uint8], NDArray[numpy.uint8], NDArray[numpy.uint64], NDArray[numpy.int64], NDArray[numpy.uint64], NDArray[numpy.uint64]]:
        """Events of the first cache group, as `EventColumns` has them."""

    @property
    def lost(self) -> int:
        """Events that a bounded ring dropped before these."""

    @property
    def token_ids(self) -> NDArray[numpy.uint32]:
        """
        block_size tokens for every stored row, concatenated; empty unless asked for.
        """

    @property
    def ids(self) -> NDArray[numpy.uint64]: ...

    @property
    def kinds(self) -> NDArray[numpy.uint8]:
        """
        0 stored, 1 removed, 2 cleared (a row without a block: all blocks of its tier, or of all tiers, are gone), 3 skipped: tokens of a stored event without a key.
        """

    @property
    def tiers(self) -> NDArray[numpy.uint8]:
        """1 to 4; 0: all, cleared."""

    @property
    def groups(self) -> NDArray[numpy.uint8]:
        """Cache group."""

    @property
    def starts(self) -> NDArray[numpy.uint8]:
        """
        1 on the first row of what one call to the store registered or removed.
        """

    @property
    def sole(self) -> NDArray[numpy.uint8]:
        """
        1 where the event is the first copy's arrival or the last copy's departure.
        """

    @property
    def sequence_hashes(self) -> NDArray[numpy.uint64]: ...

    @property
    def local_hashes(self) -> NDArray[numpy.uint64]: ...

    @property
    def parent_hashes(self) -> NDArray[numpy.uint64]:
        """0 at a root, or when not known."""

    @property
    def positions(self) -> NDArray[numpy.uint32]: ...

    @property
    def generations(self) -> NDArray[numpy.uint64]: ...

class WireColumns:
    """Events of many messages, one row per event, and the unreadable parts."""

    @property
    def kinds(self) -> NDArray[numpy.uint8]: ...

    @property
    def tiers(self) -> NDArray[numpy.uint8]: ...

    @property
    def parents(self) -> NDArray[numpy.uint64]: ...

    @property
    def offsets(self) -> NDArray[numpy.int64]: ...

    @property
    def sequence_hashes(self) -> NDArray[numpy.uint64]: ...

    @property
    def local_hashes(self) -> NDArray[numpy.uint64]: ...

    @property
    def ts(self) -> NDArray[numpy.float64]:
        """Seconds, by message."""

    @property
    def ranks(self) -> NDArray[numpy.int64]:
        """By message; -1: none."""

    @property
    def malformed(self) -> list[int]:
        """Messages that are no batch."""

    @property
    def bad_events(self) -> int: ...

    @property
    def ignored_events(self) -> int: ...

def read_wire(payloads: Sequence[bytes]) -> WireColumns:
    """
    Payloads of messages (bytes), of whichever dialect, as columns. Nothing in them raises.
    """

class RawDistance:
    """
    Errors of a reader that applies every Removed event without counting copies.
    """

    @property
    def blocks(self) -> int: ...

    @property
    def second_copies(self) -> int: ...

    @property
    def early_removals(self) -> int: ...

    @property
    def unknown_removals(self) -> int: ...

    @property
    def unnamed(self) -> int: ...

    @property
    def overflowed(self) -> int: ...

    @property
    def wrong_now(self) -> int: ...

    @property
    def wrong_peak(self) -> int: ...

    @property
    def wrong_mean(self) -> float:
        """Blocks wrongly believed gone, on average over all blocks published."""

class Consolidator:
    """Counts the copies of blocks; one caller at a time (WrongState)."""

    def __init__(self, max_blocks: int, by_content: bool) -> None: ...

    def apply(self, kinds: NDArray[numpy.uint8], tiers: NDArray[numpy.uint8], parents: NDArray[numpy.uint64], offsets: NDArray[numpy.int64], sequence_hashes: NDArray[numpy.uint64], local_hashes: NDArray[numpy.uint64]) -> WireColumns: ...

    def clear(self) -> None: ...

    @property
    def distance(self) -> RawDistance: ...

    def __len__(self) -> int: ...

class BlockGuard:
    """
    References to blocks, given back by release() or at the end of a `with`.
    """

    def __len__(self) -> int: ...

    def __repr__(self) -> str: ...

    @property
    def ids(self) -> NDArray[numpy.int32]:
        """Block ids, in order. Empty once released."""

    @property
    def released(self) -> bool:
        """Whether the blocks were released or handed on."""

    def release(self) -> None:
        """Return the blocks. Idempotent."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *args: object) -> None: ...

class MutableBlocks(BlockGuard):
    """Freshly allocated blocks that one owner writes."""

    @property
    def evicted(self) -> Identities:
        """Blocks that the allocation evicted, in eviction order."""

    @property
    def evicted_token_ids(self) -> NDArray[numpy.uint32]:
        """
        Their token ids, one block after another, where events carry them; else empty.
        """

    def stage(self, identities: Identities) -> StagedBlocks:
        """Give each block its identity; consumes this guard."""

    def register(self, identities: Identities, token_ids: Ints | None = None) -> RegisteredBlocks:
        """
        Stage and register in one call; consumes this guard. Where events carry token ids, those of all blocks must be given, unless some tier of the store has each of them.
        """

    def take(self, count: int) -> MutableBlocks:
        """Move the first `count` blocks into a guard of their own."""

class StagedBlocks(BlockGuard):
    """Complete blocks with a hash, not visible to others yet."""

    @property
    def identities(self) -> Identities: ...

    def register(self, token_ids: Ints | None = None) -> RegisteredBlocks:
        """
        Make the blocks matchable; consumes this guard. Under `reject` the result may hold other ids.
        """

    def reset(self) -> MutableBlocks:
        """Back to mutable blocks with the same ids; consumes this guard."""

class RegisteredBlocks(BlockGuard):
    """References to registered, matchable blocks."""

    @property
    def identities(self) -> Identities: ...

    @property
    def token_ids(self) -> NDArray[numpy.uint32]:
        """
        Those of the blocks, one after another, where events carry them; else empty. With them a copy is registered in another store, which has no other way to know.
        """

    def clone(self) -> RegisteredBlocks:
        """A second guard over the same blocks, with its own references."""

    def take(self, count: int) -> RegisteredBlocks:
        """Move the first `count` blocks into a guard of their own."""

    def weak(self) -> WeakBlocks:
        """Remember the blocks without holding them."""

    def set_reset_on_release(self, value: bool) -> None:
        """
        Whether the blocks are emptied, not cached, when the last reference is released.
        """

    def release(self, tail_first: bool = True) -> None:
        """
        Drop the references, by default from the last block to the first, so that a tail is evicted before its head. Idempotent.
        """

class WeakBlocks:
    """Remembers blocks without holding them."""

    def __len__(self) -> int: ...

    def __repr__(self) -> str: ...

    @property
    def identities(self) -> Identities: ...

    def upgrade(self) -> RegisteredBlocks | None:
        """
        References to all of the blocks, possibly in other copies, or None if any was evicted. Does not count as a use.
        """

class StepOutcome:
    """Result of applying a step."""

    @property
    def blocks_registered(self) -> int:
        """Blocks that the step completed."""

    @property
    def finished(self) -> bool:
        """The output budget is used up."""

def lifetime_blocks(prompt_tokens: int, max_output_tokens: int, block_size: int) -> int:
    """
    Blocks that a request draws at its peak. The last output token is sampled but never written.
    """

class RequestKv:
    """The KV of one request: schedule, view, apply."""

    def __init__(self, manager: BlockManager, prompt: Ints, max_output_tokens: int, *, salt: str = '', lora: str = '', mm_runs: Sequence[Run] = (), prefix_caching: bool = True) -> None: ...

    def match_prefix(self) -> int:
        """
        Reference the cached blocks that begin the prompt; returns their tokens, at most all but one. On a new or preempted request only.
        """

    def schedule_prefill(self, tokens: int) -> None:
        """
        Allocate the blocks of the next `tokens` tokens of the prompt, all or none. CapacityExhausted without them.
        """

    def schedule_decode(self) -> None:
        """
        Allocate the block of the next output token, if it needs one. CapacityExhausted without it.
        """

    def schedule_speculative(self, tokens: int) -> int:
        """
        Allocate for a token and up to `tokens` - 1 drafts; returns how many fit the output's limit.
        """

    def schedule_ahead(self) -> NDArray[numpy.int32] | None:
        """
        Pages of the decode behind the scheduled one, whose block it takes; None when the output ends before it.
        """

    def revert(self) -> None:
        """Undo the scheduled step: its blocks are free again."""

    @property
    def page_ids(self) -> NDArray[numpy.int32]:
        """
        Pages of the scheduled step, in position order: exactly as many as it needs.
        """

    @property
    def view_length(self) -> int:
        """Tokens that the scheduled step's pages hold after it."""

    @property
    def scheduled_tokens(self) -> int:
        """Tokens of the scheduled step; 0 without one."""

    def apply_prefill(self, token: int | None = None) -> StepOutcome:
        """
        Commit the scheduled part of the prompt; with its last part, `token` is the first output token.
        """

    def apply_decode(self, token: int) -> StepOutcome:
        """Commit the scheduled decode, with the token that it sampled."""

    def apply_speculative(self, accepted: Ints) -> StepOutcome:
        """
        Commit the accepted tokens of a scheduled speculation; the others' blocks are free again.
        """

    def preempt(self) -> None:
        """Release all blocks; the tokens so far are the prompt of the restart."""

    def close(self) -> None:
        """Release all blocks, in any state. Idempotent."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *args: object) -> None: ...

    @property
    def state(self) -> RequestKvState:
        """idle, scheduled or closed."""

    @property
    def tokens(self) -> NDArray[numpy.uint32]:
        """Prompt and output tokens so far."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt; after a preemption, of the restart."""

    @property
    def prefill_target(self) -> int:
        """Tokens that prefill computes before the first new output token."""

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV is in the blocks."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the cache had at the last match."""

    @property
    def generated_tokens(self) -> int:
        """Output tokens so far."""

    @property
    def max_output_tokens(self) -> int:
        """Most output tokens."""

    @property
    def finished(self) -> bool:
        """Whether the output's limit is reached."""

    @property
    def registered_blocks(self) -> int:
        """Blocks of this request that others can match."""

    @property
    def held_blocks(self) -> int:
        """Blocks that this request references."""

class LinkUsage:
    """Transfers, bytes and busy time of a link up to a time."""

    @property
    def name(self) -> str: ...

    @property
    def bandwidth_gbps(self) -> float:
        """10^9 bytes per second; inf: no limit."""

    @property
    def transfers_started(self) -> int: ...

    @property
    def transfers_finished(self) -> int: ...

    @property
    def bytes_started(self) -> int: ...

    @property
    def bytes_finished(self) -> int: ...

    @property
    def busy_ns(self) -> int:
        """Time in which at least one transfer was flowing."""

    @property
    def bucket_ns(self) -> int:
        """Length of the intervals of bucket_bytes."""

    @property
    def bucket_bytes(self) -> NDArray[numpy.float64]:
        """Bytes moved in each interval since time 0, at most 1024 intervals."""

class Links:
    """
    The links of a run. Transfers share bandwidth equally; completion times are exact, in whole nanoseconds, and do not depend on when one looks.
    """

    def __init__(self) -> None: ...

    def add_duplex(self, name: str, bandwidth_gbps: float, *, demand_first: bool = False) -> int:
        """
        A cap over links that name it: each transfer on any of them also needs its fair share of the cap.
        """

    def add_link(self, name: str, bandwidth_gbps: float, *, fixed_ns: int = 0, duplex: int | None = None, demand_first: bool = False) -> int:
        """
        A link of 10^9 bytes per second times bandwidth_gbps (inf: no limit). A transfer's bytes start to flow fixed_ns after its start. demand_first: background moves only while no demand transfer flows.
        """

    def set_share(self, now_ns: int, link: int, share: float) -> None:
        """
        Set the share of the link's bandwidth (0.001 to 1), also for transfers in flight.
        """

    def set_duplex_share(self, now_ns: int, duplex: int, share: float) -> None:
        """Like `set_share`, for a cap over links."""

    def start(self, now_ns: int, path: Sequence[int], num_bytes: int, *, background: bool = False) -> int:
        """
        Start a transfer over one link or two and return its id; ids rise in order of start.
        """

    def start_all(self, now_ns: int, path: Sequence[int], num_bytes: Sequence[int], *, background: bool = False) -> int:
        """Start transfers in order, all or none; returns the id of the first."""

    def next_completion_ns(self) -> int | None:
        """
        Time of the next completion if no transfer starts before; None when no transfer is in flight.
        """

    def next_wake_ns(self) -> int | None:
        """
        A time not after the next completion, cheaper to know; pop_due then may return nothing.
        """

    def pop_due(self, now_ns: int) -> list[tuple[int, int]]:
        """
        (time_ns, id) of transfers that ended up to now_ns, each once, by time and then by start.
        """

    def deadline_ns(self, transfer: int) -> int:
        """When a transfer that was not popped yet ends if none starts before."""

    def usage(self, link: int) -> LinkUsage:
        """Usage of the link up to now."""

    @property
    def now_ns(self) -> int:
        """The latest time passed to a call."""

    @property
    def in_flight(self) -> int:
        """Transfers that have not ended."""

    @property
    def idle(self) -> bool:
        """True if no transfer is in flight or waits to be popped."""

    @property
    def operations(self) -> int:
        """Work done so far, for tests of its growth."""

    def check(self) -> None:
        """Verify conservation; throws InvariantViolated."""

class LinkPairConfig:
    """The links to a tier and back."""

    def __init__(self, *, down_gbps: float = float('inf'), up_gbps: float = float('inf'), down_fixed_ns: int = 0, up_fixed_ns: int = 0, duplex_gbps: float = float('inf')) -> None: ...

    FIELDS: tuple[str, ...]

class SharedTierConfig:
    """A tier that the workers of a run share."""

    def __init__(self, *, num_blocks: int, policy: str | Callable[[], object] = 'lru', worker: LinkPairConfig, backend: LinkPairConfig, offload_concurrency: int | None = None) -> None: ...

    FIELDS: tuple[str, ...]

class TierConfig:
    """The tiers below the device."""

    def __init__(self, *, bytes_per_block: int, g2_blocks: int, g2_policy: str | Callable[[], object] = 'lru', host: LinkPairConfig, offload_concurrency: int | None = None, demand_first: bool = False, write_through: bool = False, exclusive: bool = False, min_reuse: int = 0, offload_filter: OffloadFilter | None = None, offload_batch_size: int = 32, onboard_preempted: bool = True, recompute_fallback: bool = True, onboard_failure_rate: float = 0.0, seed: int = 0, g3: SharedTierConfig | None = None, g4: SharedTierConfig | None = None, most_blocks: int | None = None) -> None: ...

    FIELDS: tuple[str, ...]

    @property
    def g2_blocks(self) -> int: ...

class TransferEstimate:
    """
    Estimated time of a transfer in ns, next to those in flight when it starts.
    """

    def __init__(self, config: TierConfig) -> None: ...

    def copy_ns(self, num_bytes: int, copies: int) -> int:
        """Device to host."""

    def lower_copy_ns(self, tier: SharedTierConfig, num_bytes: int, copies: int) -> int:
        """Host to a shared tier."""

    def stage_ns(self, tier: SharedTierConfig, num_bytes: int, loads: int, copies: int) -> int:
        """A shared tier to the host."""

    def load_ns(self, num_bytes: int, loads: int, copies: int) -> int:
        """Host to device."""

class TierRun:
    """
    Links and lower tiers that the workers of a run share. One call at a time, the workers' included: WrongState.
    """

    def __init__(self, config: TierConfig, block_size: int, events: bool = False, check: bool = False) -> None: ...

    def run_until(self, now_ns: int) -> None:
        """Finish every transfer that ends by then, each at its time."""

    @property
    def next_wake_ns(self) -> int | None: ...

    def take_events(self, tier: Tier) -> tuple[EventBatch, NDArray[numpy.int64]]:
        """
        Take the events of one shared tier, a separate publisher, with the time of each row in ns.
        """

    def check(self) -> None: ...

class TierTotals:
    """Counts of tier operations."""

    @property
    def offloaded_blocks(self) -> int: ...

    @property
    def dropped_blocks(self) -> int: ...

    @property
    def onboards(self) -> int: ...

    @property
    def onboarded_blocks(self) -> int: ...

    @property
    def joined_loads(self) -> int: ...

    @property
    def slow_loads(self) -> int: ...

    @property
    def failed_loads(self) -> int: ...

    @property
    def room_waits(self) -> int: ...

    @property
    def held_block_ns(self) -> int: ...

    @property
    def held_max_blocks(self) -> int: ...

    @property
    def deferred_lookups(self) -> int: ...

    @property
    def refused_stores(self) -> int: ...

    @property
    def flushed_copies(self) -> int: ...

class StepTiming:
    """A timing model with its speed-ups."""

    def step_ms(self, load: StepLoad, capacity_tokens: int = 0) -> float:
        """Milliseconds of one step, before rounding to nanoseconds."""

    def covers(self, load: StepLoad) -> bool:
        """Whether the model's data covers the step."""

class StepLoad:
    """The load of a step, as input of timing models."""

    def __init__(self, *, chunks: Sequence[tuple[int, int]] = [], decodes: int = 0, context_tokens: int = 0, windowed_context: int | None = None, longest_context: int = 0, rank_tokens: int = 0, drafts: int = 0, rank_width: int = 0) -> None: ...

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """
        (tokens, history) of each request that computes a prompt, or more than its next token.
        """

    @property
    def tokens(self) -> int:
        """Tokens computed in the step."""

    @property
    def drafts(self) -> int:
        """Draft tokens among them, which the step verifies."""

    @property
    def requests(self) -> int:
        """Sequences of the batch."""

    @property
    def decodes(self) -> int:
        """Sequences that decode."""

    @property
    def context_tokens(self) -> int:
        """Sum of the lengths of decoding sequences."""

    @property
    def longest_context(self) -> int:
        """Longest of these lengths."""

    @property
    def rank_tokens(self) -> int:
        """Tokens of all data-parallel ranks that step together; 0: unknown."""

    @property
    def rank_width(self) -> int:
        """Tokens to which these ranks are padded; 0: they are not."""

def physical_timing(numbers: Mapping[str, float], *, captures: Sequence[int] = [], window: int = 0, floor_above_tokens: int = 0, most_tokens: int | None = None, most_requests: int | None = None, most_context_tokens: int | None = None, most_prompt_tokens: int | None = None, ranks: int = 1) -> StepTiming: ...

class OpTable:
    """
    A time by several numbers, linear in each between the points of a table.
    """

    def __init__(self, name: str, points: tuple[Sequence[tuple[str, Sequence[float]]], Sequence[float]], extrapolate: bool) -> None: ...

    def us(self, values: Sequence[float]) -> float:
        """ConfigError outside of the points, unless the table extrapolates."""

def op_table_timing(*, layer: OpTable, once: OpTable, head: OpTable, prompts: OpTable, decodes: OpTable, mixed: OpTable, experts: OpTable | None, layers: float, skew: float, ranks: int, comm_ms: tuple[float, float, float], captures: Sequence[int]) -> StepTiming: ...

def drafted_timing(target: StepTiming, first: StepTiming, further: StepTiming, passes: int) -> StepTiming: ...

def pipelined_timing(stages: Sequence[StepTiming]) -> StepTiming: ...

def polynomial_timing() -> StepTiming: ...

def constant_timing(prefill_ms: float, decode_ms: float) -> StepTiming: ...

def interpolated_timing(prefill_isl: Sequence[float], prefill_ttft_ms: Sequence[float], decode_active_kv_tokens: Sequence[float], decode_context_length: Sequence[float], decode_itl: Sequence[float]) -> StepTiming: ...

def python_timing(model: TimingModel | StepTimingModel) -> StepTiming: ...

class VllmOffload:
    """vLLM's native host offload, as a setting of an engine."""

    def __init__(self, *, host_chunks: int, blocks_per_chunk: int = 1, eviction_policy: str = 'lru', offload_prompt_only: bool = True, store_steps: int = 0, load_steps: int = 0, release: str = '', touches: bool = True, arc_falls_back: bool = False, stores_last_token: bool = True, holders_first: bool = False, spares_in_flight: bool = False, ranks: bool = False, offers_again: bool = False, log: bool = False, samples: bool = False) -> None: ...

    FIELDS: tuple[str, ...]

class OffloadSamples:
    """Single samples of vLLM's offload since the last call."""

    @property
    def loads(self) -> list[tuple[int, int]]:
        """(bytes, ns) of each."""

    @property
    def stores(self) -> list[tuple[int, int]]:
        """(bytes, ns) of each."""

    @property
    def lookups(self) -> int:
        """Lookups for requests without transfers."""

    @property
    def deferred_ns(self) -> list[int]:
        """From a first deferred lookup to its answer, or the end."""

    @property
    def asked_chunks(self) -> list[int]:
        """Chunks that each store needed, whether or not there was room."""

    @property
    def refused_stores(self) -> int: ...

class Phase(enum.Enum):
    """State of an engine between two calls."""

    IDLE = 0
    """Nothing to do until the driver submits something."""

    READY = 1
    """begin_step is due at wake_ns."""

    IN_STEP = 2
    """
    end_step is due at wake_ns, or once the step is computed (Effects.UNKNOWN).
    """

    ASLEEP = 3
    """Waits for transfers."""

    STALLED = 4
    """No step makes progress; one that is open still ends at wake_ns."""

class RequestSpec:
    """A request for a simulated engine."""

    def __init__(self, id: int, name: str, prompt_tokens: int, max_tokens: int, identities: Identities | None = None, *, priority: int | None = 0, arrival_time: float = 0.0, eos_at: int | None = None, accepts: Sequence[int] | None = None, adapter: int = 0, leg: str = 'whole', peer: int = 0, peer_request: int | None = None, tokens: Ints | None = None, salt: int | None = None) -> None:
        """
        `identities` name the blocks that prompt and output fill; the output token with number `eos_at` ends the request before `max_tokens` does. `adapter` is of LoRA, 0 for none. `leg`: prefill if a peer decodes, decode if the worker `peer` has the prompt's blocks, under the id `peer_request` (None: the same id). `tokens` and the number of their `salt`, with identities: for engines that find parts of blocks.
        """

class RequestRecord:
    """
    Record of a finished request. Times are -1 for events that never happened.
    """

    def __init__(self, id: int, reason: str, output_tokens: int = 0, finish_ns: int = -1) -> None: ...

    @property
    def id(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def reason(self) -> str:
        """length, stop, cancelled or failed."""

    @property
    def output_tokens(self) -> int: ...

    @property
    def queued_ns(self) -> int:
        """When the engine read it: at a boundary between steps."""

    @property
    def first_admit_ns(self) -> int: ...

    @property
    def first_token_ns(self) -> int: ...

    @property
    def second_token_ns(self) -> int: ...

    @property
    def last_token_ns(self) -> int: ...

    @property
    def finish_ns(self) -> int: ...

    @property
    def preemptions(self) -> int: ...

    @property
    def cached_first(self) -> int: ...

    @property
    def cached_total(self) -> int: ...

    @property
    def looked_up(self) -> int: ...

    @property
    def below_first(self) -> list[int]: ...

    @property
    def below_total(self) -> list[int]: ...

    @property
    def parked_ns(self) -> int: ...

    @property
    def room_wait_ns(self) -> int: ...

class AdmittedRequest:
    """A request that a step admits."""

    def __init__(self, request: int, cached_tokens: int) -> None: ...

    @property
    def request(self) -> int: ...

    @property
    def cached_tokens(self) -> int: ...

    @property
    def below_tokens(self) -> list[int]:
        """Cached tokens that came from G2, G3 and G4."""

    @property
    def pulled_tokens(self) -> int:
        """Cached tokens that were read from a prefill worker."""

class Effects:
    """Results of a call."""

    def __init__(self, phase: Phase, wake_ns: int | None = None, *, tokens: Sequence[tuple[int, int]] = [], finished: Sequence[RequestRecord] = [], admitted: Sequence[AdmittedRequest] = [], batch_tokens: int = 0) -> None: ...

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """(request, new tokens), in the engine's order."""

    @property
    def finished(self) -> list[RequestRecord]:
        """Records, in the order in which requests ended."""

    @property
    def admitted(self) -> list[AdmittedRequest]:
        """Requests that the step admits, if the engine reports them."""

    @property
    def preempted(self) -> list[int]:
        """Requests that the step preempts, if the engine reports them."""

    @property
    def batch_tokens(self) -> int:
        """Tokens that the open step computes; 0 if not reported."""

    @property
    def phase(self) -> Phase: ...

    @property
    def wake_ns(self) -> int | None:
        """
        When the driver must call next; None until it submits or delivers something.
        """

    UNKNOWN: int = 9223372036854775806

class EngineSnapshot:
    """The engine at the moment of the call."""

    def __init__(self, phase: Phase, *, running: int = 0, waiting: int = 0, loading: int = 0, active_blocks: int = 0) -> None: ...

    @property
    def phase(self) -> Phase: ...

    @property
    def running(self) -> int: ...

    @property
    def waiting(self) -> int:
        """Requests in the queue."""

    @property
    def loading(self) -> int:
        """Requests whose blocks are loaded from a tier."""

    @property
    def parked(self) -> int:
        """Part of `loading`: those that are not counted as waiting."""

    @property
    def active_blocks(self) -> int: ...

class Engine:
    """
    A simulated engine of any kind: a state machine that never reads a clock. A second caller at a time raises WrongState.
    """

    def submit(self, spec: RequestSpec, now_ns: int) -> Effects:
        """Queue a request, whose id is new; this may end another one."""

    def cancel(self, request: int, now_ns: int) -> Effects:
        """
        End a request early; its record is among the effects. Unknown or finished ids are ignored.
        """

    def begin_step(self, now_ns: int) -> Effects:
        """Schedule a step, which ends at the effects' wake_ns."""

    def end_step(self, now_ns: int) -> Effects:
        """Make the step's results visible."""

    def snapshot(self) -> EngineSnapshot: ...

    def never_fits(self, prompt_tokens: int, max_tokens: int) -> str | None:
        """Why a request of this size could never run to its end, or None."""

    def advance(self, until_ns: int, stop_on_finish: bool = False) -> Effects:
        """Run steps back to back up to `until_ns`."""

    def next_landing_ns(self) -> int | None:
        """
        When to call `land` if no step is open; None if the engine waits for no transfer.
        """

    def land(self, now_ns: int) -> Effects:
        """Finish every transfer that ends by then, each at its time."""

    def finish_transfers(self) -> None:
        """Let every transfer land; for an engine that has nothing more to do."""

    def set_admitting(self, on: bool) -> None:
        """While off, only requests that hold blocks go on; the queue waits."""

    @property
    def drained(self) -> bool:
        """Whether no request holds blocks."""

    def forget_cache(self, now_ns: int) -> None:
        """Drop every unreferenced block of the device."""

    def take_events(self) -> tuple[EventBatch, NDArray[numpy.int64]]:
        """
        Take the visible events, with the time in ns from which each is: on the device the end of its step, on tiers below when it happened.
        """

    def cached_prefix(self, identities: Identities) -> int:
        """
        Leading blocks that an admission would find, on the device and below. Reads only.
        """

    def keep_times(self) -> None:
        """
        Keep token gaps and load times for RunColumns from now on; memory grows with every step.
        """

    def watch_steps(self, on: bool) -> None:
        """Prepare what StepTable.record reads, or stop doing so."""

    def set_slowdown(self, factor: float) -> None:
        """
        Steps that begin from now on take `factor` times as long; 1 ends that. WrongState for an engine that cannot.
        """

    def set_load_failures(self, tier: Tier, rate: float) -> None:
        """
        A share `rate` of the loads from a tier fails when they end. WrongState for an engine without tiers.
        """

    def list_cached(self) -> list[tuple[Tier, NDArray[numpy.uint64]]]:
        """
        Sequence hashes of the blocks that are cached, by tier; between two steps. Cost: O(blocks).
        """

    def check(self) -> None: ...

class Speculation:
    """Speculative decoding: demands on the scheduler, and acceptance rates."""

    def __init__(self, *, tokens: int = 0, lookahead: int = 0, draft_slots: int = 0, reserved_slots: int = 0, drops_last_hit: bool = False, hashed_ahead: int = 0, keys_in_update: bool = False, pads_admissions: bool = True, pads_hits: bool = True, pads_within_context: bool = True, admission_lookahead: bool = True, accept_rates: Sequence[float] = [], seed: int = 42) -> None: ...

    FIELDS: tuple[str, ...]

class MockerSettings:
    """Settings that imitate Dynamo's mocker and its replay."""

    def __init__(self, *, speedup_ratio: float = 1.0, decode_speedup_ratio: float = 1.0, charge_first_token: bool = True, accept_rates: Sequence[float] = [], burst_seed: int = 42, route_rejected: bool = False) -> None: ...

    FIELDS: tuple[str, ...]

    def apply_to(self, timing: StepTiming) -> StepTiming:
        """
        A copy of the timing with these settings. ConfigError: the model times whole steps, not decoding apart.
        """

class EngineConfig:
    """Settings of an engine of any kind."""

    @property
    def block_size(self) -> int: ...

    @property
    def num_gpu_blocks(self) -> int: ...

    @property
    def hashed_ahead(self) -> int:
        """Tokens behind a block that are part of its identity."""

    def make_engine(self, timing: StepTiming, *, tiers: TierConfig | None = None, run: TierRun | None = None, name: str = 'worker', net: LiveNet | None = None, worker: int = 0) -> Engine:
        """
        Make an engine of this kind, with `tiers`, and `run` where several engines share them; with `net`, as its worker `worker`.
        """

class VllmEngineConfig(EngineConfig):
    """Settings of a vLLM engine, with vLLM's names."""

    def __init__(self, *, block_size: int = 64, num_gpu_blocks: int = 16384, max_num_seqs: int | None = 256, max_num_batched_tokens: int | None = 8192, max_model_len: int | None = None, long_prefill_token_threshold: int = 0, enable_prefix_caching: bool = True, enable_chunked_prefill: bool = True, scheduling_policy: str = 'fcfs', preemption_mode: str = 'lifo', scheduler_reserve_full_isl: bool = True, watermark: float = 0.0, async_scheduling: bool = False, pipeline_parallel_size: int = 1, spaces_decodes: bool = False, kv_manager: str = 'native', eviction_policy: str | Callable[[], object] | None = None, mocker: MockerSettings | None = None, speculation: Speculation | None = None, free_order: str = 'unkeyed_first', phantom_hits: bool = True, caps_lone_prefill: bool = True, max_num_active_seqs: int | None = None, long_prefill_token_threshold_adaptive: bool = False, events: bool = False, kv_trace: bool = False, check: bool = False, max_loras: int | None = None, preempted_first: bool = True, offload: VllmOffload | None = None, stay_sample: float = 0.0, self_preemption_ends: bool = True, counts_running_loras: bool = False, prefill_schedule_interval: int = 1) -> None: ...

    FIELDS: tuple[str, ...]

class EventTruth:
    """An index built only from the consolidated event stream."""

    def __init__(self) -> None: ...

    def apply(self, batch: EventBatch) -> None:
        """InvariantViolated when a row contradicts those before it."""

    def require_equal(self, engine: VllmEngine) -> None:
        """
        InvariantViolated unless the engine holds exactly the blocks that the index knows.
        """

class BurstSampler:
    """Draws how many tokens a step with speculation yields."""

    def __init__(self, rates: Sequence[float], seed: int) -> None: ...

    def draw(self, remaining: int) -> int:
        """Tokens of one step, at most `remaining`."""

class VllmEngine(Engine):
    """
    An engine with vLLM's scheduler. A second caller at a time raises WrongState.
    """

    def __init__(self, config: VllmEngineConfig, timing: StepTiming, *, tiers: TierConfig | None = None, run: TierRun | None = None, name: str = 'worker') -> None:
        """With `tiers`, and `run` where several engines share them."""

    @overload
    def submit(self, spec: RequestSpec, now_ns: int) -> Effects:
        """Queue a request, as any engine does."""

    @overload
    def submit(self, name: str, prompt_tokens: int, max_tokens: int, identities: Identities | None = None, *, priority: int = 0, arrival_time: float = 0.0, eos_at: int | None = None, accepts: Sequence[int] | None = None, adapter: int = 0) -> int:
        """
        Queue a request with the arguments of RequestSpec but for its id, which is returned.
        """

    def begin_recorded_step(self, now_ns: int) -> None:
        """Schedule as a recording counts steps; not to be mixed with begin_step."""

    def end_recorded_step(self, now_ns: int) -> Effects:
        """The update that follows: asynchronously that of the batch before."""

    def skip_to(self, time_ns: int) -> None:
        """Let idle time pass."""

    @property
    def now_ns(self) -> int:
        """When the open step ends, or else when the next may begin."""

    @property
    def in_step(self) -> bool: ...

    def set_fast_forward(self, on: bool) -> None: ...

    @property
    def idle(self) -> bool: ...

    @property
    def stuck(self) -> bool: ...

    def take_finished(self) -> list[int]:
        """
        Requests that finished in the last call of end_step or advance, unless they were taken.
        """

    def emitted(self, request: int) -> int:
        """Output tokens of a request that are visible."""

    def name(self, request: int) -> str:
        """
        The name under which a request was submitted that has not ended, or has in the last step.
        """

    @property
    def scheduled(self) -> list[tuple[int, int]]:
        """(request, tokens) of the last step, in order."""

    @property
    def admitted(self) -> list[tuple[int, bool, int]]:
        """(request, resumed, cached tokens) of the last step, in order."""

    @property
    def preempted(self) -> list[int]: ...

    @property
    def finished(self) -> list[int]: ...

    @property
    def free_after_schedule(self) -> int: ...

    @property
    def running(self) -> list[int]: ...

    @property
    def num_waiting(self) -> int: ...

    def waiting_head(self, count: int = 4) -> list[int]: ...

    @property
    def batch(self) -> list[tuple[int, int]]:
        """(request, tokens) of the open step's batch, in order."""

    @property
    def num_slots(self) -> int:
        """Most requests present at one time."""

    @property
    def steps_kept(self) -> int:
        """Number of step ends kept for present requests."""

    @property
    def free_blocks(self) -> int: ...

    def free_head(self, count: int = 4) -> list[int]: ...

    def take_all_events(self) -> EventBatch:
        """
        Take all events so far, those of the step in progress too; with `check`, that step misses them at its end.
        """

    def peek_events(self) -> EventBatch:
        """
        Return the events since the last call, the step in progress included, without taking them.
        """

    def resident_hashes(self) -> list[int]:
        """Sequence hashes of the registered blocks, each once."""

    def take_kv_trace(self) -> list[tuple[int, bool, int, int, int, int]]:
        """
        Take (time ns, eviction, blocks, free, active, inactive) of allocations and evictions.
        """

    def take_stays(self) -> list[tuple[int, int, list[int]]]:
        """
        Take (lifetime ns, idle ns, gaps ns) of the sampled blocks that went to another owner.
        """

    @property
    def pool(self) -> tuple[int, int, int]:
        """(free, active, inactive) blocks."""

    @property
    def steps(self) -> int: ...

    @property
    def step_ns(self) -> int: ...

    @property
    def uncovered_ns(self) -> int: ...

    @property
    def preemptions(self) -> int: ...

    @property
    def burst_steps(self) -> int: ...

    @property
    def burst_tokens(self) -> int: ...

    @property
    def drafts(self) -> list[tuple[int, int]]:
        """(request, drafts) that the last step verifies, in order."""

    @property
    def draft_rounds(self) -> int: ...

    @property
    def drafted_tokens(self) -> int: ...

    @property
    def accepted_tokens(self) -> int: ...

    @property
    def accepted_at(self) -> list[int]:
        """Accepted drafts by their place in the round."""

    @property
    def expired_leases(self) -> int:
        """Leases that ended before a peer read the blocks."""

    @property
    def phantom_hit_blocks(self) -> int: ...

    @property
    def operations(self) -> int:
        """Index probes and policy steps so far, for tests of growth."""

    @property
    def stepped(self) -> dict[str, int]:
        """
        Steps of advance that were simulated by themselves and not fast-forwarded, by their reason.
        """

    @property
    def asleep(self) -> bool:
        """Nothing to compute until a transfer lands; no step is open."""

    @property
    def parked(self) -> int:
        """Requests whose blocks are being loaded."""

    @property
    def wake_ns(self) -> int | None:
        """A time not after the next landing; None when no transfer is in flight."""

    def set_link_share(self, now_ns: int, tier: Tier, share: float) -> None:
        """
        Set the share of bandwidth of the links to and from a tier, 0.001 to 1. A shared tier's links change for all workers.
        """

    def tier_lookup(self, identities: Identities) -> list[tuple[str, int, int]]:
        """
        (kind, tier, ns) of the leading blocks, ended by the first miss. hit: it is there; pending: it will be at that time, unless transfers join its links; retry: it is on its way, ask again next step; miss. With several KV groups: of the units of hashing of the longest hit, the answer of the slowest block.
        """

    def tier_blocks(self, tier: Tier) -> tuple[int, int, int, int]:
        """(free, active, inactive, held) of G1 or G2."""

    def prefetch(self, identities: Identities, now_ns: int) -> bool:
        """Prefetch the prefix that lower tiers have."""

    def keep_prefix(self, action: str, session: int, identities: Identities, tokens: int, kept_tokens: int, now_ns: int) -> Effects:
        """
        Do something for the KV of a session that sleeps: hold, unhold, drop, offload or prefetch the cached blocks of its first `tokens` tokens; drop leaves `kept_tokens`.
        """

    def prefix_totals(self, now_ns: int) -> PrefixTotals:
        """Numbers of such calls, and of their blocks."""

    @property
    def loading(self) -> list[int]:
        """
        Requests that hold blocks which are being loaded, under vLLM's offload.
        """

    @property
    def fetch_stages(self) -> tuple[int, int, int]:
        """
        Queued requests whose load from lower tiers has not begun, is in flight, and is done.
        """

    @property
    def offload_pending(self) -> bool:
        """
        Under vLLM's offload: transfers are in flight, or ended requests may still store.
        """

    def take_offload_line(self) -> dict[str, object]:
        """Log line of the last step's offload, if logged."""

    def take_offload_samples(self) -> OffloadSamples:
        """Single samples since the last call, if kept."""

    @property
    def offload_usage(self) -> tuple[float, float, float]:
        """
        Shares of the host that transfers hold under vLLM's offload: all, being written, being read.
        """

    @property
    def tier_totals(self) -> TierTotals: ...

    def below_tokens(self, request: int) -> tuple[int, int, int]:
        """Cached tokens that came from G2, G3 and G4."""

    def tier_waits(self, request: int) -> tuple[int, int]:
        """
        Nanoseconds parked for loads, and waiting for copies to leave the device.
        """

    def held_by_group(self) -> list[int]:
        """Blocks that running requests hold, by KV cache group."""

    @property
    def block_copies(self) -> list[tuple[int, int]]:
        """(source, destination) of the copies that the last schedule ordered."""

    def take_group_events(self) -> list[tuple[bool, int, int, int | None, int, int, int, list[int], list[int]]]:
        """
        Take (stored, group, block size, parent, position, tokens, request, hashes, ends) of every change of keys.
        """

    def group_hits(self, preempted: bool) -> tuple[int, int, int]:
        """
        (admissions, tokens looked up, tokens found), of requests preempted before or of others.
        """

    def take_handoff_line(self) -> HandOffLine:
        """Take the log of the last schedule and update, if logged."""

    def take_multi_line(self) -> MultiLine:
        """Take the log of several connectors since the last call, if logged."""

    def poll_sender(self, heartbeats: Sequence[Sequence[int]], done: Sequence[int], now_ns: int) -> tuple[list[int], list[int], list[tuple[int, int]]]:
        """
        Poll as the prefill instance's worker does; returns (sent, expired, leases with their ends in ns).
        """

    def give_report(self, *, sent: Sequence[int], received: Sequence[int], failed: Sequence[int], jobs: Sequence[int] = []) -> None:
        """
        What the poll found, for the update of the batch that was scheduled last.
        """

    def begin_last_update(self, now_ns: int) -> None:
        """
        Asynchronously: let the batch that was scheduled last be the next to end, with no other behind it.
        """

    def status(self, request: int) -> str | None:
        """State of a request in vLLM's words; None if it is not here."""

    def reset_caches(self, now_ns: int) -> bool:
        """
        Drop what the connector stores, and the device's blocks if none is in use; returns whether all of it was.
        """

    @property
    def has_ended(self) -> bool:
        """Whether a request ended since the last schedule."""

    @property
    def handoff_pending(self) -> bool:
        """Whether blocks are kept for a peer, or a notification is due."""

    @property
    def deferred_blocks(self) -> int:
        """Blocks of ended requests that a step in flight may still write."""

    @property
    def holding(self) -> list[int]:
        """Waiting requests that hold blocks, in order."""

    @property
    def orphans(self) -> list[int]:
        """Aborted requests whose blocks are still to come."""

    @property
    def held(self) -> list[int]:
        """Finished requests whose blocks are kept for a peer."""

    def held_blocks(self, request: int) -> list[int]:
        """Blocks that are kept for a peer, in order."""

class KvGroup:
    """One KV cache group: layers of a kind, with a block size of their own."""

    def __init__(self, kind: str, *, block_size: int = 16, window: int = 0, chunk: int = 0, align: bool = True, checkpoint_blocks: int = 0, checkpoint_alignment: int = 1, bounded_replay: bool = False) -> None: ...

    @property
    def block_size(self) -> int: ...

class GroupLayout:
    """
    Sizes in tokens that follow from KV cache groups, as vLLM derives them.
    """

    def __init__(self, config: VllmEngineConfig) -> None: ...

    @property
    def scheduler_block_size(self) -> int: ...

    @property
    def hash_block_size(self) -> int: ...

    @property
    def hit_unit(self) -> int:
        """Hits end at multiples of this many tokens."""

    @property
    def block_size(self) -> int: ...

    @property
    def partial_hits(self) -> bool: ...

    @property
    def max_in_flight_tokens(self) -> int: ...

    @property
    def admission_caps(self) -> list[int | None]: ...

    @property
    def blocks_per_request(self) -> int:
        """
        Blocks that vLLM's start-up plans for a request of max_model_len tokens.
        """

def with_groups(config: VllmEngineConfig, groups: Sequence[KvGroup], *, prefix_match_unit: int = 0, prefix_cache_retention_interval: int | None = 0, group_events: bool = False, event_ranges: bool = False) -> VllmEngineConfig:
    """
    A copy with these KV cache groups; its block_size is their unit of hashing. `group_events`: events are read with take_group_events. `event_ranges`: the raw stream has a row for every unit of hashing of an event.
    """

class VllmTransfer:
    """
    Hand-offs of KV blocks by vLLM's NixlConnector, as an engine's setting.
    """

    def __init__(self, *, produces: bool = False, consumes: bool = False, recomputes: bool = False, lease_s: int = 30, log: bool = False) -> None: ...

    FIELDS: tuple[str, ...]

def with_multi(config: VllmEngineConfig, *, consumes: bool, host_first: bool = False, log: bool = False) -> VllmEngineConfig:
    """
    A copy whose engines hand blocks to others and offload to the host, through vLLM's MultiConnector.
    """

def with_transfer(config: VllmEngineConfig, transfer: VllmTransfer) -> VllmEngineConfig:
    """A copy whose engines hand blocks to others."""

class SglangSettings:
    """Settings of SGLang's scheduler, with SGLang's names."""

    def __init__(self) -> None: ...

    @property
    def page_size(self) -> int: ...

    @page_size.setter
    def page_size(self, arg: int, /) -> None: ...

    @property
    def max_total_num_tokens(self) -> int: ...

    @max_total_num_tokens.setter
    def max_total_num_tokens(self, arg: int, /) -> None: ...

    @property
    def max_running_requests(self) -> int: ...

    @max_running_requests.setter
    def max_running_requests(self, arg: int, /) -> None: ...

    @property
    def max_prefill_tokens(self) -> int: ...

    @max_prefill_tokens.setter
    def max_prefill_tokens(self, arg: int, /) -> None: ...

    @property
    def chunked_prefill_size(self) -> int: ...

    @chunked_prefill_size.setter
    def chunked_prefill_size(self, arg: int, /) -> None: ...

    @property
    def prefill_max_requests(self) -> int | None: ...

    @prefill_max_requests.setter
    def prefill_max_requests(self, arg: int | None, /) -> None: ...

    @property
    def schedule_conservativeness(self) -> float: ...

    @schedule_conservativeness.setter
    def schedule_conservativeness(self, arg: float, /) -> None: ...

    @property
    def init_new_token_ratio(self) -> float: ...

    @init_new_token_ratio.setter
    def init_new_token_ratio(self, arg: float, /) -> None: ...

    @property
    def min_new_token_ratio_factor(self) -> float: ...

    @min_new_token_ratio_factor.setter
    def min_new_token_ratio_factor(self, arg: float, /) -> None: ...

    @property
    def new_token_ratio_decay_steps(self) -> int: ...

    @new_token_ratio_decay_steps.setter
    def new_token_ratio_decay_steps(self, arg: int, /) -> None: ...

    @property
    def retract_decode_steps(self) -> int: ...

    @retract_decode_steps.setter
    def retract_decode_steps(self, arg: int, /) -> None: ...

    @property
    def clip_max_new_tokens(self) -> int: ...

    @clip_max_new_tokens.setter
    def clip_max_new_tokens(self, arg: int, /) -> None: ...

    @property
    def in_batch_check_threshold(self) -> int: ...

    @in_batch_check_threshold.setter
    def in_batch_check_threshold(self, arg: int, /) -> None: ...

    @property
    def in_batch_deprioritize_threshold(self) -> int: ...

    @in_batch_deprioritize_threshold.setter
    def in_batch_deprioritize_threshold(self, arg: int, /) -> None: ...

    @property
    def enable_mixed_chunk(self) -> bool: ...

    @enable_mixed_chunk.setter
    def enable_mixed_chunk(self, arg: bool, /) -> None: ...

    @property
    def disable_radix_cache(self) -> bool: ...

    @disable_radix_cache.setter
    def disable_radix_cache(self, arg: bool, /) -> None: ...

    @property
    def ignore_eos(self) -> bool: ...

    @ignore_eos.setter
    def ignore_eos(self, arg: bool, /) -> None: ...

    @property
    def overlap(self) -> bool: ...

    @overlap.setter
    def overlap(self, arg: bool, /) -> None: ...

    @property
    def context_len(self) -> int: ...

    @context_len.setter
    def context_len(self, arg: int, /) -> None: ...

    @property
    def enable_priority_scheduling(self) -> bool: ...

    @enable_priority_scheduling.setter
    def enable_priority_scheduling(self, arg: bool, /) -> None: ...

    @property
    def priority_scheduling_preemption_threshold(self) -> int: ...

    @priority_scheduling_preemption_threshold.setter
    def priority_scheduling_preemption_threshold(self, arg: int, /) -> None: ...

    @property
    def schedule_low_priority_values_first(self) -> bool: ...

    @schedule_low_priority_values_first.setter
    def schedule_low_priority_values_first(self, arg: bool, /) -> None: ...

    @property
    def disable_priority_preemption(self) -> bool: ...

    @disable_priority_preemption.setter
    def disable_priority_preemption(self, arg: bool, /) -> None: ...

    @property
    def max_queued_requests(self) -> int | None: ...

    @max_queued_requests.setter
    def max_queued_requests(self, arg: int | None, /) -> None: ...

    @property
    def prefill_decode_interval(self) -> int: ...

    @prefill_decode_interval.setter
    def prefill_decode_interval(self, arg: int, /) -> None: ...

    @property
    def prefill_decode_interval_min_bs(self) -> int: ...

    @prefill_decode_interval_min_bs.setter
    def prefill_decode_interval_min_bs(self, arg: int, /) -> None: ...

    @property
    def decode_log_interval(self) -> int: ...

    @decode_log_interval.setter
    def decode_log_interval(self, arg: int, /) -> None: ...

    @property
    def swa_window(self) -> int | None: ...

    @swa_window.setter
    def swa_window(self, arg: int | None, /) -> None: ...

    @property
    def swa_tokens(self) -> int: ...

    @swa_tokens.setter
    def swa_tokens(self, arg: int, /) -> None: ...

    @property
    def swa_eviction_interval(self) -> int: ...

    @swa_eviction_interval.setter
    def swa_eviction_interval(self, arg: int, /) -> None: ...

    @property
    def release_prefill_swa(self) -> bool: ...

    @release_prefill_swa.setter
    def release_prefill_swa(self, arg: bool, /) -> None: ...

    @property
    def mamba_slots(self) -> int | None: ...

    @mamba_slots.setter
    def mamba_slots(self, arg: int | None, /) -> None: ...

    @property
    def mamba_extra_buffer(self) -> bool: ...

    @mamba_extra_buffer.setter
    def mamba_extra_buffer(self, arg: bool, /) -> None: ...

    @property
    def mamba_lazy(self) -> bool: ...

    @mamba_lazy.setter
    def mamba_lazy(self, arg: bool, /) -> None: ...

    @property
    def mamba_track_interval(self) -> int: ...

    @mamba_track_interval.setter
    def mamba_track_interval(self, arg: int, /) -> None: ...

    @property
    def mamba_max_states_per_path(self) -> int: ...

    @mamba_max_states_per_path.setter
    def mamba_max_states_per_path(self, arg: int, /) -> None: ...

    def set_side(self, *, role: str, metadata_slots: int | None = None, early_send: bool = True, num_reserved_decode_tokens: int = 512, extra_slots: int | None = None, polling_interval: int = 1, backs_up_retracted: bool = True, host_tokens: int | None = None, decode_radix: bool = False) -> None:
        """Make it one side of a disaggregated server."""

    def set_host(self, *, hicache_write_policy: str, hicache_ratio: float, load_back_threshold: int, tokens: int = 0) -> None:
        """Add a host tier below the device."""

    def set_names(self, *, schedule_policy: str, radix_eviction_policy: str, retraction_policy: str, tree: str) -> None: ...

class SglangEngineConfig(EngineConfig):
    """Settings of a simulated SGLang engine."""

    def __init__(self, settings: SglangSettings, *, events: bool = False, route_rejected: bool = False, check: bool = False) -> None: ...

def with_role(config: SglangEngineConfig, role: str) -> SglangEngineConfig:
    """
    A copy whose engines are one side of a disaggregated server: prefill or decode.
    """

class SglangTokens:
    """Tokens of an engine's pools, and what its host tier has copied."""

    @property
    def available(self) -> int: ...

    @property
    def evictable(self) -> int: ...

    @property
    def evicted(self) -> int: ...

    @property
    def new_token_ratio(self) -> float: ...

    @property
    def part_total(self) -> int: ...

    @property
    def part_available(self) -> int: ...

    @property
    def part_evictable(self) -> int: ...

    @property
    def host_used(self) -> int: ...

    @property
    def host_total(self) -> int: ...

    @property
    def backed_up(self) -> int: ...

    @property
    def loaded_back(self) -> int: ...

    @property
    def dropped(self) -> int: ...

    @property
    def retracted_inputs(self) -> int: ...

    @property
    def retracted_outputs(self) -> int: ...

class SglangEngine(Engine):
    """
    An engine with SGLang's scheduler. A second caller at a time raises WrongState.
    """

    @property
    def tokens(self) -> SglangTokens: ...

    def set_link_share(self, now_ns: int, tier: Tier, share: float) -> None:
        """
        Set the share of bandwidth of the links to and from the host, 0.001 to 1, for later copies.
        """

class SglangIterations:
    """SGLang's event loop without a clock."""

    def __init__(self, settings: SglangSettings, *, write_steps: int = 1, write_tokens_per_step: int | None = None, load_steps: int = 1, ack_steps: int | None = None) -> None: ...

    def set_transfer(self, request: int, *, handshake_steps: int, transfer_steps: int, fail_after: int | None = None, decode_prefix: int = 0) -> None:
        """
        Set the link of a request before it is submitted, on one side of a disaggregated server.
        """

    def submit(self, request: int, prompt: Sequence[tuple[int, int]], max_tokens: int, first_output: int, eos_at: int = 0, priority: int | None = None) -> None:
        """Receive a request; `prompt` has runs of consecutive tokens."""

    def abort(self, ids: Sequence[int]) -> None: ...

    def schedule(self) -> SglangStep | None:
        """Schedule a batch: (mode, [(id, tokens, decodes)]), or None."""

    def process(self) -> Literal['prefill', 'decode', 'idle'] | None:
        """Process the result that is due; returns prefill, decode, idle or None."""

    def check(self) -> None: ...

    @property
    def avail(self) -> int: ...

    @property
    def chunked(self) -> int | None: ...

    @property
    def empty(self) -> bool: ...

    @property
    def free_tokens(self) -> int: ...

    @property
    def component(self) -> SglangComponent | None: ...

    @property
    def state(self) -> SglangState: ...

    @property
    def cached_runs(self) -> int: ...

    def take_host_state(self) -> SglangHost | None:
        """The host tier and its transfers since the last call, or None."""

    def take_side(self) -> SglangSide:
        """Queues of a disaggregated server; take it before the log."""

    def take_log(self) -> SglangLog: ...

    def take_events(self) -> list[SglangEvent]: ...

class TrtSettings:
    """
    Settings of TensorRT-LLM's executor and KV cache manager V2, by its names.
    """

    def __init__(self) -> None: ...

    @property
    def max_batch_size(self) -> int: ...

    @max_batch_size.setter
    def max_batch_size(self, arg: int, /) -> None: ...

    @property
    def max_num_tokens(self) -> int: ...

    @max_num_tokens.setter
    def max_num_tokens(self, arg: int, /) -> None: ...

    @property
    def max_seq_len(self) -> int: ...

    @max_seq_len.setter
    def max_seq_len(self, arg: int, /) -> None: ...

    @property
    def tokens_per_block(self) -> int: ...

    @tokens_per_block.setter
    def tokens_per_block(self, arg: int, /) -> None: ...

    @property
    def enable_chunked_prefill(self) -> bool: ...

    @enable_chunked_prefill.setter
    def enable_chunked_prefill(self, arg: bool, /) -> None: ...

    @property
    def overlap(self) -> bool: ...

    @overlap.setter
    def overlap(self, arg: bool, /) -> None: ...

    @property
    def enable_prefix_aware_scheduling(self) -> bool: ...

    @enable_prefix_aware_scheduling.setter
    def enable_prefix_aware_scheduling(self, arg: bool, /) -> None: ...

    @property
    def enable_recompute_pause(self) -> bool: ...

    @enable_recompute_pause.setter
    def enable_recompute_pause(self, arg: bool, /) -> None: ...

    @property
    def enable_block_reuse(self) -> bool: ...

    @enable_block_reuse.setter
    def enable_block_reuse(self, arg: bool, /) -> None: ...

    @property
    def enable_partial_reuse(self) -> bool: ...

    @enable_partial_reuse.setter
    def enable_partial_reuse(self, arg: bool, /) -> None: ...

    @property
    def max_util_for_resume(self) -> float: ...

    @max_util_for_resume.setter
    def max_util_for_resume(self, arg: float, /) -> None: ...

    @property
    def enable_swa_scratch_reuse(self) -> bool: ...

    @enable_swa_scratch_reuse.setter
    def enable_swa_scratch_reuse(self, arg: bool, /) -> None: ...

    @property
    def batch_wait_timeout_iters(self) -> int: ...

    @batch_wait_timeout_iters.setter
    def batch_wait_timeout_iters(self, arg: int, /) -> None: ...

    @property
    def batch_wait_max_tokens_ratio(self) -> float: ...

    @batch_wait_max_tokens_ratio.setter
    def batch_wait_max_tokens_ratio(self, arg: float, /) -> None: ...

    @property
    def num_layers(self) -> int: ...

    @num_layers.setter
    def num_layers(self, arg: int, /) -> None: ...

    @property
    def layer_bytes_per_token(self) -> int: ...

    @layer_bytes_per_token.setter
    def layer_bytes_per_token(self, arg: int, /) -> None: ...

    @property
    def max_attention_window(self) -> list[int]: ...

    @max_attention_window.setter
    def max_attention_window(self, arg: Sequence[int], /) -> None: ...

    @property
    def max_tokens(self) -> int | None: ...

    @max_tokens.setter
    def max_tokens(self, arg: int | None, /) -> None: ...

    @property
    def max_gpu_total_bytes(self) -> int | None: ...

    @max_gpu_total_bytes.setter
    def max_gpu_total_bytes(self, arg: int | None, /) -> None: ...

    @property
    def host_cache_size(self) -> int | None: ...

    @host_cache_size.setter
    def host_cache_size(self, arg: int | None, /) -> None: ...

    @property
    def disk_cache_size(self) -> int: ...

    @disk_cache_size.setter
    def disk_cache_size(self, arg: int, /) -> None: ...

    @property
    def avg_seq_len(self) -> int | None: ...

    @avg_seq_len.setter
    def avg_seq_len(self, arg: int | None, /) -> None: ...

    @property
    def pool_ratio(self) -> list[float]: ...

    @pool_ratio.setter
    def pool_ratio(self, arg: Sequence[float], /) -> None: ...

    def set_names(self, *, reuse_policy: str, waiting_queue_policy: str) -> None: ...

    @property
    def chunk_unit(self) -> int: ...

    def plan_memory(self) -> tuple[list[list[int]], int, int, list[int]]:
        """
        Pages by level and group of pools, the longest sequence that fits, bytes of the device before they are rounded, and bytes of a page by group.
        """

class TrtEngineConfig(EngineConfig):
    """Settings of a simulated TensorRT-LLM engine."""

    def __init__(self, settings: TrtSettings, *, events: bool = False, check: bool = False, host_gbps: float = 50.0, disk_gbps: float = 5.0, event_buffer_size: int = 0, dies: bool = False) -> None: ...

    @property
    def dies(self) -> bool:
        """Raise where the real server ends, instead of standing still."""

    @dies.setter
    def dies(self, arg: bool, /) -> None: ...

class TrtIteration:
    """A batch, as iteration statistics count it."""

    @property
    def duration_ns(self) -> int: ...

    @property
    def contexts(self) -> int: ...

    @property
    def context_tokens(self) -> int: ...

    @property
    def context_kv_tokens(self) -> int: ...

    @property
    def generation(self) -> int: ...

    @property
    def generation_kv_tokens(self) -> int: ...

    @property
    def paused(self) -> int: ...

class TrtEngine(Engine):
    """
    An engine with TensorRT-LLM's executor. A second caller at a time raises WrongState.
    """

    @property
    def iteration(self) -> TrtIteration:
        """The batch of the last step that began."""

    def take_cache_events(self) -> list[TrtCacheEvent]:
        """TensorRT-LLM's own events since the last call."""

class TrtPasses:
    """TensorRT-LLM's executor loop without a clock."""

    def __init__(self, settings: TrtSettings, events: bool = True) -> None: ...

    def submit(self, request: int, prompt: Sequence[tuple[int, int]], max_new: int, first_output: int, *, eos_at: int = 0, priority: float = 0.5, salt: int | None = None, adapter: int = 0) -> None:
        """Receive a request; `prompt` has runs of consecutive tokens."""

    def cancel(self, request: int) -> None: ...

    def run(self) -> TrtPass:
        """Run a pass, and return what a recording has of it."""

    def check(self) -> None: ...

    @property
    def stuck(self) -> int:
        """Requests of a scheduler that can never go on; 0: it can."""

    @property
    def idle(self) -> bool: ...

class KvEventRows:
    """Drained events of a KV manager, not yet sorted into a stream."""

    def __len__(self) -> int: ...

    def grouped(self, consolidated: bool) -> list[tuple[int, bool, int | None, list[EventBlock]]]:
        """
        (id, stored, parent hash, blocks) of every event; a block is (sequence hash, local hash, position, generation, token ids).
        """

class KvManager:
    """The KV blocks of a simulated worker."""

    def __init__(self, num_gpu_blocks: int, block_size: int, *, backend: Literal['kvbm', 'native'] = 'kvbm', eviction: PolicyName | None = None, enable_prefix_caching: bool = True, events: bool = False, event_token_ids: bool = False, trace: bool = False, dp_rank: int = 0) -> None: ...

    def acquire(self, blocks: Blocks, *, token_ids: Ints | None = None, partial: bool = False) -> int: ...

    def release(self, blocks: Blocks) -> None: ...

    def seal(self, partial: int, identity: Identity, *, token_ids: Ints | None = None) -> None: ...

    def discard(self, blocks: Blocks) -> None: ...

    def probe_new_blocks(self, blocks: Blocks) -> int: ...

    def overlap(self, blocks: Blocks) -> tuple[int, int]: ...

    def is_resident(self, block: Block) -> bool: ...

    def references(self, block: Block) -> int: ...

    @property
    def num_gpu_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def dp_rank(self) -> int: ...

    @property
    def backend(self) -> Literal['kvbm', 'native']: ...

    @property
    def enable_prefix_caching(self) -> bool: ...

    @property
    def active_blocks(self) -> int: ...

    @property
    def inactive_blocks(self) -> int: ...

    @property
    def free_blocks(self) -> int: ...

    @property
    def active_references(self) -> int: ...

    def metrics(self) -> PoolMetrics: ...

    def eviction_order(self) -> NDArray[numpy.int32]: ...

    def drain_rows(self) -> KvEventRows: ...

    def drain_trace_rows(self) -> list[tuple[bool, int, int, int, int]]: ...

    def dump(self) -> str: ...

    def check(self) -> None: ...

class BlockLease:
    """The blocks of one request under the native backend, in position order."""

    def __init__(self, manager: KvManager) -> None: ...

    def allocate(self, tokens: int, *, prefix: Identities | None = None) -> None:
        """
        Hold blocks for the first `tokens` tokens, all or none. Only the first allocation may reuse a `prefix`: leading blocks, all of them resident.
        """

    def finalize(self, tokens: int, identities: Identities, *, token_ids: Ints | None = None) -> int:
        """
        The first `tokens` tokens are computed: make the blocks that this completes visible. `identities` name all complete blocks. How many became visible.
        """

    def release(self) -> None:
        """Give every block back, the last one first. The lease can start over."""

    def discard(self) -> None:
        """Release every block and make these copies unmatchable."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *args: object) -> None: ...

    @property
    def allocated_tokens(self) -> int: ...

    @property
    def visible_blocks(self) -> int:
        """Leading blocks that others can find."""

    @property
    def block_ids(self) -> NDArray[numpy.int32]:
        """Where the blocks are, in position order."""

class Applied:
    """Counts of applied events by outcome."""

    @property
    def stored(self) -> int:
        """Blocks that the worker had not had on the tier."""

    @property
    def removed(self) -> int:
        """Blocks removed from the worker's tier."""

    @property
    def unknown(self) -> NDArray[numpy.uint64]:
        """Hashes in Removed events that were not present."""

    def __repr__(self) -> str: ...

class Matches:
    """Leading blocks of a prompt that each worker holds."""

    @property
    def workers(self) -> list[tuple[int, int]]:
        """(worker, DP rank) of each row."""

    @property
    def blocks(self) -> NDArray[numpy.uint32]:
        """
        Blocks held, each counted once: a row per worker, a column per tier (G1 to G4).
        """

    def of(self, worker: int, dp_rank: int = 0) -> tuple[int, int, int, int]:
        """Blocks of one worker on G1 to G4; zeros for an unknown worker."""

class PrefixIndex:
    """
    Which worker holds which blocks on which tier, built from KV events alone.
    """

    def __init__(self, *, ttl_ms: float | None = None, max_worker_blocks: int | None = None, counts_copies: bool = False) -> None: ...

    def store(self, worker: int, hashes: Ints, *, dp_rank: int = 0, tier: Tier = Tier.G1, now_ms: float = 0.0) -> Applied:
        """Record that the worker holds these blocks (sequence hashes) on a tier."""

    def remove(self, worker: int, hashes: Ints, *, dp_rank: int = 0, tier: Tier = Tier.G1) -> Applied:
        """Remove blocks of a worker from a tier; unknown ones are counted."""

    def apply_batch(self, worker: int, batch: EventBatch, *, dp_rank: int = 0, raw: bool = False, now_ms: float = 0.0) -> Applied:
        """Apply rows of a store's event ring."""

    def apply_columns(self, worker: int, kinds: NDArray[numpy.uint8], tiers: NDArray[numpy.uint8], offsets: NDArray[numpy.int64], sequence_hashes: NDArray[numpy.uint64], *, dp_rank: int = 0, now_ms: float = 0.0) -> Applied:
        """Events as columns."""

    def clear(self, worker: int, *, dp_rank: int = 0, tier: Tier | None = None) -> None:
        """
        Remove all blocks of a worker, on one tier or on all. The worker stays known.
        """

    def remove_worker(self, worker: int, dp_rank: int | None = None) -> None:
        """Remove a worker and its blocks, with all its ranks or one."""

    def expire(self, now_ms: float) -> int:
        """Drop blocks older than `ttl_ms`; returns how many."""

    def find(self, hashes: Ints, *, early_exit: bool = False) -> Matches:
        """How many leading blocks of a prompt each worker holds, by tier."""

    def holds(self, worker: int, block_hash: int, *, dp_rank: int = 0, tier: Tier = Tier.G1) -> bool: ...

    def num_blocks(self, worker: int, *, dp_rank: int = 0, tier: Tier = Tier.G1) -> int:
        """Blocks that a worker holds on a tier."""

    def __len__(self) -> int: ...

    @property
    def workers(self) -> list[tuple[int, int]]: ...

    @property
    def memory_bytes(self) -> int:
        """Memory of the index's tables."""

    def dump_columns(self) -> tuple[NDArray[numpy.uint64], NDArray[numpy.uint32], NDArray[numpy.uint8], NDArray[numpy.uint64]]:
        """
        (workers, dp_ranks, tiers, hashes), a row for each block that a worker holds.
        """

    def snapshot(self) -> bytes:
        """Serialize the index to bytes, with a checksum."""

    def restore(self, snapshot: bytes, *, now_ms: float = 0.0) -> None:
        """
        Restore a snapshot; ages restart. InvalidArgument, and no change, when it is damaged.
        """

    def check(self) -> None:
        """Raise InvariantViolated when the index contradicts itself."""

class NativeRouter:
    """A router of the core's; one caller or run at a time (WrongState)."""

    def pick(self, row: int, session: int, outstanding_requests: Ints, outstanding_tokens: Ints, ready: Ints | None = None, parent_session: int | None = None) -> int:
        """
        Choose one of the `ready` workers (default: any) by the loads dispatched and not ended, which are by id: for fleets that run elsewhere.
        """

class RecordedRouter(NativeRouter):
    """
    Records another router's choices; one caller or run at a time (WrongState).
    """

    def __init__(self, router: str | NativeRouter | Router, *, seed: int = 0, keep_candidates: bool = False) -> None: ...

    @property
    def rows(self) -> NDArray[numpy.int64]: ...

    @property
    def time_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def worker(self) -> NDArray[numpy.int32]: ...

    @property
    def true_overlap_blocks(self) -> NDArray[numpy.int32]: ...

    @property
    def best_true_overlap_blocks(self) -> NDArray[numpy.int32]: ...

    @property
    def candidate_ends(self) -> NDArray[numpy.int64]:
        """
        By choice: end of its candidates in the following columns; each begins where the one before ends.
        """

    @property
    def candidate_workers(self) -> NDArray[numpy.int64]: ...

    @property
    def candidate_requests(self) -> NDArray[numpy.int64]: ...

    @property
    def candidate_tokens(self) -> NDArray[numpy.int64]: ...

    @property
    def candidate_overlap_blocks(self) -> NDArray[numpy.int64]: ...

def native_router(name: str, seed: int) -> NativeRouter | None:
    """
    Make a router by name; None: no router of that name (or it needs more than loads).
    """

class RouteRequest:
    """A request as a router sees it."""

    @property
    def row(self) -> int:
        """Row of the workload."""

    @property
    def session(self) -> int:
        """Session; requests of one session have the same number."""

    @property
    def parent_session(self) -> int | None:
        """Session that started this one, or None."""

    @property
    def stage(self) -> str:
        """Part of the request that needs a worker: whole, prefill or decode."""

    @property
    def arrival_ns(self) -> int: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def output_tokens(self) -> int:
        """Requested output tokens."""

    @property
    def priority(self) -> int: ...

    @property
    def block_size(self) -> int:
        """Block size of the first pool."""

    @property
    def prompt_blocks(self) -> Identities:
        """Identities of the prompt's full blocks; empty without prefix caching."""

class FleetView:
    """The fleet as its router sees it, for one call of choose()."""

    @property
    def now_ns(self) -> int: ...

    def __len__(self) -> int:
        """
        Number of ids assigned so far, those of workers that have left included.
        """

    @property
    def ready(self) -> NDArray[numpy.int64]:
        """Ids of the workers that may be chosen for this request, ascending."""

    @property
    def roles(self) -> tuple[str, ...]:
        """By worker: both, prefill or decode."""

    @property
    def states(self) -> tuple[str, ...]:
        """By worker: starting, ready, draining or gone."""

    @property
    def outstanding_requests(self) -> NDArray[numpy.int64]:
        """By worker: requests dispatched and not ended."""

    @property
    def outstanding_tokens(self) -> NDArray[numpy.int64]:
        """By worker: prompt and requested output tokens of those."""

    @property
    def pools(self) -> NDArray[numpy.int64]:
        """By worker: pool number."""

    @property
    def running(self) -> NDArray[numpy.int64]:
        """By worker: requests that have been admitted."""

    @property
    def waiting(self) -> NDArray[numpy.int64]:
        """By worker: requests that have not."""

    @property
    def used_blocks(self) -> NDArray[numpy.int64]:
        """By worker: referenced blocks."""

    @property
    def total_blocks(self) -> NDArray[numpy.int64]: ...

class KvEventBatch:
    """Block changes of one step of a worker, or of a shared tier."""

    def __init__(self, worker: int, events: EventBatch, *, pool: int = 0, time_ns: int = 0) -> None:
        """
        Build the batch of a worker; a replay, a live fleet and a router pass these to `observe`.
        """

    @property
    def worker(self) -> int | None:
        """None: a tier that the workers of a pool share."""

    @property
    def pool(self) -> int:
        """Number of the worker's pool, or of the pool that owns the tier."""

    @property
    def time_ns(self) -> int:
        """When the events became visible at their source."""

    @property
    def events(self) -> EventBatch: ...

class LastDecision:
    """The values behind a routing decision."""

    @property
    def row(self) -> int: ...

    @property
    def worker(self) -> int: ...

    @property
    def cost(self) -> float: ...

    @property
    def overlap_blocks(self) -> int: ...

    @property
    def lower_overlap_blocks(self) -> int: ...

    @property
    def best_overlap_blocks(self) -> int: ...

    @property
    def ties(self) -> int: ...

    @property
    def waited_ms(self) -> float: ...

class KvRouter(NativeRouter):
    """The native KV-aware router; one caller or run at a time (WrongState)."""

    def __init__(self, *, overlap_score_credit: float = 1.0, overlap_score_credit_decay: float = 0.0, prefill_load_scale: float = 1.0, decode_active_request_weight: float = 0.0, host_cache_hit_weight: float = 0.75, disk_cache_hit_weight: float = 0.25, external_cache_hit_weight: float = 0.0, temperature: float = 0.0, use_events: bool = True, event_delay_ms: float = 0.0, event_period_ms: float = 0.0, predict_ttl_ms: float = 0.0, approximate_ttl_ms: float = 120000.0, event_loss: float = 0.0, approximate_blocks: int = 0, queue_threshold: float | None = None, queue_policy: str = 'fcfs', seed: int = 0, keep_decisions: bool = True, keep_candidates: bool = False, imposed: Sequence[int] = [], index_all_groups: bool = True) -> None: ...

    FIELDS: tuple[str, ...]

    def begin(self, workers: int, batch_tokens: int = 8192) -> None:
        """Reset to `workers` workers; `batch_tokens` fit into a step of each."""

    def add_worker(self, batch_tokens: int = 8192, groups: GroupLayout | None = None) -> int:
        """
        Add a worker, with the layout of its KV cache groups if it has several; returns its id.
        """

    def set_available(self, worker: int, available: bool) -> None:
        """Set whether the worker may be chosen."""

    def forget(self, worker: int) -> None:
        """Drop all knowledge of the worker's cache."""

    def set_degraded(self, worker: int, degraded: bool) -> None:
        """
        Mark a worker's events as incomplete: blocks of requests sent there also count as cached for `approximate_ttl_ms`. Unmarking drops those blocks.
        """

    def decide(self, row: int, hashes: Ints, prompt_tokens: int, block_size: int, now_ms: float, *, priority: int = 0, strict_priority: int = 0) -> int | None:
        """
        Choose the worker of a request, by the sequence hashes of its prompt's full blocks; None: it waits until `release` returns it.
        """

    def release(self, now_ms: float) -> tuple[int, int] | None:
        """
        Take the next released row and its worker; None: all others wait. Call until None.
        """

    @property
    def waiting(self) -> int:
        """Number of queued requests."""

    @property
    def last(self) -> LastDecision:
        """The last decision."""

    def first_token(self, row: int) -> None:
        """
        Record a request's first token: its prompt does not delay others any more.
        """

    def ended(self, row: int) -> None:
        """Record that the request has ended."""

    @property
    def index(self) -> PrefixIndex:
        """
        Index built from received events; worker i has number i. Empty in a replay where the router reads the workers' blocks instead.
        """

    @property
    def rows(self) -> NDArray[numpy.int64]: ...

    @property
    def time_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def worker(self) -> NDArray[numpy.int32]: ...

    @property
    def cost(self) -> NDArray[numpy.float64]: ...

    @property
    def overlap_blocks(self) -> NDArray[numpy.int32]: ...

    @property
    def lower_overlap_blocks(self) -> NDArray[numpy.int32]: ...

    @property
    def best_overlap_blocks(self) -> NDArray[numpy.int32]: ...

    @property
    def true_overlap_blocks(self) -> NDArray[numpy.int32]: ...

    @property
    def best_true_overlap_blocks(self) -> NDArray[numpy.int32]: ...

    @property
    def cost_regret(self) -> NDArray[numpy.float64]: ...

    @property
    def ties(self) -> NDArray[numpy.int32]: ...

    @property
    def waited_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def candidate_ends(self) -> NDArray[numpy.int64]:
        """
        By decision: end of its candidates in the following columns, which have rows if they are kept.
        """

    @property
    def candidate_workers(self) -> NDArray[numpy.int64]: ...

    @property
    def candidate_prefill(self) -> NDArray[numpy.float64]: ...

    @property
    def candidate_active(self) -> NDArray[numpy.float64]: ...

    @property
    def candidate_added(self) -> NDArray[numpy.float64]: ...

    @property
    def candidate_requests(self) -> NDArray[numpy.float64]: ...

    @property
    def candidate_credit(self) -> NDArray[numpy.float64]: ...

    @property
    def candidate_overlap_blocks(self) -> NDArray[numpy.int64]: ...

    @property
    def candidate_lower_overlap_blocks(self) -> NDArray[numpy.int64]: ...

    @property
    def costs(self) -> NDArray[numpy.float64]:
        """
        Cost of each worker in the last decision; infinite for unavailable workers.
        """

    @property
    def prefill_tokens(self) -> NDArray[numpy.int64]:
        """
        By worker: uncached prompt tokens of dispatched requests without a first token.
        """

    @property
    def active_blocks(self) -> NDArray[numpy.int64]:
        """By worker: distinct prompt blocks of its live requests."""

    @property
    def lost_deliveries(self) -> int: ...

    @property
    def unknown_removals(self) -> int: ...

class StepTable:
    """
    Records every step of a run: its batch and the decisions of its schedule.
    """

    def __init__(self) -> None: ...

    def place(self, request: int, worker: int, now_ns: int) -> None:
        """Record that a request was sent to a worker."""

    def record(self, worker: int, engine: Engine, ended: bool, now_ns: int) -> None:
        """Record a step that has begun, or ended."""

    def split(self, worker: int) -> None:
        """
        Begin a new batch with the next step, because requests of the worker have ended.
        """

    @property
    def num_steps(self) -> int: ...

    def take(self) -> dict[str, NDArray[numpy.generic]]:
        """Take the columns by name, once."""

def read_id_lists(texts: Sequence[object]) -> tuple[numpy.typing.NDArray[numpy.int64], numpy.typing.NDArray[numpy.uint64]] | None:
    """
    Return (numbers of ids, ids) of JSON lists of integers; None if any text is anything else.
    """

def lower_weka(start_ns: NDArray[numpy.int64], end_ns: NDArray[numpy.int64], model: NDArray[numpy.int32], output_tokens: NDArray[numpy.int64], scope: NDArray[numpy.int32], id_offsets: NDArray[numpy.int64], ids: NDArray[numpy.uint64], owner: NDArray[numpy.int64], returned_ns: NDArray[numpy.int64]) -> tuple[NDArray[numpy.int64], NDArray[numpy.int32], NDArray[numpy.int64], NDArray[numpy.int64], NDArray[numpy.uint8], NDArray[numpy.int64], NDArray[numpy.uint8], int]:
    """
    Lower one Weka trace to a graph.

    Return (rows in order, stream of each row in its scope, offsets of the dependencies, rows waited for, triggers, delays in ns, relations, a blocking sub-agent that ends after the request it returned to began, or -1).
    """

def number_blocks(order: NDArray[numpy.int64], id_offsets: NDArray[numpy.int64], ids: NDArray[numpy.uint64], prompt_tokens: NDArray[numpy.int64], block_size: int, first: int) -> NDArray[numpy.uint64]:
    """
    Number the blocks of the prompts of one trace from `first`, in row order.
    """

def first_other_prefix(ids: NDArray[numpy.uint32], starts: NDArray[numpy.int64], others: NDArray[numpy.int64], counts: NDArray[numpy.int64]) -> int:
    """
    Return the first row whose `counts` ids from `starts` on differ from those from `others` on; -1: none.
    """

def expand_deltas(session_offsets: NDArray[numpy.int64], run_offsets: NDArray[numpy.int64], run_names: NDArray[numpy.int64], run_tokens: NDArray[numpy.int64], output_tokens: NDArray[numpy.int64], block_size: int, most_tokens: int) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], NDArray[numpy.uint32], int]:
    """
    Return (prompt tokens, hash offsets, hash ids, first session that is too long or -1) of turns that list what is new.
    """

class EventClass(enum.IntEnum):
    """The order of events at one time."""

    LANDING = 0
    """Transfers end."""

    STEP_END = 1
    """A step ends."""

    DELIVERY = 2
    """KV events reach the router."""

    ARRIVAL = 8
    """A request arrives, or is cancelled."""

    ABORT = 9
    """The client of a replayed request aborts it."""

    FAULT = 3
    """Something fails, or recovers."""

    HAND_BACK = 4
    """A worker has drained for too long."""

    TICK = 5
    """A scaler reads the fleet and orders workers."""

    READY = 6
    """A worker has started."""

    SESSION = 7
    """A policy decides on the KV of a session that sleeps."""

    BEGIN = 10
    """Workers that are free begin a step, with all that arrived before."""

class GroupReport:
    """Hits and blocks of a worker with several KV cache groups."""

    @property
    def admissions(self) -> int: ...

    @property
    def shortened(self) -> int:
        """Admissions whose hit another group made shorter."""

    @property
    def queries(self) -> int:
        """Tokens looked up."""

    @property
    def hits(self) -> int:
        """Tokens found in all groups."""

    @property
    def full_hits(self) -> int | None:
        """
        Tokens that full attention alone had; None when no group is full attention.
        """

    @property
    def samples(self) -> list[tuple[int, list[int]]]:
        """
        (time in ns, distinct blocks that requests hold by group), in order of time.
        """

    @property
    def peaks(self) -> list[int]:
        """Most distinct blocks that requests hold at one time, by group."""

class TierSummary:
    """One tier of a pool at the end of a run, summed over its workers."""

    @property
    def tier(self) -> Tier: ...

    @property
    def pool(self) -> str:
        """Pool name; empty in a run of one pool."""

    @property
    def first_worker(self) -> int:
        """First worker of the pool."""

    @property
    def capacity_blocks(self) -> int: ...

    @property
    def resident_blocks(self) -> int: ...

    @property
    def stored_blocks(self) -> int: ...

    @property
    def evicted_blocks(self) -> int: ...

    @property
    def residency(self) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
        """(time in ns, blocks) of a tier that workers share; else empty."""

    @property
    def events(self) -> EventTable:
        """Events of a shared tier, if kept; else empty."""

class Decider:
    """Decides whether a prefill worker computes the prompt of a request."""

    def remote(self, prompt_tokens: int, cached_tokens: int, session: int) -> bool:
        """Whether a prefill worker computes this prompt."""

    @property
    def reads_cache(self) -> bool:
        """Whether it reads the decode worker's cache."""

def uncached_rule(*, prompt_tokens: int = 0, uncached_tokens: int = 0, uncached_share: float = 0.0, either: bool = False) -> Decider:
    """
    Remote if the prompt has `prompt_tokens`, and the decode worker lacks `uncached_tokens` and `uncached_share` of it; with `either`, one of both is enough.
    """

def user_decider(user: UserDecider) -> Decider:
    """
    An object with remote(prompt_tokens, cached_tokens, session) as a decider.
    """

class HandOffLinks:
    """Links of hand-offs, 10^9 bytes per second; infinity: no limit."""

    def __init__(self, *, out_gbps: float = float('inf'), in_gbps: float = float('inf'), backend_gbps: float = float('inf'), fixed_ns: int = 0, bytes_per_block: int = 0) -> None: ...

    FIELDS: tuple[str, ...]

class PushNet:
    """KV that prefill servers push to decode servers of other processes."""

    def set_limits(self, *, boot_ns: int, wait_ns: int, drain_ns: int) -> None:
        """
        Set how long a prefill side waits for memory, and a decode side for KV and for an acknowledgement.
        """

    def set_far(self, worker: int) -> None:
        """Turn notices to a worker into messages."""

    def open(self, request: int, worker: int, *, prefills: bool, far: int | None = None, connected: bool = True, now_ns: int) -> None:
        """
        Open a request whose other side is in another process, before the engine gets it.
        """

    def open_alone(self, request: int, worker: int, *, prefills: bool) -> None:
        """Open a request whose KV moves nowhere."""

    def connect(self, request: int, now_ns: int) -> None:
        """Let a decode side go on: its peer is connected."""

    def receive(self, request: int, news: str, worker: int, prefix: int, now_ns: int) -> None:
        """
        Receive a message of a far worker; one about an unknown request is ignored.
        """

    def lose(self, worker: int, now_ns: int) -> None:
        """Fail the requests of a far worker that is lost."""

    def abandon(self, worker: int, now_ns: int) -> None:
        """Fail the requests of a worker whose engine died."""

    def leave(self, request: int, *, prefills: bool, now_ns: int) -> None:
        """Forget a request that the engine refused."""

    def take_messages(self) -> list[tuple[int, str, int, int]]:
        """Take the messages to far workers: (worker, news, request, prefix)."""

    def take_forgotten(self) -> list[int]:
        """Take the requests that no message names any more."""

class LiveNet:
    """
    Hand-offs between the engines of a process, and workers of others that are far.
    """

    def __init__(self, links: HandOffLinks) -> None: ...

    def add_worker(self, *, produces: bool, consumes: bool, far: bool = False) -> int:
        """Add a worker and return its number."""

    def run_until(self, now_ns: int) -> None:
        """Finish the transfers that end by then."""

    @property
    def next_wake_ns(self) -> int | None:
        """When a transfer next ends, or a side stops to wait for the other."""

    @property
    def pushes(self) -> PushNet:
        """KV that prefill servers push, as SGLang's."""

    def take_reached(self) -> list[int]:
        """Workers for which something has arrived since the last call."""

    def take_wanted(self) -> list[int]:
        """
        Far workers that were needed since the last call and are not connected.
        """

    def connect(self, worker: int, now_ns: int) -> None:
        """Mark a worker as connected."""

    def disconnect(self, worker: int, now_ns: int) -> None:
        """
        Mark a worker as unreachable: reads from it fail, those in flight when they end.
        """

    def fail_reads(self, worker: int, count: int) -> None:
        """Let the next `count` reads by a worker fail when they end."""

    def notify(self, worker: int, request: int, now_ns: int) -> None:
        """Deliver a notification: the blocks of a request were read."""

    def heartbeat(self, worker: int, requests: Sequence[int], now_ns: int) -> None:
        """Deliver a heartbeat for requests."""

    def take_notes(self, worker: int) -> list[int]:
        """Take the notifications to a far worker."""

    def take_heartbeats(self, worker: int) -> list[list[int]]:
        """Take the heartbeats to a far worker."""

    def take_ended(self) -> list[tuple[int, int, int, int, int, bool]]:
        """
        Reads that have ended, oldest first: (from, to, bytes, posted ns, landed ns, failed).
        """

    def late_notifications(self, worker: int) -> int:
        """
        Notifications of reads from a worker that came after the lease of the blocks.
        """

    def in_flight(self, worker: int) -> int:
        """Reads in flight by or from a worker."""

class Disaggregation:
    """How requests are divided between prefill and decode pools."""

    def __init__(self, *, seed: int = 0, decode_routing: str | NativeRouter | Router, decider: Decider, decode_first: bool = False, hop_ns: int = 0, links: HandOffLinks, transfer_failure_rate: float = 0.0) -> None: ...

    FIELDS: tuple[str, ...]

class HandOffColumns:
    """One row a request; -1 for what never happened."""

    @property
    def way(self) -> NDArray[numpy.uint8]: ...

    @property
    def prefill_worker(self) -> NDArray[numpy.int32]: ...

    @property
    def prefill_admit_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def prefill_done_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def decode_arrival_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def offered_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def posted_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def landed_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def bytes(self) -> NDArray[numpy.int64]: ...

    @property
    def decode_admit_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def pushed_busy_ns(self) -> int:
        """Of the run: time in which pushed KV moved; -1: none is pushed."""

class Fault:
    """Something that fails during a run, for a time."""

    def __init__(self, *, kind: str = 'kill', time_ns: int = 0, worker: int | None = None, duration_ns: int = 0, factor: float = 1.0, rate: float = 1.0, delay_ns: int = 0, tier: Tier) -> None: ...

    FIELDS: tuple[str, ...]

class LostRequests:
    """What becomes of requests whose worker crashes, or drains too long."""

    def __init__(self, *, survival: str = 'retry', delay_ns: int = 0, most_attempts: int = 0, drain_ns: int | None = None) -> None: ...

    FIELDS: tuple[str, ...]

class EventFaults:
    """Faults on the way of KV events from workers to a router."""

    def __init__(self, faults: Sequence[Fault], seed: int = 0) -> None: ...

    def add_worker(self) -> None:
        """Add a worker; they are numbered from 0."""

    def deliver(self, worker: int, now_ns: int, batch: EventBatch | None = None) -> EventBatch:
        """
        Take events that a worker publishes now, if any, and return those that the router receives now.
        """

    def next_due_ns(self, worker: int) -> int | None:
        """When the next events that were held back are due; None: none are."""

    def reread(self, worker: int) -> EventBatch:
        """
        Return rows after which the router knows all that the worker has published.
        """

    def forget(self, worker: int) -> EventBatch:
        """Return rows after which the router knows nothing of the worker."""

    def end(self, worker: int) -> EventBatch:
        """
        The worker has lost its cache, and what was under way. Returns the same rows as `forget`.
        """

    def is_complete(self, worker: int) -> bool:
        """Whether the router has received all that the worker has published."""

class LifeState(enum.IntEnum):
    """State of a worker in a run."""

    STARTING = 0

    READY = 1

    DRAINING = 2

    STOPPED = 3

    CRASHED = 4

    RESTARTING = 5

class LengthSum:
    """Lengths of some requests."""

    @property
    def count(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def variance(self) -> float: ...

class WorkerMetrics:
    """A worker at a tick: its open step, and its queue behind that."""

    @property
    def worker(self) -> int: ...

    @property
    def pool(self) -> int: ...

    @property
    def state(self) -> LifeState: ...

    @property
    def has_stepped(self) -> bool: ...

    @property
    def step_ns(self) -> int:
        """Duration of the open step; 0: none, or unknown."""

    @property
    def prefill(self) -> LengthSum:
        """Prompt tokens that the step computes."""

    @property
    def prefill_context_tokens(self) -> int:
        """Computed before of these prompts."""

    @property
    def decode(self) -> LengthSum:
        """Contexts of the requests that decode."""

    @property
    def queued_prefill(self) -> LengthSum:
        """Prompts that wait."""

    @property
    def queued_decode(self) -> LengthSum:
        """Contexts of requests that wait after their first token."""

def measure_worker(engine: Engine, worker: int, pool: int, state: LifeState, sent: Sequence[tuple[int, int, bool]]) -> WorkerMetrics:
    """
    Measure a worker as a scaler sees it. `sent`: its requests in the order of submission, as (id, tokens of prompt and output so far, whether it has any output).
    """

class TrafficWindow:
    """Requests since the last tick."""

    @property
    def since_ns(self) -> int: ...

    @property
    def arrived(self) -> int: ...

    @property
    def completed(self) -> int: ...

    @property
    def prompt_tokens(self) -> int:
        """Sum over those that completed, as are all that follow."""

    @property
    def output_tokens(self) -> int: ...

    @property
    def hit_share(self) -> float:
        """Sum of the cached shares of their prompts."""

    @property
    def with_tokens(self) -> int: ...

    @property
    def ttft_ns(self) -> float: ...

    @property
    def with_gaps(self) -> int: ...

    @property
    def itl_ns(self) -> float:
        """Sum of their mean gaps between tokens."""

class FleetMetrics:
    """A fleet as its scaler sees it."""

    @property
    def now_ns(self) -> int: ...

    @property
    def workers(self) -> list[WorkerMetrics]:
        """Workers that have not stopped, by id."""

    @property
    def traffic(self) -> TrafficWindow: ...

class Elastic:
    """
    When a scaler is first called, and how long workers of each pool start.
    """

    def __init__(self, *, start_ns: Sequence[int], first_tick_ns: int | None = None) -> None: ...

    FIELDS: tuple[str, ...]

class PlayLimits:
    """Which plays prepare, for how long the others run, and their idle time."""

    def __init__(self, *, preparing_plays: int = 0, duration_ns: int = 0, grace_ns: int = 0, play_idle_ns: int = 0, fleet_idle_ns: int = 0) -> None: ...

    FIELDS: tuple[str, ...]

class SessionSleep:
    """A session between two of its requests."""

    @property
    def now_ns(self) -> int: ...

    @property
    def row(self) -> int:
        """The request that has ended."""

    @property
    def session(self) -> int:
        """Requests of one session have the same number."""

    @property
    def parent_session(self) -> int | None:
        """Session that started this one, or None."""

    @property
    def worker(self) -> int: ...

    @property
    def prompt_tokens(self) -> int:
        """Prompt of the request that has ended."""

    @property
    def output_tokens(self) -> int: ...

    @property
    def first_cached_tokens(self) -> int:
        """
        Cached tokens of its first request: they were there before the session.
        """

    @property
    def asleep_ns(self) -> int:
        """Time since the request has ended; 0 at the first call."""

    @property
    def last_gap_ns(self) -> int | None:
        """
        How long the session slept before the request that has ended; None: not at all.
        """

    @property
    def is_last(self) -> bool:
        """Whether its client ends the session with this answer."""

    @property
    def told_ns(self) -> int | None:
        """
        Time from the end of the request to the next, as its client tells; None: unknown, because it waits for others too.
        """

class PrefixTotals:
    """What engines did for the KV of sleeping sessions, in numbers."""

    @property
    def holds(self) -> int: ...

    @property
    def yielded_holds(self) -> int:
        """Holds that ended because a request lacked room."""

    @property
    def held_blocks(self) -> int:
        """At the begin of each hold, summed."""

    @property
    def peak_held_blocks(self) -> int:
        """Most at one time, summed over workers."""

    @property
    def held_block_s(self) -> float:
        """Held blocks times seconds."""

    @property
    def drops(self) -> int: ...

    @property
    def dropped_blocks(self) -> int: ...

    @property
    def offloads(self) -> int: ...

    @property
    def offloaded_blocks(self) -> int: ...

    @property
    def prefetches(self) -> int: ...

    @property
    def prefetched_blocks(self) -> int: ...

class FleetResult:
    """Columns of a run, one row a request in workload order."""

    @property
    def queued_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def first_admit_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def first_token_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def second_token_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def last_token_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def finish_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def output_tokens(self) -> NDArray[numpy.int32]: ...

    @property
    def cached_tokens_first(self) -> NDArray[numpy.int64]: ...

    @property
    def cached_tokens_total(self) -> NDArray[numpy.int64]: ...

    @property
    def looked_up_tokens(self) -> NDArray[numpy.int64]: ...

    @property
    def preemptions(self) -> NDArray[numpy.int32]: ...

    @property
    def status(self) -> NDArray[numpy.uint8]: ...

    @property
    def finish_reason(self) -> NDArray[numpy.uint8]: ...

    @property
    def below_tokens_first(self) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], NDArray[numpy.int64]]: ...

    @property
    def below_tokens_total(self) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], NDArray[numpy.int64]]: ...

    @property
    def parked_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def room_wait_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def arrival_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def worker(self) -> NDArray[numpy.int32]: ...

    @property
    def onboard_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def itl_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def itl_count(self) -> NDArray[numpy.int64]: ...

    @property
    def sample_worker(self) -> NDArray[numpy.int32]: ...

    @property
    def worker_pool(self) -> NDArray[numpy.int32]: ...

    @property
    def life_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def life_worker(self) -> NDArray[numpy.int32]: ...

    @property
    def life_state(self) -> NDArray[numpy.uint8]: ...

    @property
    def loss_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def loss_request(self) -> NDArray[numpy.int64]: ...

    @property
    def loss_worker(self) -> NDArray[numpy.int32]: ...

    @property
    def loss_outcome(self) -> NDArray[numpy.uint8]: ...

    @property
    def loss_fault(self) -> NDArray[numpy.int32]: ...

    @property
    def loss_tokens(self) -> NDArray[numpy.int32]: ...

    @property
    def fault_began_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def fault_ended_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def sample_time_ns(self) -> NDArray[numpy.int64]: ...

    @property
    def sample_running(self) -> NDArray[numpy.int32]: ...

    @property
    def sample_waiting(self) -> NDArray[numpy.int32]: ...

    @property
    def sample_used_blocks(self) -> NDArray[numpy.int32]: ...

    @property
    def sample_cached_blocks(self) -> NDArray[numpy.int32]: ...

    @property
    def sample_held_blocks(self) -> NDArray[numpy.int32]: ...

    @property
    def sample_host_blocks(self) -> NDArray[numpy.int32]: ...

    @property
    def sample_kept_blocks(self) -> NDArray[numpy.int32]: ...

    @property
    def steps(self) -> int: ...

    @property
    def step_ns(self) -> int: ...

    @property
    def uncovered_ns(self) -> int: ...

    @property
    def phantom_hit_blocks(self) -> int: ...

    @property
    def expired_leases(self) -> int: ...

    @property
    def burst_steps(self) -> int: ...

    @property
    def burst_tokens(self) -> int: ...

    @property
    def draft_rounds(self) -> int: ...

    @property
    def drafted_tokens(self) -> int: ...

    @property
    def accepted_tokens(self) -> int: ...

    @property
    def late_notifications(self) -> int: ...

    @property
    def rejections(self) -> list[tuple[int, str]]: ...

    def events(self, worker: int) -> EventTable:
        """Events of a worker, published at the ends of its steps."""

    def kv_trace(self, worker: int) -> list[tuple[int, bool, int, int, int, int]]:
        """
        A worker's allocations and evictions, in the format of Engine.take_kv_trace.
        """

    @property
    def tiers(self) -> list[TierSummary]: ...

    @property
    def groups(self) -> list[GroupReport]:
        """By worker; empty: all have one KV cache group."""

    @property
    def tier_totals(self) -> TierTotals: ...

    @property
    def links(self) -> list[LinkUsage]: ...

    @property
    def handoff(self) -> HandOffColumns: ...

    @property
    def evictions(self) -> int: ...

    @property
    def prefixes(self) -> PrefixTotals:
        """KV of sleeping sessions, summed over workers."""

    @property
    def play_begin_ns(self) -> int:
        """When the lanes began, after the preparation; -1: no lanes."""

    @property
    def idle_lanes(self) -> int:
        """Lanes for which no play was left before the end of the duration."""

    @property
    def stored_blocks(self) -> int: ...

class Pool:
    """Workers that are alike."""

    def __init__(self, *, engine: EngineConfig, timing: StepTiming, workers: int = 1, tiers: TierConfig | None = None, name: str = '', role: str = 'both') -> None: ...

    FIELDS: tuple[str, ...]

def read_plain_rows(lines: bytes) -> PlainRows | None:
    """
    Timestamps (ms), input and output lengths, numbers of hash ids and the ids of lines that are all plain rows, else None.
    """

class Checkpoints:
    """
    States at the ends of fast-forwards: a run with fast-forward records them, a run without compares its own (InvariantViolated).
    """

    def __init__(self) -> None: ...

    @property
    def recorded(self) -> int: ...

    @property
    def compared(self) -> int: ...

class FleetSettings:
    """How a fleet of simulated workers plays a workload."""

    def __init__(self, *, pools: Sequence[Pool], seed: int = 0, routing: str | NativeRouter | Router, concurrency: int = 0, threads: int = 1, fast_forward: bool = True, check: bool = False, lockstep_ns: int = 0, turnaround_ns: int = 0, play_limits: PlayLimits | None = None, ranks: int = 1, checkpoints: Checkpoints | None = None, steps: StepTable | None = None, disaggregation: Disaggregation | None = None, elastic: Elastic | None = None, faults: Sequence[Fault] = [], lost: LostRequests | None = None, fault_seed: int = 0) -> None: ...

    FIELDS: tuple[str, ...]

def run_fleet(workload: object, settings: FleetSettings, *, names: Sequence[str] = [], progress: Callable[[int], None] | None = None, on_step: Callable[[int, VllmEngine, bool], None] | None = None, on_tick: Callable[[FleetMetrics], tuple[list[int | None], int | None]] | None = None, on_sleep: Callable[[SessionSleep], tuple[list[str], int | None]] | None = None) -> FleetResult:
    """
    Replay a workload (its columns, by name) through a fleet; `names` are those of its requests, if any matter.
    """

def give_back_memory() -> bool:
    """
    Return memory cached by finished runs to the system; False when there was none.
    """

def trace_identities(stream: NDArray[numpy.uint32], trace_block_size: int, stream_tokens: int, outputs: NDArray[numpy.uint32], block_size: int, row: int, count: int, adapter: int = 0) -> Identities:
    """
    Identities of the first `count` blocks of a trace row, as a fleet sees them.
    """

class RunColumns:
    """Gathers the results of live engines into the columns of a replay."""

    def __init__(self, rows: int, *, tiers: bool = False) -> None:
        """Columns for `rows` requests; with `tiers`, the tier columns too."""

    def keep(self, row: int, record: RequestRecord, worker: int, arrival_ns: int) -> None:
        """Record a finished request."""

    def reject(self, row: int, now_ns: int, why: str) -> None:
        """Record a request that was rejected before it reached an engine."""

    def add_engine(self, worker: int, engine: Engine) -> None:
        """
        Add an engine's samples, totals and tiers; token gaps and load times if it keeps them.
        """

    def add_run(self, run: TierRun) -> None:
        """The tiers and links that engines shared."""

    def take(self) -> FleetResult:
        """Take the result, once."""

class BlockVisits:
    """The blocks that each request of a workload reads and writes, numbered."""

    def __init__(self, workload: object, block_size: int, prompts_only: bool = False, computes_last: bool = False) -> None:
        """
        Number the blocks: whole blocks as vLLM holds them, or prompts with their partly filled last block.

        `computes_last`: a request that ends by itself has computed its last token too.
        """

    @property
    def visits(self) -> int:
        """Block visits of all rows."""

    @property
    def distinct(self) -> int:
        """Distinct blocks."""

    def __len__(self) -> int:
        """Rows of the workload."""

    def lru(self, rows: NDArray[numpy.int64], warm_up: int = 0) -> tuple[NDArray[numpy.int64], int]:
        """
        Return (hit tokens by LRU cache size in blocks, blocks of an unlimited cache), in one pass.
        """

    def fifo(self, rows: NDArray[numpy.int64], sizes: numpy.typing.ArrayLike, warm_up: int = 0) -> NDArray[numpy.int64]:
        """Return the hit tokens of FIFO caches."""

    def optimal(self, rows: NDArray[numpy.int64], sizes: numpy.typing.ArrayLike, warm_up: int = 0) -> NDArray[numpy.int64]:
        """
        Return the hit tokens of caches that know the future and need not store a block: a bound.
        """

    def pinned(self, policy: str, order: NDArray[numpy.int64], sizes: numpy.typing.ArrayLike, warm_up: int = 0) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
        """
        Return (hit tokens, blocks that found no place) of caches that keep the blocks of running requests.

        `order` has row r where it begins and -1 - r where it ends; `policy` is a built-in name, or optimal.
        """

    def unlimited(self, rows: NDArray[numpy.int64], caches: NDArray[numpy.int32] | None = None, loads_last: bool = False) -> NDArray[numpy.int64]:
        """
        Return the hit tokens of each row in unlimited caches: one, or those that `caches` numbers.

        `loads_last`: a request may read a last block that its prompt fills, and computes one token of it.
        """

    def shared_below(self, rows: NDArray[numpy.int64], caches: NDArray[numpy.int32], own: int, below: int, copies: bool, warm_up: int = 0) -> int:
        """
        Return the hit tokens of LRU caches of `own` blocks above one of `below` blocks that they share.
        """

    def prefix_runs(self, rows: NDArray[numpy.int64], size: int) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], NDArray[numpy.int64], NDArray[numpy.int64], NDArray[numpy.int64], NDArray[numpy.int64]]:
        """
        Return (first row, position, blocks, requests, recomputed blocks, blocks below) of shared prefixes.
        """

    def session_blocks(self, session: NDArray[numpy.int32]) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
        """Return (distinct blocks, blocks of no other) of each session."""

    def open_blocks(self, order: NDArray[numpy.int64], session: NDArray[numpy.int32]) -> int:
        """
        Return the most distinct blocks that sessions between their first begin and last end have visited.
        """

class ToyEngineConfig(EngineConfig):
    """Settings of the toy engine, for tests of the interface."""

    def __init__(self, *, block_size: int = 16, num_gpu_blocks: int = 4096, max_running: int = 4, queue_limit: int = 8, events: bool = False) -> None: ...

    FIELDS: tuple[str, ...]

def with_slow_loads(config: VllmEngineConfig, delay_ns: int) -> VllmEngineConfig:
    """
    A copy whose engines load every prompt, each within this time; for tests.
    """

class TestBlockPool:
    """The vLLM engine's pool of blocks, for tests and its benchmark."""

    def __init__(self, num_blocks: int, *, append_unnamed: bool = False, listens: bool = True) -> None: ...

    def find(self, names: Sequence[int], group: int = 0) -> tuple[list[int], int, int]:
        """Ids of the longest cached prefix; how many are free or phantoms."""

    def place(self, table: int, names: Sequence[int], group: int = 0) -> None:
        """Reference the cached prefix of `names`."""

    def take(self, table: int, count: int) -> list[int]:
        """Append new blocks to the table; their ids."""

    def cache(self, table: int, names: Sequence[int], group: int = 0) -> None:
        """Name the table's first blocks."""

    def cache_from(self, table: int, names: Sequence[int], first: int, group: int) -> None:
        """Name the table's blocks from block `first` on."""

    def skip(self, table: int, blocks: int) -> None:
        """Release the first blocks that the table has."""

    def last_window(self, names: Sequence[int], groups: Sequence[int], need: int) -> int:
        """
        End of the last `need` blocks that all the groups have; 0: of the longest prefix.
        """

    def hold(self, table: int, names: Sequence[int], first: int, group: int) -> None:
        """Reference the cached blocks of `names` from block `first` on."""

    def hand_out_cached(self) -> None:
        """Drop every cached block, and keep the order."""

    def trim(self, table: int, blocks: int) -> None:
        """Release the blocks behind the first `blocks`."""

    def withdraw(self, table: int, named: int) -> None:
        """Take names behind the first `named` back."""

    def mark_phantoms(self, table: int, named: int) -> None:
        """Mark the named blocks behind the first `named` as never computed."""

    def free(self, table: int) -> None:
        """Release all blocks of the table."""

    def reset(self) -> None:
        """Drop every cached block."""

    def ids(self, table: int) -> list[int]:
        """Ids of the table's blocks, in order."""

    def named(self, table: int) -> int:
        """Number of the table's blocks that have names."""

    def changes(self) -> list[tuple[str, int, bool]]:
        """Names that blocks got and lost since the last call."""

    def contents(self, group: int = 0) -> list[int]: ...

    def free_head(self, count: int) -> list[int]: ...

    @property
    def num_free(self) -> int: ...

    @property
    def num_runs(self) -> int: ...

    @property
    def num_nodes(self) -> int: ...

    @property
    def evictions(self) -> int: ...

    def memory_bytes(self) -> int: ...

    def check(self) -> None: ...
