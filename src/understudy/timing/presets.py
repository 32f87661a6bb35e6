"""Find the efficiencies of a model on a GPU with an engine: measured ones, or the nearest, with their origin.

Dense models of vLLM have numbers by GPU and weight type (`dense_presets`), some models with experts numbers of their
own (`expert_presets`). Everything else starts from kernels, of `dense_presets` and of op tables (`expert_kernels`),
times factors that were fitted to engines, GPUs, types and models (`fitted_factors`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from understudy.timing.accuracy import find_accuracy
from understudy.timing.dense_presets import DENSE, HOPPER, MEASURED, DensePreset, Trust
from understudy.timing.efficiencies import Efficiencies  # noqa: TC001  (msgspec reads the annotation)
from understudy.timing.engine_names import ENGINES
from understudy.timing.expert_kernels import find_expert_kernel
from understudy.timing.expert_presets import EXPERTS
from understudy.timing.fitted_factors import Target, apply_factors, find_deployment, read_fitted
from understudy.timing.known_models import MODELS
from understudy.timing.weight_types import kv_type, weight_type

if TYPE_CHECKING:
    from understudy.timing.architecture import Architecture
    from understudy.timing.gpus import Gpu

_EXPERT_OVERHEADS = {"routing_ns": 80.0, "layer_us": 16.0}
"""Overheads of layers with experts, before factors: rounded from gpt-oss-120b and MiniMax-M2.5."""
_LEAST_FLOOR_MS = 0.15
"""Launch floor per layer, before factors, where dense models of vLLM show none."""
_SOFTNESS = 3.0
_FEW_ROWS = 8
"""Measured rows below which numbers are rough."""


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """Efficiencies and their quality.

    "fitted": from many measurements of this GPU and kind of model; "rough": from one or two, or from kernels only;
    "uncalibrated": without measurements of this GPU, of this engine there, or of this model's experts.
    """

    efficiencies: Efficiencies
    trust: Trust
    origin: str
    range_text: str = ""
    """How far TPOT and TTFT may be off, from the errors of measured deployments."""


def preset(
    model: Architecture, gpu: Gpu, weights: str, kv: str, *, release: str = "", engine: str = "vllm"
) -> Preset:
    """Find the efficiencies of a model on a GPU; an unknown GPU gets Hopper's, as the origin says.

    `engine` is the one whose times are asked for (vllm, sglang, trtllm); `release` its version, used for experts that
    were measured with several versions.
    """
    kind, own = weight_type(weights).name, gpu.like or gpu.name
    name = find_model_name(model)
    target = target_of(model, gpu, weights, engine)
    is_measured = find_deployment(target) is not None
    if engine == "vllm" and (name, kind, own) in EXPERTS and not (gpu.like and is_measured):
        found = _of_experts(model, gpu, kind, kv, release.removeprefix("v"))
    elif not model.num_experts and engine == "vllm":
        found = _of_dense(model, gpu, kind, kv)
    else:
        found = _of_neighbours(model, gpu, kind, kv, engine)
    trust, origin = found.trust, found.origin
    if model.indexer is not None:
        trust, origin = (
            trust if is_measured else "uncalibrated",
            f"{origin}; sparse attention was not measured: times of attention to all tokens, not to the "
            f"{model.indexer.tokens:,} that its indexer selects",
        )
    elif model.latent is not None and not is_measured:
        trust, origin = "uncalibrated", f"{origin}; latent attention: from its sizes"
    if gpu.like and not is_measured:
        trust, origin = (
            "uncalibrated",
            f"{gpu.name} was never measured: {gpu.origin}, with the efficiencies of {gpu.like} ({origin})",
        )
    return Preset(
        efficiencies=found.efficiencies,
        trust=trust,
        origin=origin,
        range_text=find_accuracy(target).text(),
    )


def find_model_name(model: Architecture) -> str:
    """Return the name under which a model was measured: that of equal sizes, else its own."""
    names = dict.fromkeys(
        [
            *(one for one, *_ in EXPERTS),
            *(one.model for one in read_fitted().deployments if one.model in MODELS),
        ]
    )
    return next((one for one in names if MODELS[one].shape == model.shape), model.name)


def target_of(model: Architecture, gpu: Gpu, weights: str, engine: str) -> Target:
    """Return the deployment whose factors and errors hold for a model on a GPU with an engine."""
    return Target(
        engine=engine,
        gpu=gpu.name,
        model=find_model_name(model),
        weights=weight_type(weights).name,
        has_experts=bool(model.num_experts),
    )


def find_start(model: Architecture, gpu: Gpu, weights: str, kv: str, *, engine: str) -> Preset:
    """Return the numbers to which factors are applied: those of kernels, and usual overheads."""
    kind = weight_type(weights).name
    found = _of_dense(model, gpu, model.linear_type(kind) if model.num_experts else kind, kv)
    reached, origin = found.efficiencies, found.origin
    if model.num_experts:
        kernel = find_expert_kernel(gpu.name, kind)
        reached = msgspec.structs.replace(
            reached,
            experts=kernel.read,
            expert_compute=kernel.compute,
            expert_imbalance=1.0,
            softness=_SOFTNESS,
            **_EXPERT_OVERHEADS,
        )
        origin = f"{origin}; experts of {model.name} in {kind}: {kernel.origin}"
    if model.num_experts or engine != "vllm":
        floor = reached.floor_ms_per_layer or _LEAST_FLOOR_MS
        reached = msgspec.structs.replace(reached, floor_ms_per_layer=floor)
    return Preset(efficiencies=reached, trust="uncalibrated", origin=origin)


def _of_neighbours(model: Architecture, gpu: Gpu, kind: str, kv: str, engine: str) -> Preset:
    """Return the start of a deployment with all factors that were fitted to it or to its neighbours."""
    start = find_start(model, gpu, kind, kv, engine=engine)
    target = target_of(model, gpu, kind, engine)
    reached = apply_factors(start.efficiencies, target)
    title, own = ENGINES[engine], gpu.name
    known = find_deployment(target)
    if known is not None:
        trust: Trust = "fitted" if known.rows >= _FEW_ROWS else "rough"
        rows = f"{known.rows} row{'s' if known.rows > 1 else ''}"
        return Preset(
            efficiencies=reached,
            trust=trust,
            origin=f"{rows} of {target.model} in {kind} on {own}, measured with {title}",
        )
    there = [one for one in read_fitted().deployments if (one.engine, one.gpu) == (engine, own)]
    if engine != "vllm" and not there:
        origin = (
            f"{title} was never measured on {own}: its factors elsewhere, on times of vLLM ({start.origin})"
        )
    else:
        names = ", ".join(dict.fromkeys(one.model for one in there)) or "no model"
        origin = f"{start.origin}; not measured with {title} on {own}, where {names} was"
        if engine != "vllm":
            origin = f"{origin}; measured with {title}"
    return Preset(efficiencies=reached, trust="uncalibrated", origin=origin)


def _of_experts(model: Architecture, gpu: Gpu, kind: str, kv: str, release: str) -> Preset:
    """Return the numbers of experts that were measured with vLLM on this GPU."""
    dense = _of_dense(model, gpu, kind, kv)
    name, own = find_model_name(model), gpu.like or gpu.name
    experts = EXPERTS[name, kind, own]
    origin = f"{_find_dense(gpu, kind)[0].origin}; experts: {experts.origin} {name} on {own}"
    if any(release.startswith(start) for start in experts.releases):
        origin = f"{origin} with vLLM {release}"
    return Preset(
        efficiencies=msgspec.structs.replace(dense.efficiencies, **experts.numbers(release)),
        trust=_find_dense(gpu, kind)[0].trust,
        origin=origin,
    )


def _find_dense(gpu: Gpu, kind: str) -> tuple[DensePreset, bool]:
    """Return the dense preset of a GPU and type, and whether the GPU has one."""
    own = gpu.like or gpu.name
    known = DENSE.get((own, kind)) or DENSE.get((own, "*"))
    return known or HOPPER, known is not None


def _of_dense(model: Architecture, gpu: Gpu, kind: str, kv: str) -> Preset:
    """Return the numbers of dense layers of vLLM, with those of attention for this model."""
    dense, is_known = _find_dense(gpu, kind)
    own, linear = gpu.like or gpu.name, model.linear_type(kind)
    trust: Trust = dense.trust if is_known else "uncalibrated"
    origin = dense.origin if is_known else f"{gpu.name}: {gpu.origin}; efficiencies of Hopper"
    if is_known and (own, linear) not in MEASURED:
        trust, origin = "uncalibrated", f"{origin}; {linear} weights were not measured on {own}"
    reached = dense.efficiencies
    if kv_type(kv) == "fp8":
        reached = msgspec.structs.replace(reached, kv=dense.kv_fp8)
    if reached.mixed_kv_factor > 1 and model.latent is not None:
        reached = msgspec.structs.replace(reached, mixed_kv_factor=1.0)  # decodes have kernels of their own
    elif reached.mixed_kv_factor > 1:
        # FlashAttention 2 reads the cache once per query head in mixed steps: op tables show a factor of 1.75 with
        # four query heads per KV head, and 2.9 with eight.
        packed = (model.num_heads / model.kv_heads / 4) ** 1.34
        reached = msgspec.structs.replace(
            reached, mixed_kv_factor=round(1 + (reached.mixed_kv_factor - 1) * packed, 3)
        )
    return Preset(efficiencies=reached, trust=trust, origin=origin)
