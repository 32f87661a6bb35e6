"""Time replays with one and with several KV cache groups: CPU seconds, the best of three runs.

    python benchmarks/group_speed.py --trace PATH

Four workers, one thread, round robin, from a trace that was read to the end of the run.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from understudy.engines.kv_groups import KvCacheGroup
from understudy.engines.vllm_config import VllmConfig
from understudy.run.offline import run_offline
from understudy.workload.formats import read_trace

FULL = KvCacheGroup(kind="full", block_size=16)


def window(tokens: int) -> KvCacheGroup:
    """Return a group of windows."""
    return KvCacheGroup(kind="sliding_window", block_size=16, window=tokens)


STATE = KvCacheGroup(kind="mamba", block_size=544)
ENGINES = {
    "one group": VllmConfig(block_size=16, num_gpu_blocks=65536),
    "one group of full attention, as a list": VllmConfig(kv_cache_groups=(FULL,), num_gpu_blocks=65536),
    "gpt-oss: window 128, full": VllmConfig(kv_cache_groups=(window(128), FULL), num_gpu_blocks=65536),
    "Gemma 3: 5 x window 1024, full": VllmConfig(
        kv_cache_groups=(*[window(1024)] * 5, FULL), num_gpu_blocks=131072
    ),
    "Qwen3-Next: 3 x state, full": VllmConfig(
        kv_cache_groups=(*[STATE] * 3, KvCacheGroup(kind="full", block_size=544)), num_gpu_blocks=8192
    ),
}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake JSONL")
    workload = read_trace(parser.parse_args().trace)
    for name, engine in ENGINES.items():
        runs = []
        for _ in range(3):
            start = time.process_time()
            digest = run_offline(workload, engine, workers=4).facts.digest
            runs.append(time.process_time() - start)
        print(f"{name:40} {min(runs):6.2f} s  {digest}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
