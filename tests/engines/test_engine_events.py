"""What an engine says about its blocks: two streams, visible at the end of a step, and true."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from engines.building import MS, engine_for, request_spec, submit_spec
from model.kv_manager import PlainIndex, told
from model.scenario_gen import random_scenario
from understudy import _core
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import InvariantViolated
from understudy.events import EventsLost, decode
from understudy.tokens import TokenBlocks

if TYPE_CHECKING:
    from understudy.events import KvEvent, Stream

MANAGERS = pytest.mark.parametrize("manager", ["native", "kvbm"])
EVERY_MANAGER = pytest.mark.parametrize(
    "manager",
    [
        {"kv_manager": "native"},
        {"kv_manager": "kvbm", "eviction_policy": "lineage"},
        {"kv_manager": "kvbm", "eviction_policy": "lru"},
        {"kv_manager": "kvbm", "eviction_policy": "multi_lru"},
    ],
    ids=lambda manager: manager.get("eviction_policy", "native"),
)


class Listener:
    """An engine whose consolidated events feed a plain index, compared at the end of every step."""

    def __init__(self, worker: _core.VllmEngine, block_size: int) -> None:
        self.worker = worker
        self.block_size = block_size
        self.index = PlainIndex(parents=True)
        self.ids = count()
        self.heard: list[KvEvent] = []
        self.finished: list[_core.RequestRecord] = []

    def listen(self) -> None:
        batch, times = self.worker.take_events()
        assert len(times) == len(batch)
        events = decode(batch, dp_rank=0, block_size=self.block_size, stream="consolidated")
        for event in events:
            assert not isinstance(event, EventsLost)
        events = [msgspec.structs.replace(event, event_id=next(self.ids)) for event in events]
        self.index.apply(events)
        self.heard += events
        resident = self.worker.resident_hashes()
        assert len(resident) == len(set(resident))
        assert self.index.resident == set(resident)

    def step(self) -> None:
        self.worker.begin_step(self.worker.now_ns)
        self.finished += self.worker.end_step(self.worker.now_ns).finished
        self.listen()

    def drain(self, steps: int = 100_000) -> None:
        for _ in range(steps):
            if self.worker.idle:
                break
            self.step()
        assert self.worker.idle
        self.worker.check()
        assert self.worker.pool[1] == 0


def small(manager: str, blocks: int, **config: Any) -> _core.VllmEngine:
    return engine_for({"block_size": 4, "num_blocks": blocks + 1, "kv_manager": manager, **config})


def submit(worker: _core.VllmEngine, prompt: int, outputs: int, start: int = 1, index: int = 0) -> int:
    return submit_spec(worker, request_spec(f"{index}", [[start, prompt]], outputs), index, 4)


def run(worker: _core.VllmEngine, stream: Stream) -> list[tuple[str, int | None, list[int]]]:
    """Plays to the end; what was told since the call before."""
    while not worker.idle:
        worker.begin_step(worker.now_ns)
        worker.end_step(worker.now_ns)
    return told(decode(worker.take_events()[0], dp_rank=0, block_size=4, stream=stream))


def hashes(prompt: int, start: int = 1) -> list[int]:
    return list(map(int, TokenBlocks(list(range(start, start + prompt)), 4).identities.sequence_hashes))


# ── Two streams ──


@MANAGERS
def test_native_tells_what_it_removes_before_what_it_stores_and_kvbm_after(manager: str) -> None:
    worker = small(manager, 2)
    submit(worker, 8, 1)
    old, new = hashes(8), hashes(4, 101)
    assert run(worker, "raw") == [("stored", None, old)]
    submit(worker, 4, 1, start=101, index=1)
    events = [("stored", None, new), ("removed", None, old[1:])]
    assert run(worker, "raw") == (events if manager == "kvbm" else events[::-1])


def test_every_copy_is_told_in_the_raw_stream_and_the_first_and_last_in_the_consolidated_one() -> None:
    def play(stream: Stream) -> list[tuple[str, int | None, list[int]]]:
        worker = small("native", 4)
        submit(worker, 8, 1)
        submit(worker, 8, 1, index=1)
        heard = run(worker, stream)
        submit(worker, 16, 1, start=101, index=2)
        return heard + run(worker, stream)

    old, new = hashes(8), hashes(16, 101)
    second = old[1]
    assert play("raw") == [
        ("stored", None, old),
        ("stored", old[0], [second]),
        ("removed", None, [second, second, old[0]]),
        ("stored", None, new),
    ]
    assert play("consolidated") == [
        ("stored", None, old),
        ("removed", None, [second, old[0]]),
        ("stored", None, new),
    ]


def test_a_stored_suffix_is_anchored_at_the_last_reused_block() -> None:
    worker = small("kvbm", 10)
    submit(worker, 8, 1)
    run(worker, "raw")
    submit(worker, 12, 1, index=1)
    whole = hashes(12)
    assert run(worker, "raw") == [("stored", whole[1], whole[2:])]


def test_reuse_and_release_are_silent() -> None:
    worker = small("kvbm", 10)
    submit(worker, 8, 1)
    assert len(run(worker, "raw")) == 1
    submit(worker, 8, 1, index=1)
    assert run(worker, "raw") == []


def test_a_prompt_in_chunks_is_stored_in_as_many_events() -> None:
    worker = engine_for(
        {"block_size": 64, "num_blocks": 20, "max_num_batched_tokens": 256, "kv_manager": "kvbm"}
    )
    submit_spec(worker, request_spec("a", [[1, 512]], 1), 0, 64)
    while not worker.idle:
        worker.begin_step(worker.now_ns)
        worker.end_step(worker.now_ns)
    batch, times = worker.take_events()
    events = told(decode(batch, dp_rank=0, block_size=64, stream="raw"))
    whole = TokenBlocks(list(range(1, 513)), 64).identities.sequence_hashes.tolist()
    assert events == [("stored", None, whole[:4]), ("stored", whole[3], whole[4:])]
    assert sorted(set(times.tolist())) == [MS, 3 * MS]


@MANAGERS
def test_events_are_visible_at_the_end_of_their_step(manager: str) -> None:
    worker = small(manager, 10)
    submit(worker, 8, 2)
    worker.begin_step(5 * MS)
    assert len(worker.take_events()[0]) == 0
    worker.end_step(9 * MS)
    batch, times = worker.take_events()
    assert times.tolist() == [9 * MS, 9 * MS]
    assert batch.ids.tolist() == [0, 1]


# ── Truth ──


@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "caching"])
@pytest.mark.parametrize("shared", [False, True], ids=["unique", "shared"])
@MANAGERS
def test_an_index_fed_by_the_events_meets_no_error(
    manager: str, shared: bool, caching: bool, chunked: bool
) -> None:
    config = VllmConfig(
        block_size=64,
        num_gpu_blocks=500,
        enable_prefix_caching=caching,
        enable_chunked_prefill=chunked,
        kv_manager="kvbm" if manager == "kvbm" else "native",
    )
    worker = _core.VllmEngine(config.native(events=True, check=True), _core.constant_timing(1.0, 1.0))
    for request in range(200):
        start = 1 if shared else 1 + 1000 * request
        outputs = range(10_000_000 + 100 * request, 10_000_000 + 100 * (request + 1))
        tokens = TokenBlocks([*range(start, start + 1000), *outputs], 64)
        worker.submit(f"{request}", 1000, 100, tokens.identities if caching else None)
    listener = Listener(worker, 64)
    if caching:
        listener.drain()
    else:
        while not worker.idle:
            worker.begin_step(worker.now_ns)
            listener.finished += worker.end_step(worker.now_ns).finished
        assert len(worker.take_events()[0]) == 0
    assert sorted(record.id for record in listener.finished) == list(range(200))
    assert [record.output_tokens for record in listener.finished] == [100] * 200
    assert any(event.blocks for event in listener.heard if not isinstance(event, EventsLost)) == caching


@EVERY_MANAGER
def test_an_index_meets_no_error_under_pressure(manager: dict[str, str]) -> None:
    config = {"block_size": 4, "num_blocks": 7, "max_num_batched_tokens": 8, "max_num_seqs": 3, **manager}
    worker = engine_for(config, check=True)
    for index in range(8):
        submit(worker, 8, 4, index=index)
    listener = Listener(worker, 4)
    listener.drain()
    assert [record.output_tokens for record in listener.finished] == [4] * 8


@EVERY_MANAGER
def test_an_engine_that_checks_itself_plays_on_its_own_too(manager: dict[str, str]) -> None:
    ends = []
    for check in (False, True):
        worker = engine_for({"block_size": 4, "num_blocks": 13, **manager}, check=check)
        for index in range(8):
            submit(worker, 8, 4 + index, start=1 + index % 3, index=index)
        worker.advance(1000 * MS)
        assert worker.idle
        ends.append((worker.now_ns, worker.steps, worker.preemptions, sorted(worker.resident_hashes())))
    assert ends[0] == ends[1]


def test_what_a_check_costs_does_not_grow_with_what_is_cached() -> None:
    worker = engine_for({"block_size": 4, "num_blocks": 40_001}, check=True)
    done = [0]
    for index in range(400):  # each alone: between two of them nothing is under way
        submit(worker, 256, 4, start=1 + 1000 * index, index=index)
        worker.advance(worker.now_ns + 1000 * MS)
        assert worker.idle
        done.append(worker.operations)
    first, last = done[100] - done[0], done[400] - done[300]
    resident = len(worker.resident_hashes())
    assert resident > 25_000
    assert last < 2 * first
    worker.finish_transfers()  # the end of a run: whatever it costs, everything is compared
    assert worker.operations - done[-1] >= resident


@EVERY_MANAGER
def test_an_index_agrees_with_the_engine_at_every_step_of_random_scenarios(manager: dict[str, str]) -> None:
    removed = 0
    for seed in range(40):
        scenario = random_scenario(seed)
        config = {**scenario["config"], **manager}
        if not config["enable_prefix_caching"] or config["num_blocks"] > 300:
            continue
        worker = engine_for(config, check=True)
        listener = Listener(worker, config["block_size"])
        for step in range(150):
            for index, spec in enumerate(scenario["requests"]):
                if spec["arrival_step"] == step:
                    submit_spec(
                        worker, spec, index, config["block_size"], config.get("max_model_len", 131072)
                    )
            listener.step()
        worker.check()
        removed += sum(kind == "removed" for kind, _, _ in told(listener.heard))
    assert removed > 0


# ── The check can fail ──


@MANAGERS
@pytest.mark.parametrize(
    ("blocks", "message"),
    [(8, "is in the store alone"), (1000, "the events report 0 hashes, the store holds 2")],
    ids=["small", "large"],
)
def test_events_that_somebody_took_away_are_missed_at_the_end_of_the_step(
    manager: str, blocks: int, message: str
) -> None:
    config = {"block_size": 4, "num_blocks": blocks + 1, "kv_manager": manager}
    worker = engine_for(config, check=True)
    submit(worker, 8, 3)
    worker.begin_step(0)
    assert len(worker.take_all_events()) == 2
    with pytest.raises(InvariantViolated, match=message):
        worker.end_step(MS)


@MANAGERS
def test_lost_and_repeated_events_contradict_the_others(manager: str) -> None:
    worker = small(manager, 3)
    submit(worker, 6, 3)
    worker.begin_step(0)
    worker.end_step(MS)
    first, _ = worker.take_events()
    for _ in range(2):
        worker.begin_step(worker.now_ns)
        worker.end_step(worker.now_ns)
    second, _ = worker.take_events()
    assert (len(first), len(second)) == (1, 1)
    submit(worker, 12, 1, start=101, index=1)
    worker.begin_step(worker.now_ns)
    worker.end_step(worker.now_ns)
    third, _ = worker.take_events()

    truth = _core.EventTruth()
    truth.apply(first)
    with pytest.raises(InvariantViolated, match="stores what is there already"):
        truth.apply(first)

    with pytest.raises(InvariantViolated, match="stores a child before its parent"):
        _core.EventTruth().apply(second)

    with pytest.raises(InvariantViolated, match="removes what is not there"):
        _core.EventTruth().apply(third)

    truth = _core.EventTruth()
    truth.apply(first)
    truth.apply(second)
    with pytest.raises(InvariantViolated, match="is in the events alone"):
        truth.require_equal(worker)

    truth = _core.EventTruth()
    for batch in (first, second, third):
        truth.apply(batch)
    truth.require_equal(worker)
