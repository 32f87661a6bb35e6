"""The kernels behind the backend's interface (CUDA)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from understudy.qwen3.backend import rotary_tables
from understudy.qwen3.kernels import decode, matvec, norm, prefill, rotary

if TYPE_CHECKING:
    from understudy.qwen3.batch import Batch
    from understudy.qwen3.config import Qwen3Config
    from understudy.qwen3.weights import Layer


class TritonBackend:
    """See `Backend`. `config` is that of the rank."""

    def __init__(self, config: Qwen3Config, device: torch.device) -> None:
        self.config = config
        self._tables = rotary_tables(config, device)
        self._multiprocessors = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        )

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return matvec.matvec(x, weight) if x.shape[0] == 1 else F.linear(x, weight)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return norm.norm(x, weight, self.config.norm_eps)

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norm.add_norm(x, residual, weight, self.config.norm_eps)

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
        if chunks:
            prefill.prefill_attention(
                queries[:tokens],
                batch.page_ids,
                batch.page_indptr,
                batch.seq_lens,
                batch.chunk_indptr,
                keys,
                values,
                out[:tokens],
                batch.longest_chunk,
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
                decode.splits_for(batch.num_decodes, self.config.kv_heads, self._multiprocessors),
            )
        return out.flatten(1)

    def gated(self, x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            return matvec.matvec_gate(x, gate_up)
        return norm.gate(F.linear(x, gate_up))
