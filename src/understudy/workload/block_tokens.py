"""Synthesize token ids for traces without them; equal trace ids give equal tokens, so shared prefixes stay shared.

A replay names a block by the runs of trace ids that it covers. Here the tokens of a trace block are its id, repeated
(as `Workload` defines content); a block of outputs, known only to its request, has tokens sampled from its hash.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from understudy._core import salt_hash, xxh3_64
from understudy.events.events import Stored

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from understudy.events.events import Removed
    from understudy.workload import Workload


class TokenSource:
    """Look up or synthesize the tokens of a replayed workload's blocks by local hash."""

    def __init__(self, workload: Workload, block_size: int) -> None:
        self._size = block_size
        self._runs: dict[int, tuple[tuple[int, int], ...]] = {}  # runs (id, length) by local hash
        if workload.trace_block_size % block_size == 0 and workload.output_token_ids is None:
            for each in np.unique(workload.hash_ids).tolist():  # each block is inside one trace block
                self._add(((each, block_size),))
        else:
            for row in range(len(workload.arrival_ns)):
                self._add_row(workload, row)

    def _add_row(self, workload: Workload, row: int) -> None:
        first, last = workload.hash_offsets[row : row + 2].tolist()
        ids = np.repeat(workload.hash_ids[first:last], workload.trace_block_size)[
            : workload.prompt_tokens[row]
        ]
        if workload.output_token_ids is not None and workload.output_token_offsets is not None:
            first, last = workload.output_token_offsets[row : row + 2].tolist()
            ids = np.concatenate([ids, workload.output_token_ids[first:last]])
        for at in range(0, len(ids) - self._size + 1, self._size):
            block = ids[at : at + self._size].tolist()
            self._add(tuple((each, len(list(group))) for each, group in groupby(block)))

    def _add(self, runs: tuple[tuple[int, int], ...]) -> None:
        self._runs[xxh3_64(np.array(runs, np.uint64).tobytes(), salt_hash())] = runs

    def get_tokens(self, local_hash: int) -> tuple[int, ...]:
        """Return the tokens of the block with that local hash."""
        runs = self._runs.get(local_hash)
        if runs is None:
            return tuple(
                np.random.default_rng(local_hash).integers(0, 1 << 32, self._size, np.uint32).tolist()
            )
        return tuple(each for each, length in runs for _ in range(length))

    def add_tokens(
        self, events: Iterable[tuple[int, Stored | Removed]]
    ) -> Iterator[tuple[int, Stored | Removed]]:
        """Yield the events with token ids of stored blocks, and local hashes of those tokens."""
        known: dict[int, tuple[int, tuple[int, ...]]] = {}
        for time_ns, event in events:
            if not isinstance(event, Stored):
                yield time_ns, event
                continue
            blocks = []
            for block in event.blocks:
                if block.local_hash is None:
                    blocks.append(block)
                    continue
                if block.local_hash not in known:
                    tokens = self.get_tokens(block.local_hash)
                    data = np.asarray(tokens, np.uint32).tobytes()
                    known[block.local_hash] = xxh3_64(data, salt_hash()), tokens
                local, tokens = known[block.local_hash]
                blocks.append(msgspec.structs.replace(block, local_hash=local, token_ids=tokens))
            yield time_ns, msgspec.structs.replace(event, blocks=tuple(blocks))
