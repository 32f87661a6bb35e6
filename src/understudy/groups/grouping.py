"""Divide the layers of a model into groups: vLLM's rules where all groups have equal pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from understudy.errors import ConfigError
from understudy.groups.packing import packed_groups

if TYPE_CHECKING:
    from understudy.groups.layer import Layer

LEAST_ATTENTION_BLOCK = 16
LEAST_MLA_BLOCK = 128
"""Units of the attention block next to states, in tokens."""


class LayerGroup(NamedTuple):
    """Layers that share block tables: their indices, their planned form, and whether their pages may differ."""

    indices: tuple[int, ...]
    layers: tuple[Layer, ...]
    uniform_type: bool = False


class StateBlock(NamedTuple):
    """Blocks of a model with states: tokens of an attention block, and the padded page of a state in bytes."""

    attention_block: int | None
    state_page_padded: int | None
    layers: tuple[Layer, ...]


def fit_states(layers: tuple[Layer, ...], *, max_model_len: int, prefix_caching: bool) -> StateBlock:
    """Grow the attention blocks of a model with states until a state fits in one, and pad states to its page."""
    states = [layer for layer in layers if layer.kind == "mamba"]
    if not states:
        return StateBlock(None, None, layers)
    attention = next((layer for layer in layers if layer.is_full), None) or next(
        (layer for layer in layers if layer.kind not in ("mamba", "circular")), None
    )
    if attention is None:
        block = None if prefix_caching else max_model_len
        alone = (layer.with_block(block) if block else layer for layer in layers)
        return StateBlock(None, None, tuple(alone))
    unit = max(LEAST_MLA_BLOCK if attention.kind == "mla" else LEAST_ATTENTION_BLOCK, attention.tokens)
    per_token = attention.with_block(unit).own_page_bytes // unit
    largest = max(state.own_page_bytes for state in states)
    block = unit * -(-largest // (unit * per_token))
    page = block * per_token
    padded = None if page == largest else page
    state_block = block if prefix_caching else max_model_len
    fitted = tuple(
        layer.with_block(state_block).padded_to(padded)
        if layer.kind == "mamba"
        else layer.with_block(layer.tokens if layer.kind == "circular" else block)
        for layer in layers
    )
    return StateBlock(block, padded, fitted)


def group_layers(layers: tuple[Layer, ...], *, layout: str, disable_hybrid: bool) -> list[LayerGroup]:
    """Divide layers into groups. ConfigError for what vLLM refuses.

    `layout` orders the dimensions of the cache; with blocks outermost, layers of several page sizes are packed.
    """
    if disable_hybrid and _one_group(layers) is None:
        layers = _keep_all_tokens(layers)
        if _one_group(layers) is None:
            raise ConfigError(
                "--disable-hybrid-kv-cache-manager (disable_hybrid): the layers still differ with "
                "windows as full attention; leave it out"
            )
    if (alone := _one_group(layers)) is not None:
        return [alone]
    if layout.startswith("B") and len({layer.page_bytes for layer in layers}) > 1:
        packed = packed_groups(layers)
        return [LayerGroup(indices, tuple(layers[i] for i in indices), True) for indices in packed]
    equal = _with_equal_pages(layers)
    if equal is None:
        full = _keep_all_tokens(layers)
        alone = _one_group(full)
        assert alone is not None
        return [alone._replace(uniform_type=True)]
    return _equal_groups(equal)


def _one_group(layers: tuple[Layer, ...]) -> LayerGroup | None:
    """Return the only group of layers that are equal or of one type; None if they need several."""
    everything = tuple(range(len(layers)))
    if len({layer.spec for layer in layers}) == 1:
        return LayerGroup(everything, layers)
    if len({layer.uniform_type for layer in layers}) == 1:
        return LayerGroup(everything, layers, uniform_type=True)
    return None


def _keep_all_tokens(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Plan windows and local attention as full attention, if there is any; with its block if that is unique."""
    blocks = {layer.tokens for layer in layers if layer.is_full}
    if not blocks:
        return layers
    block = blocks.pop() if len(blocks) == 1 else None
    return tuple(layer.as_full(block) for layer in layers)


def _with_equal_pages(layers: tuple[Layer, ...]) -> tuple[Layer, ...] | None:
    """Return layers with the largest page each: larger blocks if that divides it, else padding.

    None: MLA layers do not divide the page and are next to plain windows, so that one group must hold all.
    """
    largest = max(layer.page_bytes for layer in layers)
    equal = []
    for index, layer in enumerate(layers):
        factor, remainder = divmod(largest, layer.page_bytes)
        if factor == 1 and not remainder:
            equal.append(layer)
        elif layer.kind == "mamba" or (remainder and layer.kind != "mla" and layer.alignment is None):
            equal.append(layer.padded_to(largest))
        elif not remainder and layer.with_block(layer.tokens * factor).page_bytes == largest:
            equal.append(layer.with_block(layer.tokens * factor))
        elif _can_share_one_group(layers):
            return None
        else:
            raise ConfigError(
                f"layers: the page of layer {index} ({layer.kind}, {layer.page_bytes} bytes) does not divide the "
                f"largest page ({largest} bytes), and MLA pages are not padded; choose another block_size, or a "
                "layout with blocks outermost"
            )
    return tuple(equal)


def _can_share_one_group(layers: tuple[Layer, ...]) -> bool:
    kinds = {layer.kind for layer in layers}
    return (
        {"mla", "sliding_window"} <= kinds
        and not kinds & {"sliding_window_mla", "chunked_local"}
        and _one_group(_keep_all_tokens(layers)) is not None
    )


def _equal_groups(layers: tuple[Layer, ...]) -> list[LayerGroup]:
    """Divide layers of equal pages into groups of about as many layers as the rarest kind has."""
    buckets: dict[Layer, list[int]] = {}
    for index, layer in enumerate(layers):
        buckets.setdefault(layer.spec, []).append(index)
    fewest = min(len(bucket) for bucket in buckets.values())
    most = max(len(bucket) for bucket in buckets.values())
    size = most if 2 * most < 3 * fewest else fewest
    groups = []
    for bucket in buckets.values():
        number = -(-len(bucket) // size)
        for first in range(number):
            indices = tuple(bucket[first::number])
            groups.append(LayerGroup(indices, tuple(layers[i] for i in indices)))
    return groups
