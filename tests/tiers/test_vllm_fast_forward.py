"""vLLM's offload on the clock is the same with fast-forward and step by step, and with all checks."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.building import single_turns
from tiers.building import EVENT_COLUMNS, INF, forked
from understudy._core import (
    LinkPairConfig,
    RequestSpec,
    TierConfig,
    VllmEngine,
    VllmEngineConfig,
    constant_timing,
)
from understudy.engines.offload_profiles import offload_profile
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import WrongState
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers.settings import TiersConfig
from understudy.workload import ClosedLoop

BLOCK = 16


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    """The arguments of a run: prompts that share beginnings, on a device and a host that are too small."""
    chunk = draw(st.sampled_from([1, 2, 4]))
    rows = []
    for index in range(draw(st.integers(2, 14))):
        start = 100 * draw(st.integers(1, 3))
        shared = list(range(start, start + draw(st.integers(0, 8))))
        own = list(range(1000 + 50 * index, 1000 + 50 * index + draw(st.integers(1, 5))))
        rows.append((draw(st.integers(0, 60)), draw(st.integers(1, 40)), shared + own))
    closed = draw(st.booleans())
    rows.sort(key=lambda row: row[0])
    workload = single_turns(
        [BLOCK * len(blocks) for _, _, blocks in rows],
        [outputs for _, outputs, _ in rows],
        None if closed else [arrival for arrival, _, _ in rows],
        [blocks for _, _, blocks in rows],
        BLOCK,
        priority=[draw(st.integers(0, 2)) for _ in rows],
    )
    engine = VllmConfig(
        block_size=BLOCK,
        num_gpu_blocks=draw(st.integers(18, 40)),
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.sampled_from([64, 256, 2048])),
        async_scheduling=draw(st.booleans()),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
        scheduler_reserve_full_isl=draw(st.booleans()),
        vllm_version=draw(st.sampled_from(["recorded", "0.30", "0.32"])),
        timing=Constant(prefill_ms=1.0, decode_ms=1.0),
    )
    link = {
        "down_gbps": draw(st.sampled_from([0.02, 0.5, 20.0])),
        "up_gbps": draw(st.sampled_from([0.02, 0.5, "inf"])),
        "fixed_us": draw(st.sampled_from([0, 300])),
    }
    host = {
        "tier": "g2",
        "blocks": chunk * draw(st.integers(1, 40)),
        "eviction": draw(st.sampled_from(["lru", "arc"])),
        "link": link,
    }
    tiers = TiersConfig.from_dict(
        {
            "kv_bytes_per_token": 1 << 10,
            "tiers": [host],
            "offload": {
                "mode": "vllm",
                "blocks_per_chunk": chunk,
                "offload_prompt_only": draw(st.booleans()),
            },
        }
    )
    arguments = {"workload": workload, "engine": engine, "tiers": tiers, "workers": draw(st.integers(1, 2))}
    return arguments | ({"load": ClosedLoop(concurrency=draw(st.integers(1, 8)))} if closed else {})


def outcome(run: dict[str, Any], **how: Any) -> Any:
    """The digests, or how it came to a halt."""
    rest = {name: value for name, value in run.items() if name not in ("workload", "engine")}
    try:
        return run_offline(RunPlan(run["workload"], run["engine"], events=True, **rest, **how)).facts.digests
    except WrongState as halt:
        return str(halt)


@settings(max_examples=20)
@given(run=runs())
def test_fast_forwards_are_not_seen(run: dict[str, Any]) -> None:
    forwarded = outcome(run)
    assert outcome(run, fast_forward=False) == forwarded
    assert outcome(run, check=True) == forwarded


def live(seed: int, fast_forward: bool) -> list[Any]:
    """Everything that can be seen of an engine whose requests come, and are cancelled, at any time."""
    rng = Random(f"offload {seed}")
    chunk, chunks = rng.choice([1, 2, 4]), rng.randint(2, 40)
    rules = offload_profile(rng.choice(["recorded", "0.30", "0.32"]))
    config = VllmEngineConfig(
        block_size=4,
        num_gpu_blocks=rng.randint(16, 40),
        max_num_seqs=rng.choice([2, 4, 16]),
        max_num_batched_tokens=rng.choice([16, 64, 2048]),
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        async_scheduling=rng.random() < 0.7,
        events=True,
        offload=rules.native(
            host_chunks=chunks, blocks_per_chunk=chunk, eviction_policy=rng.choice(["lru", "arc"])
        ),
    )
    speeds = LinkPairConfig(
        down_gbps=rng.choice([0.2, 1.0, 100.0]),
        up_gbps=rng.choice([0.2, 1.0, INF]),
        down_fixed_ns=rng.choice([0, 300_000]),
    )
    below = TierConfig(bytes_per_block=1_000_000, g2_blocks=chunk * chunks, host=speeds, write_through=True)
    engine = VllmEngine(config, constant_timing(1.0, rng.choice([0.5, 1.0])), tiers=below)
    engine.set_fast_forward(fast_forward)
    seen: list[Any] = []
    requests: list[int] = []
    until_ns = 0
    for turn in range(rng.randint(10, 25)):
        for _ in range(rng.choice([0, 1, 1, 3])):
            prompt, outputs = rng.randint(1, 40), rng.randint(1, rng.choice([5, 40]))
            if engine.never_fits(prompt, outputs) is None:
                blocks = forked(rng.randrange(3), rng.randrange(8), rng.randrange(1000), 100)
                place: dict[str, Any] = {"priority": rng.randrange(3), "arrival_time": float(turn)}
                spec = RequestSpec(len(requests), "r", prompt, outputs, blocks, **place)
                engine.submit(spec, until_ns if engine.in_step else engine.now_ns)
                requests.append(len(requests))
        until_ns += rng.choice([1, 3, 10, 40]) * rng.choice([250_000, 1_000_000])
        effects = engine.advance(until_ns, rng.random() < 0.3)
        seen += [(ended.id, ended.last_token_ns, ended.parked_ns) for ended in effects.finished]
        seen += [engine.now_ns, engine.running, engine.steps, engine.free_head(40), engine.stuck]
        if requests and rng.random() < 0.4:
            now_ns = until_ns if engine.in_step else engine.now_ns
            seen.append(not engine.cancel(rng.choice(requests), now_ns).finished)
        if engine.idle:
            engine.skip_to(until_ns)
    engine.advance(10**13)
    engine.check()
    batch, times_ns = engine.take_events()
    seen += [getattr(batch, name).tolist() for name in EVENT_COLUMNS]
    return [*seen, times_ns.tolist(), engine.idle, engine.stuck, engine.preemptions, engine.offload_usage]


@pytest.mark.parametrize("seed", range(60))
def test_requests_come_and_go_between_fast_forwards_as_between_steps(seed: int) -> None:
    assert live(seed, True) == live(seed, False)


def test_a_load_that_takes_no_time_has_come_though_another_worker_began_then() -> None:
    """Its request is admitted at once, and does not wait for copies down that end later."""
    blocks = [range(8), range(100, 108), range(9), range(200, 209)]
    arrivals_ms = [0, 100, 120, 120]
    run: dict[str, Any] = {
        "workload": single_turns([BLOCK * len(ids) for ids in blocks], 4, arrivals_ms, blocks, BLOCK),
        "engine": VllmConfig(
            block_size=BLOCK, num_gpu_blocks=12, timing=Constant(prefill_ms=1.0, decode_ms=1.0)
        ),
        "tiers": TiersConfig.from_dict(
            {
                "kv_bytes_per_token": 1 << 10,
                "tiers": [{"tier": "g2", "blocks": 40, "link": {"down_gbps": 0.002, "up_gbps": "inf"}}],
                "offload": {"mode": "vllm"},
            }
        ),
        "workers": 2,
        "routing": "least_loaded",
    }
    forwarded = outcome(run)
    assert outcome(run, fast_forward=False) == forwarded
    assert outcome(run, check=True) == forwarded
    timeline = run_offline(RunPlan(**run, fast_forward=False)).timeline
    assert timeline.worker.tolist() == [0, 0, 0, 1]
    assert timeline.first_admit_ns.tolist() == [1_000_000 * time_ms for time_ms in arrivals_ms]
    assert timeline.tiers is not None
    assert timeline.tiers.below_tokens_first[0].tolist() == [0, 0, 5 * BLOCK, 0]
    assert timeline.tiers.parked_ns.tolist() == [0, 0, 0, 0]
