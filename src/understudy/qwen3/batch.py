"""Arrays of a step that kernels read: flat tokens, their positions, and the pages of each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from understudy.errors import InvalidArgument
from understudy.timing.recorded.shapes import is_uneven

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from understudy.kv import KvView


class Chunk(NamedTuple):
    """A part of a prompt: the last tokens of `view`, which the step computes. Earlier tokens are in the pages."""

    tokens: npt.NDArray[np.integer]
    view: KvView


class Decode(NamedTuple):
    """One input token of a request, the last of `view`."""

    token: int
    view: KvView


def are_uneven(decodes: Sequence[Decode]) -> bool:
    """Return whether one context is so long that the device would wait for it."""
    if len(decodes) < 2:
        return False
    lengths = [decode.view.seq_len for decode in decodes]
    return is_uneven(len(lengths), sum(lengths), max(lengths))


class Flat(NamedTuple):
    """A step's arrays on the host, chunks before decodes; positions are derived only from the views."""

    tokens: npt.NDArray[np.int32]  # [T]
    positions: npt.NDArray[np.int32]  # [T]
    owners: npt.NDArray[np.int32]  # [T] request of each token
    page_ids: npt.NDArray[np.int32]  # pages of all requests, end to end; shared ones repeat
    page_indptr: npt.NDArray[np.int32]  # [B + 1]
    seq_lens: npt.NDArray[np.int32]  # [B] after the step
    chunk_indptr: npt.NDArray[np.int32]  # [chunks + 1] tokens of each chunk
    ends: npt.NDArray[np.int32]  # [B] last token of each request

    @classmethod
    def build(cls, chunks: Sequence[Chunk], decodes: Sequence[Decode]) -> Flat:
        """Build the arrays. InvalidArgument without any row, or when a chunk is empty or longer than its view."""
        for chunk in chunks:
            if not 0 < len(chunk.tokens) <= chunk.view.seq_len:
                raise InvalidArgument(
                    f"a chunk of {len(chunk.tokens)} tokens ends a view of {chunk.view.seq_len}"
                )
        if not chunks and not decodes:
            raise InvalidArgument("a step needs at least one chunk or decode")
        views = [chunk.view for chunk in chunks] + [decode.view for decode in decodes]
        count, fed = len(views), np.array([decode.token for decode in decodes], np.int32)
        seq_lens = np.array([view.seq_len for view in views], np.int32)
        page_indptr = np.zeros(count + 1, np.int32)
        np.cumsum([len(view.page_ids) for view in views], out=page_indptr[1:])
        page_ids = np.concatenate([view.page_ids for view in views])
        chunk_indptr = np.zeros(len(chunks) + 1, np.int32)
        if not chunks:
            rows = np.arange(count, dtype=np.int32)
            return cls(fed, seq_lens - 1, rows, page_ids, page_indptr, seq_lens, chunk_indptr, rows)
        per_request = np.ones(count, np.int32)
        per_request[: len(chunks)] = [len(chunk.tokens) for chunk in chunks]
        np.cumsum(per_request[: len(chunks)], out=chunk_indptr[1:])
        tokens = np.concatenate([*(np.asarray(chunk.tokens, np.int32) for chunk in chunks), fed])
        owners = np.repeat(np.arange(count, dtype=np.int32), per_request)
        ends = np.cumsum(per_request, dtype=np.int32)
        positions = np.arange(len(tokens), dtype=np.int32) - np.repeat(ends - seq_lens, per_request)
        return cls(tokens, positions, owners, page_ids, page_indptr, seq_lens, chunk_indptr, ends - 1)

    def tiles(self, rows: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Split chunks into tiles of `rows` tokens; return chunk and start of each, longest contexts first."""
        lengths = np.diff(self.chunk_indptr)
        counts = -(-lengths // rows)
        owners = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        starts = ((np.arange(len(owners)) - first) * rows).astype(np.int32)
        order = np.argsort(-((self.seq_lens[: len(lengths)] - lengths)[owners] + starts), kind="stable")
        return owners[order], starts[order]


@dataclass(slots=True)
class Batch:
    """The arrays of `Flat` on the device, with host-side numbers that kernel launches need."""

    tokens: torch.Tensor
    positions: torch.Tensor
    owners: torch.Tensor
    page_ids: torch.Tensor
    page_indptr: torch.Tensor
    seq_lens: torch.Tensor
    chunk_indptr: torch.Tensor
    tile_owners: torch.Tensor  # chunk of each tile; -1: empty tile
    tile_starts: torch.Tensor
    logit_rows: torch.Tensor  # rows whose logits are returned
    tile_rows: int
    num_chunks: int
    chunk_tokens: int
    num_decodes: int
    histories: tuple[int, ...]  # tokens before each chunk
    uneven: bool = False  # a decode may have a far longer context than the others

    @classmethod
    def build(
        cls,
        chunks: Sequence[Chunk],
        decodes: Sequence[Decode],
        device: torch.device,
        *,
        all_logits: bool = False,
    ) -> Batch:
        """Build a batch from views with one copy to the device. InvalidArgument as in `Flat.build`."""
        flat = Flat.build(chunks, decodes)
        lengths = np.diff(flat.chunk_indptr)
        longest = int(lengths.max(initial=0))
        tile_rows = 128 if longest > 64 else 64 if longest > 16 else 16
        rows = np.arange(len(flat.tokens), dtype=np.int32) if all_logits else flat.ends
        parts = {**flat._asdict(), "logit_rows": rows}
        del parts["ends"]
        parts["tile_owners"], parts["tile_starts"] = flat.tiles(tile_rows)
        whole = torch.from_numpy(np.concatenate(list(parts.values())))
        if device.type == "cuda":
            whole = whole.pin_memory()
        arrays = whole.to(device, non_blocking=True).split([len(part) for part in parts.values()])
        return cls(
            **dict(zip(parts, arrays, strict=True)),
            tile_rows=tile_rows,
            num_chunks=len(chunks),
            chunk_tokens=int(flat.chunk_indptr[-1]),
            num_decodes=len(decodes),
            histories=tuple((flat.seq_lens[: len(chunks)] - lengths).tolist()),
            uneven=are_uneven(decodes),
        )
