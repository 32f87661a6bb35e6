"""Estimate how many KV blocks fit on the GPUs of a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from understudy.checks import share
from understudy.errors import ConfigError
from understudy.timing.weight_types import weight_type

if TYPE_CHECKING:
    from understudy.timing.deployment import Deployment
    from understudy.timing.drafter import Drafter

BLOCKS_PLUS_MINUS = 0.08
"""Relative uncertainty of the estimate."""

_MXFP4_MULTIPLE = 256
"""Hidden sizes are padded to it where experts are mxfp4."""
_WINDOWED_REQUESTS = 256
"""Most requests whose windows the estimate for one KV cache group keeps."""
_FIXED_BYTES = 0.6e9
"""Bytes of CUDA's context, graphs and collective buffers, from one run (RTX 4090, Llama-3.1-8B, 2,588 blocks)."""


class KvMemory(NamedTuple):
    """Memory of one GPU, in bytes: what vLLM may use of it, and what weights, activations and graphs take."""

    usable: float
    spent: float

    @property
    def free(self) -> int:
        """Bytes left for the KV cache."""
        return int(self.usable - self.spent)


def usable_bytes(memory: float, gpu_memory_utilization: float) -> float:
    """Return the bytes of a GPU's memory that an engine may use. ConfigError if the share is not in (0, 1]."""
    return share("gpu_memory_utilization", gpu_memory_utilization) * memory


def kv_memory(
    deployment: Deployment,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    gpu_memory_utilization: float,
    memory_bytes: float | None = None,
    weight_bytes: float | None = None,
    overhead_bytes: float | None = None,
    drafter: Drafter | None = None,
    stage: int | None = None,
) -> KvMemory:
    """Estimate the memory of a GPU that weights, activations of the largest step and graphs leave.

    With a pipeline, that of a GPU of a stage; None: of the one with the most weights.

    The weights are those of the model and of its drafter.
    `memory_bytes`, `weight_bytes` (of the whole model) and `overhead_bytes` (all but weights) override the GPU's
    memory, the architecture's size and the estimate.
    """
    model, tp = deployment.model, deployment.parallel.tensor
    widest = max(model.intermediate_size, model.expert_size * model.experts_per_token) / tp
    activations = max_num_batched_tokens * (4 * widest + 8 * model.hidden_size) * 2
    logits = max_num_seqs * model.vocab_size * 8
    memory = deployment.gpu.memory_gb * 1e9 if memory_bytes is None else memory_bytes
    usable = usable_bytes(memory, gpu_memory_utilization)
    own, shares = deployment.stage_weight_bytes, deployment.stage_shares
    place = own.index(max(own)) if stage is None else stage
    weights = own[place] if weight_bytes is None else weight_bytes / tp * shares[place]
    if weight_bytes is None:
        weights += _padding_bytes(deployment) * shares[place]
    weights += _absorbed_bytes(deployment) * shares[place]
    weights += 0 if drafter is None else drafter.weight_bytes_per_gpu(deployment)
    if place < len(own) - 1:
        logits = 0  # the head is on the last stage
    spent = weights + (activations + logits + _FIXED_BYTES if overhead_bytes is None else overhead_bytes)
    return KvMemory(usable, spent)


def _padding_bytes(deployment: Deployment) -> float:
    """Return the bytes by which kernels of mxfp4 experts widen them: the hidden size to a multiple of 256.

    With vLLM 0.14 on H100, gpt-oss-120b takes 64.4 GiB; its checkpoint has 60.8.
    """
    model, parallel = deployment.model, deployment.parallel
    if weight_type(deployment.weights).name != "mxfp4" or not model.num_experts:
        return 0.0
    wide = -(-model.hidden_size // _MXFP4_MULTIPLE) * _MXFP4_MULTIPLE
    experts = model.expert_bytes(deployment.weights) / (parallel.tensor * parallel.data)
    return experts * (wide / model.hidden_size - 1)


def _absorbed_bytes(deployment: Deployment) -> float:
    """Return the bytes of the matrices that decodes with latent attention use, which vLLM keeps in 16 bits beside."""
    latent = deployment.model.latent
    if latent is None:
        return 0.0
    heads = deployment.model.num_heads / deployment.parallel.tensor
    return deployment.model.num_layers * 2 * latent.rank * heads * (latent.key + latent.value)


def kv_blocks(
    deployment: Deployment,
    *,
    block_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    gpu_memory_utilization: float,
    memory_bytes: float | None = None,
    weight_bytes: float | None = None,
    overhead_bytes: float | None = None,
    drafter: Drafter | None = None,
) -> int:
    """Estimate the usable blocks of one worker with one KV cache group, from `kv_memory`.

    Those of a pipeline are as many as the stage with the least room has.

    Sliding-window layers keep only their window of each sequence. ConfigError if the model does not fit.
    """
    model = deployment.model
    fewest: int | None = None
    for stage, part in enumerate(deployment.stage_shares):
        usable, spent = kv_memory(
            deployment,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            gpu_memory_utilization=gpu_memory_utilization,
            memory_bytes=memory_bytes,
            weight_bytes=weight_bytes,
            overhead_bytes=overhead_bytes,
            drafter=drafter,
            stage=stage,
        )
        block = int(block_size * deployment.kv_bytes_per_token * part)
        if 0 < model.window_layers < model.num_layers:
            windows = deployment.window_bytes_per_token * part
            spent += min(max_num_seqs, _WINDOWED_REQUESTS) * model.window_tokens * windows
            block = int(block - block_size * windows)
        block += 0 if drafter is None else block_size * drafter.kv_bytes_per_token(deployment)
        blocks = int((usable - spent) // block) - 1  # one is reserved
        if blocks < 1:
            raise does_not_fit(deployment, KvMemory(usable, spent))
        fewest = blocks if fewest is None else min(fewest, blocks)
    assert fewest is not None
    return fewest


def does_not_fit(deployment: Deployment, memory: KvMemory) -> ConfigError:
    """Return the error for a model that leaves no room for KV blocks."""
    return ConfigError(
        f"{deployment.model.name} in {deployment.weights} takes {memory.spent / 1e9:.1f} of the "
        f"{memory.usable / 1e9:.1f} usable GB of a {deployment.gpu.name}, which leaves no room for KV blocks; use more "
        "GPUs (tensor_parallel_size, pipeline_parallel_size), a smaller weight type, or a higher gpu_memory_utilization"
    )
