"""A slow model of vLLM's native host offload with several KV cache groups: lookups, loads, stores and evictions.

The model reads from the lines of a run what the scheduler did: lookups with their local hits, scheduled, preempted and
finished requests, finished jobs. It computes the rest of the host's part of each line. Blocks that are handed out
again before their chunk is stored, or that another request hits, are not modelled. So one request runs at a time, only
prompts are stored, and a window covers more than a chunk (`model_scenario`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from .vllm_host import Access, Arc, Chunk, HostTier, Lru, RequestArc

Line = dict[str, Any]
Key = tuple[tuple[int, ...], int]
"""Tokens up to the end of a chunk, and its group."""


@dataclass(frozen=True)
class Group:
    """A KV cache group; `window` is the number of chunks that a load needs, None for full attention."""

    kind: str
    block: int
    chunk: int
    reach: int
    window: int | None

    def skipped(self, tokens: int) -> int:
        """Leading tokens that a token behind `tokens` tokens does not read."""
        if self.kind.startswith("sliding"):
            return max(0, tokens - self.reach + 1)
        return tokens // self.reach * self.reach if self.kind == "chunked_local" else 0

    def needs(self, tokens: int) -> int:
        """Chunks of the window that ends at `tokens`."""
        assert self.window is not None
        if not self.kind.startswith("sliding"):
            return self.window
        return max(self.window, math.ceil((self.reach - 1 + -tokens % self.chunk) / self.chunk))


@dataclass(eq=False)
class Seen(Access):
    """Uses of chunks by one request, with its number among those that used some."""

    rank: int = 0

    def in_order(self) -> list[Any]:
        """Return chunks by end, and of one end by group."""
        return sorted(self.seen, key=lambda key: (len(key[0]), key[1]))


class RequestRanks(Lru):
    """0.33: chunks of one request share a number, the last of them first, until it ends."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.ranks: dict[Any, tuple[int, int, int]] = {}
        self.numbers = 0

    def rank_for(self, key: Any, access: Seen) -> tuple[int, int, int]:
        """Return the rank of a chunk that a request uses; of one end the first group is evicted first."""
        if not access.rank:
            self.numbers += 1
            access.rank = self.numbers
        return access.rank, -len(key[0]), key[1]

    def ended(self, access: Access) -> None:
        """Give every chunk of a request a number of its own, the last of them first."""
        for key in reversed(access.in_order()):
            if key in self.chunks:
                self.numbers += 1
                self.ranks[key] = (self.numbers, 0, 0)

    def oldest(self) -> list[Any]:
        """Return idle chunks, the next victim first."""
        return sorted(self.idle, key=self.ranks.__getitem__)

    def remove(self, key: Any) -> None:
        """Forget a chunk."""
        super().remove(key)
        del self.ranks[key]


class GroupHost(HostTier):
    """A host whose chunks are those of all groups."""

    def __init__(self, capacity: int, policy: str) -> None:
        super().__init__(capacity, policy, touches=False, arc_falls_back=True)
        self.policy = RequestRanks(capacity) if policy == "lru" else RequestArc(capacity)
        if isinstance(self.policy, Arc):
            self.policy.falls_back = True

    def use(self, keys: list[Key], access: Seen) -> None:
        """Rank chunks that the request uses for the first time; call before they are stored or loaded."""
        if not isinstance(self.policy, RequestRanks):
            return
        new = [key for key in keys if key not in access.seen]
        present = [key for key in new if (chunk := self.get(key)) is None or chunk.ready]
        for key in present:
            rank = self.policy.rank_for(key, access)
            if key in self.policy.chunks and self.policy.ranks[key] < rank:
                self.policy.ranks[key] = rank

    def store(self, keys: list[Key], access: Seen) -> list[tuple[Key, int]] | None:
        """Return the absent chunks with their slots; None: no room."""
        self.use(keys, access)
        stored = self.prepare_store(keys, 0, access)
        for key, _ in stored or ():
            if isinstance(self.policy, RequestRanks):
                self.policy.ranks[key] = self.policy.rank_for(key, access)
        return stored  # type: ignore[return-value]

    def load(self, keys: list[Key], access: Seen) -> list[int]:
        """Return the chunks' slots, which stay until the load ends."""
        self.use(keys, access)
        return self.prepare_load(keys, 0, access)

    def chunk(self, key: Key) -> Chunk | None:
        """Return the chunk, if it is here."""
        return self.get(key)


@dataclass(eq=False)
class Request:
    """A request as the connector knows it."""

    name: str
    tokens: tuple[int, ...]  # prompt and all outputs
    prompt: int
    order: tuple[float, int]
    known: int = 0
    computed: int = 0
    nulls: list[int] = field(default_factory=list)  # leading null blocks, by group
    next_stored: list[int] = field(default_factory=list)
    access: Seen = field(default_factory=Seen)
    jobs: set[int] = field(default_factory=set)


class GroupOffloadModel:
    """The connector. Feed it the lines of a run in order; `predict` returns its part of each."""

    def __init__(self, config: Line, offload: Line) -> None:
        self.per_chunk: int = offload["blocks_per_chunk"]
        self.prompt_only: bool = offload["offload_prompt_only"]
        self.groups = [_group(group, self.per_chunk) for group in config["groups"]]
        self.full = [g for g, group in enumerate(self.groups) if group.window is None]
        windows = [g for g, group in enumerate(self.groups) if group.window is not None]
        self.windows = sorted(windows, key=lambda g: -(self.groups[g].window or 0))
        chunks = {self.groups[g].chunk for g in self.full} or {max(group.chunk for group in self.groups)}
        self.alignment = chunks.pop() if len(chunks) == 1 else 0
        self.host = GroupHost(offload["host_chunks"], offload["eviction_policy"])
        self.jobs: dict[int, tuple[Request, list[Key], bool]] = {}
        self.next_job = 0
        self.loading: set[Key] = set()
        self.ended: list[Request] = []

    # ── Lookup ──

    def key(self, request: Request, g: int, index: int) -> Key:
        """Return the name of a chunk."""
        return request.tokens[: (index + 1) * self.groups[g].chunk], g

    def look_up(self, request: Request, local: int) -> int | None:
        """Return the tokens that all groups can load behind the local ones; None: ask again."""
        request.next_stored = [0] * len(self.groups)
        if request.jobs:
            return None
        found = self._converge(request, local)
        if found and self._overlaps_a_load(request, local, local + found):
            return None
        return found

    def _converge(self, request: Request, local: int) -> int | None:
        bound = request.known - bool(self.windows)
        everything = self.full + self.windows
        groups, hit, deferred = everything, 0, False
        while groups:
            again: list[int] = []
            saw_window = False
            for g in groups:
                group = self.groups[g]
                keys = request.known // group.chunk
                bound = min(bound, keys * group.chunk)
                if bound - local < group.chunk:
                    return 0
                first, end = local // group.chunk, min(math.ceil(bound / group.chunk), keys)
                found = self._find(request, g, first, end, bound)
                if found == 0:
                    return 0
                if found is None:
                    deferred = True
                else:
                    bound = min(bound, group.chunk * (first + found))
                if bound - local < group.chunk:
                    return 0
                if bound - local < hit:
                    if deferred:
                        deferred, again = False, everything
                    elif saw_window and not again:
                        again = self.windows
                saw_window |= group.window is not None
                hit = bound - local
            groups = again
        return None if deferred else hit

    def _find(self, request: Request, g: int, first: int, end: int, bound: int) -> int | None:
        states = [self.host.chunk(self.key(request, g, index)) for index in range(first, end)]
        group = self.groups[g]
        if group.window is None:
            run = next((n for n, chunk in enumerate(states) if chunk is None), len(states))
            return run if all(chunk.ready for chunk in states[:run] if chunk is not None) else None
        need, run, pending = group.needs(min(bound, end * group.chunk)), 0, False
        for place in reversed(range(len(states))):
            chunk = states[place]
            if chunk is None:
                need, run, pending = group.window, 0, False
                continue
            run += 1
            pending |= not chunk.ready
            if run == need:
                return None if pending else place + need
        return None if pending else run

    def _overlaps_a_load(self, request: Request, local: int, total: int) -> bool:
        for g, group in enumerate(self.groups):
            first, end = local // group.chunk, math.ceil(total / group.chunk)
            if group.window is not None:
                first = max(first, end - group.needs(total))
            if any(self.key(request, g, index) in self.loading for index in range(first, end)):
                return True
        return False

    # ── Transfers ──

    def _add_job(self, request: Request, keys: list[Key], slots: list[int], *, is_store: bool) -> Line:
        number, self.next_job = self.next_job, self.next_job + 1
        self.jobs[number] = (request, keys, is_store)
        request.jobs.add(number)
        return {
            "job": number,
            "req": request.name,
            "chunks": [len(tokens) // self.groups[g].chunk - 1 for tokens, g in keys],
            "groups": [g for _, g in keys],
            "host": slots,
        }

    def load(self, request: Request, local: int, total: int) -> Line:
        """Load what the blocks of the request read, up to `total` tokens."""
        keys: list[Key] = []
        for g, group in enumerate(self.groups):
            end = math.ceil(total / group.block)
            first = max(math.ceil(local / group.block), group.skipped(total) // group.block)
            chunks = math.ceil(total / group.chunk)
            if first < end:
                keys += [self.key(request, g, index) for index in range(first // self.per_chunk, chunks)]
            request.next_stored[g] = chunks
        self.loading.update(keys)
        return self._add_job(request, keys, self.host.load(keys, request.access), is_store=False)

    def store(self, request: Request, after: int, *, finished: bool) -> Line | str | None:
        """Store the chunks that are complete and worth it; returns the job, or the name of a refused request."""
        tokens = min(after, request.known)
        if self.prompt_only:
            tokens = min(tokens, request.prompt)
        ends = [tokens // group.chunk for group in self.groups]
        keys = [
            self.key(request, g, index)
            for g in range(len(self.groups))
            for index in range(request.next_stored[g], ends[g])
            if self._is_worth_storing(request, g, index, ends[g], finished=finished)
        ]
        stored = self.host.store(keys, request.access) if keys else []
        if stored is None:
            return request.name
        request.next_stored = [max(pair) for pair in zip(request.next_stored, ends, strict=True)]
        if not stored:
            return None
        return self._add_job(request, [key for key, _ in stored], [slot for _, slot in stored], is_store=True)

    def _is_worth_storing(self, request: Request, g: int, index: int, end: int, *, finished: bool) -> bool:
        blocks = range(index * self.per_chunk, (index + 1) * self.per_chunk)
        horizon = request.prompt // self.groups[g].chunk
        if finished:
            horizon = end
        elif end > horizon:
            horizon = -1
        kept = [self._is_reachable(g, block, horizon * self.per_chunk) for block in blocks]
        null = [block < request.nulls[g] for block in blocks]
        return any(kept) and not null[-1] and not any(k and n for k, n in zip(kept, null, strict=True))

    def _is_reachable(self, g: int, block: int, horizon: int) -> bool:
        group = self.groups[g]
        if not group.kind.startswith("sliding") or not self.alignment or self.alignment % group.block:
            return True
        need = math.ceil((group.reach - 1) / group.block)
        segment = self.alignment // group.block
        if need >= segment or block % segment >= segment - need:
            return True
        return horizon // segment * segment <= block < horizon and block >= horizon - need

    def finish_jobs(self, numbers: list[int]) -> None:
        """End transfers, in order."""
        for number in numbers:
            request, keys, is_store = self.jobs.pop(number)
            request.jobs.remove(number)
            if is_store:
                self.host.store_done(keys)
            else:
                self.host.load_done(keys)
                self.loading.difference_update(keys)


def _group(group: Line, per_chunk: int) -> Group:
    kind, block = group["kind"], group["block_size"]
    chunk = block * per_chunk
    reach = group.get("window") or group.get("chunk") or 0
    limited = kind.startswith("sliding") or kind == "chunked_local"
    return Group(kind, block, chunk, reach, math.ceil(reach / chunk) if limited else None)
