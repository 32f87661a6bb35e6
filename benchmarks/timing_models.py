"""What a replay costs with each timing model, against the polynomial in the same run.

    python benchmarks/timing_models.py --trace PATH

A closed loop, so that engines are as busy whatever their speed and take about as many steps (the table says how many).
The models take turns; seconds are of the CPU, medians.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import msgspec

from harness.publish import add_json_flag, publish
from understudy.engines.vllm_config import VllmConfig
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers.gpu import GpuSettings
from understudy.workload import ClosedLoop, read_trace

MODELS = {
    "polynomial": None,
    "physical, Llama-3.1-8B on H100": ("Llama-3.1-8B", 1),
    "physical, experts, Mixtral-8x7B on 2 H100": ("Mixtral-8x7B", 2),
    "physical, sliding window, gpt-oss-120b on 2 H100": ("gpt-oss-120b", 2),
    "physical, sliding window, Gemma-3-12B on H100": ("Gemma-3-12B", 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    add_json_flag(parser)
    args = parser.parse_args()
    workload = read_trace(args.trace).head(args.requests)
    engines = {name: _engine(model) for name, model in MODELS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in MODELS}
    steps: dict[str, int] = {}
    for _ in range(args.rounds):
        for name, engine in engines.items():
            began = time.process_time()
            run = run_offline(RunPlan(workload, engine, workers=4, load=ClosedLoop(concurrency=256)))
            seconds[name].append(time.process_time() - began)
            steps[name] = run.timeline.steps
    first = median(seconds["polynomial"])
    measured = {
        name: {"time": median(taken), "time of the polynomial": median(taken) / first, "steps": steps[name]}
        for name, taken in seconds.items()
    }
    publish("timing_models", measured, args.json)


def _engine(model: tuple[str, int] | None) -> VllmConfig:
    engine = VllmConfig(block_size=16, num_gpu_blocks=65536, max_num_seqs=128, max_num_batched_tokens=8192)
    if model is None:
        return engine
    gpu = GpuSettings(name="H100", tensor_parallel_size=model[1])
    return msgspec.structs.replace(engine, timing=gpu.timing(model[0], None))


if __name__ == "__main__":
    main()
