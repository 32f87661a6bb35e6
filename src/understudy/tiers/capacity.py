"""`understudy.capacity`: KV cache groups and blocks of a model on a GPU, as vLLM plans them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.checks import read_as
from understudy.errors import ConfigError
from understudy.tiers.gpu import GpuSettings
from understudy.timing.contexts import known_context

if TYPE_CHECKING:
    from collections.abc import Mapping

    from understudy.groups import GroupPlan


def capacity(
    model: str,
    gpu: str | Mapping[str, Any],
    *,
    tensor_parallel_size: int = 1,
    max_model_len: int | None = None,
    kv_dtype: str | None = None,
    block_size: int | None = None,
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
) -> GroupPlan:
    """Plan the KV cache groups and the blocks of a model on a GPU, as vLLM does.

    Parameters:
        model: known model name, or path of a config.json.
        gpu: name of a GPU, or settings by name as `gpu` of a replay.
        tensor_parallel_size: GPUs of an engine.
        max_model_len: longest request in tokens; None: the model's, or what fits.
        kv_dtype: type of the KV cache; None: the model's own.
        block_size: tokens per block; None: vLLM's.
        max_num_batched_tokens: tokens per step; None: vLLM's for the GPU.
        max_num_seqs: requests in a batch; None: vLLM's for the GPU.

    Errors: ConfigError names an unknown model or GPU, and weights that do not fit.

    Example:
        plan = us.capacity("gpt-oss-120b", "H200")
        print(plan.num_blocks, plan.max_model_len, [group.kind for group in plan.groups])
    """
    given: dict[str, Any] = {"name": gpu} if isinstance(gpu, str) else dict(gpu)
    given.setdefault("tensor_parallel_size", tensor_parallel_size)
    settings = read_as(GpuSettings, given, "gpu")
    length = known_context(model) if max_model_len is None else max_model_len
    if length is None:
        raise ConfigError(f"max_model_len: the context of {model} is not known; give a number")
    return settings.groups(
        model,
        kv_dtype,
        max_model_len=length,
        auto_fit=max_model_len is None,
        block_size=block_size,
        step_tokens=max_num_batched_tokens,
        sequences=max_num_seqs,
    )
