"""vLLM's offload on the clock: given the order in which transfers end, it decides as the slow model in lockstep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.vllm_connector import RELEASES
from model.vllm_offload import OffloadModel
from understudy._core import LinkPairConfig, TierConfig, TokenBlocks, VllmEngine, constant_timing
from understudy.engines.offload_profiles import offload_profile
from understudy.engines.vllm_config import VllmConfig

if TYPE_CHECKING:
    from model.vllm_connector import Job

BLOCK = 4
STEP_NS = 1_000_000


class Imposed:
    """A worker of the model that is told which jobs are done in a step, in their order."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        self.done: list[int] = []

    def run(self, _step: int, loads: list[Job], stores: list[Job], _flush: list[int]) -> list[Job]:
        self.jobs |= {job.id: job for job in loads + stores}
        return [self.jobs.pop(job) for job in self.done]


@st.composite
def workloads(draw: st.DrawFn) -> dict[str, Any]:
    blocks = draw(st.integers(14, 40))
    requests = []
    for index in range(draw(st.integers(3, 20))):
        shared = [1000 * draw(st.integers(1, 3)), draw(st.sampled_from([8, 16, 24]))]
        own = [500_000 + 1000 * index, draw(st.integers(1, 16))]
        requests.append(
            {
                "id": f"r{index}",
                "prompt": [shared, own],
                "max_tokens": draw(st.integers(1, 8)),
                "priority": draw(st.integers(0, 2)),
            }
        )
    return {
        "blocks": blocks,
        "seqs": draw(st.integers(1, 5)),
        "budget": draw(st.sampled_from([16, 64, 256])),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "offload": {
            "host_chunks": draw(st.integers(1, 30)),
            "blocks_per_chunk": draw(st.sampled_from([1, 2, 4])),
            "eviction_policy": draw(st.sampled_from(["lru", "arc"])),
            "offload_prompt_only": draw(st.booleans()),
        },
        # From what a block takes far less than a step to what it takes several.
        "gbps": [draw(st.sampled_from([0.005, 0.02, 0.1, 1.0])) for _ in range(2)],
        "requests": requests,
    }


def tokens_of(request: dict[str, Any], index: int) -> np.ndarray[Any, Any]:
    runs = [*request["prompt"], [1_000_000 + 100_000 * index, request["max_tokens"]]]
    return np.concatenate([np.arange(start, start + count, dtype=np.uint32) for start, count in runs])


def decided(names: dict[int, str], line: dict[str, Any]) -> dict[str, Any]:
    jobs = {
        kind: [(job["job"], names[job["request"]], job["chunks"], job["host"]) for job in line[kind]]
        for kind in ("loads", "stores")
    }
    return jobs | {
        "lookups": [[names[request], local, hit] for request, local, hit in line["lookups"]],
        "store_failed": [names[request] for request in line["refused"]],
        "flush": line["flush"],
    }


def on_the_clock(load: dict[str, Any], version: str) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """What every schedule decided, and the jobs that were done before the next one."""
    config = VllmConfig(
        block_size=BLOCK,
        num_gpu_blocks=load["blocks"],
        max_num_seqs=load["seqs"],
        max_num_batched_tokens=load["budget"],
        scheduling_policy=load["policy"],
        async_scheduling=False,
        vllm_version=version,
    ).native(events=True, check=True, offload=offload_profile(version).native(**load["offload"], log=True))
    down, up = load["gbps"]
    chunks, size = load["offload"]["host_chunks"], load["offload"]["blocks_per_chunk"]
    tiers = TierConfig(
        bytes_per_block=1 << 14,
        g2_blocks=chunks * size,
        host=LinkPairConfig(down_gbps=down, up_gbps=up),
        write_through=True,
    )
    engine = VllmEngine(config, constant_timing(1.0, 1.0), tiers=tiers)
    names = {}
    for index, request in enumerate(load["requests"]):
        tokens = tokens_of(request, index)
        identities = TokenBlocks(tokens, BLOCK).identities
        prompt = len(tokens) - request["max_tokens"]
        number = engine.submit(
            request["id"],
            prompt,
            request["max_tokens"],
            identities,
            priority=request["priority"],
            arrival_time=index,
        )
        names[number] = request["id"]
    lines: list[dict[str, Any]] = []
    done: list[list[int]] = []
    now = 0
    while not engine.idle and not engine.stuck:
        engine.begin_step(now)
        duration = engine.now_ns - now
        line: dict[str, Any] = engine.take_offload_line()
        if done:
            done[-1] += line["done"]  # they had ended before this schedule
        scheduled = {names[request]: count for request, count in engine.scheduled}
        lines.append(decided(names, line) | {"scheduled": scheduled})
        done.append([])
        if engine.in_step:
            engine.end_step(now + duration)
            ended: dict[str, Any] = engine.take_offload_line()
            done[-1] += ended["done"]
        now += max(duration, STEP_NS)
    return lines, done


@pytest.mark.parametrize("version", ["recorded", "v0.30", "v0.32.0"])
@settings(max_examples=12)
@given(load=workloads())
def test_the_same_completions_give_the_same_decisions(version: str, load: dict[str, Any]) -> None:
    lines, done = on_the_clock(load, version)
    config = {
        "block_size": BLOCK,
        "num_blocks": load["blocks"] + 1,
        "max_num_seqs": load["seqs"],
        "max_num_batched_tokens": load["budget"],
        "max_model_len": 131072,
        "policy": load["policy"],
    }
    model = OffloadModel(config, load["offload"] | {"store_steps": 0, "load_steps": 0}, RELEASES[version])
    worker = Imposed()
    model.worker = worker  # type: ignore[assignment]
    for index, request in enumerate(load["requests"]):
        model.add(request | {"arrival_step": 0}, index)
    for line, ended in zip(lines, done, strict=True):
        worker.done = ended
        record = model.step()
        jobs = {
            kind: [(job["job"], job["req"], job["chunks"], job["host"]) for job in record[kind]]
            for kind in ("loads", "stores")
        }
        names = ("lookups", "store_failed", "flush", "scheduled")
        assert line == jobs | {name: record[name] for name in names}
