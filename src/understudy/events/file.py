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
    arrays: dict[str, Any] = {
        "format": np.array(FORMAT),
        "stream": np.array(stream),
        "block_size": np.array(block_size),
        "publishers": np.array(list(publishers), np.str_),
    }
    for number, told in enumerate(publishers.values()):
        columns = told.columns
        stored = np.repeat(columns.kinds == STORED, np.diff(columns.offsets))
        parts = {
            "time_ns": told.time_ns,
            "kinds": columns.kinds,
            "tiers": columns.tiers,
            "parents": columns.parents,
            "offsets": columns.offsets,
            "sequence_hashes": columns.sequence_hashes,
            "stored_local_hashes": columns.local_hashes[stored],  # of a Removed there are none
            "positions": told.positions,
            "generations": _narrow(told.generations),
        }
        arrays |= {f"{number}/{name}": part for name, part in parts.items()}
    with create(path) as file:
        np.savez(file, **arrays)


def _narrow(column: npt.NDArray[np.uint64]) -> npt.NDArray[np.unsignedinteger[Any]]:
    return column.astype(np.uint32) if not len(column) or column.max() < 1 << 32 else column


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
        names = arrays["publishers"].tolist()
        publishers = {name: _publisher(arrays, number) for number, name in enumerate(names)}
        return EventFile(str(arrays["stream"]), int(arrays["block_size"]), publishers)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"{path} is no file of KV events: {error!r}") from error


def _publisher(arrays: dict[str, Any], number: int) -> PublisherEvents:
    def part(name: str) -> Any:
        return arrays[f"{number}/{name}"]

    kinds, offsets = part("kinds"), part("offsets")
    local_hashes = np.zeros(len(part("sequence_hashes")), np.uint64)
    local_hashes[np.repeat(kinds == STORED, np.diff(offsets))] = part("stored_local_hashes")
    columns = EventColumns(
        kinds, part("tiers"), part("parents"), offsets, part("sequence_hashes"), local_hashes
    )
    columns.check()
    return PublisherEvents(columns, part("time_ns"), part("positions"), part("generations").astype(np.uint64))
