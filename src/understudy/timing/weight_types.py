"""Data types of weights and of the KV cache: bytes per element, and the GPU peak they compute at."""

from __future__ import annotations

from typing import NamedTuple

from understudy.errors import ConfigError


class WeightType(NamedTuple):
    """A weight type. `bytes` is per parameter, including its share of the scales."""

    name: str
    bytes: float
    peak: str
    """GPU peak of its matrix products: bf16, fp8 or fp4. Weight-only types compute in bf16."""

    @property
    def is_narrow(self) -> bool:
        """Whether a weight has 4 bits."""
        return self.bytes < 1


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
    **dict.fromkeys(("bfloat16", "float16", "fp16", "half", "w16a16"), "bf16"),
    **dict.fromkeys(("float8", "e4m3", "e5m2", "fp8e4m3", "fp8e5m2", "fp8_e4m3", "fp8_e5m2"), "fp8"),
    **dict.fromkeys(("float8_e4m3", "float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz", "mxfp8"), "fp8"),
    **dict.fromkeys(("fp8_block", "fp8_static", "fp8_dynamic", "fp8_per_tensor", "fp8_per_channel"), "fp8"),
    **dict.fromkeys(
        ("w8a8", "fp8_w8a8", "w8a8_fp8", "modelopt", "modelopt_fp8", "fbgemm_fp8", "fp8_ootb"), "fp8"
    ),
    # int8 has the size and the peak of fp8.
    **dict.fromkeys(("int8", "w8a8_int8", "int8_w8a8"), "fp8"),
    **dict.fromkeys(("awq", "gptq", "w4a16", "int4_wo", "awq_marlin", "gptq_marlin"), "int4"),
    **dict.fromkeys(("int4_awq", "awq_int4", "int4_gptq", "gptq_int4", "w4a16_awq", "w4a16_gptq"), "int4"),
    **dict.fromkeys(("w4a16_mxfp4", "w4a8_mxfp4_mxfp8", "w4a8_mxfp4", "mxfp4_moe"), "mxfp4"),
    **dict.fromkeys(("fp4", "modelopt_fp4", "w4a4_nvfp4", "nvfp4_block", "w4a4"), "nvfp4"),
}

KV_TYPES = {"bf16": 2, "fp8": 1}
_KV_NAMES = {
    **dict.fromkeys(("bfloat16", "float16", "fp16", "half", "auto"), "bf16"),
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2", "fp8_inc"), "fp8"),
    **dict.fromkeys(("float8", "float8_e4m3", "e4m3", "e5m2", "fp8e4m3", "fp8e5m2"), "fp8"),
}


def weight_type(name: str) -> WeightType:
    """Return a weight type by its name or an alias used by engines. ConfigError for an unknown name."""
    key = _normalise(name)
    known = WEIGHT_TYPES.get(_WEIGHT_NAMES.get(key, key))
    if known is None:
        raise ConfigError(f"weight type {name!r} is not known; known are {', '.join(WEIGHT_TYPES)}")
    return known


def kv_type(name: str) -> str:
    """Return bf16 or fp8 for any name used by engines. ConfigError for an unknown name."""
    key = _normalise(name)
    key = _KV_NAMES.get(key, key)
    if key not in KV_TYPES:
        raise ConfigError(f"kv_dtype: KV type {name!r} is not known; known are {', '.join(KV_TYPES)}")
    return key


def type_in_name(model: str) -> str | None:
    """Return the weight type in a model's name, such as fp8 in Llama-3.1-70B-Instruct-FP8; None without one.

    ConfigError for an unknown type (…-quantized.w8a16).
    """
    name = model.rpartition("/")[2].lower()
    _, quantised, kind = name.partition("quantized.")
    if quantised:
        return weight_type(kind).name
    return next(
        (weight_type(part).name for part in name.split("-") if part in _WEIGHT_NAMES or part in WEIGHT_TYPES),
        None,
    )


def _normalise(name: str) -> str:
    return name.strip().lower().removeprefix("torch.").replace("-", "_")
