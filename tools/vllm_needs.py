"""Print the packages that an installed vLLM needs on a CPU, in the form of a requirements file.

    python tools/vllm_needs.py [--any-version]

With --any-version without lower bounds, for a package index that lacks the newest versions.
"""

from __future__ import annotations

import re
import sys
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


def without_lower_bounds(requirement: str) -> str:
    """Return the requirement without its lower bounds."""
    name, marker, condition = requirement.partition(";")
    bare = re.sub(r",?\s*>=?\s*[^,;\s]+", "", name).rstrip(", ")
    return re.sub(r"^([^\s,<=!~]+)\s*,", r"\1", bare) + (f" ;{condition}" if marker else "")


if __name__ == "__main__":
    found = needs(requires("vllm") or [])
    print(*(map(without_lower_bounds, found) if "--any-version" in sys.argv else found), sep="\n")
