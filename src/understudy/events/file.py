"""Events of a run in a file of columns: an .npz, as numpy reads it, a fraction of the size of lines of JSON."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from understudy._core import Tier
from understudy.errors import InvalidArgument
from understudy.events.columns import STORED, EventColumns
from understudy.events.events import Removed, RemovedBlock, Stored, StoredBlock
from understudy.outputs import create

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from os import PathLike

    import numpy.typing as npt

    from understudy._core import EventBatch
    from understudy.events.events import Stream

FORMAT = 1
_OF_EVENTS = ("time_ns", "kinds", "tiers", "parents")
_OF_BLOCKS = ("sequence_hashes", "local_hashes", "positions", "generations")


class PublisherEvents(msgspec.Struct, frozen=True, eq=False):
    """The events of one publisher, with what an index has no use for."""

    columns: EventColumns
    time_ns: npt.NDArray[np.int64]  # of every event: the end of its step
    positions: npt.NDArray[np.uint32]  # of every block
    generations: npt.NDArray[np.uint64]  # of every block

    @classmethod
    def of(cls, batch: EventBatch, times: npt.NDArray[np.int64], stream: Stream) -> PublisherEvents:
        """What a store or an engine told, with the time of every row."""
        told = batch.event_columns(stream == "raw")
        first, positions, generations = told[6:]
        return cls(EventColumns(*told[:6]), times[first], positions, generations)

    def __len__(self) -> int:
        return len(self.columns)

    def __iter__(self) -> Iterator[tuple[int, Stored | Removed]]:
        """(time in ns, event), as the lines of JSON tell them; ids count from 0."""
        columns = self.columns
        hashes, local = columns.sequence_hashes.tolist(), columns.local_hashes.tolist()
        positions, generations = self.positions.tolist(), self.generations.tolist()
        bounds, parents = columns.offsets.tolist(), columns.parents.tolist()
        times, kinds, tiers = self.time_ns.tolist(), columns.kinds.tolist(), columns.tiers.tolist()
        for i in range(len(columns)):
            run = range(bounds[i], bounds[i + 1])
            if kinds[i] == STORED:
                stored = (
                    StoredBlock(hashes[at], local[at] or None, positions[at], generations[at], None)
                    for at in run
                )
                yield times[i], Stored(i, parents[i] or None, tuple(stored), Tier(tiers[i]), 0)
            else:
                removed = (RemovedBlock(hashes[at], positions[at], generations[at]) for at in run)
                yield times[i], Removed(i, tuple(removed), Tier(tiers[i]), 0)


def write_columns(
    path: str | PathLike[str], publishers: Mapping[str, PublisherEvents], *, stream: Stream, block_size: int
) -> None:
    """Write the events of every publisher. InvalidArgument when the file cannot be written."""
    parts = list(publishers.values())

    def joined(name: str, kind: Any) -> Any:
        holders = (part if hasattr(part, name) else part.columns for part in parts)
        return np.concatenate([np.zeros(0, kind), *(getattr(holder, name) for holder in holders)])

    kinds = {"time_ns": np.int64, "kinds": np.uint8, "tiers": np.uint8, "positions": np.uint32}
    arrays = {name: joined(name, kinds.get(name, np.uint64)) for name in (*_OF_EVENTS, *_OF_BLOCKS)}
    with create(path) as file:
        np.savez(
            file,
            format=np.array(FORMAT),
            stream=np.array(stream),
            block_size=np.array(block_size),
            publishers=np.array(list(publishers), np.str_),
            events=np.array([len(part) for part in parts], np.int64),
            lengths=np.concatenate(
                [np.zeros(0, np.int64), *(np.diff(part.columns.offsets) for part in parts)]
            ),
            **arrays,
        )


class EventFile(msgspec.Struct, frozen=True, eq=False):
    """A file of events, read."""

    stream: str
    block_size: int
    publishers: dict[str, PublisherEvents]  # "worker 0", "worker 1", …, "G3"


def read_columns(path: str | PathLike[str]) -> EventFile:
    """Read what `write_columns` wrote. InvalidArgument when the file is none, or its columns contradict each other."""
    try:
        with np.load(path, allow_pickle=False) as found:
            arrays: dict[str, Any] = {name: found[name] for name in found.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise InvalidArgument(f"{path} is no file of KV events: {error}") from error
    try:
        if int(arrays["format"]) != FORMAT:
            raise InvalidArgument(f"{path} has format {int(arrays['format'])}; this version reads {FORMAT}")
        starts = np.concatenate([[0], np.cumsum(arrays["events"])])
        blocks = np.concatenate([np.zeros(1, np.int64), np.cumsum(arrays["lengths"])])
        publishers = {}
        for i, name in enumerate(arrays["publishers"].tolist()):
            events = slice(int(starts[i]), int(starts[i + 1]))
            first, last = int(blocks[events.start]), int(blocks[events.stop])
            of_events = {key: arrays[key][events] for key in _OF_EVENTS}
            of_blocks = {key: arrays[key][first:last] for key in _OF_BLOCKS}
            columns = EventColumns(
                of_events["kinds"],
                of_events["tiers"],
                of_events["parents"],
                blocks[events.start : events.stop + 1] - first,
                of_blocks["sequence_hashes"],
                of_blocks["local_hashes"],
            )
            columns.check()
            publishers[name] = PublisherEvents(
                columns, of_events["time_ns"], of_blocks["positions"], of_blocks["generations"]
            )
        return EventFile(str(arrays["stream"]), int(arrays["block_size"]), publishers)
    except (KeyError, IndexError, TypeError) as error:
        raise InvalidArgument(f"{path} is no file of KV events: {error!r}") from error
