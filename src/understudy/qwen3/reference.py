"""Backend in plain torch for any device: slow and simple; the reference for testing the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from understudy.qwen3.rotary import rotary_tables

if TYPE_CHECKING:
    from understudy.qwen3.batch import Batch
    from understudy.qwen3.config import Qwen3Config
    from understudy.qwen3.weights import Layer


class ReferenceBackend:
    """Implement `Backend` in plain torch. `config` is that of the rank."""

    def __init__(self, config: Qwen3Config, device: torch.device) -> None:
        self.config = config
        self._cos, self._sin = rotary_tables(config, device)

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight)

    def normed_linear(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual if x is None else x + residual
        return F.linear(self.norm(total, norm), weight), total

    def normed_gated(
        self, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, gate_up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both, total = self.normed_linear(x, residual, norm, gate_up)
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up, total

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute the RMS norm over the last dimension in float32."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.norm_eps)
        return weight * (wide * scale).to(x.dtype)

    def store(
        self, qkv: torch.Tensor, layer: Layer, batch: Batch, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        heads, kv_heads, dim = self.config.num_heads, self.config.kv_heads, self.config.head_dim
        q, k, v = qkv.view(-1, heads + 2 * kv_heads, dim).split((heads, kv_heads, kv_heads), dim=1)
        q = self._rotate(self.norm(q, layer.q_norm), batch.positions)
        k = self._rotate(self.norm(k, layer.k_norm), batch.positions)
        page_size = keys.shape[1]
        positions = batch.positions.long()
        pages = batch.page_ids[
            (batch.page_indptr[batch.owners.long()] + positions // page_size).long()
        ].long()
        keys[pages, positions % page_size] = k
        values[pages, positions % page_size] = v
        return q

    def attend(
        self, queries: torch.Tensor, batch: Batch, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty_like(queries)
        indptr = batch.page_indptr.tolist()
        lengths = batch.seq_lens.tolist()
        starts = [*batch.chunk_indptr.tolist()[:-1], *range(batch.chunk_tokens, len(queries))]
        ends = [*batch.chunk_indptr.tolist()[1:], *range(batch.chunk_tokens + 1, len(queries) + 1)]
        for request, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if start == end:  # an unused row of a captured step
                continue
            pages = batch.page_ids[indptr[request] : indptr[request + 1]].long()
            length = lengths[request]
            k = keys[pages].flatten(0, 1)[:length].transpose(0, 1)  # [head, position, dim]
            v = values[pages].flatten(0, 1)[:length].transpose(0, 1)
            q = queries[start:end].transpose(0, 1)
            positions = batch.positions[start:end, None]
            seen = torch.arange(length, device=queries.device)[None] <= positions
            attended = F.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=seen[None, None], enable_gqa=True
            )
            out[start:end] = attended[0].transpose(0, 1)
        return out.flatten(1)

    def argmax(self, logits: torch.Tensor, out: torch.Tensor) -> None:
        torch.argmax(logits, -1, out=out)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos = self._cos[positions.long()][:, None]
        sin = self._sin[positions.long()][:, None]
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
