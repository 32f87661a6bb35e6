"""A replay under either KV manager: its events, its trace of allocations, and the check of both."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from model.kv_manager import PlainIndex
from replay.building import ONE_MS, conversations, crowd, play, single_turns
from understudy.api import replay
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, InvalidArgument
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.options import Execution, Outputs
from understudy.run.run_plan import RunPlan

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.events import Stream
    from understudy.workload import Workload

MS = 1_000_000
MANAGERS = pytest.mark.parametrize(
    "manager",
    [{}, {"kv_manager": "kvbm"}, {"kv_manager": "kvbm", "eviction_policy": "lru"}],
    ids=["native", "lineage", "lru"],
)
TIGHT: dict[str, Any] = {"block_size": 16, "num_gpu_blocks": 100}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@MANAGERS
@pytest.mark.parametrize("workload", [crowd(), conversations()], ids=["single", "sessions"])
@pytest.mark.parametrize("fast_forward", [False, True])
def test_events_of_every_worker_build_an_index_without_error(
    manager: dict[str, Any], workload: Workload, fast_forward: bool
) -> None:
    run = run_offline(
        RunPlan(workload, VllmConfig(**TIGHT, **manager), workers=2, events=True, fast_forward=fast_forward)
    )
    assert run.kv is not None
    for worker in range(2):
        index = PlainIndex(parents=True)
        events = list(run.kv.events(worker, "consolidated"))
        times = [time_ns for time_ns, _ in events]
        assert times == sorted(times)
        index.apply([event for _, event in events])
        assert 0 < len(index.resident) <= 100
    assert run.timeline.evictions > 0


@MANAGERS
@pytest.mark.parametrize("stream", ["raw", "consolidated"])
def test_fast_forward_tells_the_same_at_the_same_times(manager: dict[str, Any], stream: Stream) -> None:
    def events(run: OfflineRun) -> list[Any]:
        assert run.kv is not None
        return [list(run.kv.events(worker, stream)) for worker in range(2)]

    config = VllmConfig(**TIGHT, **manager)
    runs = [
        run_offline(RunPlan(crowd(), config, workers=2, events=True, fast_forward=fast_forward))
        for fast_forward in (False, True)
    ]
    assert events(runs[0]) == events(runs[1])


@MANAGERS
@pytest.mark.parametrize("load", [crowd(), conversations()], ids=["alone", "together"])
def test_a_checked_run_is_the_same_run(manager: dict[str, Any], load: Workload) -> None:
    config = VllmConfig(**TIGHT, **manager)
    assert (
        play(load, config, workers=2).facts.digest
        == run_offline(RunPlan(load, config, workers=2)).facts.digest
    )


@MANAGERS
def test_a_preemption_does_not_overwrite_what_the_first_admission_found(manager: dict[str, Any]) -> None:
    # Each has two blocks of four tokens and then wants a third; there are five.
    workload = single_turns([8, 8], [3, 2], trace_block_size=4)
    run = play(workload, VllmConfig(block_size=4, num_gpu_blocks=5, timing=ONE_MS, **manager))
    assert run.timeline.preemptions.tolist() == [0, 1]
    assert run.timeline.cached_tokens_first.tolist() == [0, 0]
    assert run.timeline.cached_tokens_total.tolist() == [0, 8]


@MANAGERS
def test_a_request_that_can_never_fit_is_rejected_and_the_next_one_runs(manager: dict[str, Any]) -> None:
    workload = single_turns([100, 8], 1, trace_block_size=4)
    run = play(workload, VllmConfig(block_size=4, num_gpu_blocks=6, timing=ONE_MS, **manager))
    assert list(run.timeline.reject_reasons) == [0]
    assert run.timeline.output_tokens.tolist() == [0, 1]


def test_keeping_events_changes_nothing_else() -> None:
    plain = run_offline(RunPlan(crowd(), VllmConfig(**TIGHT)))
    kept = run_offline(RunPlan(crowd(), VllmConfig(**TIGHT), events=True, kv_trace=True))
    assert plain.kv is None
    assert kept.facts.digests.pop("events")
    assert plain.facts == kept.facts


def test_sharing_blocks_leaves_more_room_than_copies_do() -> None:
    # Ten equal prompts of four blocks at once: copies of the last block, or one of each.
    workload = single_turns([64] * 10, 4, content=[[1, 2, 3, 4]] * 10)
    used = {}
    for manager in ("native", "kvbm"):
        config = VllmConfig.from_dict(
            {
                "block_size": 16,
                "num_gpu_blocks": 100,
                "kv_manager": manager,
                "timing": {"kind": "constant", "prefill_ms": 0.0, "decode_ms": 1.0},
            }
        )
        run = run_offline(RunPlan(workload, config))
        used[manager] = int(np.max(run.timeline.sample_used_blocks))
    assert used == {"native": 3 + 10 + 10, "kvbm": 4 + 10}


def test_events_are_written_by_time_with_ids_that_count_for_each_worker(tmp_path: Path) -> None:
    path, raw = tmp_path / "events.jsonl", tmp_path / "raw.jsonl"
    replay(crowd(), VllmConfig(**TIGHT), workers=3, outputs=Outputs(events=path, raw_events=raw))
    told = lines(path)
    assert [(line["time_ns"], line["worker"]) for line in told] == sorted(
        (line["time_ns"], line["worker"]) for line in told
    )
    for worker in range(3):
        ids = [line["event_id"] for line in told if line["worker"] == worker]
        assert ids == list(range(len(ids)))
    stored = next(line for line in told if line["type"] == "stored")
    assert list(stored) == ["time_ns", "worker", "event_id", "type", "tier", "parent_hash", "blocks"]
    assert stored["tier"] == "G1"
    assert stored["parent_hash"] is None
    assert list(stored["blocks"][0]) == ["sequence_hash", "local_hash", "position", "generation"]
    removed = next(line for line in told if line["type"] == "removed")
    assert list(removed["blocks"][0]) == ["sequence_hash", "position", "generation"]


@pytest.mark.parametrize(("manager", "raw"), [("native", 4 + 9), ("kvbm", 4)])
def test_copies_are_told_in_the_raw_stream_alone(tmp_path: Path, manager: str, raw: int) -> None:
    workload = single_turns([64] * 10, 4, content=[[1, 2, 3, 4]] * 10)
    config = VllmConfig.from_dict({"block_size": 16, "num_gpu_blocks": 100, "kv_manager": manager})
    paths = tmp_path / "events.jsonl", tmp_path / "raw.jsonl"
    replay(workload, config, outputs=Outputs(events=paths[0], raw_events=paths[1]))
    assert [sum(len(line["blocks"]) for line in lines(path)) for path in paths] == [4, raw]


@pytest.mark.parametrize("manager", ["native", "kvbm"])
def test_the_report_says_how_far_the_raw_stream_is_from_the_truth(tmp_path: Path, manager: str) -> None:
    # Ten copies of the last block of one prompt; then room for another prompt takes some of them, but not all.
    content = [[1, 2, 3, 4]] * 10 + [list(range(100, 130))]
    workload = single_turns([64] * 10 + [480], 4, [0.0] * 10 + [60_000.0], content)
    config = VllmConfig.from_dict({"block_size": 16, "num_gpu_blocks": 40, "kv_manager": manager})
    report = replay(workload, config, outputs=Outputs(raw_events=tmp_path / "raw.npz"))
    told = report.run.raw_stream
    if manager == "kvbm":
        assert not any(told.values())
        return
    assert told["second_copies"] == 9
    assert 0 < told["early_removals"] < 9
    assert told["wrong_blocks_peak"] == 1  # of all those copies one hash is believed gone that is there
    assert 0 < told["wrong_blocks_mean"] < 1
    plain = replay(workload, config, outputs=Outputs(events=tmp_path / "truth.npz"))
    assert plain.run.raw_stream == {}


def test_without_prefix_caching_there_is_nothing_to_tell(tmp_path: Path) -> None:
    for manager in ("native", "kvbm"):
        path = tmp_path / f"{manager}.jsonl"
        config = VllmConfig.from_dict({"enable_prefix_caching": False, "g1_backend": manager})
        replay(crowd(), config, outputs=Outputs(events=path), execution=Execution(check=True))
        assert path.read_text() == ""


@MANAGERS
def test_a_trace_accounts_for_every_block_handed_out_and_evicted(
    tmp_path: Path, manager: dict[str, Any]
) -> None:
    path = tmp_path / "kv.jsonl"
    run = run_offline(RunPlan(crowd(), VllmConfig(**TIGHT, **manager), workers=2, kv_trace=True))
    assert run.kv is not None
    run.kv.write(kv_trace=path)
    trace = lines(path)
    assert sum(line["blocks"] for line in trace if line["event"] == "eviction") == run.timeline.evictions
    for line in trace:
        assert (
            line["free_blocks"] + line["active_blocks"] + line["inactive_blocks"]
            == line["total_blocks"]
            == 100
        )
        assert line["utilization"] == (100 - line["free_blocks"]) / 100
    times = [line["time_ns"] for line in trace]
    assert times == sorted(times)
    forwarded = run_offline(
        RunPlan(crowd(), VllmConfig(**TIGHT, **manager), workers=2, kv_trace=True, fast_forward=False)
    )
    assert forwarded.kv is not None
    forwarded.kv.write(kv_trace=tmp_path / "single.jsonl")
    assert (tmp_path / "single.jsonl").read_text() == path.read_text()


def test_the_first_allocation_of_a_request_is_its_first_step(tmp_path: Path) -> None:
    path = tmp_path / "kv.jsonl"
    workload = single_turns([20], 2, arrival_ms=[5])
    replay(
        workload, VllmConfig(block_size=16, num_gpu_blocks=10, timing=ONE_MS), outputs=Outputs(kv_trace=path)
    )
    assert lines(path) == [
        {
            "time_ns": 0,
            "worker": 0,
            "event": "allocation",
            "blocks": 2,
            "block_size": 16,
            "free_blocks": 8,
            "active_blocks": 2,
            "inactive_blocks": 0,
            "total_blocks": 10,
            "utilization": 0.2,
        }
    ]


@pytest.mark.parametrize(
    ("kept", "asked"),
    [
        ({"events": True}, {"events": "a.npz", "kv_trace": "b.jsonl"}),
        ({"kv_trace": True}, {"kv_trace": "a.jsonl", "events": "b.npz"}),
        ({"kv_trace": True}, {"kv_trace": "a.jsonl", "raw_events": "b.jsonl"}),
    ],
)
def test_what_the_run_did_not_keep_is_not_written_nor_anything_beside_it(
    tmp_path: Path, kept: dict[str, Any], asked: dict[str, str]
) -> None:
    run = run_offline(RunPlan(single_turns([64]), **kept))
    assert run.kv is not None
    missing = "kv_trace" if "events" in kept else "events"
    paths: dict[str, Any] = {name: tmp_path / file for name, file in asked.items()}
    with pytest.raises(InvalidArgument, match=f"the run kept no {missing}; run it with {missing}=True"):
        run.kv.write(**paths)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["events.npz", "events.jsonl"])
def test_a_stream_that_does_not_exist_is_not_written(tmp_path: Path, name: str) -> None:
    kv = run_offline(RunPlan(single_turns([64]), events=True)).kv
    assert kv is not None
    with pytest.raises(InvalidArgument, match="stream must be 'raw' or 'consolidated', got 'whole'"):
        kv.write_events(tmp_path / name, "whole")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_events_are_asked_for_of_workers_that_there_are() -> None:
    traced = run_offline(RunPlan(single_turns([64]), kv_trace=True)).kv
    told = run_offline(RunPlan(single_turns([64]), events=True)).kv
    assert traced is not None
    assert told is not None
    for ask in (lambda: traced.events(0, "raw"), traced.digests, traced.raw_distance):
        with pytest.raises(InvalidArgument, match="the run kept no events"):
            ask()
    for worker in (-1, 1):
        with pytest.raises(InvalidArgument, match=f"worker must be from 0 to 0, got {worker}"):
            told.events(worker, "raw")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eviction_policy": "magic"}, "eviction_policy 'magic' is not known"),
        ({"kv_manager": "kvbm", "g1_backend": "kvbm"}, "g1_backend and kv_manager"),
        ({"g1_backend": None}, "g1_backend must be native or kvbm"),
        ({"kv_manager": "kvbm", "eviction_policy": 3}, "eviction_policy must be a name"),
        ({"kv_manager": "radix"}, "kv_manager"),
    ],
)
def test_a_wrong_choice_of_manager_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VllmConfig.from_dict(settings)
