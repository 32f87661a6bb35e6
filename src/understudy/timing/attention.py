"""`LatentAttention` and `Indexer`: sizes of attention that keeps a latent, and of what selects tokens for it."""

from __future__ import annotations

import msgspec

from understudy.errors import ConfigError
from understudy.kv.counts import count

FP8_SPARSE_BYTES = 656
"""Bytes of a token in vLLM's fp8 cache of sparse MLA: 512 in fp8, their scales, and 64 in bf16."""


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of multi-head latent attention (MLA): one vector per token, from which every head has keys and values."""

    rank: int
    """Elements of the latent (`kv_lora_rank`)."""
    rope: int
    """Elements of the key with positions, which all heads share (`qk_rope_head_dim`)."""
    key: int
    """Elements of a head's key without positions (`qk_nope_head_dim`)."""
    value: int
    """Elements of a head's value (`v_head_dim`)."""
    query_rank: int = 0
    """Elements of the latent of queries (`q_lora_rank`); 0: queries are projected at once."""

    def __post_init__(self) -> None:
        for name in ("rank", "rope", "key", "value"):
            count(f"latent.{name}", getattr(self, name), 1, ConfigError)
        count("latent.query_rank", self.query_rank, 0, ConfigError)

    @property
    def cached(self) -> int:
        """Elements of a token in the KV cache of one layer."""
        return self.rank + self.rope

    @property
    def expanded(self) -> int:
        """Elements of a head's query times key, and of its value: products of an expanded pair of tokens."""
        return self.key + self.rope + self.value

    @property
    def absorbed(self) -> int:
        """The same if the query is projected to the latent instead, as in decode."""
        return self.cached + self.rank

    def whole_parameters(self, hidden: int) -> int:
        """Return the parameters of a layer that every tensor-parallel GPU has: projections to the latents."""
        return hidden * (self.query_rank + self.cached)

    def head_parameters(self, hidden: int, heads: int) -> int:
        """Return the parameters of a layer that are divided among GPUs: those of heads, and the output."""
        query = (self.query_rank or hidden) * heads * (self.key + self.rope)
        return query + self.rank * heads * (self.key + self.value) + heads * self.value * hidden


class Indexer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of an indexer, which selects the tokens that sparse attention reads."""

    layers: int
    heads: int
    size: int
    """Elements of a key."""
    tokens: int
    """Tokens that a query attends to at most."""
    key_bytes: int
    """Bytes of a token's key in the cache of one layer."""

    def parameters(self, hidden: int, query: int) -> int:
        """Return the parameters of a layer: queries from `query` inputs, one key, and a weight per head (of MLA)."""
        weights = hidden * self.heads if query != hidden else 0
        return query * self.heads * self.size + hidden * self.size + weights


def latent_bytes(latent: LatentAttention, element_bytes: int, *, is_sparse: bool) -> int:
    """Return the bytes of a token in the cache of one layer, whole on every GPU."""
    return FP8_SPARSE_BYTES if is_sparse and element_bytes == 1 else latent.cached * element_bytes
