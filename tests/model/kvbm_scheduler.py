"""The scheduler model over the kvbm manager: one physical block a hash, shared, and visible once acquired."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from understudy.tokens import Identities, Identity, TokenBlocks, lineage_hash

from .kv_manager import Block, KvManager
from .vllm_config import RECORDED, Config, Profile
from .vllm_scheduler import VllmModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .vllm_format import KvEvent
    from .vllm_requests import Request


@dataclass(frozen=True)
class SharedConfig(Config):
    """The scheduler's settings with those of the KV manager, which recordings do not have."""

    kv_manager: Literal["kvbm"] = "kvbm"
    eviction_policy: Literal["lineage", "lru", "multi_lru"] | None = None


@dataclass
class Hit:
    """A leading block that is here."""

    refs: int
    phantom: bool = False


class SharedPool:
    """The slow KV manager, spoken to in tokens, with events as the golden files write them."""

    def __init__(self, config: SharedConfig) -> None:
        self.block_size = config.block_size
        self.caching = config.enable_prefix_caching
        self.kv = KvManager(config.num_blocks - 1, config.eviction_policy or "lineage")
        self.told: dict[int, tuple[int, int]] = {}  # by sequence hash: position and first token
        self.numbers: dict[int, int] = {}
        self.fresh_name = itertools.count(1)
        self.private: dict[tuple[int, int], Identity] = {}  # without caching, by request and position

    def free_count(self) -> int:
        return self.kv.available()

    def free_head(self, count: int) -> list[int]:
        return [slot + 1 for slot in self.kv.order.head(count)]

    def find(self, tokens: Sequence[int]) -> list[Hit]:
        """The blocks at the start of `tokens` that are here, always leaving at least one token."""
        found: list[Hit] = []
        if self.caching:
            for identity in self.identities(tokens)[: (len(tokens) - 1) // self.block_size]:
                entry = self.kv.entries.get(identity.lineage_hash)
                if entry is None:
                    break
                found.append(Hit(entry.references))
        return found

    def identities(self, tokens: Sequence[int]) -> list[Identity]:
        blocks = list(TokenBlocks(list(tokens), self.block_size).identities)
        for position, block in enumerate(blocks):
            self.told[block.sequence_hash] = (position, tokens[position * self.block_size])
        return blocks

    def name(self, request: Request, position: int) -> Identity:
        """A full block of the request; without caching a name of its own, the same for the request's life."""
        if self.caching:
            return self.identities(request.tokens)[position]
        key = (request.index, position)
        if key not in self.private:
            unique = lineage_hash(next(self.fresh_name) << 20, None, position)
            self.private[key] = Identities.from_lineage_hashes([unique])[0]
        return self.private[key]

    def publish(self) -> list[KvEvent]:
        """Hand over what the manager told since the last call."""
        events: list[KvEvent] = []
        told, self.kv.raw = self.kv.raw, []
        for kind, parent, hashes in told if self.caching else []:
            if kind == "removed":
                if not events or events[-1]["type"] != "removed":
                    events.append({"type": "removed", "n": 0, "h": []})
                events[-1]["h"] += [self.numbers[value] for value in hashes]
                events[-1]["n"] += len(hashes)
                continue
            position, _ = self.told[hashes[0]]
            numbers = [self.numbers.setdefault(value, len(self.numbers)) for value in hashes]
            events.append(
                {
                    "type": "stored",
                    "n": len(hashes),
                    "h": numbers,
                    "parent": None if parent is None else self.numbers[parent],
                    "pos": position * self.block_size,
                    "first_tokens": [self.told[value][1] for value in hashes],
                }
            )
        return events


class KvbmModel(VllmModel):
    """`VllmModel` where blocks are shared by hash. A request's table holds names: an Identity, or a partial's id."""

    def __init__(self, config: Mapping[str, Any], profile: Profile = RECORDED) -> None:
        settings = SharedConfig.parse(config, profile)
        assert isinstance(settings, SharedConfig)
        super().__init__(settings, profile)
        self.pool: Any = SharedPool(settings)
        self.partials = itertools.count()

    def named(self, request: Request) -> int:
        """Leading blocks that can have a name: full ones of the prompt, and of the output those with a token behind."""
        return max(request.prompt_tokens, len(request.tokens) - 1) // self.config.block_size

    def _allocate(self, request: Request, count: int, hits: list[Any], admission: bool) -> bool:
        config, pool = self.config, self.pool
        total = request.computed + len(hits) * config.block_size + count
        watermark = int(config.watermark * config.num_blocks) if admission and self.running else 0
        if admission and config.scheduler_reserve_full_isl:
            whole = max(0, self._blocks_for(len(request.tokens)) - len(hits))
            if whole + sum(hit.refs == 0 for hit in hits) + watermark > pool.free_count():
                return False
        table: list[Any] = request.table
        wanted: list[Block] = [
            pool.name(request, position) if position < self.named(request) else next(self.partials)
            for position in range(len(table), self._blocks_for(total))
        ]
        held = [
            isinstance(block, Identity)
            and block.lineage_hash in pool.kv.entries
            and pool.kv.holdings(block) > 0
            for block in wanted
        ]
        if held.count(False) + watermark > pool.free_count():
            return False
        pool.kv.acquire(wanted)
        table += wanted
        return True

    def _receive(self, request: Request) -> None:
        if self.config.async_scheduling:
            request.ahead -= 1
        table: list[Any] = request.table
        for position in range(min(self.named(request), len(table))):
            if isinstance(table[position], int):
                identity = self.pool.name(request, position)
                self.pool.kv.seal(table[position], identity)
                table[position] = identity

    def _free(self, request: Request) -> None:
        table: list[Any] = request.table
        self.pool.kv.release(table[::-1])
        request.table = []

    def check(self) -> None:
        """Assert that what requests hold is what the manager counts."""
        held: list[Any] = [block for request in self.running for block in request.table]
        assert all(not request.table for request in self.waiting)
        assert self.pool.kv.active_references() == len(held)
        assert all(self.pool.kv.holdings(block) == held.count(block) for block in held)


def model_for(config: Mapping[str, Any], profile: Profile = RECORDED) -> VllmModel:
    """The model of the KV manager that the settings name."""
    return (KvbmModel if config.get("kv_manager") == "kvbm" else VllmModel)(config, profile)
