"""The burst of the tests: 30 s at one request a second, 60 s at eight, 150 s at one."""

from __future__ import annotations

from typing import Any

import numpy as np

from understudy import VllmConfig
from understudy.run.autoscale import Autoscale
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload import Workload

BLOCK = 64
PROMPT = 2048
ANSWER = 256
ENGINE = VllmConfig(
    block_size=BLOCK,
    num_gpu_blocks=1024,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    max_model_len=32768,
    async_scheduling=False,
)


def burst() -> Workload:
    """Return the burst, with prompts that share nothing."""
    return workload_of([*range(30), *(30 + i / 8 for i in range(480)), *range(90, 240)])


def workload_of(
    arrivals_s: list[float], *, prompt: int = PROMPT, answer: int = ANSWER, block: int = BLOCK
) -> Workload:
    """Return requests of one size at these times."""
    rows = len(arrivals_s)
    blocks = -(-prompt // block)
    return Workload(
        arrival_ns=np.round(np.array(arrivals_s) * 1e9).astype(np.int64),
        prompt_tokens=np.full(rows, prompt, np.int32),
        output_tokens=np.full(rows, answer, np.int32),
        hash_ids=np.arange(rows * blocks, dtype=np.uint32),
        hash_offsets=np.arange(rows + 1, dtype=np.int64) * blocks,
        trace_block_size=block,
    )


def run_burst(scaler: str, **settings: Any) -> OfflineRun:
    """Play the burst from one worker on, with 20 s from an order to a worker."""
    autoscale = Autoscale(scaler=scaler, startup_s=20, max_workers=8)
    return run_offline(RunPlan(burst(), ENGINE, autoscale=autoscale, **settings))


def gpu_seconds(run: OfflineRun) -> float:
    """Return the time for which workers had GPUs."""
    assert run.timeline.lives is not None
    return run.timeline.lives.paid_ns(run.timeline.end_ns) / 1e9


def mean_ttft_s(run: OfflineRun) -> float:
    """Return the mean time to the first token."""
    return float((run.timeline.first_token_ns - run.timeline.arrival_ns).mean()) / 1e9
