"""Files of load generators, written from a simulated benchmark: what each format would have saved."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from understudy.calibrate.experiment import build_engine_config
from understudy.calibrate.load import Load, build_load
from understudy.calibrate.simulate import Outcome, simulate
from understudy.timing.deployment import Deployment, Parallelism
from understudy.timing.find_architecture import find_architecture
from understudy.timing.gpus import find_gpu
from understudy.timing.physical import Physical

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.timing.efficiencies import Efficiencies

DEPLOYMENT = Deployment(
    model=find_architecture("Llama-3.1-8B"), gpu=find_gpu("H100"), weights="bf16", parallel=Parallelism()
)
SEQS, BATCHED = 64, 4096


def open_load(rows: int = 60, rate: float = 12.0, seed: int = 1) -> Load:
    draw = np.random.default_rng(seed)
    return build_load(
        draw.integers(200, 3000, rows),
        draw.integers(20, 120, rows),
        arrival_s=np.cumsum(draw.exponential(1 / rate, rows)),
    )


def measure(load: Load, truth: Efficiencies) -> Outcome:
    """What a client would have measured, were these the numbers."""
    engine = build_engine_config(
        DEPLOYMENT, max_num_seqs=SEQS, max_num_batched_tokens=BATCHED, enable_prefix_caching=False
    )
    timing = Physical(coefficients=DEPLOYMENT.coefficients(truth))
    return simulate(load, msgspec.structs.replace(engine, timing=timing), front_end_ms=truth.front_end_ms)


def vllm_detailed(path: Path, load: Load, seen: Outcome, **more: Any) -> Path:
    w = load.workload
    outputs = w.output_tokens.tolist()
    gaps = [
        [float(tpot) / 1e3] * (count - 1)
        for tpot, count in zip(np.nan_to_num(seen.tpot_ms), outputs, strict=True)
    ]
    content = {
        **_vllm_head(load, seen),
        "input_lens": w.prompt_tokens.tolist(),
        "output_lens": outputs,
        "ttfts": (seen.ttft_ms / 1e3).tolist(),
        "itls": gaps,
        "start_times": (5000 + w.arrival_ns / 1e9).tolist(),
        "errors": [""] * len(w),
        **more,
    }
    return _write(path, content)


def vllm_plain(path: Path, load: Load, seen: Outcome, **more: Any) -> Path:
    return _write(path, {**_vllm_head(load, seen), **more})


def _vllm_head(load: Load, seen: Outcome) -> dict[str, Any]:
    w = load.workload
    return {
        "model_id": "meta-llama/Llama-3.1-8B",
        "num_prompts": len(w),
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": load.concurrency or None,
        "duration": 60.0,
        "completed": len(w),
        "failed": 0,
        "total_input_tokens": int(w.total_prompt_tokens),
        "total_output_tokens": int(w.total_output_tokens),
        "mean_ttft_ms": seen.mean("ttft_ms"),
        "mean_tpot_ms": seen.mean("tpot_ms"),
    }


def aiperf_records(path: Path, load: Load, seen: Outcome) -> Path:
    lines: list[dict[str, Any]] = [{"metadata": {"benchmark_phase": "warmup"}, "metrics": {}}]
    w = load.workload
    for row in range(len(w)):
        start = 10**18 + int(w.arrival_ns[row])
        lines.append(
            {
                "metadata": {
                    "request_start_ns": start,
                    "request_end_ns": start + round(seen.e2e_ms[row] * 1e6),
                    "benchmark_phase": "profiling",
                    "was_cancelled": False,
                },
                "metrics": {
                    "input_sequence_length": {"value": int(w.prompt_tokens[row]), "unit": "tokens"},
                    "output_sequence_length": {"value": int(w.output_tokens[row]), "unit": "tokens"},
                    "time_to_first_token": {"value": seen.ttft_ms[row] * 1e6, "unit": "ns"},
                    "request_latency": {"value": seen.e2e_ms[row] / 1e3, "unit": "s"},
                },
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def aiperf_summary(path: Path, load: Load, seen: Outcome) -> Path:
    w = load.workload
    return _write(
        path,
        {
            "schema_version": "1.1",
            "input_config": {"loadgen": {"concurrency": load.concurrency}},
            "request_count": {"unit": "requests", "avg": float(len(w))},
            "input_sequence_length": _block(w.prompt_tokens, "tokens"),
            "output_sequence_length": _block(w.output_tokens, "tokens"),
            "time_to_first_token": {"unit": "ms", "avg": seen.mean("ttft_ms")},
            "inter_token_latency": {"unit": "ms", "avg": seen.mean("tpot_ms")},
            "request_latency": {"unit": "ms", "avg": seen.mean("e2e_ms")},
        },
    )


def _block(values: Any, unit: str) -> dict[str, Any]:
    return {"unit": unit, "avg": float(values.mean()), "std": float(values.std())}


def guidellm(path: Path, load: Load, seen: Outcome) -> Path:
    w = load.workload
    rows = []
    for row in range(len(w)):
        start = 1.7e9 + w.arrival_ns[row] / 1e9
        rows.append(
            {
                "prompt_tokens": int(w.prompt_tokens[row]),
                "output_tokens": int(w.output_tokens[row]),
                "time_to_first_token_ms": float(seen.ttft_ms[row]),
                "request_latency": float(seen.e2e_ms[row] / 1e3),
                "request_start_time": start,
                "info": {"timings": {"request_start": start}},
            }
        )
    requests_by_end = {"successful": rows, "errored": [], "incomplete": []}
    return _write(
        path, {"args": {}, "benchmarks": [{"config": {}, "metrics": {}, "requests": requests_by_end}]}
    )


def own_requests(path: Path, load: Load, seen: Outcome) -> Path:
    w = load.workload
    lines = [
        {
            "arrival_ms": float(w.arrival_ns[row] / 1e6),
            "prompt_tokens": int(w.prompt_tokens[row]),
            "output_tokens": int(w.output_tokens[row]),
            "ttft_ms": float(seen.ttft_ms[row]),
            "e2e_ms": float(seen.e2e_ms[row]),
            "status": "completed",
        }
        for row in range(len(w))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _write(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content))
    return path
