"""How many KV blocks fit on the GPUs of a worker."""

from __future__ import annotations

import msgspec

from understudy.errors import ConfigError
from understudy.tiers.model_shape import ModelShape


class GpuSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory of one GPU and what of it the KV cache gets; sizes in bytes or as text ("80GiB")."""

    memory: int | str
    weights: int | str
    """Of the whole model; each GPU holds its share."""
    gpu_memory_utilization: float = 0.9
    overhead: int | str | None = None
    """Of each GPU: activations, graphs."""
    tensor_parallel_size: int = 1

    def num_blocks(self, model: str | None, kv_dtype: str | None, block_size: int) -> int:
        """Blocks of a worker with this model. Raises ConfigError, naming the field."""
        if model is None:
            raise ConfigError(
                "gpu needs model, to know what a token weighs: a name or the path of a config.json"
            )
        return ModelShape.find(model).num_gpu_blocks(
            block_size=block_size,
            gpu_memory=self.memory,
            weights=self.weights,
            gpu_memory_utilization=self.gpu_memory_utilization,
            overhead=self.overhead,
            kv_dtype=kv_dtype,
            tensor_parallel=self.tensor_parallel_size,
        )
