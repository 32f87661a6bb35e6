"""The KV cache of an engine: one pool of blocks that serves every request and every tensor-parallel rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy._core import BlockManager, Tier, lifetime_blocks
from understudy.errors import ConfigError, WrongState
from understudy.kv.counts import count
from understudy.kv.layout import KvLayout
from understudy.kv.request import RequestKv

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    import numpy.typing as npt

    from understudy._core import DuplicatePolicyName, PolicyName
    from understudy.kv.policy import EvictionPolicy


class KvCacheManager:
    """Pool, layout and admission. Logical only: block ids are page indices into buffers that the engine owns.

    One block is padding for the rows that fill up a CUDA graph's batch; no request ever gets it. One manager decides
    for all ranks, and every rank receives the same views.
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

    @property
    def padding_block(self) -> int:
        """The block that padded rows write to. Stable for the manager's life."""
        return self._padding_block

    @property
    def total_blocks(self) -> int:
        """All blocks, padding included."""
        return self.blocks.num_blocks

    @property
    def max_request_blocks(self) -> int:
        """The most that one request can ever hold."""
        return self.total_blocks - 1

    @property
    def available_blocks(self) -> int:
        """Blocks that a schedule can get now, cached ones included."""
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
        """A fresh request. It holds nothing until it matches a prefix or schedules a step.

        WrongState once the manager is closed: the padding block is not its own any more.
        """
        if self._padding.released:
            raise WrongState("this KvCacheManager is closed; make requests before close()")
        return RequestKv(
            self.blocks,
            prompt,
            max_output_tokens,
            salt=salt,
            lora=lora,
            mm_runs=mm_runs,
            prefix_caching=self.prefix_caching,
        )

    # ── Admission ──

    def lifetime_blocks(self, prompt_tokens: int, max_output_tokens: int) -> int:
        """Blocks that a request draws at its peak, at most; cache hits only ever make it fewer."""
        return lifetime_blocks(prompt_tokens, max_output_tokens, self.layout.page_size)

    def can_ever_fit(self, prompt_tokens: int, max_output_tokens: int) -> bool:
        """Whether the request fits into an empty pool. If not, reject it: it would wait for ever."""
        return self.lifetime_blocks(prompt_tokens, max_output_tokens) <= self.max_request_blocks

    def future_blocks(self, active: Iterable[RequestKv]) -> int:
        """Blocks that the active requests may still draw before they end; a closed one draws none."""
        return sum(
            self.lifetime_blocks(kv.prompt_tokens, kv.max_output_tokens) - kv.held_blocks
            for kv in active
            if kv.state != "closed"
        )

    def can_admit(self, prompt_tokens: int, max_output_tokens: int, active: Iterable[RequestKv]) -> bool:
        """Whether the request can run to its end now, and every active one too, without running out of blocks."""
        needed = self.lifetime_blocks(prompt_tokens, max_output_tokens)
        return needed <= self.available_blocks - self.future_blocks(active)

    def close(self) -> None:
        """Give the padding block back. Idempotent; requests stay valid."""
        self._padding.release()

    def __enter__(self) -> KvCacheManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
