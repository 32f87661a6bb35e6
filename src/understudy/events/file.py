"""Events of a run in a columnar .npz file, a fraction of the size of JSON lines.

Publisher `n` has `n/kinds`, `tiers`, `parents`, `offsets` and `sequence_hashes` as in `EventColumns`, `time_ns` per
event, and `stored_local_hashes` for the blocks of Stored events only. Positions and generations are stored in runs:
from block `run_offsets[i]` on they count from `run_positions[i]` and `run_generations[i]`, up in a Stored and down in
a Removed, which lists blocks from the last to the first. With several cache groups `groups` has that of each event.
"""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from understudy._core import Tier
from understudy.errors import InvalidArgument
from understudy.events.columns import EventColumns, EventKind
from understudy.events.events import Removed, RemovedBlock, Stored, StoredBlock
from understudy.outputs import create

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from os import PathLike

    import numpy.typing as npt

    from understudy._core import EventTable
    from understudy.events.events import Stream

FORMAT = 2

_HEADS = (
    "kinds",
    "tiers",
    "parents",
    "offsets",
    "time_ns",
    "run_offsets",
    "run_positions",
    "run_generations",
)


class PublisherEvents(msgspec.Struct, frozen=True, eq=False):
    """Events of one publisher, with times, positions and generations."""

    columns: EventColumns
    time_ns: npt.NDArray[np.int64]  # of every event: the end of its step
    positions: npt.NDArray[np.uint32]  # of every block
    generations: npt.NDArray[np.uint64]  # of every block
    groups: npt.NDArray[np.uint8] | None = None  # of every event; None: one cache group

    def __len__(self) -> int:
        return len(self.columns)

    def __iter__(self) -> Iterator[tuple[int, Stored | Removed]]:
        """Yield (time in ns, event) as in the JSON lines; ids count from 0."""
        columns = self.columns
        hashes, local = columns.sequence_hashes.tolist(), columns.local_hashes.tolist()
        positions, generations = self.positions.tolist(), self.generations.tolist()
        bounds, parents = columns.offsets.tolist(), columns.parents.tolist()
        times, kinds, tiers = self.time_ns.tolist(), columns.kinds.tolist(), columns.tiers.tolist()
        groups = [0] * len(columns) if self.groups is None else self.groups.tolist()
        for i in range(len(columns)):
            run = range(bounds[i], bounds[i + 1])
            if kinds[i] == EventKind.STORED:
                stored = (
                    StoredBlock(hashes[at], local[at] or None, positions[at], generations[at], None)
                    for at in run
                )
                yield times[i], Stored(i, parents[i] or None, tuple(stored), Tier(tiers[i]), 0, groups[i])
            else:
                removed = (RemovedBlock(hashes[at], positions[at], generations[at]) for at in run)
                yield times[i], Removed(i, tuple(removed), Tier(tiers[i]), 0, groups[i])


def write_columns(
    path: str | PathLike[str], publishers: Mapping[str, EventTable], *, stream: Stream, block_size: int
) -> None:
    """Write the events of every publisher. InvalidArgument when the file cannot be written."""
    raw = stream == "raw"
    with create(path) as file, zipfile.ZipFile(file, "w") as archive:
        _write(archive, "format", [np.array(FORMAT)])
        _write(archive, "stream", [np.array(stream)])
        _write(archive, "block_size", [np.array(block_size)])
        _write(archive, "publishers", [np.array(list(publishers), np.str_)])
        for number, table in enumerate(publishers.values()):
            heads = table.heads(raw)
            if not heads["groups"].any():
                del heads["groups"]
            for name, column in heads.items():
                _write(archive, f"{number}/{name}", [column])
            _write(archive, f"{number}/sequence_hashes", table.sequence_hashes(raw))
            _write(archive, f"{number}/stored_local_hashes", table.stored_local_hashes(raw))


def _write(archive: zipfile.ZipFile, name: str, parts: Sequence[npt.NDArray[Any]]) -> None:
    """Write the concatenation of `parts` as one array in `numpy.savez` format, without copying them."""
    first = parts[0] if parts else np.zeros(0, np.uint64)
    header = np.lib.format.header_data_from_array_1_0(first)
    if first.ndim:
        header["shape"] = (sum(map(len, parts)),)
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array_header_1_0(member, header)
        for part in parts:
            member.write(part.data if part.ndim else part.tobytes())


class EventFile(msgspec.Struct, frozen=True, eq=False):
    """Content of a file of events."""

    stream: str
    block_size: int
    publishers: dict[str, PublisherEvents]  # "worker 0", "worker 1", …, "G3"


def read_columns(path: str | PathLike[str]) -> EventFile:
    """Read a file of `write_columns`. InvalidArgument when it is not one, or its columns contradict each other."""
    try:
        with np.load(path, allow_pickle=False) as found:
            arrays: dict[str, Any] = {name: found[name] for name in found.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise InvalidArgument(f"{path}: not a file of KV events ({error})") from error
    try:
        if int(arrays["format"]) != FORMAT:
            raise InvalidArgument(
                f"{path}: format {int(arrays['format'])} is not supported; write it again in format {FORMAT}"
            )
        names = arrays["publishers"].tolist()
        publishers = {name: _read_publisher(arrays, number) for number, name in enumerate(names)}
        return EventFile(str(arrays["stream"]), int(arrays["block_size"]), publishers)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"{path}: not a file of KV events ({error!r})") from error


def _read_publisher(arrays: dict[str, Any], number: int) -> PublisherEvents:
    def part(name: str) -> Any:
        return arrays[f"{number}/{name}"]

    kinds, tiers, parents, offsets, time_ns, runs, run_positions, run_generations = map(part, _HEADS)
    hashes = part("sequence_hashes")
    stored = np.repeat(kinds == EventKind.STORED, np.diff(offsets))
    local_hashes = np.zeros(len(hashes), np.uint64)
    local_hashes[stored] = part("stored_local_hashes")
    columns = EventColumns(kinds, tiers, parents, offsets, hashes, local_hashes)
    columns.check()
    if len(time_ns) != len(kinds) or runs[0] != 0 or runs[-1] != len(hashes):
        raise InvalidArgument("time_ns and run_offsets must cover every event and every block")
    lengths = np.diff(runs)
    distance = np.arange(len(hashes)) - np.repeat(runs[:-1], lengths)
    distance[~stored] *= -1
    positions = np.repeat(run_positions, lengths) + distance
    generations = np.repeat(run_generations, lengths).astype(np.int64) + distance
    return PublisherEvents(
        columns,
        time_ns,
        positions.astype(np.uint32),
        generations.astype(np.uint64),
        arrays.get(f"{number}/groups"),
    )
