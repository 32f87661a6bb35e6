"""A run's events, kept in runs of blocks, are the rows that were told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from events.building import chain, manager_of
from understudy._core import EventTable
from understudy.events import EventColumns
from understudy.events.columns import EventKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy._core import EventBatch

COLUMNS = ("kinds", "tiers", "starts", "sole", "sequence_hashes", "positions", "generations")
OF_STORED = ("local_hashes", "parent_hashes")


def rows_of(batch: EventBatch) -> dict[str, list[int]]:
    """What is kept of rows: of Removed neither parents nor local hashes."""
    stored = batch.kinds == EventKind.STORED
    kept = {name: getattr(batch, name).tolist() for name in COLUMNS}
    return kept | {name: np.where(stored, getattr(batch, name), 0).tolist() for name in OF_STORED}


def batches(calls: list[tuple[int, int, bool]]) -> Iterator[EventBatch]:
    """What a small pool tells call by call: copies of blocks that are there, families, evictions."""
    manager = manager_of(12, "vllm", duplicates="keep")
    held: list[Any] = []
    for start, count, keep in calls:
        metrics = manager.metrics()
        if metrics.reset_blocks + metrics.inactive_blocks < count:
            for blocks in held:
                blocks.release()
            held.clear()
        blocks = manager.allocate(count).register(chain(start, 12)[:count])
        if keep:
            held.append(blocks)
        else:
            blocks.release()
        yield manager.store.drain_events()
    for blocks in held:
        blocks.release()


CALLS = st.lists(
    st.tuples(st.sampled_from([10, 10, 20, 50]), st.integers(1, 9), st.booleans()), min_size=1, max_size=40
)


@given(calls=CALLS, moments=st.lists(st.integers(0, 2), min_size=40, max_size=40))
def test_a_table_has_the_rows_and_both_streams(calls: list[Any], moments: list[int]) -> None:
    table, said, times = EventTable(), [], []
    now_ns = 0
    for batch, later in zip(batches(calls), moments, strict=False):
        now_ns += later
        table.append(batch, now_ns)
        said.append(batch)
        times += [now_ns] * len(batch)
    rows, time_ns = table.rows()
    assert time_ns.tolist() == times
    assert len(table) == len(times)
    wanted: dict[str, list[int]] = {name: [] for name in (*COLUMNS, *OF_STORED)}
    for batch in said:
        for name, values in rows_of(batch).items():
            wanted[name] += values
    assert rows_of(rows) == wanted
    for raw in (True, False):
        columns = EventColumns.from_batch(rows, "raw" if raw else "consolidated")
        heads = table.heads(raw)
        for name in ("kinds", "tiers", "parents", "offsets"):
            assert heads[name].tolist() == getattr(columns, name).tolist()
        hashes, local = columns.sequence_hashes.tolist(), columns.local_hashes
        stored = np.repeat(columns.kinds == EventKind.STORED, np.diff(columns.offsets))
        assert [value for part in table.sequence_hashes(raw) for value in part.tolist()] == hashes
        assert [value for part in table.stored_local_hashes(raw) for value in part.tolist()] == local[
            stored
        ].tolist()


def test_a_digest_is_of_what_was_said_and_when() -> None:
    calls = [(10, 5, False), (10, 5, True), (20, 9, False), (50, 9, False)] * 3

    def digest(times: list[int]) -> int:
        table = EventTable()
        for batch, time_ns in zip(batches(calls[: len(times)]), times, strict=True):
            table.append(batch, time_ns)
        return table.digest

    digests = [digest(times) for times in ([1] * 12, [1] * 12, [1] * 11 + [2], [1] * 11, [])]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_many_rows_lie_in_parts() -> None:
    manager = manager_of(4000, "vllm")
    table, said = EventTable(), []
    for start in range(10):
        manager.allocate(3000).register(chain(10_000 * start + 1, 3000)).release()
        batch = manager.store.drain_events()
        table.append(batch, start)
        said.append(batch.sequence_hashes)
    parts = table.sequence_hashes(True)
    assert len(parts) > 1
    assert np.array_equal(np.concatenate(parts), np.concatenate(said))
    assert np.array_equal(table.rows()[0].sequence_hashes, np.concatenate(said))
