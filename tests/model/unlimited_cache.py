"""What a prefix cache without limits would hit: a trie of token blocks, filled request by request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from understudy.workload import Workload

Token = int | tuple[str, int, int]


class UnlimitedCache:
    """Every block that was ever computed, by its content and that of all blocks before it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._children: dict[tuple[int, tuple[Token, ...]], int] = {}

    def hit_tokens(self, prompt: list[Token]) -> int:
        """Tokens of the prompt that are cached; at least one is left to compute."""
        blocks = 0
        for node in self._walk(prompt[:-1]):
            if node is None:
                break
            blocks += 1
        return blocks * self.block_size

    def insert(self, tokens: list[Token]) -> None:
        """Cache all full blocks of `tokens`."""
        parent = 0
        for block in self._blocks(tokens):
            parent = self._children.setdefault((parent, block), len(self._children) + 1)

    def _walk(self, tokens: list[Token]) -> list[int | None]:
        nodes: list[int | None] = []
        parent: int | None = 0
        for block in self._blocks(tokens):
            parent = None if parent is None else self._children.get((parent, block))
            nodes.append(parent)
        return nodes

    def _blocks(self, tokens: list[Token]) -> list[tuple[Token, ...]]:
        size = self.block_size
        return [tuple(tokens[at : at + size]) for at in range(0, len(tokens) - size + 1, size)]


def prompt_of(workload: Workload, row: int) -> list[Token]:
    """The prompt's tokens: each hash id stands for a block of copies of itself."""
    size = workload.trace_block_size
    ids = workload.prompt_hash_ids(row).tolist()
    return [ids[position // size] for position in range(int(workload.prompt_tokens[row]))]


def output_of(workload: Workload, row: int) -> list[Token]:
    """The output's tokens: those that the source knows, else ones that nobody else has."""
    known = workload.known_output_tokens(row)
    if known is not None:
        return list(known.tolist())
    return [("output", row, position) for position in range(int(workload.output_tokens[row]))]


def hits_one_after_another(
    workload: Workload, order: list[int], workers: list[int], block_size: int
) -> list[int]:
    """Cached prompt tokens of every row when each request, in that order, ends before the next begins.

    The last output token of a request is never computed, so never cached.
    """
    caches: dict[int, UnlimitedCache] = {}
    hits = [0] * len(workload)
    for row in order:
        cache = caches.setdefault(workers[row], UnlimitedCache(block_size))
        prompt = prompt_of(workload, row)
        hits[row] = cache.hit_tokens(prompt)
        cache.insert(prompt + output_of(workload, row)[:-1])
    return hits
