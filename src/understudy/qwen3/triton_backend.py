"""Backend of Triton kernels (CUDA)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from understudy.qwen3.kernels import argmax, decode, matvec, prefill, rotary
from understudy.qwen3.kernels.gated import MOST_ROWS, gated
from understudy.qwen3.kernels.norm import add_norm, gate
from understudy.qwen3.rotary import rotary_tables
from understudy.timing.recorded.shapes import parts_of

if TYPE_CHECKING:
    from understudy.qwen3.batch import Batch
    from understudy.qwen3.config import Qwen3Config
    from understudy.qwen3.weights import Layer


FLASH_TOKENS = 1024
"""From this length on, torch's attention is faster, including the copy of keys and values that it needs."""


class TritonBackend:
    """Implement `Backend` with Triton kernels. `config` is that of the rank."""

    def __init__(self, config: Qwen3Config, device: torch.device) -> None:
        self.config = config
        self._tables = rotary_tables(config, device)
        self._multiprocessors = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        )

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return matvec.matvec(x, weight) if x.shape[0] == 1 else F.linear(x, weight)

    def normed_linear(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual.shape[0] == 1:
            return matvec.normed_matvec(x, residual, norm, weight, self.config.norm_eps)
        normed, total = add_norm(x, residual, norm, self.config.norm_eps)
        return F.linear(normed, weight), total

    def normed_gated(
        self, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, gate_up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual.shape[0] == 1:
            return matvec.normed_matvec(x, residual, norm, gate_up, self.config.norm_eps, gates=True)
        normed, total = add_norm(x, residual, norm, self.config.norm_eps)
        few = residual.shape[0] <= MOST_ROWS
        return gated(normed, gate_up) if few else gate(F.linear(normed, gate_up)), total

    def store(
        self, qkv: torch.Tensor, layer: Layer, batch: Batch, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        return rotary.store(
            qkv,
            (layer.q_norm, layer.k_norm),
            self._tables,
            batch.positions,
            batch.owners,
            batch.page_ids,
            batch.page_indptr,
            keys,
            values,
            self.config.num_heads,
            self.config.norm_eps,
        )

    def attend(
        self, queries: torch.Tensor, batch: Batch, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty_like(queries)
        chunks, tokens = batch.num_chunks, batch.chunk_tokens
        whole = batch.histories == (0,) and tokens >= FLASH_TOKENS
        if whole:
            out[:tokens] = _flash(queries[:tokens], batch, keys, values)
        elif chunks:
            prefill.prefill_attention(
                queries[:tokens],
                batch.page_ids,
                batch.page_indptr,
                batch.seq_lens,
                batch.chunk_indptr,
                (batch.tile_owners, batch.tile_starts, batch.tile_rows),
                keys,
                values,
                out[:tokens],
            )
        if batch.num_decodes:
            decode.decode_attention(
                queries[tokens:],
                batch.page_ids,
                batch.page_indptr[chunks:],
                batch.seq_lens[chunks:],
                keys,
                values,
                out[tokens:],
                parts_of(batch.num_decodes, self.config.kv_heads, self._multiprocessors, uneven=batch.uneven),
            )
        return out.flatten(1)

    def argmax(self, logits: torch.Tensor, out: torch.Tensor) -> None:
        argmax.argmax(logits, out)


def _flash(queries: torch.Tensor, batch: Batch, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Compute causal attention of one whole prompt from position 0 over its gathered pages."""
    tokens = queries.shape[0]
    padded = -(-tokens // FLASH_TOKENS) * FLASH_TOKENS  # torch plans again for every length, which is slow
    pages = batch.page_ids[: -(-tokens // keys.shape[1])]

    def pad(x: torch.Tensor) -> torch.Tensor:
        more = F.pad(x, (0, 0, 0, 0, 0, padded - tokens)) if padded > tokens else x
        return more.transpose(0, 1)[None]

    attended = F.scaled_dot_product_attention(
        pad(queries),
        pad(keys[pages].flatten(0, 1)[:tokens]),
        pad(values[pages].flatten(0, 1)[:tokens]),
        is_causal=True,
        enable_gqa=True,
    )
    return attended[0, :, :tokens].transpose(0, 1)
