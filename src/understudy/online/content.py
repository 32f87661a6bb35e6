"""Prompts and answers of an online replay, with the workload's tokens and lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.server.outputs import Answer, Outputs

if TYPE_CHECKING:
    import numpy.typing as npt

    from understudy.workload import Workload

_VOCABULARY = 200_000
_MIX = np.uint64(0x9E3779B97F4A7C15)


class TrueOutputs(Outputs):
    """Answers as the workload has them: they end where it says, and say what the next turn quotes.

    The seed of a request is its row.
    """

    def __init__(self, outputs: Outputs, workload: Workload) -> None:
        self.__dict__.update(outputs.__dict__)
        self._workload = workload

    def answer(
        self, prompt: npt.NDArray[np.uint32], limit: int, *, seed: int | None = None, **how: Any
    ) -> Answer:
        """Generate an answer (see `Outputs`)."""
        answer = super().answer(prompt, limit, seed=seed, **how)
        if seed is None:
            return answer
        if limit_of(self._workload, seed) is not None:
            length = max(int(self._workload.output_tokens[seed]), 1)
            answer = Answer(answer.tokens[:length], length <= limit, limit)
        if self._workload.output_in_next is None or not self._workload.output_in_next[seed]:
            return answer
        quoted = prompt_of(self._workload, int(self._workload.next_turn[seed]))[len(prompt) :]
        return Answer(quoted[: len(answer.tokens)].astype(np.uint32), answer.stops, answer.room)


def limit_of(workload: Workload, row: int) -> int | None:
    """Return the output limit of a row, if it has one."""
    limit = -1 if workload.max_tokens is None else int(workload.max_tokens[row])
    return None if limit < 0 or workload.output_tokens[row] == 0 else limit


def prompt_of(workload: Workload, row: int) -> npt.NDArray[np.int64]:
    """Make the token ids of a prompt: equal content hashes give equal tokens, others different ones."""
    first, last = int(workload.hash_offsets[row]), int(workload.hash_offsets[row + 1])
    size = workload.trace_block_size
    hashes = workload.hash_ids[first:last].astype(np.uint64)
    count = int(workload.prompt_tokens[row])
    keys = (hashes[:, None] << np.uint64(20)) + np.arange(size, dtype=np.uint64)[None, :]
    flat = keys.reshape(-1)[:count]
    if len(flat) < count:  # the trace names fewer blocks: what follows is the request's own
        own = (np.uint64(1) << np.uint64(60)) + (np.uint64(row) << np.uint64(24))
        flat = np.concatenate([flat, own + np.arange(count - len(flat), dtype=np.uint64)])
    with np.errstate(over="ignore"):
        mixed = (flat + np.uint64(1)) * _MIX
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(32)
    return (mixed % np.uint64(_VOCABULARY)).astype(np.int64)
