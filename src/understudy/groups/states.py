"""Shapes of the states that Mamba, gated delta net and Kimi delta attention layers keep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError
from understudy.groups.layer import Layer

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.timing.model_config import ModelConfig

    Share = Callable[[str, int], int]


def state_layer(config: ModelConfig, *, tensor_parallel: int, dtype: str, state_dtype: str | None) -> Layer:
    """Return the state layer of a model, on one of `tensor_parallel` GPUs.

    `dtype` is the model's; `state_dtype` replaces the type of the recurrent state. ConfigError names a missing key.
    """

    def share(what: str, size: int) -> int:
        if size % tensor_parallel:
            raise ConfigError(
                f"tensor_parallel={tensor_parallel} does not divide the {size} {what} of {config.where}; "
                "choose a divisor"
            )
        return size // tensor_parallel

    if config.has("linear_attn_config"):
        return _kimi_delta(config, share, dtype, state_dtype)
    if config.has("linear_num_value_heads"):
        return _gated_delta(config, share, dtype, state_dtype)
    if config.has("mamba_num_heads", "mamba_n_heads"):
        return _mamba2(config, share, dtype, state_dtype, tensor_parallel)
    if config.has("mamba_d_state") and config.has("mamba_expand"):
        width = share("state channels", config.number("mamba_expand") * config.number("hidden_size"))
        kept = config.number("mamba_d_conv") - 1
        return _layer(((kept, width), (width, config.number("mamba_d_state"))), dtype, state_dtype)
    raise ConfigError(
        f"{config.where}: the states of its layers are not known; known are Mamba, Mamba 2, gated delta net "
        "(linear_num_value_heads) and Kimi delta attention (linear_attn_config)"
    )


def _layer(
    shapes: tuple[tuple[int, ...], ...], dtype: str, state_dtype: str | None, **checkpoints: Any
) -> Layer:
    return Layer(kind="mamba", shapes=shapes, dtypes=(dtype, state_dtype or dtype), **checkpoints)


def _gated_delta(config: ModelConfig, share: Share, dtype: str, state_dtype: str | None) -> Layer:
    heads, size = config.number("linear_num_value_heads"), config.number("linear_value_head_dim")
    key_size = config.number("linear_key_head_dim")
    channels = 2 * config.number("linear_num_key_heads") * key_size + heads * size
    conv = (config.number("linear_conv_kernel_dim") - 1, share("convolution channels", channels))
    state = (share("value heads", heads), size, key_size)
    return _layer((conv, state), dtype, state_dtype, checkpoint_blocks=1, checkpoint_alignment="grid")


def _kimi_delta(config: ModelConfig, share: Share, dtype: str, state_dtype: str | None) -> Layer:
    linear = config.inner("linear_attn_config")
    heads, size = linear.number("num_heads"), linear.number("head_dim")
    kept = linear.number("short_conv_kernel_size") - 1
    conv = (kept, share("convolution channels", 3 * heads * size))
    # The recurrent state is in 32 bits, whatever the model's type.
    return _layer((conv, (share("heads", heads), size, size)), dtype, state_dtype or "f32")


def _mamba2(
    config: ModelConfig, share: Share, dtype: str, state_dtype: str | None, tensor_parallel: int
) -> Layer:
    heads = config.number("mamba_num_heads", "mamba_n_heads")
    size = config.number("mamba_head_dim", "mamba_d_head")
    groups = config.number("n_groups", "mamba_n_groups")
    if groups % tensor_parallel:
        groups = tensor_parallel  # groups are repeated where heads need them
    width = config.number("ssm_state_size", "mamba_d_state")
    channels = share("convolution channels", heads * size + 2 * groups * width)
    conv = (config.number("conv_kernel", "mamba_d_conv") - 1, channels)
    state = (share("heads", heads), size, width)
    return _layer((conv, state), dtype, state_dtype, checkpoint_blocks=1, checkpoint_alignment=1)
