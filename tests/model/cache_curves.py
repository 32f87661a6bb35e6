"""Caches of one size, request by request, over blocks named by all their tokens: slow, and written without the core."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.workload import Workload

Token = int | tuple[int, int]
Block = tuple[Token, ...]  # all tokens up to its end


class Request(NamedTuple):
    """Blocks of a request, first to last, of which it may read the first `readable`."""

    blocks: list[Block]
    readable: int
    prompt_tokens: int

    def hit_tokens(self, found: int, block_size: int) -> int:
        """Prompt tokens in the first `found` blocks."""
        return min(found * block_size, self.prompt_tokens)


def requests_of(workload: Workload, block_size: int, *, prompts_only: bool) -> list[Request]:
    """List the blocks of every row, as vLLM holds them or as a prompt-only simulator does."""
    out = []
    for row in range(len(workload)):
        prompt, output = int(workload.prompt_tokens[row]), int(workload.cut_output_tokens[row])
        ids = workload.prompt_hash_ids(row).tolist()
        tokens: list[Token] = [each for each in ids for _ in range(workload.trace_block_size)]
        if prompts_only:
            held = readable = -(-prompt // block_size)
            readable = min(readable, len(tokens) // block_size)
        else:
            computed = prompt + max(output - 1, 0)
            held, readable = computed // block_size, (prompt - 1) // block_size
            known = workload.known_output_tokens(row)
            tokens = tokens[:prompt] + ([] if known is None else known.tolist())
        tokens = tokens[: held * block_size]
        tokens += [(row, place) for place in range(len(tokens), held * block_size)]
        blocks = [tuple(tokens[: (i + 1) * block_size]) for i in range(held)]
        out.append(Request(blocks, readable, prompt))
    return out


def lru(requests: Sequence[Request], block_size: int, size: int, warm_up: int = 0) -> int:
    """Hit tokens of an LRU cache whose blocks are touched from the last to the first of each request."""
    stack: list[Block] = []  # most recent last
    hits = 0
    for number, request in enumerate(requests):
        cached = set(stack[max(len(stack) - size, 0) :])
        found = _prefix(request, cached)
        if number >= warm_up:
            hits += request.hit_tokens(found, block_size)
        for block in reversed(request.blocks):
            if block in stack:
                stack.remove(block)
            stack.append(block)
    return hits


def fifo(requests: Sequence[Request], block_size: int, size: int, warm_up: int = 0) -> int:
    """Hit tokens of a FIFO cache that stores missing blocks from the first to the last of each request."""
    queue: list[Block] = []
    hits = 0
    for number, request in enumerate(requests):
        found = _prefix(request, set(queue))
        if number >= warm_up:
            hits += request.hit_tokens(found, block_size)
        for block in request.blocks:
            if block not in queue:
                queue.append(block)
                del queue[: max(len(queue) - size, 0)]
    return hits


def optimal(requests: Sequence[Request], block_size: int, size: int, warm_up: int = 0) -> int:
    """Hit tokens of Belady's rule with bypass: keep the `size` blocks that are read soonest."""
    cached: set[Block] = set()
    hits = 0
    for number, request in enumerate(requests):
        found = _prefix(request, cached)
        if number >= warm_up:
            hits += request.hit_tokens(found, block_size)
        uses = {
            block: use
            for block in cached.union(request.blocks)
            if (use := _next_use(requests, number, block))
        }
        cached = set(sorted(uses, key=uses.__getitem__)[:size])
    return hits


def pinned_optimal(requests: Sequence[Request], block_size: int, order: Sequence[int], size: int) -> int:
    """Hit tokens of Belady's rule where running requests hold their blocks; `order` as in the core."""
    begun = [row for row in order if row >= 0]
    served = [requests[row] for row in begun]
    cached: list[Block] = []
    holds: dict[int, list[Block]] = {}
    hits = number = 0
    for event in order:
        if event < 0:
            del holds[~event]
            continue
        request = requests[event]
        hits += request.hit_tokens(_prefix(request, set(cached)), block_size)
        held = holds[event] = [block for block in request.blocks if block in cached]
        for block in request.blocks:
            if block in cached:
                continue
            pinned = {each for blocks in holds.values() for each in blocks}
            if len(cached) == size:
                free = [each for each in cached if each not in pinned]
                if not free:
                    continue
                never = (len(requests), 0)
                cached.remove(max(free, key=lambda each: _next_use(served, number, each) or never))
            cached.append(block)
            held.append(block)
        number += 1
    return hits


def _prefix(request: Request, cached: set[Block]) -> int:
    found = 0
    while found < request.readable and request.blocks[found] in cached:
        found += 1
    return found


def _next_use(requests: Sequence[Request], after: int, block: Block) -> tuple[int, int] | None:
    """Return (request, position) of the next read."""
    for number in range(after + 1, len(requests)):
        request = requests[number]
        if block in request.blocks[: request.readable]:
            return number, request.blocks.index(block)
    return None
