"""`KvCacheManager`: the block pool of an engine, shared by all requests and tensor-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy._core import BlockManager, Tier, lifetime_blocks
from understudy.errors import CapacityExhausted, ConfigError, WrongState
from understudy.kv.admission import AdmissionQueue
from understudy.kv.counts import count
from understudy.kv.freed import FreedBlocks
from understudy.kv.layout import KvLayout
from understudy.kv.request import RequestKv

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    import numpy.typing as npt

    from understudy.core_types import DuplicatePolicyName, PolicyName
    from understudy.kv.policy import EvictionPolicy


class KvCacheManager:
    """Block pool, layout and admission checks. Block ids are page indices into buffers that the engine owns.

    One block is reserved for the padding rows of a CUDA graph's batch; no request gets it. One manager allocates for
    all ranks, and every rank uses the same views.
    """

    def __init__(
        self,
        num_blocks: int,
        layout: KvLayout,
        *,
        policy: PolicyName | EvictionPolicy = "lru",
        duplicates: DuplicatePolicyName = "allow",
        prefix_caching: bool = True,
        dp_rank: int = 0,
        events: bool = False,
        event_capacity: int | None = None,
        event_token_ids: bool = False,
    ) -> None:
        if count("num_blocks", num_blocks, 1, ConfigError) < 2:
            raise ConfigError(f"num_blocks must be at least 2 (one is padding), got {num_blocks!r}")
        if not isinstance(layout, KvLayout):
            raise ConfigError(f"layout must be a KvLayout, got {layout!r}")
        self.layout = layout
        self.prefix_caching = prefix_caching
        self.blocks = BlockManager(
            num_blocks,
            block_size=layout.page_size,
            policy=policy,
            duplicates=duplicates,
            reset_on_release=not prefix_caching,
            tier=Tier.G1,
            dp_rank=dp_rank,
            events=events,
            event_capacity=event_capacity,
            event_token_ids=event_token_ids,
        )
        self._padding = self.blocks.allocate(1)
        self._padding_block = int(self._padding.ids[0])
        self._freed = FreedBlocks()
        self._queue = AdmissionQueue(self._freed)

    @property
    def padding_block(self) -> int:
        """Block that padding rows write to; constant for the manager's lifetime."""
        return self._padding_block

    @property
    def total_blocks(self) -> int:
        """Number of blocks, including the padding block."""
        return self.blocks.num_blocks

    @property
    def max_request_blocks(self) -> int:
        """Most blocks that one request can use."""
        return self.total_blocks - 1

    @property
    def available_blocks(self) -> int:
        """Blocks that can be allocated now, including cached blocks that would be evicted."""
        return self.blocks.available

    def request(
        self,
        prompt: Sequence[int] | npt.NDArray[np.integer],
        max_output_tokens: int,
        *,
        salt: str = "",
        lora: str = "",
        mm_runs: Sequence[tuple[int, int, int]] = (),
    ) -> RequestKv:
        """Create a request. It has no blocks until it matches a prefix or schedules a step.

        WrongState after close(), which releases the padding block.
        """
        if self._padding.released:
            raise WrongState("this KvCacheManager is closed; create requests before close()")
        kv = RequestKv(
            self.blocks,
            prompt,
            max_output_tokens,
            salt=salt,
            lora=lora,
            mm_runs=mm_runs,
            prefix_caching=self.prefix_caching,
        )
        kv.freed = self._freed
        return kv

    # ── Admission ──

    def lifetime_blocks(self, prompt_tokens: int, max_output_tokens: int) -> int:
        """Return the most blocks that a request allocates; cache hits reduce the number."""
        return lifetime_blocks(prompt_tokens, max_output_tokens, self.layout.page_size)

    def can_ever_fit(self, prompt_tokens: int, max_output_tokens: int) -> bool:
        """Whether the request fits into an empty pool; if not, reject it, because it would wait forever."""
        return self.lifetime_blocks(prompt_tokens, max_output_tokens) <= self.max_request_blocks

    def future_blocks(self, active: Iterable[RequestKv]) -> int:
        """Return the most blocks that the active requests may still allocate; closed requests count 0."""
        return sum(
            self.lifetime_blocks(kv.prompt_tokens, kv.max_output_tokens) - kv.held_blocks
            for kv in active
            if kv.state != "closed"
        )

    def can_admit(self, prompt_tokens: int, max_output_tokens: int, active: Iterable[RequestKv]) -> bool:
        """Whether the request and all active ones can run to their ends without running out of blocks."""
        needed = self.lifetime_blocks(prompt_tokens, max_output_tokens)
        return needed <= self.available_blocks - self.future_blocks(active)

    async def admit(
        self,
        prompt: Sequence[int] | npt.NDArray[np.integer],
        max_output_tokens: int,
        *,
        salt: str = "",
        lora: str = "",
        mm_runs: Sequence[tuple[int, int, int]] = (),
    ) -> RequestKv:
        """Wait until a request and all that were admitted here can run to their ends, then create it.

        Requests are admitted in the order of the calls. Admit all requests of a manager this way, from one event loop.
        CapacityExhausted at once if it would not fit into an empty pool.
        """
        if not self.can_ever_fit(len(prompt), max_output_tokens):
            raise CapacityExhausted(
                f"a request of {len(prompt)} + {max_output_tokens} tokens never fits into {self.max_request_blocks} "
                "blocks; reject it"
            )
        return await self._queue.admit(
            lambda active: self.can_admit(len(prompt), max_output_tokens, active),
            lambda: self.request(prompt, max_output_tokens, salt=salt, lora=lora, mm_runs=mm_runs),
        )

    @property
    def admitted(self) -> list[RequestKv]:
        """Requests that `admit` created and that are not closed."""
        return self._queue.admitted

    def on_freed(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` whenever a request of this manager is closed or preempted; return what ends that.

        It is called in the thread of that call, after the blocks are free.
        """
        return self._freed.subscribe(listener)

    def __repr__(self) -> str:
        return (
            f"<KvCacheManager: {self.max_request_blocks:,} blocks of {self.layout.page_size} tokens, "
            f"{self.available_blocks:,} available>"
        )

    def close(self) -> None:
        """Release the padding block. Idempotent; requests stay valid."""
        self._padding.release()

    def __enter__(self) -> KvCacheManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
