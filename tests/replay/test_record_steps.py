"""Every step of a replay in a file: recorded schedules come out of it as they are, to the byte."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.replay_gen import random_case
from replay.building import ONE_MS, conversations, crowd, sessions, single_turns
from understudy import _core
from understudy._core import Tier
from understudy.cli import main
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, InvalidArgument, WrongState
from understudy.kv import EvictionPolicy
from understudy.router import Router
from understudy.router.kv import KvRouting
from understudy.run.offline import run_offline
from understudy.run.pools import WorkerPool
from understudy.run.run_plan import RunPlan
from understudy.tiers import TiersConfig
from understudy.workload import ClosedLoop, Lockstep, concat, read_trace, write_mooncake
from understudy.workload.scenario import read_scenario

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm"
NAMES = sorted(path.stem for path in (GOLDEN / "scenarios").iterdir())
NEVER_FITS = {"outgrows_pool", "too_long_chunked", "too_long_reserve"}
"""Each has a request that can never fit: a replay rejects it, where the scheduler stalls for ever."""


def lines(path: Path) -> list[dict[str, Any]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in data.splitlines()]


def record(argv: list[str], path: Path) -> None:
    assert main(["replay", *argv, "--record-steps", str(path), "--quiet"]) == 0


# ── Recordings ──


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEVER_FITS])
def test_a_replay_of_a_recorded_scenario_reproduces_the_recording(name: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl.gz"
    scenario = str(GOLDEN / "scenarios" / f"{name}.json")
    record([scenario, "--format", "vllm-scenario", "--vllm-version", "recorded"], path)
    _, *ours = gzip.decompress(path.read_bytes()).splitlines()
    _, *theirs = gzip.decompress((GOLDEN / "golden" / f"{name}.jsonl.gz").read_bytes()).splitlines()
    assert ours == theirs


@pytest.mark.parametrize("name", sorted(NEVER_FITS))
def test_a_request_that_can_never_fit_is_rejected_and_the_others_finish(name: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    record([str(GOLDEN / "scenarios" / f"{name}.json"), "--format", "vllm-scenario"], path)
    requests = read_scenario(GOLDEN / "scenarios" / f"{name}.json").requests
    end = lines(path)[-1]["end"]
    assert (end["reason"], end["finished"]) == ("done", len(requests) - 1)


def test_flags_win_over_the_scenario_s_own_settings(tmp_path: Path) -> None:
    argv = [str(GOLDEN / "scenarios" / "single.json"), "--format", "vllm-scenario"]
    record([*argv, "--num-gpu-blocks", "77"], tmp_path / "steps.jsonl")
    assert lines(tmp_path / "steps.jsonl")[-2]["free_blocks"] == 77


def test_what_is_no_scenario_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scenario.json"
    path.write_text("[]")
    assert main(["replay", str(path), "--format", "vllm-scenario"]) == 2
    assert "scenario.json: Expected `object`" in capsys.readouterr().err


def test_a_scenario_has_no_trace_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    path = GOLDEN / "scenarios" / "single.json"
    assert main(["replay", str(path), "--format", "vllm-scenario", "--trace-block-size", "4"]) == 2
    assert "--trace-block-size is not an option of format vllm-scenario" in capsys.readouterr().err


def test_a_scenario_s_order_of_equal_priorities_survives_sorting_but_not_a_trace(tmp_path: Path) -> None:
    workload = read_trace(GOLDEN / "scenarios" / "priority_ties.json", "vllm-scenario")
    order = workload.queue_order
    assert order is not None
    part = workload.take([2, 0])
    assert part.queue_order is not None
    assert part.queue_order.tolist() == [order[2], order[0]]
    with pytest.raises(InvalidArgument, match="presence of queue_order"):
        concat([workload, single_turns([1], trace_block_size=1, request_ids=["other"])])
    with pytest.raises(InvalidArgument, match="queue_order"):
        write_mooncake(workload, tmp_path / "trace.jsonl")


# ── Ordinary traces ──


@pytest.mark.parametrize("routing", ["kv", "mine"])
def test_recording_takes_nothing_from_a_router_that_listens(routing: str, tmp_path: Path) -> None:
    class Listener(Router):
        def __init__(self) -> None:
            self.heard = 0

        def observe(self, batch: Any) -> None:
            self.heard += len(batch.events)

        def choose(self, _request: Any, _view: Any) -> int:
            return self.heard % 2

    digests = set()
    for path in (None, tmp_path / "steps.jsonl"):
        how: dict[str, Any] = {"routing": Listener() if routing == "mine" else routing, "record_steps": path}
        engine = VllmConfig(block_size=16, num_gpu_blocks=64)
        digests.add(run_offline(RunPlan(crowd(40), engine, workers=2, **how)).facts.digest)
    assert len(digests) == 1


def test_blocks_that_land_between_steps_are_in_the_recording(tmp_path: Path) -> None:
    """An idle worker loads what another has computed; its router is asked again before the next step ends."""
    link = {"down_gbps": 1, "up_gbps": 1}
    tiers = TiersConfig.from_dict(
        {
            "kv_bytes_per_token": 1000,
            "tiers": [{"tier": tier, "blocks": 100, "link": link} for tier in ("g2", "g3")],
            "offload": {"mode": "write_through", "recompute_fallback": False},
        }
    )
    workload = single_turns([320] * 3, 20, [0, 1000, 1001], [range(20)] * 3)
    router = KvRouting().build(0, imposed=np.array([0, 1, 1], np.int32))
    engine = VllmConfig(block_size=16, num_gpu_blocks=100, timing=ONE_MS)
    path = tmp_path / "steps.jsonl"
    run = run_offline(
        RunPlan(workload, engine, workers=2, tiers=tiers, routing=router, record_steps=path, events=True)
    )
    assert run.kv is not None
    assert run.timeline.worker.tolist() == [0, 1, 1]
    loaded = [event for step in lines(path)[1:-1] if step["worker"] == 1 for event in step["kv_events"]]
    told = [event for _, event in run.kv.events(1, "raw") if event.tier == Tier.G1]
    assert sum(event["n"] for event in loaded) == sum(len(event.blocks) for event in told) >= 20


def test_workers_that_keep_their_own_time_say_who_and_when(tmp_path: Path) -> None:
    workload = single_turns([16, 16, 8], [2, 3, 1], arrival_ms=[0, 0, 50.5])
    path = tmp_path / "steps.jsonl"
    engine = VllmConfig(block_size=8, timing=ONE_MS, async_scheduling=False)
    run = run_offline(RunPlan(workload, engine, workers=2, record_steps=path))
    header, *steps, end = lines(path)
    assert header["header"]["requests"] == 3
    assert [(s["worker"], s["end_ns"] / 1e6, s["step"]) for s in steps] == [
        (0, 1, 0),
        (1, 1, 0),
        (0, 2, 1),
        (1, 2, 1),
        (1, 3, 2),
        (0, 51.5, 2),
    ]
    assert steps[0]["scheduled"] == {"0": 16}
    assert steps[0]["kv_events"][0]["first_tokens"] == [0, 0]
    assert end["end"] == {
        "reason": "done",
        "steps": run.timeline.steps,
        "finished": 3,
        "preemptions": 0,
        "scheduled_tokens": 16 + 1 + 16 + 2 + 8,
        "cached_tokens": 0,
        "stored_blocks": 5,
        "removed_blocks": 0,
    }


def test_recording_changes_nothing(tmp_path: Path) -> None:
    for seed in range(20):
        case = random_case(seed)
        try:
            plain = run_offline(RunPlan(case.workload, case.config, **case.how))
        except WrongState:
            continue
        path = tmp_path / f"{seed}.jsonl.gz"
        recorded = run_offline(RunPlan(case.workload, case.config, **case.how, record_steps=path))
        assert recorded.facts == plain.facts, seed
        *steps, end = lines(path)[1:]
        # A line a schedule: asynchronously one more wherever the queue of batches was empty.
        more = len(steps) - plain.timeline.steps
        assert (more > 0) if case.config.async_scheduling else (more == 0)
        assert len(steps) == end["end"]["steps"]
        assert end["end"]["finished"] == plain.timeline.completed.sum()
        assert end["end"]["preemptions"] == plain.timeline.preemptions.sum()
        assert end["end"]["cached_tokens"] == plain.timeline.cached_tokens_total.sum()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_recording_leaves_the_events_to_those_who_asked_for_them(
    tmp_path: Path, asynchronous: bool
) -> None:
    config = VllmConfig(block_size=16, num_gpu_blocks=60, async_scheduling=asynchronous)
    how: dict[str, Any] = {"workers": 2, "events": True, "check": True}
    alone, recorded = tmp_path / "alone.jsonl", tmp_path / "recorded.jsonl"
    beside = tmp_path / "beside.jsonl"
    run_offline(RunPlan(conversations(8), config, workers=2, record_steps=alone))
    plain = run_offline(RunPlan(conversations(8), config, **how))
    both = run_offline(RunPlan(conversations(8), config, **how, record_steps=recorded))
    assert plain.kv is not None
    assert both.kv is not None
    assert recorded.read_bytes() == alone.read_bytes()
    for stream in ("consolidated", "raw"):
        plain.kv.write_events(alone, stream)
        both.kv.write_events(beside, stream)
        assert beside.read_bytes() == alone.read_bytes() != b""


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"]
    for path in files:
        run_offline(
            RunPlan(
                conversations(8), VllmConfig(block_size=16, num_gpu_blocks=60), workers=2, record_steps=path
            )
        )
    assert files[0].read_bytes() == files[1].read_bytes()


def test_output_that_the_next_turn_quotes_has_its_tokens_and_other_output_none(tmp_path: Path) -> None:
    for quoted in (True, False):
        workload = sessions([(16, 33, 0), (64, 1, 0)], quoted=quoted, trace_block_size=16)
        path = tmp_path / "steps.jsonl"
        run_offline(RunPlan(workload, VllmConfig(block_size=16, timing=ONE_MS), record_steps=path))
        firsts = [t for s in lines(path)[1:-1] for e in s["kv_events"] for t in e.get("first_tokens", ())]
        assert firsts == ([0, 1, 2, 3] if quoted else [0, None, None, 1, 2, 3])


def test_recording_needs_one_thread(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no recording of steps"):
        run_offline(RunPlan(crowd(4), workers=2, threads=2, record_steps=tmp_path / "steps.jsonl"))


@pytest.mark.parametrize("pools", [False, True])
def test_recording_needs_an_eviction_policy_that_tells_its_order(tmp_path: Path, pools: bool) -> None:
    class Mine(EvictionPolicy):
        def on_freed(self, blocks: Any, lineage_hashes: Any) -> None: ...

        def on_taken(self, blocks: Any) -> None: ...

        def select(self, count: int) -> list[int]:
            return list(range(count))

    engine, path = VllmConfig(num_gpu_blocks=99, eviction_policy=Mine), tmp_path / "steps.jsonl"
    fleet: dict[str, Any] = (
        {"pools": [WorkerPool(), WorkerPool(engine=engine)]} if pools else {"engine": engine}
    )
    with pytest.raises(ConfigError, match=r"record_steps .* eviction_policy .*Mine.* name a built-in policy"):
        run_offline(RunPlan(crowd(4), record_steps=path, **fleet))
    assert not path.exists()
    run_offline(RunPlan(crowd(4), VllmConfig(num_gpu_blocks=99, eviction_policy="lru"), record_steps=path))


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="nowhere"):
        run_offline(RunPlan(crowd(4), record_steps=tmp_path / "nowhere" / "steps.jsonl"))


# ── Lockstep ──


def test_in_lockstep_a_step_is_a_millisecond_and_idle_ones_count() -> None:
    workload = single_turns([8, 8], [2, 1], arrival_ms=[3, 7])
    run = run_offline(RunPlan(workload, VllmConfig(async_scheduling=False), load=Lockstep(), workers=2))
    assert run.timeline.first_token_ns.tolist() == [4_000_000, 8_000_000]
    assert run.timeline.steps == 2 * 8


def test_a_workload_without_timestamps_cannot_run_in_lockstep() -> None:
    workload = single_turns([8], has_arrivals=False)
    with pytest.raises(InvalidArgument, match="no arrivals"):
        run_offline(RunPlan(workload, load=Lockstep()))
    assert run_offline(RunPlan(workload, load=ClosedLoop(concurrency=1))).timeline.completed.all()


# ── Identities of a row ──


def test_identities_of_a_row_are_checked() -> None:
    ids = np.arange(4, dtype=np.uint32)
    none = np.zeros(0, dtype=np.uint32)
    assert len(_core.trace_identities(ids, 16, 64, none, 8, 0, 8)) == 8
    with pytest.raises(InvalidArgument, match="fewer than 65 tokens"):
        _core.trace_identities(ids, 16, 65, none, 8, 0, 8)
    with pytest.raises(InvalidArgument, match="block sizes"):
        _core.trace_identities(ids, 0, 64, none, 8, 0, 8)
