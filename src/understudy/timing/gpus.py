"""Data sheets of GPUs: their peaks for dense matrix products, without sparsity."""

from __future__ import annotations

import math

import msgspec

from understudy.errors import ConfigError
from understudy.timing.names import name_key, unknown_name


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU. `link_gbps` is the bandwidth per direction of its link to the worker's other GPUs, GB/s."""

    name: str
    bandwidth_gbps: float
    bf16_tflops: float
    fp8_tflops: float | None = None
    """None: fp8 weights compute at the bf16 peak."""
    fp4_tflops: float | None = None
    link_gbps: float
    memory_gb: float
    """Memory in GB (10^9 bytes)."""
    origin: str
    like: str = ""
    """GPU whose efficiencies its times have, because it was never measured; empty: it was measured."""

    def __post_init__(self) -> None:
        for name in ("bandwidth_gbps", "bf16_tflops", "link_gbps", "memory_gb", "fp8_tflops", "fp4_tflops"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"gpu.{name} must be a finite number above 0, got {value:g}")

    def describe(self) -> str:
        """Return the name, and that the GPU was never measured if so."""
        return f"{self.name} (never measured)" if self.like else self.name

    def tflops(self, peak: str) -> float:
        """Return the peak of matrix products of a type (bf16, fp8, fp4); bf16's if the GPU lacks the type."""
        own = {"fp8": self.fp8_tflops, "fp4": self.fp4_tflops}.get(peak)
        return self.bf16_tflops if own is None else own


_NVLINK = "NVIDIA's data sheet (SXM), dense"
_PCIE = "NVIDIA's data sheet, dense; its link is PCIe"
_AMD = "AMD's data sheet, dense; its link is Infinity Fabric to all seven others"

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="H100",
            bandwidth_gbps=3350,
            bf16_tflops=989,
            fp8_tflops=1979,
            link_gbps=450,
            memory_gb=85.0,  # 80 GB as sold; 79.2 GiB as the driver shows it
            origin=_NVLINK,
        ),
        Gpu(
            name="H200",
            bandwidth_gbps=4800,
            bf16_tflops=989,
            fp8_tflops=1979,
            link_gbps=450,
            memory_gb=150.1,  # 141 GB as sold; 139.8 GiB as the driver shows it
            origin=_NVLINK,
        ),
        Gpu(
            name="B200",
            bandwidth_gbps=8000,
            bf16_tflops=2250,
            fp8_tflops=4500,
            fp4_tflops=9000,
            link_gbps=900,
            memory_gb=191.5,  # 192 GB as sold; 178.4 GiB as the driver shows it
            origin=_NVLINK,
        ),
        Gpu(
            name="A100",
            bandwidth_gbps=2039,
            bf16_tflops=312,
            link_gbps=300,
            memory_gb=85.0,  # the 80 GB variant
            origin=_NVLINK,
        ),
        Gpu(
            name="L40S",
            bandwidth_gbps=864,
            bf16_tflops=362,
            fp8_tflops=733,
            link_gbps=32,
            memory_gb=47.7,
            origin=_PCIE,
        ),
        Gpu(
            name="RTX 4090",
            bandwidth_gbps=1008,
            bf16_tflops=165,
            fp8_tflops=330,
            link_gbps=32,
            memory_gb=25.25,  # from a recorded run
            origin=_PCIE,
        ),
        Gpu(
            name="RTX PRO 6000",
            bandwidth_gbps=1597,
            bf16_tflops=503,
            fp8_tflops=1007,
            fp4_tflops=2015,
            link_gbps=64,
            memory_gb=101.9,
            origin=_PCIE,
        ),
        Gpu(
            name="B300",
            bandwidth_gbps=8000,
            bf16_tflops=2250,
            fp8_tflops=4500,
            fp4_tflops=13500,
            link_gbps=900,
            memory_gb=288.4,
            origin=_NVLINK,
            like="B200",
        ),
        Gpu(
            name="GB200",
            bandwidth_gbps=8000,
            bf16_tflops=2500,
            fp8_tflops=5000,
            fp4_tflops=10000,
            link_gbps=900,
            memory_gb=198.7,
            origin=_NVLINK,
            like="B200",
        ),
        Gpu(
            name="GB300",
            bandwidth_gbps=8000,
            bf16_tflops=2500,
            fp8_tflops=5000,
            fp4_tflops=15000,
            link_gbps=900,
            memory_gb=298.0,
            origin=_NVLINK,
            like="B200",
        ),
        Gpu(
            name="H20",
            bandwidth_gbps=4000,
            bf16_tflops=148,
            fp8_tflops=296,
            link_gbps=450,
            memory_gb=102.6,  # 96 GB as sold
            origin=_NVLINK,
            like="H200",
        ),
        Gpu(
            name="GH200",
            bandwidth_gbps=4000,
            bf16_tflops=989,
            fp8_tflops=1979,
            link_gbps=450,
            memory_gb=102.6,  # the variant with 96 GB of HBM3
            origin=_NVLINK,
            like="H200",
        ),
        Gpu(
            name="RTX 5090",
            bandwidth_gbps=1792,
            bf16_tflops=209.5,
            fp8_tflops=419,
            fp4_tflops=1676,
            link_gbps=64,
            memory_gb=34.2,
            origin=_PCIE,
            like="RTX PRO 6000",
        ),
        Gpu(
            name="L4",
            bandwidth_gbps=300,
            bf16_tflops=121,
            fp8_tflops=242,
            link_gbps=32,
            memory_gb=24.1,
            origin=_PCIE,
            like="L40S",
        ),
        Gpu(
            name="A10G",
            bandwidth_gbps=600,
            bf16_tflops=70,
            link_gbps=32,
            memory_gb=24.1,
            origin=_PCIE,
            like="A100",
        ),
        Gpu(
            name="MI300X",
            bandwidth_gbps=5300,
            bf16_tflops=1307,
            fp8_tflops=2615,
            link_gbps=448,
            memory_gb=206.1,  # 192 GiB
            origin=_AMD,
            like="H200",
        ),
        Gpu(
            name="MI325X",
            bandwidth_gbps=6000,
            bf16_tflops=1307,
            fp8_tflops=2615,
            link_gbps=448,
            memory_gb=274.9,  # 256 GiB
            origin=_AMD,
            like="H200",
        ),
        Gpu(
            name="MI355X",
            bandwidth_gbps=8000,
            bf16_tflops=2517,
            fp8_tflops=5033,
            fp4_tflops=10066,
            link_gbps=537.6,
            memory_gb=309.2,  # 288 GiB
            origin=_AMD,
            like="H200",
        ),
    )
}
"""GPUs by name. `memory_gb` is what the driver shows, which differs from what is sold and sets the number of blocks."""


ALIASES = {
    "H100": ("H100 SXM", "H100 SXM5", "H100 80GB", "H100 80GB HBM3", "H100 SXM 80GB", "H100 SXM5 80GB"),
    "H200": ("H200 SXM", "H200 SXM5", "H200 141GB", "H200 SXM 141GB", "H200 SXM5 141GB"),
    "B200": ("B200 SXM", "B200 SXM6", "B200 180GB", "B200 192GB"),
    "A100": ("A100 SXM", "A100 SXM4", "A100 80GB", "A100 SXM 80GB", "A100 SXM4 80GB"),
    "L40S": ("L40S 48GB",),
    "RTX 4090": ("4090", "GeForce RTX 4090", "RTX 4090 24GB"),
    "RTX PRO 6000": (
        "PRO 6000",
        "RTX PRO 6000 Server",
        "RTX PRO 6000 Blackwell",
        "RTX PRO 6000 Blackwell Server Edition",
    ),
    "B300": ("B300 SXM", "B300 SXM6", "B300 SXM6 AC", "B300 288GB"),
    "GB200": ("GB200 SXM", "GB200 NVL72"),
    "GB300": ("GB300 SXM", "GB300 NVL72"),
    "H20": ("H20 SXM", "H20 96GB"),
    "GH200": ("GH200 96GB", "GH200 480GB"),
    "RTX 5090": ("5090", "GeForce RTX 5090", "RTX 5090 32GB"),
    "L4": ("L4 24GB",),
    "A10G": ("A10G 24GB",),
    **{
        name: (f"AMD {name}", f"Instinct {name}", f"AMD Instinct {name}")
        for name in ("MI300X", "MI325X", "MI355X")
    },
}
"""Other names of a GPU, from drivers and tables of measurements; each also with the prefix NVIDIA."""

_BY_KEY = {name_key(name): GPUS[own] for own, others in ALIASES.items() for name in (own, *others)}


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its name or by one of its `ALIASES`; ConfigError lists the nearest names.

    Case, spaces, hyphens and underscores are ignored. A name that merely contains a known one does not match: an H100
    NVL or an A100 of 40 GB has other peaks.
    """
    found = _BY_KEY.get(name_key(name).removeprefix("nvidia"))
    if found is None:
        what = unknown_name(f"gpu {name!r} is not known", GPUS, name)
        raise ConfigError(
            f"{what}; describe another GPU with --gpu-bandwidth-gbps, --gpu-tflops, --gpu-memory and --gpu-link-gbps"
        )
    return found


def sheet_gpu(
    *, bandwidth_gbps: float, tflops: float, memory_gb: float, link_gbps: float | None = None
) -> Gpu:
    """Build a custom GPU from its data sheet; fp8 products are assumed to run at twice `tflops` (bf16)."""
    return Gpu(
        name="data sheet",
        bandwidth_gbps=bandwidth_gbps,
        bf16_tflops=tflops,
        fp8_tflops=2 * tflops,
        link_gbps=bandwidth_gbps / 8 if link_gbps is None else link_gbps,
        memory_gb=memory_gb,
        origin="user-defined data sheet",
    )
