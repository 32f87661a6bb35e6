"""Check the parts of a saved run, so that no file makes a reader fail or allocate without bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from understudy.errors import InvalidArgument
from understudy.run.step_columns import EventKind, Stop

if TYPE_CHECKING:
    import zipfile

    from numpy.typing import NDArray

    from understudy.run.step_columns import StepColumns

_MOST = 2**62
"""Times and counts stay below; sums of two of them fit into 64 bits."""
_BOMB_BYTES = 100_000_000
_BOMB_RATIO = 200
"""Saved runs shrink 3 to 20 times."""


class Link(msgspec.Struct, frozen=True):
    """A link of tiers: bytes in each bucket of time."""

    name: str
    bucket_ns: int
    bytes: list[int | float]

    def __post_init__(self) -> None:
        if self.bucket_ns < 1:
            raise ValueError("links.bucket_ns must be at least 1")


class Header(msgspec.Struct, frozen=True):
    """The facts of a saved run: all of it but its columns."""

    run: dict[str, Any]
    request_ids: list[str] | None
    front_end_ns: int
    block_size: int
    worker_blocks: tuple[int, ...]
    links: list[Link]
    reasons: list[str | None] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.front_end_ns < _MOST:
            raise ValueError("front_end_ns must be at least 0")
        if self.block_size < 1:
            raise ValueError("block_size must be at least 1")


def check_archive(archive: zipfile.ZipFile) -> None:
    """Raise InvalidArgument for an archive that unpacks to far more than saved runs do."""
    members = archive.infolist()
    unpacked = sum(member.file_size for member in members)
    packed = sum(member.compress_size for member in members)
    if unpacked > max(_BOMB_BYTES, _BOMB_RATIO * packed):
        raise InvalidArgument(
            f"the file unpacks from {packed / 1e6:,.1f} MB to {unpacked / 1e6:,.0f} MB, as no saved run does; save the "
            "run again"
        )


def check_columns(
    steps: StepColumns, requests: dict[str, NDArray[Any]], decisions: dict[str, NDArray[Any]], workers: int
) -> None:
    """Raise InvalidArgument for a column whose type, length or values no run has."""
    rows = len(next(iter(requests.values())))
    columns = steps.arrays()
    for name, column in columns.items():
        _check_values(name, column, 0, _STEP_LIMITS.get(name, _MOST))
    for name in _ROWS_OF_REQUESTS:
        _check_values(name, columns[name], -1, rows)
    for name in ("step_worker", "event_worker"):
        _check_values(name, columns[name], 0, workers)
    _check_values("step_batch", steps.step_batch, 0, len(steps.step_batch))
    _check_values("loading_step", steps.loading_step, 0, len(steps.step_batch))
    if not np.isin(steps.entry_batch, steps.step_batch).all():
        raise InvalidArgument("column entry_batch names a batch that no step computed; save the run again")
    is_same_worker = np.diff(steps.step_worker) == 0
    for name in ("step_begin_ns", "step_end_ns"):
        if np.any(np.diff(columns[name])[is_same_worker] < 0):
            raise InvalidArgument(f"column {name} must ascend on each worker; save the run again")
    for group, least in ((requests, -1), (decisions, -_MOST)):
        lengths = {name: len(column) for name, column in group.items() if column.ndim}
        if len(set(lengths.values())) > 1:
            raise InvalidArgument(f"columns have different lengths: {lengths}; save the run again")
        for name, column in group.items():
            if group is requests or column.dtype.kind != "f":
                _check_values(name, column, least, _MOST)
    if decisions:
        _check_values("decision_rows", decisions["rows"], 0, rows)


def check_request_ids(ids: list[str] | None, rows: int) -> None:
    """Raise InvalidArgument unless every request has an id, or none has."""
    if ids is not None and len(ids) != rows:
        raise InvalidArgument(f"request_ids: {len(ids)} ids for {rows} requests; save the run again")


_STEP_LIMITS = {"step_stop": len(Stop), "event_kind": len(EventKind), "entry_decodes": 2}
_ROWS_OF_REQUESTS = ("step_head", "entry_request", "loading_request", "event_request", "event_other")


def _check_values(name: str, column: NDArray[Any], least: int, limit: int) -> None:
    """Raise InvalidArgument unless the column has one axis and whole numbers from `least` to below `limit`."""
    if column.ndim != 1 or column.dtype.kind not in "iu":
        raise InvalidArgument(f"column {name} must be a list of whole numbers; save the run again")
    if name in _ROWS_OF_REQUESTS:
        least = -1  # no request
    if column.size and (int(column.min()) < least or int(column.max()) >= limit):
        raise InvalidArgument(f"column {name} must be from {least} to {limit - 1:,}; save the run again")
