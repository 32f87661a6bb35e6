"""`plan_groups`: KV cache groups, their blocks in a given memory and the capacity that vLLM reports."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.defaults import UNKNOWN_DEVICE
from understudy.errors import ConfigError
from understudy.groups.grouping import LayerGroup, fit_states, group_layers
from understudy.groups.layer import Layer  # noqa: TC001  (msgspec reads the annotations)
from understudy.kv.counts import count

if TYPE_CHECKING:
    from collections.abc import Iterable

_KINDS = {
    "full": "full_attention",
    "rswa": "full_attention",
    "mla": "mla_attention",
    "chunked_local": "chunked_local_attention",
    "circular": "unknown",
}


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache group: layers that share block tables."""

    layers: tuple[int, ...]
    """Indices of the layers, in the order of the model."""
    kind: str
    """vLLM's name of the kind, as in its KV events."""
    block_size: int
    page_bytes: int
    """Bytes per block of one layer, or of all layers if `uniform_type`."""
    window: int | None
    uniform_type: bool
    """Whether pages of the group's layers may differ."""
    blocks_per_request: int
    """Blocks that vLLM's start-up plans for a request of `max_model_len` tokens."""
    layer: Layer
    """First layer, as planned: block size and padded page."""
    align: bool = True
    """Whether states are kept at ends of blocks (prefix caching), not only the newest."""
    checkpoint_alignment: int = 1
    """Tokens between possible checkpoints of a state."""


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of a model and what one GPU's memory holds of them. Block sizes in tokens."""

    attention_block: int | None
    """Block of attention layers next to states; None without states."""
    state_page_padded: int | None
    """Bytes of a padded state; None if states need no padding."""
    groups: tuple[Group, ...]
    bytes_per_block: int
    num_blocks: int
    """Blocks of the pool, vLLM's null block included."""
    scheduler_block_size: int
    hash_block_size: int
    cache_hit_alignment: int
    """Unit of the lengths of prefix cache hits."""
    kv_cache_size_tokens: int
    max_concurrency: float
    """Requests of `max_model_len` tokens that vLLM reports as its maximum concurrency."""
    max_model_len: int
    """Longest request; with `auto_fit`, the longest one that fits."""

    def to_dict(self) -> dict[str, Any]:
        """Return the plan in the form of recorded derivations."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        del content["max_model_len"]
        content["groups"] = list(content["groups"])
        for group in content["groups"]:
            group["layers"] = [f"layer.{index}" for index in group["layers"]]
            for name in ("layer", "align", "checkpoint_alignment"):
                del group[name]
        return content


def plan_groups(
    layers: Iterable[Layer],
    *,
    memory_bytes: int,
    max_model_len: int,
    max_num_batched_tokens: int = UNKNOWN_DEVICE.max_num_batched_tokens,
    async_scheduling: bool = True,
    prefix_caching: bool = True,
    layout: str = "LBNHC",
    disable_hybrid: bool = False,
    prefix_match_unit: int | None = None,
    auto_fit: bool = False,
) -> GroupPlan:
    """Plan the groups of a model's layers in `memory_bytes` of one GPU, as vLLM 0.33 does.

    `layout` orders the dimensions of the cache (blocks, layers, heads, tokens, content). `auto_fit` shortens
    `max_model_len` until one request fits, as vLLM's `--max-model-len auto` does. ConfigError for layers that vLLM
    refuses, and if one request of `max_model_len` tokens does not fit.
    """
    given = tuple(layers)
    if not given:
        raise ConfigError("layers: a model without layers has no KV cache; give at least one")
    count("max_model_len", max_model_len, 1, ConfigError)
    count("max_num_batched_tokens", max_num_batched_tokens, 1, ConfigError)
    if prefix_match_unit is not None:
        count("prefix_match_unit", prefix_match_unit, 1, ConfigError)
    if sorted(layout) != sorted("LBNHC"):
        raise ConfigError(
            f"layout: {layout!r} does not order the letters B, L, H, N and C; give LBNHC or BLHNC"
        )
    fitted = fit_states(given, max_model_len=max_model_len, prefix_caching=prefix_caching)
    planned = group_layers(fitted.layers, layout=layout, disable_hybrid=disable_hybrid)
    in_flight = max_num_batched_tokens * (2 if async_scheduling else 1)

    def describe(length: int) -> tuple[Group, ...]:
        return tuple(
            _describe_group(group, length, in_flight, prefix_caching, prefix_match_unit) for group in planned
        )

    def count_blocks(length: int) -> int:
        return sum(group.blocks_per_request for group in describe(length))

    bytes_per_block = max(sum(layer.page_bytes for layer in group.layers) for group in planned)
    num_blocks = count("memory_bytes", memory_bytes, 1, ConfigError) // bytes_per_block
    if auto_fit:
        fitting = bisect_right(range(1, max_model_len + 1), num_blocks - 1, key=count_blocks)
        max_model_len = max(fitting, 1)
    groups = describe(max_model_len)
    per_request = count_blocks(max_model_len)
    if per_request > num_blocks - 1:
        raise ConfigError(
            f"max_model_len: one request of {max_model_len} tokens needs {per_request} blocks of {bytes_per_block} "
            f"bytes and a null block, and {memory_bytes} bytes hold {num_blocks}; give more memory, or a shorter "
            "max_model_len"
        )
    sizes = _block_sizes(groups, prefix_caching, prefix_match_unit)
    return GroupPlan(
        attention_block=fitted.attention_block,
        state_page_padded=fitted.state_page_padded,
        groups=groups,
        bytes_per_block=bytes_per_block,
        num_blocks=num_blocks,
        scheduler_block_size=sizes[0],
        hash_block_size=sizes[1],
        cache_hit_alignment=sizes[2],
        kv_cache_size_tokens=int(num_blocks / per_request * max_model_len),
        max_concurrency=num_blocks / per_request,
        max_model_len=max_model_len,
    )


def _describe_group(
    group: LayerGroup, max_model_len: int, in_flight: int, align: bool, prefix_match_unit: int | None
) -> Group:
    first = group.layers[0]
    kinds = {_KINDS.get(layer.kind, layer.kind) for layer in group.layers}
    alignment = first.checkpoint_alignment
    if alignment == "grid":
        alignment = prefix_match_unit or first.tokens
    return Group(
        layers=group.indices,
        kind=kinds.pop() if len(kinds) == 1 else "full_attention",
        block_size=first.tokens,
        page_bytes=sum(layer.page_bytes for layer in group.layers)
        if group.uniform_type
        else first.page_bytes,
        window=first.window if first.kind in ("sliding_window", "sliding_window_mla") else None,
        uniform_type=group.uniform_type,
        blocks_per_request=max(
            _blocks_per_request(layer, max_model_len, in_flight, align) for layer in group.layers
        ),
        layer=first,
        align=align,
        checkpoint_alignment=alignment or 1,
    )


def _blocks_per_request(layer: Layer, max_model_len: int, in_flight: int, align: bool) -> int:
    if layer.kind == "mamba":
        return 2 + layer.checkpoint_blocks if align else 1
    if layer.kind == "circular":
        return 1
    if layer.kind == "chunked_local":
        assert layer.chunk is not None
        return -(-min(layer.chunk + in_flight, max_model_len) // layer.tokens)
    if layer.kind in ("sliding_window", "sliding_window_mla"):
        assert layer.window is not None
        return -(-min(layer.window - 1 + in_flight, max_model_len) // layer.tokens) + 1
    return -(-max_model_len // layer.tokens)


def _block_sizes(
    groups: tuple[Group, ...], prefix_caching: bool, prefix_match_unit: int | None
) -> tuple[int, int, int]:
    """Return the units of scheduling, of hashing and of hits, in tokens."""
    if len(groups) == 1:
        return (groups[0].block_size,) * 3
    scheduler = math.lcm(*(group.block_size for group in groups))
    if not prefix_caching:
        return (scheduler,) * 3
    cacheable = [group for group in groups if group.layer.is_cacheable]
    hashing = prefix_match_unit or math.gcd(*(group.block_size for group in cacheable)) or scheduler
    for group in cacheable:
        if group.block_size % hashing:
            raise ConfigError(
                f"prefix_match_unit: {hashing} does not divide the block of {group.block_size} tokens of a "
                f"{group.kind} group; give a divisor of every block"
            )
    states = [group for group in cacheable if group.kind == "mamba"]
    is_partial = any(group.block_size > hashing for group in states) and all(
        group.layer.is_full or group.kind == "mamba" or group.block_size == hashing for group in cacheable
    )
    return scheduler, hashing, hashing if is_partial else scheduler
