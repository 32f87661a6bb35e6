"""The prefix index: what it answers, what it refuses, what it leaves behind."""

from __future__ import annotations

import os
import resource
import threading

import msgspec
import numpy as np
import pytest

from understudy.errors import InvalidArgument
from understudy.events.columns import EventColumns
from understudy.kv import Tier
from understudy.router import PrefixIndex

U64 = np.uint64


def prompt(seed: int, blocks: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, blocks, U64)


def columns(*events: tuple[int, int, list[int]]) -> EventColumns:
    hashes = np.array([h for _, _, blocks in events for h in blocks], U64)
    return EventColumns(
        np.array([kind for kind, _, _ in events], np.uint8),
        np.array([tier for _, tier, _ in events], np.uint8),
        np.zeros(len(events), U64),
        np.cumsum([0, *(len(blocks) for _, _, blocks in events)], dtype=np.int64),
        hashes,
        np.zeros_like(hashes),
    )


def test_a_match_ends_where_a_worker_has_no_block() -> None:
    blocks = prompt(1, 10)
    index = PrefixIndex()
    index.store(0, blocks)
    index.store(1, blocks[:4])
    index.store(2, blocks[5:])
    index.store(3, np.delete(blocks, 6))
    found = index.find(blocks)
    assert found.workers == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert found.blocks[:, 0].tolist() == [10, 4, 0, 6]
    assert found.of(3) == (6, 0, 0, 0)
    assert found.of(99) == (0, 0, 0, 0)


def test_a_block_counts_on_its_fastest_tier_and_only_once() -> None:
    blocks = prompt(2, 6)
    index = PrefixIndex()
    index.store(0, blocks[:3])
    index.store(0, blocks[1:5], tier=Tier.G2)
    index.store(0, blocks[4:], tier=Tier.G3)
    assert index.find(blocks).of(0) == (3, 2, 1, 0)
    index.remove(0, blocks[:1])
    assert index.find(blocks).of(0) == (0, 0, 0, 0)


def test_ranks_of_a_worker_are_apart() -> None:
    blocks = prompt(3, 4)
    index = PrefixIndex()
    index.store(5, blocks, dp_rank=0)
    index.store(5, blocks[:2], dp_rank=3)
    assert index.find(blocks).of(5, 3) == (2, 0, 0, 0)
    index.remove_worker(5, 0)
    assert index.workers == [(5, 3)]
    index.remove_worker(5)
    assert index.workers == []
    assert len(index) == 0


def test_a_batch_of_removals_goes_on_past_unknown_hashes_and_names_them() -> None:
    index = PrefixIndex()
    index.store(0, [1, 2, 3])
    applied = index.remove(0, [9, 1, 8, 3])
    assert (applied.removed, applied.unknown.tolist()) == (2, [9, 8])
    assert index.dump().hashes.tolist() == [2]
    assert index.remove(77, [1]).unknown.tolist() == [1]
    assert index.workers == [(0, 0)]


@pytest.mark.parametrize("seed", range(24))
def test_removals_in_any_order_leave_the_truth(seed: int) -> None:
    random = np.random.default_rng(seed)
    blocks = prompt(seed, 64)
    index = PrefixIndex()
    for worker in range(4):
        index.store(worker, blocks)
    held = {worker: set(blocks.tolist()) for worker in range(4)}
    for worker in random.integers(0, 4, 40).tolist():
        gone = random.choice(blocks, 3)
        index.remove(worker, gone)
        held[worker] = held[worker] - set(gone.tolist())
        expected = [
            next((i for i, b in enumerate(blocks.tolist()) if b not in held[w]), 64) for w in range(4)
        ]
        assert index.find(blocks).blocks[:, 0].tolist() == expected


def test_columns_are_applied_in_order_with_clears() -> None:
    index = PrefixIndex()
    applied = index.apply(
        4, columns((0, 1, [1, 2, 3]), (1, 1, [2, 9]), (0, 2, [7]), (2, 0, []), (0, 1, [5])), dp_rank=1
    )
    assert (applied.stored, applied.removed, applied.unknown.tolist()) == (5, 1, [9])
    assert index.dump(4, 1).hashes.tolist() == [5]


@pytest.mark.parametrize(
    "events",
    [
        columns((3, 1, [])),
        columns((0, 5, [1])),
        columns((0, 0, [1])),
        columns((2, 1, [1])),
        msgspec.structs.replace(columns((0, 1, [1, 2])), offsets=np.zeros(1, np.int64)),
    ],
)
def test_columns_that_contradict_each_other_change_nothing(events: EventColumns) -> None:
    index = PrefixIndex()
    index.store(0, [1])
    with pytest.raises(InvalidArgument):
        index.apply(0, events)
    assert index.dump().hashes.tolist() == [1]


def test_a_raw_stream_is_consolidated_by_counting_copies() -> None:
    index = PrefixIndex(counts_copies=True)
    index.store(0, [1, 2, 1])
    index.remove(0, [1])
    assert index.holds(0, 1)
    copy = PrefixIndex(counts_copies=True)
    index.store(0, [2])
    copy.restore(index.snapshot())
    copy.check()
    copy.remove(0, [1, 2])
    assert (copy.holds(0, 1), copy.holds(0, 2)) == (False, True)


def test_ages_begin_anew_when_a_snapshot_is_restored() -> None:
    index = PrefixIndex(ttl_ms=10)
    index.store(0, [1], now_ms=0)
    index.restore(index.snapshot(), now_ms=8)
    assert index.expire(10) == 0
    assert index.expire(18) == 1
    assert len(index) == 0


def test_told_again_is_young_again() -> None:
    index = PrefixIndex(ttl_ms=10)
    index.store(0, [1, 2], now_ms=0)
    index.store(0, [2], now_ms=9)
    assert index.expire(10) == 1
    assert index.find([2]).of(0) == (1, 0, 0, 0)


@pytest.mark.parametrize("damage", ["cut", "flip", "foreign", "empty"])
def test_a_damaged_snapshot_is_refused_and_changes_nothing(damage: str) -> None:
    index = PrefixIndex()
    index.store(0, [1, 2])
    good = bytearray(index.snapshot())
    if damage == "cut":
        bad = bytes(good[:-8])
    elif damage == "flip":
        good[20] ^= 1
        bad = bytes(good)
    else:
        bad = b"" if damage == "empty" else bytes(64)
    with pytest.raises(InvalidArgument, match="snapshot"):
        index.restore(bad)
    assert index.dump().hashes.tolist() == [1, 2]


def test_a_worker_that_leaves_takes_everything_along_and_its_number_is_used_again() -> None:
    index = PrefixIndex(ttl_ms=100)
    blocks = prompt(4, 1000)
    for worker in range(70):
        index.store(worker, blocks)
    for worker in range(69):
        index.remove_worker(worker)
    index.check()
    assert index.dump().workers.tolist() == [69] * 1000
    index.store(1234, blocks[:5])
    assert index.find(blocks).of(1234) == (5, 0, 0, 0)
    index.remove_worker(69)
    index.remove_worker(1234)
    assert (len(index), index.memory_bytes < 50_000) == (0, True)


@pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer keeps what was freed"
)
def test_memory_returns_after_churn() -> None:
    index = PrefixIndex()

    def churn(round_: int) -> None:
        for worker in range(4):
            index.store(worker, prompt(round_ * 4 + worker, 50_000))
        for worker in range(4):
            index.remove(worker, prompt(round_ * 4 + worker, 50_000)[::-1])

    churn(0)
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for round_ in range(1, 25):
        churn(round_)
    assert len(index) == 0
    assert index.memory_bytes < 100_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kb <= 3 * 1024


def test_many_workers_with_blocks_of_their_own_cost_no_more_than_few() -> None:
    few, many = PrefixIndex(), PrefixIndex()
    for worker in range(2):
        few.store(worker, prompt(worker, 50_000))
    for worker in range(1000):
        many.store(worker, prompt(worker, 100))
    assert many.memory_bytes < 1.5 * few.memory_bytes


def test_readers_see_whole_answers_while_a_writer_writes() -> None:
    index = PrefixIndex()
    steady = prompt(5, 500)
    index.store(0, steady)
    failures: list[str] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            if index.find(steady).of(0) != (500, 0, 0, 0):
                failures.append("a steady prompt was not found whole")
                return

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for round_ in range(20):
        index.store(1, prompt(100 + round_, 20_000))
        index.remove(1, prompt(100 + round_, 20_000))
        index.store(2 + round_, steady)
        index.remove_worker(2 + round_)
    stop.set()
    for reader in readers:
        reader.join()
    assert not failures
    index.check()
