"""Write `demo_trace.jsonl`: bursty chats with six assistants and many shared prefixes.

Each assistant has a long system prompt; users return for several turns after a pause. The file depends only on
the numbers below, so running this script reproduces it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from understudy.workload import (
    DEFAULT_TRACE_BLOCK_SIZE,
    Gamma,
    LogNormal,
    Normal,
    SyntheticSpec,
    SystemPrompts,
    Workload,
    synthesise,
    write_mooncake,
)

DEMO_TRACE = Path(__file__).with_name("demo_trace.jsonl")

SPEC = SyntheticSpec(
    sessions=130,
    prompt_tokens=LogNormal(mean=900, std=900, max=6_000),
    followup_tokens=LogNormal(mean=160, std=120, max=1_000),
    output_tokens=LogNormal(mean=220, std=180, min=1, max=1_200),
    turns=Normal(mean=3, std=1.5, min=1, max=8),
    think_time_ms=LogNormal(mean=5_000, std=4_000),
    arrivals=Gamma(qps=2, burstiness=0.6),
    prefixes=SystemPrompts(groups=6, tokens=2_048),
    trace_block_size=DEFAULT_TRACE_BLOCK_SIZE,
    content_seed=7,
    arrival_seed=7,
)


def demo_workload() -> Workload:
    """Return the demo workload."""
    return synthesise(SPEC)


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else DEMO_TRACE
    workload = demo_workload()
    write_mooncake(workload, path)
    print(f"{path}: {len(workload)} requests in {workload.sessions} sessions")
