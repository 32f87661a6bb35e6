"""`Drafter`: the sizes of what drafts tokens for a model, its step coefficients and its memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from understudy._core import StepTiming, drafted_timing
from understudy.errors import ConfigError
from understudy.timing.architecture import Architecture
from understudy.timing.deployment import Deployment, Parallelism
from understudy.timing.find_architecture import find_architecture
from understudy.timing.model_config import ModelConfig
from understudy.timing.weight_types import weight_type

if TYPE_CHECKING:
    from understudy.timing.coefficients import StepCoefficients
    from understudy.timing.efficiencies import Efficiencies

DraftMethod = Literal["mtp", "eagle", "eagle3", "draft_model"]


class Drafter(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter's decoder, the parameters beside its layers, and the origin of these sizes."""

    model: Architecture
    """Layers and output matrix of one pass."""
    weights: str
    tensor: int = 1
    """GPUs that share it."""
    pass_parameters: int = 0
    """Linear parameters of each pass beside the layers."""
    step_parameters: int = 0
    """Linear parameters that are used once per step, for all its tokens."""
    own_head: bool = True
    """Whether the output matrix is stored beside the model's."""
    own_embedding: bool = False
    origin: str = ""
    """Where the sizes come from, for notes."""

    @property
    def parameters(self) -> int:
        """Parameters that a pass reads: layers and output matrix, of experts all that are stored."""
        model = self.model
        experts = model.expert_layers * model.num_experts * model.expert_parameters
        return model.linear_parameters + self.pass_parameters + experts + model.head_parameters

    def weight_bytes_per_gpu(self, target: Deployment) -> float:
        """Bytes of its weights on one GPU, in addition to those of `target`."""
        model = self.model
        matrices = 1 if model.tied_head else 2
        shared = (matrices - min(matrices, self.own_head + self.own_embedding)) * model.head_parameters * 2
        linear = weight_type(model.linear_type(self.weights)).bytes
        extra = (self.pass_parameters + self.step_parameters) * linear
        return self.deployment(target).weight_bytes_per_gpu + (extra - shared) / self.tensor

    def kv_bytes_per_token(self, target: Deployment) -> int:
        """KV bytes of its layers per token on one GPU."""
        return self.deployment(target).kv_bytes_per_token

    def deployment(self, target: Deployment) -> Deployment:
        """Place it on the GPUs of `target`; experts are spread as those of `target` are."""
        spread = target.parallel if self.model.num_experts else Parallelism()
        return Deployment(
            model=self.model,
            gpu=target.gpu,
            weights=self.weights,
            kv=target.kv,
            parallel=msgspec.structs.replace(spread, tensor=self.tensor),
        )

    def coefficients(
        self, target: Deployment, efficiencies: Efficiencies, *, first: bool = False
    ) -> StepCoefficients:
        """Compute the coefficients of a pass; `first`: with the work that is done once per step."""
        own = msgspec.structs.replace(
            efficiencies, step_ms=0.0, sequence_us=0.0, prefill_ms=0.0, floor_ms_per_layer=0.0
        )
        found = self.deployment(target).coefficients(own)
        linear = self.model.linear_parameters
        share = 1 + (self.pass_parameters + (self.step_parameters if first else 0)) / linear
        return msgspec.structs.replace(
            found, weights_ms=found.weights_ms * share, token_ms=found.token_ms * share
        )

    def build(
        self, timing: StepTiming, target: Deployment, efficiencies: Efficiencies, passes: int
    ) -> StepTiming:
        """Add `passes` passes of the drafter to every step of `timing`."""
        first = self.coefficients(target, efficiencies, first=True)
        further = self.coefficients(target, efficiencies)
        return drafted_timing(timing, first.build(), further.build(), passes)


def find_drafter(
    method: DraftMethod, target: Deployment, named: str | None = None, tensor: int | None = None
) -> Drafter:
    """Return the drafter of `target`: with the sizes of `named`, else those that follow from the target.

    `named` is the path of a config.json or its folder, or, for a draft model, a known name. ConfigError if the sizes of
    a draft model are not known, or do not divide.
    """
    size = target.parallel.tensor if tensor is None else tensor
    if method == "draft_model":
        if named is None:
            raise ConfigError(
                "speculative_config.model: a draft model is charged by its own sizes; give a known name or the path "
                "of its config.json"
            )
        model = find_architecture(named)
        if model.vocab_size != target.model.vocab_size:
            raise ConfigError(
                f"speculative_config.model: {model.name} has a vocabulary of {model.vocab_size:,}, "
                f"{target.model.name} one of {target.model.vocab_size:,}, and vLLM accepts only equal ones; choose "
                "another draft model"
            )
        window = model.window_tokens if model.window_tokens == target.model.window_tokens else 0
        if not window:  # contexts are measured with the target's window
            model = msgspec.structs.replace(model, window_tokens=0, window_layers=0)
        return Drafter(
            model=model,
            weights=model.weights,
            tensor=size,
            own_embedding=True,
            origin=f"sizes of {model.name}",
        )
    if method == "mtp":
        return _own_layer(target, size)
    path = None if named is None else Path(named)
    if path is not None and (path.is_dir() or path.suffix == ".json"):
        return _read_head(method, target, path / "config.json" if path.is_dir() else path, size)
    unknown = "" if named is None else f", because the sizes of {named} are not known"
    return _eagle(method, _layer_of(target.model), size, f"one dense layer of {target.model.name}{unknown}")


def _layer_of(target: Architecture) -> Architecture:
    """Return one layer of full attention and a dense MLP; of experts, as wide as those of one token."""
    wide = target.intermediate_size or target.experts_per_token * target.expert_size
    return Architecture(
        name=f"the drafter of {target.name}",
        num_layers=1,
        hidden_size=target.hidden_size,
        num_heads=target.num_heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        intermediate_size=wide,
        latent=target.latent,
    )


def _own_layer(target: Deployment, tensor: int) -> Drafter:
    """Return the multi-token prediction layer: one layer of the model, behind a projection of two inputs."""
    model = target.model
    layer = msgspec.structs.replace(
        model,
        name=f"the drafter of {model.name}",
        num_layers=1,
        dense_layers=0,
        window_tokens=0,
        window_layers=0,
        shared_layers=0,
        mlp_layers=0,
        indexer=None,
        state_layers=0,
        state_elements=0,
        state_bytes=0,
        state_parameters=0,
    )
    return Drafter(
        model=layer,
        weights=target.weights,
        tensor=tensor,
        pass_parameters=2 * model.hidden_size**2,
        own_head=False,
        origin=f"one layer of {model.name}",
    )


def _eagle(method: str, layer: Architecture, tensor: int, origin: str, fused: int | None = None) -> Drafter:
    """Return an EAGLE head: its attention reads two inputs (3), or a projection combines them (1)."""
    hidden = layer.hidden_size
    if method == "eagle3":
        second_input = hidden * layer.head_dim * (layer.num_heads + 2 * layer.kv_heads)
        if layer.latent is not None:
            second_input = layer.latent.whole_parameters(hidden)
        combined = 3 * (hidden if fused is None else fused) * hidden
        return Drafter(
            model=layer,
            weights="bf16",
            tensor=tensor,
            pass_parameters=second_input,
            step_parameters=combined,
            origin=origin,
        )
    return Drafter(
        model=layer,
        weights="bf16",
        tensor=tensor,
        pass_parameters=2 * hidden * hidden,
        own_head=False,
        origin=origin,
    )


def _read_head(method: str, target: Deployment, path: Path, tensor: int) -> Drafter:
    """Read the sizes of an EAGLE head. ConfigError names the file and the key."""
    config = ModelConfig.read(path)
    heads = config.number("num_attention_heads")
    hidden = config.number("hidden_size")
    try:
        layer = Architecture(
            name=f"the drafter in {path}",
            num_layers=config.num_layers(1),
            hidden_size=hidden,
            num_heads=heads,
            kv_heads=config.number("num_key_value_heads", default=heads),
            head_dim=config.head_dim(heads),
            vocab_size=config.number("draft_vocab_size", "vocab_size"),
            intermediate_size=config.number("intermediate_size"),
        )
    except ConfigError as error:
        raise ConfigError(f"{config.where}: {error}") from error
    fused = config.optional("target_hidden_size") or target.model.hidden_size
    return _eagle(method, layer, tensor, f"sizes of {path}", fused)
