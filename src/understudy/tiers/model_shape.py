"""`ModelShape`: the KV bytes per token of a model, and the number of blocks that fit on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from understudy.checks import share
from understudy.defaults import MEMORY_SHARE
from understudy.errors import ConfigError
from understudy.groups.of_model import config_of_model
from understudy.kv.counts import count
from understudy.tiers.sizes import parse_bytes
from understudy.timing import known_models
from understudy.timing.layer_pattern import cached_kinds, layer_kinds
from understudy.timing.model_config import ModelConfig

DTYPE_BYTES = {
    **dict.fromkeys(("float32", "fp32"), 4),
    **dict.fromkeys(("bfloat16", "bf16", "float16", "fp16", "half"), 2),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2", "int8"), 1),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a model that set the size of its KV cache.

    With latent attention (MLA) a token has one latent vector of `latent_dim` per layer and no heads; otherwise keys
    and values of `kv_heads` times `head_dim`.
    """

    name: str
    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    latent_dim: int = 0

    def __post_init__(self) -> None:
        dtype_bytes(self.dtype)
        count(f"{self.name}: num_layers", self.num_layers, 1, ConfigError)
        if not self.latent_dim:
            count(f"{self.name}: kv_heads", self.kv_heads, 1, ConfigError)
            count(f"{self.name}: head_dim", self.head_dim, 1, ConfigError)

    @classmethod
    def find(cls, model: str) -> ModelShape:
        """Find a model by name, or read the `config.json` at a path or in a folder."""
        path = Path(model)
        if path.is_dir():
            return cls.from_config(path / "config.json")
        if path.suffix == ".json":
            return cls.from_config(path)
        # The owner and the variant do not matter: meta-llama/Llama-3.1-8B-Instruct is Llama-3.1-8B.
        known = MODELS.get(known_models.known_name(model) or "")
        if known is not None:
            return known
        try:
            config = config_of_model(model)
        except ConfigError:
            raise known_models.unknown_model(model, MODELS) from None
        return _read_config(config)

    @classmethod
    def from_config(cls, path: Path) -> ModelShape:
        """Read a Hugging Face `config.json`. ConfigError names the file and the invalid key."""
        return _read_config(ModelConfig.read(path))

    def bytes_per_token(self, *, kv_dtype: str | None = None, tensor_parallel: int = 1) -> int:
        """Return the KV bytes per token on one of `tensor_parallel` GPUs.

        Heads are divided among GPUs, and replicated if there are more GPUs than heads; a latent is whole on each.
        """
        width = dtype_bytes(self.dtype if kv_dtype in (None, "auto") else str(kv_dtype))
        gpus = count("tensor_parallel", tensor_parallel, 1, ConfigError)
        if self.latent_dim:
            return self.num_layers * self.latent_dim * width
        if self.kv_heads % gpus and gpus % self.kv_heads:
            raise ConfigError(
                f"tensor_parallel={gpus} does not fit the {self.kv_heads} KV heads of {self.name}"
            )
        heads = max(self.kv_heads // gpus, 1)
        return self.num_layers * 2 * heads * self.head_dim * width

    def num_gpu_blocks(
        self,
        *,
        block_size: int,
        gpu_memory: int | str,
        weights: int | str,
        gpu_memory_utilization: float = MEMORY_SHARE,
        overhead: int | str | None = None,
        kv_dtype: str | None = None,
        tensor_parallel: int = 1,
    ) -> int:
        """Return the blocks that fit on one GPU next to the weights.

        Memory times utilisation, less one GPU's share of `weights` (of the whole model) and `overhead` (activations,
        graphs), divided by the bytes per block.
        """
        share("gpu_memory_utilization", gpu_memory_utilization)
        # Compute with the exact decimal, not with its binary approximation.
        usable = int(parse_bytes("gpu_memory", gpu_memory) * Fraction(str(gpu_memory_utilization)))
        spent = -(
            -parse_bytes("weights", weights) // count("tensor_parallel", tensor_parallel, 1, ConfigError)
        )
        if overhead is not None:
            spent += parse_bytes("overhead", overhead)
        block_bytes = count("block_size", block_size, 1, ConfigError) * self.bytes_per_token(
            kv_dtype=kv_dtype, tensor_parallel=tensor_parallel
        )
        if usable - spent < block_bytes:
            raise ConfigError(
                f"gpu_memory: {self.name} takes {spent} of {usable} usable bytes of a GPU, and a block of "
                f"{block_bytes} does not fit; use more memory, a higher gpu_memory_utilization or more tensor_parallel"
            )
        return (usable - spent) // block_bytes


def count_kv_parts(model: str | None, gpus: int) -> int:
    """Return among how many of the GPUs of an engine a token's KV is divided; the others hold copies.

    All of them, if the model is not known.
    """
    try:
        shape = None if model is None else ModelShape.find(model)
    except ConfigError:
        shape = None
    return gpus if shape is None else shape.bytes_per_token() // shape.bytes_per_token(tensor_parallel=gpus)


def dtype_bytes(dtype: str) -> int:
    """Return the bytes per element of a data type. ConfigError for an unknown type."""
    name = dtype.removeprefix("torch.").lower()
    if name not in DTYPE_BYTES:
        raise ConfigError(f"dtype {dtype!r} is not known; known are {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]


def _read_config(config: ModelConfig) -> ModelShape:
    _reject_mixed_layers(config)
    dtype = {"bf16": "bfloat16", "f16": "float16"}[config.dtype()]
    layers, where = len(cached_kinds(config)), config.where.removeprefix("model ")
    if config.has("kv_lora_rank"):
        latent = config.number("kv_lora_rank") + config.number("qk_rope_head_dim")
        return ModelShape(where, layers, 0, 0, dtype, latent)
    heads = config.number("num_attention_heads")
    kv_heads = config.number("num_key_value_heads", default=heads)
    return ModelShape(where, layers, kv_heads, config.head_dim(heads), dtype)


def _reject_mixed_layers(config: ModelConfig) -> None:
    """Raise ConfigError if the KV bytes per token are not constant, because layers differ or keep other state."""
    if config.content.get("is_encoder_decoder"):
        reason = "it has an encoder and a decoder"
    elif config.has("ssm_cfg", "state_size", "mamba_d_state", "index_head_dim", "sparse_attention_config"):
        reason = "its layers keep more than keys and values"
    elif len(kinds := set(layer_kinds(config))) > 1:
        reason = "its layers are of several kinds"
    elif kinds - {"full", "window"}:
        reason = "its layers keep more than keys and values"
    else:
        return
    raise ConfigError(
        f"{config.where}: the KV bytes per token are not constant, because {reason}; give --gpu, which gives it KV "
        "cache groups, or kv_bytes_per_token"
    )


MODELS = {
    shape.name: shape
    for shape in (
        (
            ModelShape(model.name, model.num_layers, model.kv_heads, model.head_dim)
            if model.latent is None
            else ModelShape(model.name, model.num_layers, 0, 0, latent_dim=model.latent.cached)
        )
        for model in known_models.MODELS.values()
        if not (model.window_layers or model.state_layers or model.indexer)  # else they are not constant
    )
}
"""Known models by repository name, without the owner and suffixes such as -Instruct."""
