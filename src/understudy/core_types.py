"""Types that the stub of the native core names: aliases, records and protocols."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, TypedDict

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    import numpy as np
    import numpy.typing as npt

    from understudy._core import FleetView, Identities, Identity, RouteRequest, StepLoad

Ints: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"
Run: TypeAlias = tuple[int, int, int]
"""A multimodal run: (mm_hash, offset, length)."""

DuplicatePolicyName: TypeAlias = Literal["allow", "reject", "keep"]
PolicyName: TypeAlias = Literal["lineage", "lineage_fifo", "lru", "multi_lru", "fifo", "vllm", "vllm_append"]
RequestKvState: TypeAlias = Literal[
    "idle", "prefill_scheduled", "decode_scheduled", "speculative_scheduled", "closed"
]

Block: TypeAlias = "Identity | int"
"""A block of a KV manager: a complete one, or the id of a partial one."""
Blocks: TypeAlias = "Identities | Sequence[Block]"
EventBlock: TypeAlias = tuple[int, int | None, int, int, tuple[int, ...] | None]
"""(sequence hash, local hash, position, generation, token ids)."""

PlainRows: TypeAlias = (
    "tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.int64],"
    " npt.NDArray[np.int64], npt.NDArray[np.uint64]]"
)
"""Timestamps in ms, input lengths, output lengths, numbers of hash ids, and hash ids."""


class Policy(Protocol):
    """A user-defined eviction policy (`understudy.kv.EvictionPolicy`)."""

    def on_freed(self, blocks: npt.NDArray[np.int32], lineage_hashes: list[int | None], /) -> None:
        """Receive blocks that lost their last reference."""

    def on_taken(self, blocks: npt.NDArray[np.int32], /) -> None:
        """Receive blocks that were allocated or matched."""

    def select(self, count: int, /) -> Ints:
        """Return the next `count` blocks to allocate."""


class StepTimingModel(Protocol):
    """A user-defined timing model of whole steps."""

    def step_ms(self, step: StepLoad, /) -> float:
        """Return the milliseconds of a step."""


class TimingModel(Protocol):
    """A user-defined timing model of prompts and of decoding."""

    def prefill_ms(self, requests: int, mean_input: int, mean_cached: int, /) -> float:
        """Return the milliseconds of a step's prompts."""

    def decode_ms(
        self, requests: int, context_tokens: int, mean_context: int, capacity_tokens: int, /
    ) -> float:
        """Return the milliseconds of a step's decoding."""


class Router(Protocol):
    """A user-defined router (`understudy.router.Router`)."""

    def choose(self, request: RouteRequest, view: FleetView) -> int:
        """Return the id of a worker that is ready."""


class UserDecider(Protocol):
    """A user-defined rule of remote prefill."""

    def remote(self, prompt_tokens: int, cached_tokens: int, session: int, /) -> bool:
        """Return whether a prefill worker computes this prompt."""


class OffloadFilter(Protocol):
    """A user-defined rule of offloads."""

    def select(self, lineage_hashes: list[int], reuse: npt.NDArray[np.uint32], /) -> Sequence[object]:
        """Return a truth value for each block."""


SglangStep: TypeAlias = tuple[str, list[tuple[int, int, bool]]]
"""(mode, [(request, tokens, whether it decodes)])."""
SglangEvent: TypeAlias = tuple[bool, list[int], int, int, list[tuple[int, int]], bool]
"""(stored, pages, parent, begin, runs of tokens, on the host)."""


class SglangState(TypedDict):
    """State of SGLang's scheduler between two iterations."""

    running: list[int]
    batch_is_full: bool
    waiting: int
    waiting_head: list[int]
    new_token_ratio: float
    avail: int
    evictable: int
    protected: int
    nodes: int
    evict_head: list[list[int]]


class SglangLog(TypedDict):
    """Decisions of SGLang's scheduler since the last call."""

    admitted: list[tuple[int, bool, int, int]]
    retracted: list[int]
    preempted: list[int]
    finished: list[int]
    aborted: list[int]
    sampled: list[int]


class SglangSide(TypedDict):
    """Queues of one side of a disaggregated SGLang server, and its decisions since the last call."""

    sent: list[tuple[int, int, bool]]
    resumed: list[int]
    allocated: list[tuple[int, int, int]]
    arrived: list[int]
    joined: list[int]
    bootstrap: list[int]
    waiting: list[int]
    moving: list[int]
    held: list[int]
    retracted: list[int]
    slots: int
    buffers: int
    host_tokens: int


class SglangComponent(TypedDict):
    """SGLang's pool of window KV (in tokens) or of states (in slots)."""

    free: int
    evictable: int
    protected: int
    evict_head: list[list[int]]
    window_begins: list[tuple[int, int]]
    """Running requests, with the tokens whose window KV is given back."""


class TrtCacheEvent(TypedDict, total=False):
    """A KV event of TensorRT-LLM; which keys it has depends on its kind."""

    id: int
    group: int
    window: int
    kind: str
    """created, stored, removed or updated."""
    parent: int | None
    blocks: list[Any]
    """created: blocks by level; stored: hash, runs of tokens, level, priority and salt; removed: hashes."""
    block: int
    level: list[int]
    scope: tuple[int | None, int | None]
    """stored, of an engine on a clock: adapter and salt."""


class TrtPass(TypedDict):
    """What a pass of TensorRT-LLM's executor did, and its state behind it, as recordings have it."""

    ctx: list[list[int]]
    gen: list[int]
    pages: dict[int, list[list[int]]]
    suspended: list[int]
    recompute: list[int]
    sampled: list[int]
    answered: list[int]
    finished: list[int]
    events: list[TrtCacheEvent]
    copies: list[list[object]]
    active: list[list[int]]
    waiting: int
    caches: list[list[object]]
    pool: list[list[list[int]]]


class SglangHost(TypedDict):
    """SGLang's host tier, and its transfers since the last call."""

    writes: list[int]
    loads: list[int]
    host_avail: int
    writing: int
    loading: int
    on_both: int
    host_only: int
    host_evict_head: list[list[int]]


class HandOffLine(TypedDict):
    """Hand-offs of the last schedule and update."""

    lookups: list[tuple[int, int, int]]
    in_batch: list[int]
    not_processed: list[int]
    to_send: list[tuple[int, int]]
    pulls: list[tuple[int, list[int]]]
    heartbeat: list[int]


class MultiLine(TypedDict):
    """Several connectors of one engine, since the last call."""

    lookups: list[tuple[int, int, int | None, list[int | None]]]
    """(request, tokens found on the device, tokens to load or None: ask again, answer of each connector asked)."""
    told: list[tuple[int, list[int]]]
    """(request, tokens that each connector is to load)."""
