"""Types of weights and of the KV cache: what an element weighs, and which of a GPU's peaks it computes at."""

from __future__ import annotations

from typing import NamedTuple

from understudy.errors import ConfigError


class WeightType(NamedTuple):
    """A type of weights. `bytes` is of one parameter, its share of the scales included."""

    name: str
    bytes: float
    peak: str
    """Which peak of the GPU its products run at: bf16, fp8 or fp4. Weight-only types compute in bf16."""


WEIGHT_TYPES = {
    kind.name: kind
    for kind in (
        WeightType("bf16", 2.0, "bf16"),
        WeightType("fp8", 1.0, "fp8"),
        WeightType("int4", 0.5 + 2 / 128, "bf16"),  # a 16-bit scale for each group of 128
        WeightType("mxfp4", 0.5 + 1 / 32, "bf16"),  # an 8-bit scale for each group of 32
        WeightType("nvfp4", 0.5 + 1 / 16, "fp4"),  # an 8-bit scale for each group of 16
    )
}

_WEIGHT_NAMES = {
    **dict.fromkeys(("bfloat16", "float16", "fp16", "half"), "bf16"),
    **dict.fromkeys(("fp8_e4m3", "float8_e4m3fn", "e4m3", "fp8_block", "fp8_static", "fp8_dynamic"), "fp8"),
    **dict.fromkeys(("w8a8", "fp8_w8a8", "fp8_per_tensor", "modelopt", "fp8_ootb"), "fp8"),
    **dict.fromkeys(("awq", "gptq", "w4a16", "int4_wo", "awq_marlin", "gptq_marlin"), "int4"),
    **dict.fromkeys(("w4a16_mxfp4", "w4a8_mxfp4_mxfp8"), "mxfp4"),
    "fp4": "nvfp4",
    "modelopt_fp4": "nvfp4",
}

KV_TYPES = {"bf16": 2, "fp8": 1}
_KV_NAMES = {
    **dict.fromkeys(("bfloat16", "float16", "fp16", "half", "auto"), "bf16"),
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2"), "fp8"),
}


def weight_type(name: str) -> WeightType:
    """A type of weights by its name or by one that engines use for it; ConfigError for one that is not known."""
    plain = _plain(name)
    known = WEIGHT_TYPES.get(_WEIGHT_NAMES.get(plain, plain))
    if known is None:
        raise ConfigError(f"weight type {name!r} is not known; known are {', '.join(WEIGHT_TYPES)}")
    return known


def kv_type(name: str) -> str:
    """bf16 or fp8, by any name that engines use for it; ConfigError for one that is not known."""
    plain = _plain(name)
    plain = _KV_NAMES.get(plain, plain)
    if plain not in KV_TYPES:
        raise ConfigError(f"KV type {name!r} is not known; known are {', '.join(KV_TYPES)}")
    return plain


def _plain(name: str) -> str:
    return name.strip().lower().removeprefix("torch.").replace("-", "_")
