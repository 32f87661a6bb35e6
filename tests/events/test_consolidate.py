"""A raw stream consolidated by itself is the stream that the store, which knows, calls the truth."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.building import chain, manager_of
from events.test_wire_columns import rows_of
from replay.building import single_turns
from threads import run_together
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import CapacityExhausted, InvalidArgument, WrongState
from understudy.events import EventColumns
from understudy.events.columns import EventKind
from understudy.events.consolidate import Consolidator
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan

STORED, REMOVED, CLEARED = EventKind.STORED, EventKind.REMOVED, EventKind.CLEARED


def columns(*events: tuple[int, int, list[int]], tier: int = 1) -> EventColumns:
    """(kind, parent, hashes) of every event."""
    hashes = [value for _, _, blocks in events for value in blocks]
    return EventColumns(
        np.array([kind for kind, _, _ in events], np.uint8),
        np.array([0 if kind == CLEARED else tier for kind, _, _ in events], np.uint8),
        np.array([parent for _, parent, _ in events], np.uint64),
        np.cumsum([0, *(len(blocks) for _, _, blocks in events)]).astype(np.int64),
        np.array(hashes, np.uint64),
        np.array(
            [value if kind == STORED else 0 for kind, _, blocks in events for value in blocks], np.uint64
        ),
    )


def test_a_second_copy_is_not_told_and_its_leaving_neither() -> None:
    truth = Consolidator()
    assert rows_of(truth.apply(columns((STORED, 0, [1, 2])))) == [(STORED, 1, 0, [1, 2], [1, 2])]
    assert rows_of(truth.apply(columns((STORED, 0, [1, 2, 3, 4])))) == [(STORED, 1, 2, [3, 4], [3, 4])]
    assert rows_of(truth.apply(columns((REMOVED, 0, [2, 3])))) == [(REMOVED, 1, 0, [3], [0])]
    # 2 is there still; between two blocks that are new it parts them.
    assert rows_of(truth.apply(columns((STORED, 9, [8, 2, 3])))) == [
        (STORED, 1, 9, [8], [8]),
        (STORED, 1, 2, [3], [3]),
    ]
    assert len(truth) == 5
    distance = truth.distance
    assert (distance.second_copies, distance.early_removals, distance.wrong_now, distance.wrong_peak) == (
        3,
        1,
        0,
        1,
    )


def test_what_is_not_there_cannot_leave() -> None:
    truth = Consolidator()
    assert rows_of(truth.apply(columns((REMOVED, 0, [1]), (STORED, 0, [1]), (REMOVED, 0, [2, 1, 1])))) == [
        (STORED, 1, 0, [1], [1]),
        (REMOVED, 1, 0, [1], [0]),
    ]
    assert truth.distance.unknown_removals == 3


def test_tiers_are_counted_apart_and_cleared_together() -> None:
    truth = Consolidator()
    truth.apply(columns((STORED, 0, [1]), (STORED, 0, [1])))
    assert rows_of(truth.apply(columns((STORED, 0, [1]), tier=2))) == [(STORED, 2, 0, [1], [1])]
    assert rows_of(truth.apply(columns((CLEARED, 0, [])))) == [(CLEARED, 0, 0, [], [])]
    assert len(truth) == 0
    assert rows_of(truth.apply(columns((STORED, 0, [1])))) == [(STORED, 1, 0, [1], [1])]


def with_content(local: list[int], *events: tuple[int, int, list[int]], tier: int = 1) -> EventColumns:
    """`columns` with these local hashes."""
    return msgspec.structs.replace(columns(*events, tier=tier), local_hashes=np.array(local, np.uint64))


def test_blocks_of_equal_content_and_other_next_tokens_are_one_until_the_last_leaves() -> None:
    truth = Consolidator(by_content=True)
    assert rows_of(truth.apply(with_content([7], (STORED, 0, [1])))) == [(STORED, 1, 0, [7], [7])]
    assert rows_of(truth.apply(with_content([7], (STORED, 0, [2])))) == []
    assert rows_of(truth.apply(columns((REMOVED, 0, [1])))) == []
    assert rows_of(truth.apply(columns((REMOVED, 0, [2])))) == [(REMOVED, 1, 0, [7], [0])]
    assert len(truth) == 0


def test_a_block_that_is_offloaded_without_tokens_has_its_name_on_the_device() -> None:
    truth = Consolidator(by_content=True)
    ((*_, names, _),) = rows_of(truth.apply(with_content([7, 8], (STORED, 0, [1, 2]))))
    offloaded = with_content([0, 0, 0], (STORED, 0, [2]), (STORED, 0, [1]), (STORED, 0, [9]), tier=2)
    assert [hashes for *_, hashes, _ in rows_of(truth.apply(offloaded))] == [names[1:], names[:1]]
    assert truth.distance.unnamed == 1
    assert rows_of(truth.apply(columns((REMOVED, 0, [1]), tier=2))) == [(REMOVED, 2, 0, names[:1], [0])]


def test_memory_is_bounded() -> None:
    truth = Consolidator(max_blocks=10)
    truth.apply(columns((STORED, 0, list(range(1, 100)))))
    assert len(truth) == 10
    assert truth.distance.overflowed == 89


def test_columns_that_do_not_hold_together_are_refused() -> None:
    good = columns((STORED, 0, [1, 2]))
    bad = EventColumns(
        good.kinds, good.tiers, good.parents, good.offsets + 1, good.sequence_hashes, good.local_hashes
    )
    with pytest.raises(InvalidArgument, match="offsets does not fit"):
        Consolidator().apply(bad)


@pytest.mark.parametrize("manager", [{}, {"kv_manager": "kvbm"}], ids=["native", "kvbm"])
def test_the_raw_stream_of_a_run_becomes_its_consolidated_one(manager: dict[str, Any]) -> None:
    # Equal prompts at once, which vLLM computes each for itself, and others that drive them out.
    content = [[1 + i // 10, 2, 3, 4] for i in range(100)]
    workload = single_turns([64] * 100, 4, content=content, arrival_ms=[i // 10 for i in range(100)])
    run = run_offline(
        RunPlan(workload, VllmConfig(block_size=16, num_gpu_blocks=60, **manager), workers=2, events=True)
    )
    assert run.kv is not None
    copies = 0
    for worker in range(2):
        batch, _ = run.kv._result.events(worker).rows()
        truth = Consolidator()
        blocks = flat(truth.apply(EventColumns.from_batch(batch, "raw")))
        assert blocks == flat(EventColumns.from_batch(batch, "consolidated"))
        assert {kind for kind, *_ in blocks} == {STORED, REMOVED}
        copies += truth.distance.second_copies
    assert (copies > 0) == (manager == {})


def flat(told: EventColumns) -> list[tuple[int, int, int, int, int]]:
    """A row a block: (kind, tier, parent, hash, local hash). Where events are cut does not matter."""
    rows = []
    for kind, tier, parent, hashes, local in rows_of(told):
        chained = [parent, *hashes] if kind == STORED else [0] * (len(hashes) + 1)
        rows += [(kind, tier, *each) for each in zip(chained, hashes, local, strict=False)]
    return rows


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 6), st.integers(1, 4)), max_size=40))
def test_the_truth_of_a_store_that_keeps_copies(steps: list[tuple[int, int, int]]) -> None:
    manager = manager_of(12, "vllm", duplicates="keep")
    held: list[Any] = []
    for release, start, count in steps:
        if release and held:
            held.pop(start % len(held)).release()
        else:
            with contextlib.suppress(CapacityExhausted):
                held.append(manager.allocate(count).register(chain(start * 10, count)))
    batch = manager.store.drain_events()
    for guard in held:
        guard.release()
    raw, consolidated = EventColumns.from_batch(batch, "raw"), EventColumns.from_batch(batch, "consolidated")
    whole = flat(Consolidator().apply(raw))
    assert whole == flat(consolidated)
    truth = Consolidator()
    assert [row for i in range(len(raw)) for row in flat(truth.apply(raw.slice(i, i + 1)))] == whole


def test_by_content_blocks_have_the_names_that_a_router_computes() -> None:
    # The engine calls them 900, 901, …; their local hashes are 10, 11, ….
    prompt = chain(10, 3)
    names = prompt.sequence_hashes.tolist()
    truth = Consolidator(by_content=True)

    def stored(parent: int, hashes: list[int], local: list[int], tier: int = 1) -> EventColumns:
        said = columns((STORED, parent, hashes), tier=tier)
        return EventColumns(
            said.kinds,
            said.tiers,
            said.parents,
            said.offsets,
            said.sequence_hashes,
            np.array(local, np.uint64),
        )

    assert rows_of(truth.apply(stored(0, [900, 901], [10, 11]))) == [(STORED, 1, 0, names[:2], [10, 11])]
    assert rows_of(truth.apply(stored(901, [902], [12]))) == [(STORED, 1, names[1], names[2:], [12])]
    assert rows_of(truth.apply(columns((REMOVED, 0, [902, 901])))) == [
        (REMOVED, 1, 0, [names[2], names[1]], [0, 0])
    ]
    # Its parent is on another tier.
    assert rows_of(truth.apply(stored(900, [901, 902], [11, 12], tier=2))) == [
        (STORED, 2, names[0], names[1:], [11, 12])
    ]
    # Without tokens, or behind what is not known, it has no name; nor has what follows it.
    assert rows_of(truth.apply(stored(0, [800, 801], [0, 5]))) == []
    assert rows_of(truth.apply(stored(777, [802], [5]))) == []
    assert truth.distance.unnamed == 3
    assert len(truth) == 3


def test_of_two_threads_one_is_told_and_the_other_is_counted() -> None:
    truth = Consolidator()
    counted: list[int] = []

    def feed(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            hashes = rng.integers(1, 5000, (500, 4))
            with contextlib.suppress(WrongState):
                truth.apply(
                    columns(
                        *(
                            (int(kind), 0, blocks)
                            for kind, blocks in zip(rng.integers(0, 2, 500), hashes.tolist(), strict=True)
                        )
                    )
                )
                counted.append(hashes.size)

    run_together(*(partial(feed, seed) for seed in range(4)))
    assert truth.distance.blocks == sum(counted)
