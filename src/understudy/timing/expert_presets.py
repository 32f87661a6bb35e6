"""Presets of experts of vLLM by model, expert type and GPU, each with the origin of its numbers.

"InferenceX" is gpt-oss-120b and MiniMax-M2.5 on H100, H200 and B200, "BLIS" Mixtral at constant rates.
"""

from __future__ import annotations

import msgspec


class ExpertPreset(msgspec.Struct, frozen=True, kw_only=True):
    """Efficiencies that were fitted to one model with experts on one GPU."""

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


EXPERTS: dict[tuple[str, str, str], ExpertPreset] = {
    ("gpt-oss-120b", "mxfp4", "H100"): ExpertPreset(
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
    ("gpt-oss-120b", "mxfp4", "H200"): ExpertPreset(
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
    ("gpt-oss-120b", "mxfp4", "B200"): ExpertPreset(
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
    ("MiniMax-M2.5", "fp8", "H100"): ExpertPreset(
        read=1.17, compute=0.063, origin="InferenceX, nine rows of", others={"link_latency_us": 41.8}
    ),
    ("MiniMax-M2.5", "fp8", "B200"): ExpertPreset(
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
    ("MiniMax-M2.5", "nvfp4", "B200"): ExpertPreset(
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
    ("Qwen3-30B-A3B", "bf16", "RTX PRO 6000"): ExpertPreset(
        read=0.925,
        compute=0.45,
        origin="op tables, and a recorded run on two ranks, of",
        others={"layer_us": 65.0, "routing_ns": 130.0, "link": 0.3, "link_latency_us": 44.0},
    ),
    ("Mixtral-8x7B", "bf16", "H100"): ExpertPreset(
        read=0.906,
        compute=0.268,
        origin="BLIS, five experiments with",
        others={"layer_us": 9.6, "routing_ns": 89.0},
    ),
}
"""Efficiencies of experts by model, expert type and GPU. A value above 1 absorbs unmodelled effects."""
