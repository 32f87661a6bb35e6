"""Print the packages that an installed vLLM needs on a CPU, in the form of a requirements file."""

from __future__ import annotations

import re
from importlib.metadata import requires

GPU = re.compile(
    r"torch|nvidia-|nvtx|flashinfer|tilelang|apache-tvm|quack|tokenspeed|humming|pynvvideocodec|fastsafetensors|"
    r"instanttensor|numba|opencv|deep-?gemm|triton|xformers|zentorch",
    re.IGNORECASE,
)
"""Names of packages that neither the scheduler nor the command line imports; PyTorch is installed first."""
BENCH = ("datasets", "pandas", "uvloop")
"""Packages of `vllm bench`, which the release lists as extras or not at all."""


def needs(requirements: list[str]) -> list[str]:
    """Return the requirements without extras and GPU packages, and those of `vllm bench`."""
    kept = [line for line in requirements if "extra ==" not in line and not GPU.match(line)]
    return [*kept, *BENCH]


if __name__ == "__main__":
    print(*needs(requires("vllm") or []), sep="\n")
