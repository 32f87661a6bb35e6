"""Presets of dense models of vLLM by GPU and weight type, each with the origin of its numbers.

They are fitted to public measurements (docs/accuracy.md lists which data each number was fitted to):

- "InferenceX": Llama-3.1-70B on H100, H200 and B200, one mean TTFT and TPOT per row.
- "BLIS": experiments with fp16 models on H100, A100 and L40S at constant rates.
- "op tables": kernel times of RTX 4090 and RTX PRO 6000, and "recorded runs" on them, from LLMServingSim.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from understudy.timing.efficiencies import Efficiencies

Trust = Literal["fitted", "rough", "uncalibrated"]


class DensePreset(msgspec.Struct, frozen=True, kw_only=True):
    """Efficiencies of dense models on a GPU, and their quality."""

    efficiencies: Efficiencies
    kv_fp8: float
    trust: Trust
    origin: str


HOPPER = DensePreset(
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
_HOPPER_BF16 = DensePreset(
    efficiencies=msgspec.structs.replace(
        HOPPER.efficiencies,
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
_B200_FP8 = DensePreset(
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
_B200_NVFP4 = DensePreset(
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
_A100 = DensePreset(
    efficiencies=msgspec.structs.replace(
        HOPPER.efficiencies, weights=0.653, link_latency_us=14.3, step_ms=0.94
    ),
    kv_fp8=0.33,
    trust="rough",
    origin="two BLIS experiments on A100; the rest as on Hopper",
)
_L40S = DensePreset(
    efficiencies=msgspec.structs.replace(HOPPER.efficiencies, weights=0.738, link=0.4, link_latency_us=20.0),
    kv_fp8=0.33,
    trust="rough",
    origin="one BLIS experiment on L40S; the rest as on Hopper; its link is a guess",
)
_RTX_4090 = DensePreset(
    efficiencies=msgspec.structs.replace(
        HOPPER.efficiencies,
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
_RTX_PRO_6000 = DensePreset(
    efficiencies=msgspec.structs.replace(
        HOPPER.efficiencies,
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

DENSE: dict[tuple[str, str], DensePreset] = {
    **dict.fromkeys((("H100", "*"), ("H200", "*")), HOPPER),
    **dict.fromkeys((("H100", "bf16"), ("H200", "bf16")), _HOPPER_BF16),
    ("B200", "*"): _B200_FP8,
    ("B200", "nvfp4"): _B200_NVFP4,
    ("B200", "mxfp4"): _B200_NVFP4,
    ("A100", "*"): _A100,
    ("L40S", "*"): _L40S,
    ("RTX 4090", "*"): _RTX_4090,
    ("RTX PRO 6000", "*"): _RTX_PRO_6000,
}
MEASURED = {
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
