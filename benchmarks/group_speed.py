"""Time replays with one and with several KV cache groups: CPU seconds, the best of three runs.

    python benchmarks/group_speed.py --trace PATH [--gpu H200] [--json [FOLDER]]
    python benchmarks/group_speed.py --trace PATH --routing kv

Four workers, one thread, from a trace that was read to the end of the run. With --gpu: whole replays of gpt-oss-120b
and Gemma-3-27B with the blocks and step times of that GPU, and the same without the hybrid manager (one group).
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.publish import add_json_flag, publish
from understudy.api import replay
from understudy.engines.kv_groups import KvCacheGroup
from understudy.engines.vllm_config import VllmConfig
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers.gpu import GpuSettings
from understudy.workload.formats import read_trace

if TYPE_CHECKING:
    from collections.abc import Callable

MODELS = {"gpt-oss-120b": "gpt-oss-120b", "Gemma-3-27B": "gemma-3-27b-it"}
FULL = KvCacheGroup(kind="full", block_size=16)


def window(tokens: int) -> KvCacheGroup:
    """Return a group of windows."""
    return KvCacheGroup(kind="sliding_window", block_size=16, window=tokens)


STATE = KvCacheGroup(kind="mamba", block_size=544)
LIMITS: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
ENGINES = {
    "one group": VllmConfig(block_size=16, num_gpu_blocks=65536, **LIMITS),
    "one group of full attention, as a list of groups": VllmConfig(
        kv_cache_groups=(FULL,), num_gpu_blocks=65536, **LIMITS
    ),
    "gpt-oss: a window of 128 and full attention": VllmConfig(
        kv_cache_groups=(window(128), FULL), num_gpu_blocks=65536, **LIMITS
    ),
    "Gemma 3: five windows of 1,024 and full attention": VllmConfig(
        kv_cache_groups=(*[window(1024)] * 5, FULL), num_gpu_blocks=131072, **LIMITS
    ),
    "Qwen3-Next: three states and full attention, blocks of 544": VllmConfig(
        kv_cache_groups=(*[STATE] * 3, KvCacheGroup(kind="full", block_size=544)),
        num_gpu_blocks=8192,
        **LIMITS,
    ),
}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake JSONL")
    parser.add_argument(
        "--routing", default="round_robin", help="routing of the fleet (default: round_robin)"
    )
    parser.add_argument("--gpu", help="also replay known models on this GPU")
    add_json_flag(parser)
    args = parser.parse_args()
    workload = read_trace(args.trace)

    def offline(engine: VllmConfig) -> None:
        run_offline(RunPlan(workload, engine, workers=4, routing=args.routing))

    def on_gpu(model: str, *, one_group: bool) -> None:
        gpu = GpuSettings(name=args.gpu, disable_hybrid_kv_cache_manager=one_group)
        engine = VllmConfig(block_size=16, **LIMITS)
        replay(workload, engine, model=model, gpu=gpu, workers=4, routing=args.routing)

    seconds = {name: measure(name, partial(offline, engine)) for name, engine in ENGINES.items()}
    measured = {name: {"time": taken} for name, taken in seconds.items()}
    if args.routing == "round_robin":
        for name, taken in seconds.items():
            measured[name]["of one group"] = taken / seconds["one group"]
    for shown, model in MODELS.items() if args.gpu else ():
        name = f"{shown} on an {args.gpu}"
        several, one = (measure(name, partial(on_gpu, model, one_group=off)) for off in (False, True))
        measured[name] = {"time": several, "of one group": several / one}
    publish("group_speed" if args.routing == "round_robin" else "group_speed_kv", measured, args.json)
    return 0


def measure(name: str, run: Callable[[], object]) -> float:
    """Return the CPU seconds of the best of three runs."""
    runs = []
    for _ in range(3):
        start = time.process_time()
        run()
        runs.append(time.process_time() - start)
    print(f"{name}: {min(runs):.2f} s", flush=True)
    return min(runs)


if __name__ == "__main__":
    sys.exit(main())
