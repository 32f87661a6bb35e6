"""A slow, obvious request: token lists, block lists, and every rule spelled out, on the model of the block manager."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from understudy.errors import CapacityExhausted, InvalidArgument, WrongState
from understudy.tokens import Identity, TokenBlocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model.block_manager import BlockManager

State = Literal["idle", "prefill_scheduled", "decode_scheduled", "speculative_scheduled", "closed"]
Prefix = tuple[str, str, tuple[int, ...]]  # salt, adapter, every token up to the end of the block


class Names:
    """The identity of every token prefix. Equal prefixes have one, different ones never the same."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.by_prefix: dict[Prefix, Identity] = {}
        self.by_lineage: dict[int, Prefix] = {}

    def of(self, tokens: Sequence[int], salt: str, lora: str) -> list[Identity]:
        """Of every complete block."""
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        prefixes = [(salt, lora, tuple(tokens[:end])) for end in ends]
        if any(prefix not in self.by_prefix for prefix in prefixes):
            whole = TokenBlocks(tokens, self.block_size, salt=salt, lora=lora).identities
            for prefix, identity in zip(prefixes, whole, strict=True):
                assert self.by_prefix.setdefault(prefix, identity) == identity
                assert self.by_lineage.setdefault(identity.lineage_hash, prefix) == prefix
        return [self.by_prefix[prefix] for prefix in prefixes]


class RequestKv:
    """What `understudy.kv.RequestKv` must do, errors included."""

    def __init__(
        self,
        pool: BlockManager,
        names: Names,
        prompt: Sequence[int],
        max_output: int,
        *,
        salt: str = "",
        lora: str = "",
        caching: bool = True,
    ) -> None:
        self.pool, self.names = pool, names
        self.salt, self.lora, self.caching = salt, lora, caching
        self.tokens = list(prompt)
        self.prompt = len(prompt)
        self.target = len(prompt)
        self.max_output = max_output
        self.state: State = "idle"
        self.computed = 0
        self.cached = 0
        self.registered = 0
        self.scheduled = 0
        self.taken = 0
        self.ahead = 0  # blocks that the decode behind the scheduled one will write
        self.blocks: list[int] = []

    # ── Schedule ──

    def match_prefix(self) -> int:
        self.need("idle")
        if self.computed or self.blocks:
            raise WrongState
        if not self.caching:
            return 0
        self.blocks = self.pool.match_prefix(self.identities()[: (self.target - 1) // self.names.block_size])
        self.registered = len(self.blocks)
        self.computed = self.cached = len(self.blocks) * self.names.block_size
        return self.cached

    def schedule_prefill(self, tokens: int) -> None:
        self.need("idle")
        if self.computed >= self.target:
            raise WrongState
        if not 1 <= tokens <= self.target - self.computed:
            raise InvalidArgument
        self.begin("prefill_scheduled", tokens)

    def schedule_decode(self) -> None:
        self.need_decodable()
        self.begin("decode_scheduled", 1)

    def schedule_speculative(self, tokens: int) -> int:
        self.need_decodable()
        if tokens < 1:
            raise InvalidArgument
        self.begin("speculative_scheduled", min(tokens, self.max_output - self.generated))
        return self.scheduled

    def begin(self, state: State, tokens: int) -> None:
        missing = self.pages(self.computed + tokens) - len(self.blocks)
        if missing > self.pool.available():
            raise CapacityExhausted
        fresh, _ = self.pool.allocate(missing)
        self.blocks += fresh
        self.state, self.scheduled, self.taken = state, tokens, missing + self.ahead
        self.ahead = 0

    def schedule_ahead(self) -> list[int] | None:
        self.need("decode_scheduled")
        if self.generated + 1 >= self.max_output:
            return None
        missing = self.pages(self.computed + 2) - len(self.blocks)
        if missing > self.pool.available():
            raise CapacityExhausted
        fresh, _ = self.pool.allocate(missing)
        self.blocks += fresh
        self.ahead += missing
        return self.blocks

    def revert(self) -> None:
        if self.state in ("idle", "closed"):
            raise WrongState
        self.keep_only(len(self.blocks) - self.taken - self.ahead)
        self.state, self.scheduled, self.taken, self.ahead = "idle", 0, 0, 0

    # ── Apply ──

    def apply_prefill(self, token: int | None) -> tuple[int, bool]:
        self.need("prefill_scheduled")
        samples = self.computed + self.scheduled == self.target and self.generated < self.max_output
        if samples != (token is not None):
            raise InvalidArgument
        return self.apply(self.scheduled, [] if token is None else [token])

    def apply_decode(self, token: int) -> tuple[int, bool]:
        self.need("decode_scheduled")
        return self.apply(1, [token])

    def apply_speculative(self, accepted: Sequence[int]) -> tuple[int, bool]:
        self.need("speculative_scheduled")
        if len(accepted) > self.scheduled:
            raise InvalidArgument
        return self.apply(len(accepted), accepted)

    def apply(self, rows: int, sampled: Sequence[int]) -> tuple[int, bool]:
        """Blocks registered, and whether the request is at its end."""
        self.computed += rows
        self.tokens += sampled
        before = self.registered
        if self.caching:
            full = self.computed // self.names.block_size
            fresh = self.blocks[before:full]
            self.pool.stage(fresh, self.identities()[before:full])
            self.blocks[before:full] = self.pool.register(fresh)
            self.registered = full
        self.keep_only(self.pages(self.computed) + self.ahead)
        self.state, self.scheduled, self.taken = "idle", 0, 0
        return self.registered - before, self.finished

    # ── Let go ──

    def preempt(self) -> None:
        self.need("idle")
        spent = 0 < self.max_output <= self.generated
        self.keep_only(0)
        self.computed = self.cached = self.registered = self.ahead = 0
        self.target = len(self.tokens) - spent  # the last token of the budget is never fed

    def close(self) -> None:
        self.keep_only(0)
        self.state, self.scheduled, self.taken, self.ahead, self.registered = "closed", 0, 0, 0, 0

    # ── Parts ──

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt

    @property
    def finished(self) -> bool:
        return self.generated >= self.max_output and self.computed >= self.target

    def identities(self) -> list[Identity]:
        return self.names.of(self.tokens, self.salt, self.lora)

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.names.block_size)

    def keep_only(self, count: int) -> None:
        """Give the blocks behind the first `count` back, the last one first."""
        self.pool.release(self.blocks[count:][::-1])
        del self.blocks[count:]

    def need(self, state: State) -> None:
        if self.state != state:
            raise WrongState

    def need_decodable(self) -> None:
        self.need("idle")
        if self.computed < self.target or self.generated >= self.max_output:
            raise WrongState
