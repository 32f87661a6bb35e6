"""Metadata of a captured step: arrays at fixed addresses, padded to the step's shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from understudy.qwen3.batch import Batch, Flat

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from understudy.qwen3.batch import Chunk, Decode
    from understudy.timing.recorded.shapes import Shape


class StepArrays:
    """Metadata of a captured step: host arrays and one device array, whose addresses never change.

    Two host arrays alternate: the next step is written to one while the device may still read the other.

    A step is padded to its shape. Padded rows feed token 0 at position 0 of the padding block, padded tiles compute
    nothing, and the results of both are ignored.
    """

    def __init__(
        self, shapes: Sequence[Shape], *, padding_block: int, max_pages: int, device: torch.device
    ) -> None:
        self._padding_block = padding_block
        tokens, slots = max(s.tokens for s in shapes), max(s.slots for s in shapes)
        requests = slots + max(s.decode_rows for s in shapes) + 1
        tiles = max(s.tiles for s in shapes)
        sizes = {
            **dict.fromkeys(("tokens", "positions", "owners"), tokens),
            "seq_lens": requests,
            "page_indptr": requests + 1,
            "chunk_indptr": slots + 1,
            "tile_owners": tiles,
            "tile_starts": tiles,
            "logit_rows": requests,
            "page_ids": requests * max_pages,  # requests share pages, so this is the sum over all contexts
        }
        self._pages_at = sum(sizes.values()) - sizes["page_ids"]
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(sum(sizes.values()), dtype=torch.int32, pin_memory=pinned) for _ in "ab"]
        self._host_index = 0
        self._device = torch.zeros_like(self._hosts[0], device=device, pin_memory=False)
        parts = zip(sizes, self._device.split(list(sizes.values())), strict=True)
        self._device_arrays: dict[str, torch.Tensor] = dict(parts)
        self.logit_rows = self._device_arrays["logit_rows"]
        places = np.cumsum([0, *sizes.values()])
        self._host_arrays: list[dict[str, npt.NDArray[np.int32]]] = [
            {
                name: host.numpy()[at : at + size]
                for (name, size), at in zip(sizes.items(), places, strict=False)
            }
            for host in self._hosts
        ]

    def batch(self, shape: Shape) -> Batch:
        """Return the device arrays of a shape, as kernels read them."""
        there, slots = self._device_arrays, shape.slots
        requests = slots + shape.decode_rows
        return Batch(
            tokens=there["tokens"][: shape.tokens],
            positions=there["positions"][: shape.tokens],
            owners=there["owners"][: shape.tokens],
            page_ids=there["page_ids"],
            page_indptr=there["page_indptr"][: requests + 1],
            seq_lens=there["seq_lens"][:requests],
            chunk_indptr=there["chunk_indptr"][: slots + 1],
            tile_owners=there["tile_owners"][: shape.tiles],
            tile_starts=there["tile_starts"][: shape.tiles],
            logit_rows=there["logit_rows"][:requests],
            tile_rows=shape.tile_rows,
            num_chunks=slots,
            chunk_tokens=shape.chunk_rows,
            num_decodes=shape.decode_rows,
            histories=(),
            uneven=shape.in_parts,
        )

    def fill(
        self,
        shape: Shape,
        chunks: Sequence[Chunk],
        decodes: Sequence[Decode],
        wanted: Sequence[int] | None = None,
    ) -> None:
        """Write a step's metadata and copy it to the device. An empty step is all padding.

        `wanted` are the rows of `logit_rows`, if not the last row of each request.
        """
        self._host_index = 1 - self._host_index
        here, slots, at = self._host_arrays[self._host_index], shape.slots, shape.chunk_rows
        first, padding = len(chunks), slots + shape.decode_rows
        end, last = at + len(decodes), slots + len(decodes)
        flat = Flat.build(chunks, decodes) if chunks or decodes else None
        fed = 0 if flat is None else int(flat.chunk_indptr[-1])
        for name, blank in (("tokens", 0), ("positions", 0), ("owners", padding)):
            rows = here[name]
            rows[fed:at] = blank
            rows[end : shape.tokens] = blank
            if flat is not None:
                of = getattr(flat, name)
                rows[:fed] = of[:fed]
                rows[at:end] = of[fed:] + (slots - first if name == "owners" else 0)
        lengths, counts = here["seq_lens"], np.ones(padding + 1, np.int32)
        lengths[: padding + 1] = 1
        lengths[first:slots] = counts[first:slots] = 0
        used = 0
        if flat is not None:
            lengths[:first], lengths[slots:last] = flat.seq_lens[:first], flat.seq_lens[first:]
            pages = np.diff(flat.page_indptr)
            counts[:first], counts[slots:last] = pages[:first], pages[first:]
            used = len(flat.page_ids)
            here["page_ids"][:used] = flat.page_ids
            here["logit_rows"][: first + len(decodes)] = flat.ends
            here["logit_rows"][first : first + len(decodes)] += at - fed
        here["logit_rows"][first + len(decodes) : padding] = 0
        if wanted is not None:
            here["logit_rows"][: len(wanted)] = wanted
        padded = padding + 1 - last
        here["page_ids"][used : used + padded] = self._padding_block
        here["page_indptr"][0] = 0
        np.cumsum(counts, out=here["page_indptr"][1 : padding + 2])
        if slots:
            here["tile_owners"][: shape.tiles] = -1
            here["chunk_indptr"][: slots + 1] = fed
            if flat is not None:
                here["chunk_indptr"][: first + 1] = flat.chunk_indptr
                owners, starts = flat.tiles(shape.tile_rows)
                here["tile_owners"][: len(owners)], here["tile_starts"][: len(starts)] = owners, starts
        self._send(self._hosts[self._host_index], self._pages_at + used + padded)

    def set_decode_tokens(self, tokens: torch.Tensor) -> None:
        """Copy device tokens, which may still be computed, to the decodes of a step without prompts."""
        self._device_arrays["tokens"][: len(tokens)].copy_(tokens)

    def _send(self, host: torch.Tensor, until: int) -> None:
        if self._device.device.type == "cuda":
            from understudy.qwen3.kernels.fetch import fetch

            fetch(host, self._device, until)
        else:
            self._device[:until].copy_(host[:until])
