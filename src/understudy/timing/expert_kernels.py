"""Efficiencies of expert kernels by GPU and type, from tables of kernel times.

They are medians over models of fits of our form to times of one layer on one GPU at 27 token counts each (vLLM 0.24,
from AISimulate 0.13, Apache-2.0), mostly 5 to 15 % off. Launches, links and routing are no part of them, so they hold
for other models; fits of whole deployments do not.
"""

from __future__ import annotations

from typing import NamedTuple

from understudy.timing.weight_types import weight_type


class ExpertKernel(NamedTuple):
    """Shares of the memory bandwidth and of the peak that experts of a type reach on a GPU."""

    read: float
    compute: float
    origin: str


_TABLES: dict[tuple[str, str], tuple[float, float]] = {
    ("H100", "bf16"): (0.80, 0.50),
    ("H100", "fp8"): (0.75, 0.30),
    ("H100", "int4"): (0.65, 0.25),
    ("H100", "mxfp4"): (0.65, 0.55),
    ("H200", "bf16"): (0.80, 0.55),
    ("H200", "fp8"): (0.75, 0.275),
    ("H200", "int4"): (0.55, 0.25),
    ("H200", "mxfp4"): (0.45, 0.60),
    ("B200", "bf16"): (0.75, 0.40),
    ("B200", "fp8"): (0.65, 0.185),
    ("B200", "nvfp4"): (0.70, 0.35),
    ("B200", "int4"): (0.45, 0.10),
    ("B300", "bf16"): (0.75, 0.40),
    ("B300", "fp8"): (0.65, 0.19),
    ("B300", "nvfp4"): (0.70, 0.25),
    ("B300", "int4"): (0.50, 0.10),
    ("RTX PRO 6000", "bf16"): (0.85, 0.35),
    ("RTX PRO 6000", "fp8"): (0.80, 0.30),
    ("RTX PRO 6000", "nvfp4"): (0.80, 0.425),
    ("RTX PRO 6000", "int4"): (0.75, 0.60),
    ("RTX PRO 6000", "mxfp4"): (0.80, 0.50),
    ("L40S", "bf16"): (0.75, 0.60),
    ("L40S", "fp8"): (0.75, 0.425),
    ("L40S", "int4"): (0.70, 0.55),
    ("L40S", "mxfp4"): (0.70, 0.45),
}
_DERIVED = {
    (gpu, "mxfp4"): (0.70, 0.50, "activations in 8 bits: read as nvfp4, at half of its rate")
    for gpu in ("B200", "B300")
}
"""Types whose table is of another kernel than engines use: gpt-oss in 16-bit activations is 89 % off on B200."""
_NEAREST = {
    "A100": "H100",
    "RTX 4090": "L40S",
    "RTX 5090": "RTX PRO 6000",
    "L4": "L40S",
    "A10G": "L40S",
    "H20": "H200",
    "GH200": "H200",
    "GB200": "B200",
    "GB300": "B300",
    "MI300X": "H200",
    "MI325X": "H200",
    "MI355X": "H200",
}
"""GPU whose table stands in for one without; H200's for a custom GPU."""
_LIKE = {"nvfp4": "mxfp4", "mxfp4": "int4"}
"""Type whose kernels stand in where a GPU has no table of it."""


def find_expert_kernel(gpu: str, weights: str) -> ExpertKernel:
    """Return the efficiencies of experts of a type on a GPU, or of the nearest of which there is a table."""
    kind = weight_type(weights).name
    place = _NEAREST.get(gpu, gpu if any(known == gpu for known, _ in _TABLES) else "H200")
    while (place, kind) not in _TABLES and (place, kind) not in _DERIVED:
        kind = _LIKE.get(kind, "bf16")
    if (place, kind) in _DERIVED:
        return ExpertKernel(*_DERIVED[place, kind])
    read, compute = _TABLES[place, kind]
    return ExpertKernel(read, compute, f"op tables of {kind} experts on {place}")
