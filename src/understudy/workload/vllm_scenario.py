"""Reader of conformance scenarios as workloads: one hash id per token, one millisecond per step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from understudy.errors import InvalidArgument
from understudy.workload.arrivals import LOCKSTEP_NS
from understudy.workload.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path


def read_vllm_scenario(path: Path) -> Workload:
    """Read scenarios/NAME.json; replay it in lockstep, with the scenario's own settings.

    Errors: InvalidArgument, naming the file and the field, if it is not a scenario.
    """
    from understudy.workload.scenario import OUTPUT_BASE, OUTPUT_STRIDE, read_scenario

    scenario = read_scenario(path)
    if scenario.aborts:
        raise InvalidArgument(f"{path}: aborts are not supported by replays; use `understudy conformance`")
    requests = scenario.requests
    lengths = [r.max_tokens if r.eos_at is None else r.eos_at for r in requests]
    prompts = [request.prompt_tokens() for request in requests]
    starts = OUTPUT_BASE + OUTPUT_STRIDE * np.arange(len(requests))
    outputs = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    none = np.empty(0, np.uint32)
    queue_time = [i if r.arrival_time is None else r.arrival_time for i, r in enumerate(requests)]
    return Workload(
        arrival_ns=np.array([request.arrival_step * LOCKSTEP_NS for request in requests]),
        prompt_tokens=np.array([len(prompt) for prompt in prompts]),
        output_tokens=np.array(lengths),
        max_tokens=None
        if all(request.eos_at is None for request in requests)
        else np.array([-1 if request.eos_at is None else request.max_tokens for request in requests]),
        hash_offsets=np.cumsum([0, *map(len, prompts)]),
        hash_ids=np.concatenate([none, *prompts]),
        trace_block_size=1,
        priority=np.array([request.priority for request in requests]),
        output_token_offsets=np.cumsum([0, *map(len, outputs)]),
        output_token_ids=np.concatenate([none, *outputs]).astype(np.uint32),
        queue_order=np.unique(queue_time, return_inverse=True)[1],
        request_ids=[request.id for request in requests],
    )
