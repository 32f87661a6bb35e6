"""Presets of efficiencies by GPU, weight type and, for experts, model, each with the origin of its numbers.

They are fitted to public measurements of vLLM (docs/accuracy.md lists which data each number was fitted to):

- "InferenceX": Llama-3.1-70B, gpt-oss-120b and MiniMax-M2.5 on H100, H200 and B200, one mean TTFT and TPOT per row.
- "BLIS": experiments with fp16 models on H100, A100 and L40S at constant rates.
- "op tables": kernel times of RTX 4090 and RTX PRO 6000, and "recorded runs" on them, from LLMServingSim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from understudy.timing.efficiencies import Efficiencies
from understudy.timing.engine_names import ENGINES
from understudy.timing.known_models import MODELS
from understudy.timing.weight_types import kv_type, weight_type

if TYPE_CHECKING:
    from understudy.timing.architecture import Architecture
    from understudy.timing.gpus import Gpu

Trust = Literal["fitted", "rough", "uncalibrated"]


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """Efficiencies and their quality.

    "fitted": from many measurements of this GPU and kind of model; "rough": from one or two, or from kernels only;
    "uncalibrated": without measurements of this GPU or of this model's experts, from the nearest that has some.
    """

    efficiencies: Efficiencies
    trust: Trust
    origin: str


class _Dense(msgspec.Struct, frozen=True, kw_only=True):
    efficiencies: Efficiencies
    kv_fp8: float
    trust: Trust
    origin: str


class _Experts(msgspec.Struct, frozen=True, kw_only=True):
    read: float
    compute: float
    origin: str
    others: dict[str, float] = {}
    """Other efficiencies of this model."""
    releases: dict[str, dict[str, float]] = {}
    """Efficiencies that differ in other releases of vLLM, by the start of the version; expert kernels change often."""

    def numbers(self, release: str) -> dict[str, float]:
        """Return the efficiencies by name, those of the release if they were measured."""
        own = next((found for start, found in self.releases.items() if release.startswith(start)), {})
        return {"experts": self.read, "expert_compute": self.compute, **self.others, **own}


_HOPPER = _Dense(
    efficiencies=Efficiencies(
        weights=0.805,
        compute=0.52,
        kv=0.82,
        link=0.62,
        link_latency_us=13.7,
        step_ms=0.95,
        layer_us=6.5,
        sequence_us=11.0,
        prefill_ms=1.1,
        front_end_ms=6.6,
    ),
    kv_fp8=0.33,
    trust="fitted",
    origin="InferenceX Llama-3.1-70B fp8 on H100 and H200; bf16 KV from BLIS on H100",
)
_HOPPER_BF16 = _Dense(
    efficiencies=msgspec.structs.replace(
        _HOPPER.efficiencies,
        weights=0.802,
        kv=0.803,
        link_latency_us=8.2,
        step_ms=0.99,
        sequence_us=12.1,
        prefill_ms=1.25,
        front_end_ms=6.1,
    ),
    kv_fp8=0.33,
    trust="fitted",
    origin="BLIS Llama-3.1-8B and Llama-2-70B fp16 on H100, 8 experiments; the rest as for fp8",
)
_B200_FP8 = _Dense(
    efficiencies=Efficiencies(
        weights=0.625,
        compute=0.394,
        kv=0.96,
        link=0.31,
        link_latency_us=9.2,
        step_ms=1.58,
        layer_us=5.0,
        sequence_us=8.3,
        prefill_ms=1.3,
        floor_ms_per_layer=1.07,
        front_end_ms=6.1,
    ),
    kv_fp8=0.96,
    trust="fitted",
    origin="InferenceX Llama-3.1-70B fp8 on B200; bf16 KV assumed equal to fp8",
)
_B200_NVFP4 = _Dense(
    efficiencies=Efficiencies(
        weights=0.466,
        compute=0.356,
        kv=0.86,
        link=0.25,
        link_latency_us=11.5,
        step_ms=1.28,
        layer_us=5.0,
        sequence_us=14.0,
        prefill_ms=1.3,
        floor_ms_per_layer=0.84,
        front_end_ms=5.9,
    ),
    kv_fp8=0.86,
    trust="fitted",
    origin="InferenceX Llama-3.1-70B nvfp4 on B200; bf16 KV assumed equal to fp8",
)
_A100 = _Dense(
    efficiencies=msgspec.structs.replace(
        _HOPPER.efficiencies, weights=0.653, link_latency_us=14.3, step_ms=0.94
    ),
    kv_fp8=0.33,
    trust="rough",
    origin="two BLIS experiments on A100; the rest as on Hopper",
)
_L40S = _Dense(
    efficiencies=msgspec.structs.replace(_HOPPER.efficiencies, weights=0.738, link=0.4, link_latency_us=20.0),
    kv_fp8=0.33,
    trust="rough",
    origin="one BLIS experiment on L40S; the rest as on Hopper; its link is a guess",
)
_RTX_4090 = _Dense(
    efficiencies=msgspec.structs.replace(
        _HOPPER.efficiencies,
        weights=0.917,
        compute=0.907,
        kv=0.839,
        link=0.3,
        link_latency_us=25.0,
        step_ms=1.19,
        layer_us=10.0,
        prefill_ms=1.24,
        mixed_kv_factor=1.72,
    ),
    kv_fp8=0.85,
    trust="rough",
    origin="op tables and a recorded run of Llama-3.1-8B (FlashAttention 2); its link is a guess",
)
_RTX_PRO_6000 = _Dense(
    efficiencies=msgspec.structs.replace(
        _HOPPER.efficiencies,
        weights=0.862,
        compute=0.69,
        kv=0.932,
        link=0.25,
        link_latency_us=40.0,
        step_ms=1.84,
        layer_us=10.0,
        sequence_us=9.8,
        prefill_ms=0.56,
        mixed_kv_factor=1.42,
    ),
    kv_fp8=0.85,
    trust="rough",
    origin="op tables and a recorded run of Llama-3.1-8B (FlashAttention 2); its link as documented with the recording "
    "(16 GB/s, 20 µs per hop)",
)

DENSE: dict[tuple[str, str], _Dense] = {
    **dict.fromkeys((("H100", "*"), ("H200", "*")), _HOPPER),
    **dict.fromkeys((("H100", "bf16"), ("H200", "bf16")), _HOPPER_BF16),
    ("B200", "*"): _B200_FP8,
    ("B200", "nvfp4"): _B200_NVFP4,
    ("B200", "mxfp4"): _B200_NVFP4,
    ("A100", "*"): _A100,
    ("L40S", "*"): _L40S,
    ("RTX 4090", "*"): _RTX_4090,
    ("RTX PRO 6000", "*"): _RTX_PRO_6000,
}
_MEASURED = {
    ("H100", "bf16"),
    ("H100", "fp8"),
    ("H200", "bf16"),
    ("H200", "fp8"),
    ("B200", "fp8"),
    ("B200", "nvfp4"),
    ("A100", "bf16"),
    ("L40S", "bf16"),
    ("RTX 4090", "bf16"),
    ("RTX PRO 6000", "bf16"),
}
"""Measured pairs of GPU and weight type."""

EXPERTS: dict[tuple[str, str, str], _Experts] = {
    ("gpt-oss-120b", "mxfp4", "H100"): _Experts(
        read=0.881,
        compute=0.174,
        origin="InferenceX",
        others={
            "kv": 1.22,
            "step_ms": 1.28,
            "layer_us": 17.4,
            "routing_ns": 125.0,
            "link": 0.52,
            "link_latency_us": 9.2,
            "prefill_ms": 1.42,
            "sequence_us": 11.5,
        },
    ),
    ("gpt-oss-120b", "mxfp4", "H200"): _Experts(
        read=0.657,
        compute=0.178,
        origin="InferenceX",
        others={
            "kv": 1.37,
            "step_ms": 1.73,
            "layer_us": 18.7,
            "routing_ns": 123.0,
            "link": 0.54,
            "link_latency_us": 5.7,
            "prefill_ms": 1.75,
            "sequence_us": 7.6,
        },
    ),
    ("gpt-oss-120b", "mxfp4", "B200"): _Experts(
        read=1.17,
        compute=0.509,
        origin="InferenceX",
        others={
            "kv": 1.3,
            "step_ms": 1.28,
            "layer_us": 15.1,
            "routing_ns": 57.0,
            "link": 0.30,
            "link_latency_us": 8.0,
            "prefill_ms": 1.24,
            "sequence_us": 12.9,
            "floor_ms_per_layer": 0.72,
        },
    ),
    ("MiniMax-M2.5", "fp8", "H100"): _Experts(
        read=1.17, compute=0.063, origin="InferenceX, nine rows of", others={"link_latency_us": 41.8}
    ),
    ("MiniMax-M2.5", "fp8", "B200"): _Experts(
        read=0.939,
        compute=0.091,
        origin="InferenceX",
        others={
            "kv": 1.12,
            "step_ms": 4.4,
            "layer_us": 20.2,
            "routing_ns": 72.0,
            "link": 0.40,
            "link_latency_us": 8.8,
            "prefill_ms": 1.37,
            "sequence_us": 7.3,
            "floor_ms_per_layer": 0.84,
        },
        releases={
            "0.17": {
                "experts": 0.788,
                "expert_compute": 0.059,
                "routing_ns": 114.0,
                "step_ms": 5.05,
                "floor_ms_per_layer": 1.27,
            }
        },
    ),
    ("MiniMax-M2.5", "nvfp4", "B200"): _Experts(
        read=0.983,
        compute=0.125,
        origin="InferenceX",
        others={
            "kv": 1.34,
            "step_ms": 2.89,
            "layer_us": 22.7,
            "routing_ns": 80.0,
            "link": 0.24,
            "link_latency_us": 6.6,
            "prefill_ms": 1.29,
            "sequence_us": 17.9,
            "floor_ms_per_layer": 0.80,
        },
    ),
    ("Qwen3-30B-A3B", "bf16", "RTX PRO 6000"): _Experts(
        read=0.925,
        compute=0.45,
        origin="op tables, and a recorded run on two ranks, of",
        others={"layer_us": 65.0, "routing_ns": 130.0, "link": 0.3, "link_latency_us": 44.0},
    ),
    ("Mixtral-8x7B", "bf16", "H100"): _Experts(
        read=0.906,
        compute=0.268,
        origin="BLIS, five experiments with",
        others={"layer_us": 9.6, "routing_ns": 89.0},
    ),
}
"""Efficiencies of experts by model, expert type and GPU. A value above 1 absorbs unmodelled effects."""

_NEAREST = {
    "bf16": ("Mixtral-8x7B", "bf16", "H100"),
    "int4": ("Mixtral-8x7B", "bf16", "H100"),
    "mxfp4": ("gpt-oss-120b", "mxfp4", "H100"),
    "fp8": ("MiniMax-M2.5", "fp8", "B200"),
    "nvfp4": ("MiniMax-M2.5", "nvfp4", "B200"),
}
"""Experts to use, by weight type, if none were measured on the GPU or its sibling."""

_SIBLINGS = {"H100": "H200", "H200": "H100"}


def _nearest_experts(kind: str, gpu: Gpu, dense: _Dense) -> _Experts:
    """Return the experts of another model, on this GPU or its sibling if possible.

    The share of bandwidth is scaled by the GPUs' ratio for other weights.
    """
    own = gpu.like or gpu.name
    near = (own, _SIBLINGS.get(own))
    same = [name for where in near for name in EXPERTS if name[1] == kind and name[2] == where]
    usual = _NEAREST[kind]
    source = same[0] if same else usual if usual in EXPERTS else _NEAREST["bf16"]
    known = EXPERTS[source]
    there = DENSE.get((source[2], kind)) or DENSE[source[2], "*"]
    others: dict[str, float] = {
        name: known.others[name] for name in ("layer_us", "routing_ns") if name in known.others
    }
    # A share above 1 absorbs unmodelled effects of its own model and must not be transferred.
    read = min(known.read * dense.efficiencies.weights / there.efficiencies.weights, 1.0)
    return _Experts(
        read=round(read, 3),
        compute=known.compute,
        origin=f"no measurement on {gpu.name}: those of {source[0]} in {source[1]} on {source[2]}",
        others=others,
    )


def preset(
    model: Architecture, gpu: Gpu, weights: str, kv: str, *, release: str = "", engine: str = "vllm"
) -> Preset:
    """Find the efficiencies of a model on a GPU; an unknown GPU gets Hopper's, as the origin says.

    `engine` is the one whose times are asked for (vllm, sglang, trtllm); `release` its version, used for experts that
    were measured with several versions.
    """
    kind, cache, release = weight_type(weights).name, kv_type(kv), release.removeprefix("v")
    own = gpu.like or gpu.name
    known = DENSE.get((own, kind)) or DENSE.get((own, "*"))
    dense = known or _HOPPER
    trust: Trust = dense.trust if known else "uncalibrated"
    origin = dense.origin if known else f"{gpu.name}: {gpu.origin}; efficiencies of Hopper"
    linear = model.linear_type(kind)
    name = next((one for one, *_ in EXPERTS if MODELS[one].shape == model.shape), model.name)
    experts = EXPERTS.get((name, kind, own)) if model.num_experts else None
    if known and experts is None and (own, linear) not in _MEASURED:
        trust, origin = "uncalibrated", f"{origin}; {linear} weights were not measured on {own}"
    efficiencies = dense.efficiencies
    if cache == "fp8":
        efficiencies = msgspec.structs.replace(efficiencies, kv=dense.kv_fp8)
    if efficiencies.mixed_kv_factor > 1 and model.latent is not None:
        efficiencies = msgspec.structs.replace(
            efficiencies, mixed_kv_factor=1.0
        )  # decodes have kernels of their own
    elif efficiencies.mixed_kv_factor > 1:
        # FlashAttention 2 reads the cache once per query head in mixed steps: op tables show a factor of 1.75 with
        # four query heads per KV head, and 2.9 with eight.
        packed = (model.num_heads / model.kv_heads / 4) ** 1.34
        efficiencies = msgspec.structs.replace(
            efficiencies, mixed_kv_factor=round(1 + (efficiencies.mixed_kv_factor - 1) * packed, 3)
        )
    if model.num_experts:
        if experts is None:
            trust, experts = "uncalibrated", _nearest_experts(kind, gpu, dense)
            origin = f"{origin}; experts of {model.name} in {kind}: {experts.origin}"
        else:
            origin = f"{origin}; experts: {experts.origin} {name} on {own}"
            if any(release.startswith(start) for start in experts.releases):
                origin = f"{origin} with vLLM {release}"
        efficiencies = msgspec.structs.replace(efficiencies, **experts.numbers(release))
    if model.indexer is not None:
        trust, origin = (
            "uncalibrated",
            f"{origin}; sparse attention was not measured: times of attention to all tokens, not to the "
            f"{model.indexer.tokens:,} that its indexer selects",
        )
    elif model.latent is not None:
        trust, origin = "uncalibrated", f"{origin}; latent attention: from its sizes"
    if engine != "vllm":
        trust, origin = (
            "uncalibrated",
            f"{ENGINES[engine]} was never measured on {own}: times of vLLM ({origin})",
        )
    if gpu.like:
        trust, origin = (
            "uncalibrated",
            f"{gpu.name} was never measured: {gpu.origin}, with the efficiencies of {gpu.like} ({origin})",
        )
    return Preset(efficiencies=efficiencies, trust=trust, origin=origin)
