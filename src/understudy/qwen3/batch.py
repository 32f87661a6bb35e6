"""What a step computes, as arrays that kernels read: flat tokens, their positions, and the pages of each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from understudy.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from understudy.kv import KvView


_ARRAYS = (
    "tokens",
    "positions",
    "owners",
    "page_ids",
    "page_indptr",
    "seq_lens",
    "chunk_indptr",
    "logit_rows",
)


class Chunk(NamedTuple):
    """A piece of a prompt: tokens that the step computes, the last of `view`. What is before it is in the pages."""

    tokens: npt.NDArray[np.integer]
    view: KvView


class Decode(NamedTuple):
    """One token that a request feeds, the last of `view`."""

    token: int
    view: KvView


@dataclass(slots=True)
class Batch:
    """Arrays on the device, chunks first and then decodes. Requests share pages, so `page_ids` may repeat ids.

    The kernels derive a request's length from its pages alone: `seq_lens` is the views', and positions have no other
    source. Ints beside the arrays are what a launch needs to know without asking the device.
    """

    tokens: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    owners: torch.Tensor  # [T] request of each token
    page_ids: torch.Tensor  # pages of all requests, end to end
    page_indptr: torch.Tensor  # [B + 1]
    seq_lens: torch.Tensor  # [B] after the step
    chunk_indptr: torch.Tensor  # [chunks + 1] tokens of each chunk
    logit_rows: torch.Tensor  # rows whose logits are wanted
    num_chunks: int
    chunk_tokens: int
    num_decodes: int
    longest_chunk: int
    histories: tuple[int, ...]  # of each chunk, tokens before it

    @classmethod
    def build(
        cls,
        chunks: Sequence[Chunk],
        decodes: Sequence[Decode],
        device: torch.device,
        *,
        all_logits: bool = False,
    ) -> Batch:
        """From views, in one copy to the device. InvalidArgument when a chunk is empty or longer than its view."""
        for chunk in chunks:
            if not 0 < len(chunk.tokens) <= chunk.view.seq_len:
                raise InvalidArgument(
                    f"a chunk of {len(chunk.tokens)} tokens ends a view of {chunk.view.seq_len}"
                )
        if not chunks and not decodes:
            raise InvalidArgument("a step needs at least one chunk or decode")
        views = [chunk.view for chunk in chunks] + [decode.view for decode in decodes]
        lengths = np.array([len(chunk.tokens) for chunk in chunks], np.int32)
        chunk_indptr = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        chunk_tokens, count = int(chunk_indptr[-1]), len(views)
        seq_lens = np.fromiter((view.seq_len for view in views), np.int32, count)
        tokens = np.concatenate(
            [np.asarray(chunk.tokens, np.int32) for chunk in chunks]
            + [np.fromiter((decode.token for decode in decodes), np.int32, len(decodes))]
        )
        per_request = np.concatenate((lengths, np.ones(len(decodes), np.int32)))
        owners = np.repeat(np.arange(count, dtype=np.int32), per_request)
        ends = np.cumsum(per_request)
        positions = (np.arange(len(tokens)) - np.repeat(ends - seq_lens, per_request)).astype(np.int32)
        page_indptr = np.zeros(count + 1, np.int32)
        np.cumsum([len(view.page_ids) for view in views], out=page_indptr[1:])
        page_ids = np.concatenate([view.page_ids for view in views])
        logit_rows = np.arange(len(tokens)) if all_logits else ends - 1
        parts = (tokens, positions, owners, page_ids, page_indptr, seq_lens, chunk_indptr, logit_rows)
        flat = torch.from_numpy(np.concatenate([part.astype(np.int32) for part in parts]))
        if device.type == "cuda":
            flat = flat.pin_memory()
        arrays = flat.to(device, non_blocking=True).split([len(part) for part in parts])
        named = zip(_ARRAYS, arrays, strict=True)
        return cls(
            **dict(named),
            num_chunks=len(chunks),
            chunk_tokens=chunk_tokens,
            num_decodes=len(decodes),
            longest_chunk=int(lengths.max(initial=0)),
            histories=tuple((seq_lens[: len(chunks)] - lengths).tolist()),
        )
