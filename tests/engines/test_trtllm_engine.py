"""TensorRT-LLM's engine on a clock: fast-forward, KV events, replays, and what is refused."""

from __future__ import annotations

import json
import os
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import understudy as us
from engines.building import constant
from understudy import _core
from understudy.engines.trtllm_config import TrtllmConfig
from understudy.errors import ConfigError, InvalidArgument, WrongState
from understudy.run.digest import digests

if TYPE_CHECKING:
    from pathlib import Path

MS = 1_000_000
COUNT = int(os.environ.get("TRTLLM_COUNT", "2000" if os.environ.get("UNDERSTUDY_SOAK_OPS") else "60"))
"""Random configurations; more of them: `TRTLLM_COUNT=2000 python -m pytest -n 16 -k fast_forward` and this file."""


def random_config(rng: Random) -> TrtllmConfig:
    return TrtllmConfig.from_dict(
        {
            "tokens_per_block": rng.choice([16, 32]),
            "num_gpu_blocks": rng.choice([24, 40, 100, 400]),
            "num_layers": rng.choice([1, 2]),
            "max_attention_window": rng.choice([(), (), (64,), (128, 4096)]),
            "max_batch_size": rng.choice([2, 4, 16]),
            "max_num_tokens": rng.choice([256, 512]),
            "max_seq_len": rng.choice([400, 900]),
            "enable_chunked_prefill": rng.random() < 0.7,
            "disable_overlap_scheduler": rng.random() < 0.5,
            "host_cache_size": rng.choice([0, 0, None, 8 << 20]),
            "block_reuse_policy": rng.choice(["all_reusable", "all_reusable", "per_request"]),
            "enable_block_reuse": rng.random() < 0.9,
        }
    )


def random_arrivals(
    rng: Random, config: TrtllmConfig, count: int = 24
) -> list[tuple[int, _core.RequestSpec]]:
    """Requests that share prefixes, in bursts and apart."""
    out = []
    time = 0
    adapters = rng.choice([[0], [0], [0, 1, 2]])
    for index in range(count):
        time += rng.choice([0, 1, 5, 40, 200]) * MS
        prompt, outputs = rng.randrange(1, 250), rng.choice([1, 2, 30, 100, 300])
        blocks = (prompt + outputs) // config.block_size + 1
        adapter = rng.choice(adapters)
        shared, base = rng.randrange(blocks + 1), 1000 * rng.randrange(1, 4) + 10_000 * adapter
        hashes = [base + k for k in range(shared)]
        hashes += [100_000 + 1000 * index + k for k in range(blocks - shared)]
        named = _core.Identities.from_local_hashes(hashes)
        eos = rng.choice([None, None, 5])
        spec = _core.RequestSpec(index, f"r{index}", prompt, outputs, named, eos_at=eos, adapter=adapter)
        out.append((time, spec))
    return out


def make(config: TrtllmConfig, *, check: bool = True) -> _core.Engine:
    native = config.live_config(events=True, check=check)
    native.dies = False  # it stands still, as in a replay
    return native.make_engine(constant(5.0, 1.0))


def describe_record(record: _core.RequestRecord) -> tuple[Any, ...]:
    times = (
        record.queued_ns,
        record.first_admit_ns,
        record.first_token_ns,
        record.last_token_ns,
        record.finish_ns,
    )
    return (record.id, record.reason, record.output_tokens, *times, record.preemptions, record.cached_first)


def describe_events(engine: _core.Engine) -> list[tuple[Any, ...]]:
    batch, times = engine.take_events()
    columns: list[Any] = [batch.kinds, batch.tiers, batch.sequence_hashes, times]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def run(
    config: TrtllmConfig, arrivals: list[tuple[int, _core.RequestSpec]], *, leaps: bool
) -> tuple[list[Any], list[Any], Any]:
    """Return finished requests, events and the last state, step by step or with fast-forward."""
    engine = make(config)
    finished: list[Any] = []

    def note(effects: _core.Effects) -> _core.Effects:
        finished.extend(describe_record(record) for record in effects.finished)
        return effects

    def run_until(until: int, effects: _core.Effects) -> None:
        while not leaps and effects.wake_ns is not None:
            due = effects.wake_ns
            if effects.phase == _core.Phase.IN_STEP and due <= until:
                effects = note(engine.end_step(due))
            elif effects.phase == _core.Phase.READY and due < until:
                effects = note(engine.begin_step(due))
            else:
                return
        if leaps:
            note(engine.advance(until))

    effects = engine.advance(0)
    for index, (time, spec) in enumerate(arrivals):
        run_until(time, effects)
        try:
            effects = note(engine.submit(spec, time))
        except InvalidArgument as error:
            finished.append((index, str(error)))
            effects = engine.advance(0)
    run_until(10**15, effects)
    last = engine.snapshot()
    return finished, describe_events(engine), (last.phase, last.running, last.waiting, last.active_blocks)


@pytest.mark.parametrize("seed", range(COUNT))
def test_fast_forward_gives_what_steps_give(seed: int) -> None:
    rng = Random(f"trtllm engine {seed}")
    config = random_config(rng)
    arrivals = random_arrivals(rng, config)
    stepped = run(config, arrivals, leaps=False)
    leapt = run(config, arrivals, leaps=True)
    assert leapt == stepped
    assert stepped[2][0] in (_core.Phase.IDLE, _core.Phase.STALLED)


def write_trace(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "routing", ["round_robin", "random", "least_loaded", "power_of_two", "session_affinity", "kv"]
)
def test_a_replay_ends_every_request_under_each_router(tmp_path: Path, routing: Any) -> None:
    rows = [
        {
            "timestamp": 40 * index,
            "input_length": 520 + 7 * index,
            "output_length": 20 + index % 30,
            "hash_ids": [index % 5, 100 + index],
        }
        for index in range(60)
    ]
    engine = TrtllmConfig(num_gpu_blocks=400, enable_chunked_prefill=True, max_model_len=2000)
    report = us.replay(write_trace(tmp_path / "t.jsonl", rows), engine, workers=3, routing=routing)
    assert "60 of 60 requests" in repr(report)


def test_workers_in_threads_do_what_they_do_one_after_another(tmp_path: Path) -> None:
    rows = [
        {
            "timestamp": 15 * index,
            "input_length": 700,
            "output_length": 40,
            "hash_ids": [index % 7, 100 + index],
        }
        for index in range(40)
    ]
    trace = write_trace(tmp_path / "t.jsonl", rows)
    engine = TrtllmConfig(
        num_gpu_blocks=400, num_layers=4, max_attention_window=(128, 4096), max_model_len=2000
    )
    runs = [us.replay(trace, engine, workers=4, execution=us.Execution(threads=count)) for count in (1, 2)]
    assert digests(runs[0].columns) == digests(runs[1].columns)


def test_the_deadlock_that_ends_the_real_server_is_a_finding(tmp_path: Path) -> None:
    engine = TrtllmConfig(
        num_gpu_blocks=24, host_cache_size=0, enable_chunked_prefill=True, max_model_len=700, max_num_seqs=16
    )
    rows = [
        {"timestamp": 0, "input_length": 200, "output_length": 300, "hash_ids": [index]}
        for index in range(16)
    ]
    with pytest.raises(WrongState, match=r"V2 scheduler deadlock: \d+ generation requests"):
        us.replay(write_trace(tmp_path / "t.jsonl", rows), engine)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_cancelled_request_is_answered_at_once_and_frees_its_pages(overlap: bool) -> None:
    engine = make(TrtllmConfig(num_gpu_blocks=64, host_cache_size=0, disable_overlap_scheduler=not overlap))
    spec = _core.RequestSpec(1, "r", 100, 500, None)
    engine.submit(spec, 0)
    engine.advance(20 * MS)
    (record,) = engine.cancel(1, 20 * MS).finished
    assert record.reason == "cancelled"
    engine.advance(100 * MS)
    now = engine.snapshot()
    assert (now.running, now.waiting, now.active_blocks) == (0, 0, 0)


def test_prompts_that_can_never_run_are_refused() -> None:
    engine = make(TrtllmConfig(num_gpu_blocks=400, max_model_len=600, max_num_batched_tokens=128))
    with pytest.raises(InvalidArgument, match="leave no room for an output in max_seq_len"):
        engine.submit(_core.RequestSpec(1, "r", 600, 1, None), 0)
    with pytest.raises(
        InvalidArgument, match=r"exceed max_num_tokens \(128\); raise it, or turn enable_chunked_prefill on"
    ):
        engine.submit(_core.RequestSpec(1, "r", 200, 1, None), 0)


def test_options_are_read_as_users_write_them() -> None:
    config = TrtllmConfig.from_dict(
        {
            "max_batch_size": 64,
            "enable_chunked_prefill": True,
            "kv_cache_config": {
                "max_tokens": 100_000,
                "enable_block_reuse": False,
                "host_cache_size": 0,
                "free_gpu_memory_fraction": 0.9,
                "use_kv_cache_manager_v2": True,
                "block_reuse_config": {"policy": "per_request"},
            },
            "scheduler_config": {
                "capacity_scheduler_policy": "MAX_UTILIZATION",
                "waiting_queue_policy": "priority",
            },
            "cuda_graph_config": {"enable_padding": True},
        }
    )
    assert (config.max_num_seqs, config.enable_prefix_caching, config.host_cache_size) == (64, False, 0)
    assert (config.block_reuse_policy, config.waiting_queue_policy) == ("per_request", "priority")
    assert config.num_gpu_blocks * config.block_size >= 100_000 / 0.95
    assert config.notes() == []


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"kv_cache_config": {"use_kv_cache_manager_v2": False}},
            "C\\+\\+ manager V1, which is not simulated",
        ),
        ({"max_tokens": 4096, "num_gpu_blocks": 8}, "num_gpu_blocks names the same memory; give one"),
        ({"free_gpu_memory_fraction": 1.5}, "free_gpu_memory_fraction must be above 0 and at most 1"),
        ({"speculative_config": {"decoding_type": "MTP"}}, "speculation is not simulated"),
        ({"enable_attention_dp": True}, "data parallelism is not simulated"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism is not simulated"),
        (
            {"kv_cache_config": {"block_reuse_config": {"policy": "per_conversation"}}},
            "per_conversation is not",
        ),
        ({"kv_cache_config": {"max_tokens": 8}, "max_tokens": 9}, "max_tokens is given as well; give one"),
        ({"max_batch_size": 8, "max_num_seqs": 9}, "names the same setting; give one"),
        ({"max_attention_windows": [1]}, "max_attention_windows is not a setting"),
        ({"kv_cache_config": [1]}, "kv_cache_config: must be a mapping"),
        (
            {"enable_chunked_prefill": True, "max_num_tokens": 128, "max_attention_window": [64]},
            "below the unit of chunks, 256",
        ),
    ],
)
def test_what_is_wrong_or_not_simulated_is_refused_by_name(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        TrtllmConfig.from_dict(options)


@pytest.mark.parametrize("windows", [(), (64, 4096), (64, 64, 64, 4096), (64, 1024, 4096)])
@pytest.mark.parametrize(
    "size", [{"num_gpu_blocks": 100}, {"max_tokens": 6000}, {"max_gpu_total_bytes": 3 << 28}]
)
def test_pages_stay_as_they_are_when_another_setting_changes(
    windows: tuple[int, ...], size: dict[str, int]
) -> None:
    """Groups of pools have pages of different sizes; their number is all that the settings keep."""
    options = {"num_layers": 8, "max_attention_window": windows, "max_batch_size": 8, "max_seq_len": 4096}
    once = TrtllmConfig.from_dict({**options, **size})
    twice = msgspec.structs.replace(once, max_num_seqs=4)
    again = TrtllmConfig.from_dict(twice.describe())
    assert once.num_gpu_blocks == twice.num_gpu_blocks == again.num_gpu_blocks
    assert once.num_gpu_blocks >= size.get("num_gpu_blocks", 0)


def test_tokens_size_the_host_and_the_longest_sequence_too() -> None:
    config = TrtllmConfig.from_dict({"max_tokens": 6400, "num_layers": 2, "layer_kv_bytes": 4096})
    assert config.max_model_len == 6400
    assert config.host_cache_size == -(-6400 * 2 * 4096 * 100 // 95)
