"""Helpers for the columns of a workload: checked, read-only numpy arrays and ragged (CSR) ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from understudy.errors import InvalidArgument

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

BoolColumn = NDArray[np.bool_]
Int32Column = NDArray[np.int32]
Int64Column = NDArray[np.int64]
UInt32Column = NDArray[np.uint32]

_Scalar = TypeVar("_Scalar", bound=np.generic)
_PART = 1 << 20
"""Entries that are looked at together."""


class RowError(InvalidArgument):
    """A value that does not fit its column; has the `field`, the `row` (from 0) and the `reason`."""

    def __init__(self, field: str, row: int, reason: str) -> None:
        super().__init__(f"{field}[{row}] {reason}")
        self.field = field
        self.row = row
        self.reason = reason


def first_row(bad: BoolColumn) -> int | None:
    """Return the index of the first true entry; None if there is none."""
    return int(bad.argmax()) if bad.any() else None


def column(field: str, values: ArrayLike, dtype: type[_Scalar], rows: int | None = None) -> NDArray[_Scalar]:
    """Return `values` as a contiguous read-only array of `dtype`, with every value unchanged.

    Errors: InvalidArgument when it is not one-dimensional, not of integers (or bools), or not `rows` long;
    RowError on the first value that `dtype` cannot hold.
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise InvalidArgument(f"{field} must be one-dimensional, got {array.ndim} dimensions")
    if rows is not None and len(array) != rows:
        raise InvalidArgument(f"{field} must have {rows} entries, got {len(array)}")
    wanted = np.dtype(dtype)
    if array.dtype != wanted and len(array):
        if array.dtype.kind not in ("b" if wanted.kind == "b" else "iu"):
            kind = "booleans" if wanted.kind == "b" else "integers"
            raise InvalidArgument(f"{field} must contain {kind}, got {array.dtype}")
        if wanted.kind in "iu":
            limits = np.iinfo(wanted)
            bad = first_row((array < limits.min) | (array > limits.max))
            if bad is not None:
                raise RowError(field, bad, f"must fit {wanted}, got {array[bad]}")
    result = np.ascontiguousarray(array, dtype=wanted).view()
    result.flags.writeable = False
    return result


def offsets_of(counts: NDArray[np.integer]) -> Int64Column:
    """Return CSR offsets for rows of these lengths."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def check_offsets(field: str, offsets: Int64Column, values: int) -> None:
    """Raise RowError unless `offsets` start at 0, ascend and end at `values`."""
    if offsets[0] != 0:
        raise RowError(field, 0, f"must be 0, got {offsets[0]}")
    bad = first_row(np.diff(offsets) < 0)
    if bad is not None:
        raise RowError(
            field, bad + 1, f"must not be below the one before, got {offsets[bad + 1]} < {offsets[bad]}"
        )
    if offsets[-1] != values:
        raise RowError(
            field, len(offsets) - 1, f"must equal the number of values, {values}, got {offsets[-1]}"
        )


def ragged_positions(starts: Int64Column, counts: NDArray[np.integer]) -> Int64Column:
    """Return counts[0] numbers from starts[0] on, then counts[1] from starts[1] on, …, as one array."""
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)


def take_ragged(
    offsets: Int64Column, values: NDArray[_Scalar], rows: Int64Column
) -> tuple[Int64Column, NDArray[_Scalar]]:
    """Return the CSR pair of only `rows`, in that order."""
    counts = np.diff(offsets)[rows]
    return offsets_of(counts), values[ragged_positions(offsets[:-1][rows], counts)]


def intern_ids(ids: NDArray[np.integer]) -> UInt32Column:
    """Renumber ids as 0, 1, 2, … in order of first appearance.

    Errors: InvalidArgument if there are more than 2^32 distinct ids.
    """
    if not len(ids):
        return np.empty(0, np.uint32)
    if ids[0] == 0 and int(ids.max()) < 2**32 and _is_numbered(ids):
        return ids.astype(np.uint32, copy=False)  # as most published traces are
    if (largest := int(ids.max())) < 4 * len(ids) and int(ids.min()) >= 0:
        return _renumber_small(ids, largest)
    _, first_seen, inverse = np.unique(ids, return_index=True, return_inverse=True)
    if len(first_seen) > 2**32:
        raise InvalidArgument(f"hash_ids has {len(first_seen)} distinct ids, at most 2^32 are supported")
    names = np.empty(len(first_seen), np.uint32)
    names[np.argsort(first_seen)] = np.arange(len(first_seen), dtype=np.uint32)
    return names[inverse]


def _is_numbered(ids: NDArray[np.integer]) -> bool:
    """Return whether ids are numbered by first appearance; a part at a time, because there may be many."""
    highest = 0
    for start in range(0, len(ids), _PART):
        seen = np.maximum.accumulate(ids[start : start + _PART].astype(np.int64))
        np.maximum(seen, highest, out=seen)
        if seen[0] > highest + 1 or bool((np.diff(seen) > 1).any()):
            return False
        highest = int(seen[-1])
    return True


def _renumber_small(ids: NDArray[np.integer], largest: int) -> UInt32Column:
    """Renumber ids that index a table, a part at a time."""
    first = np.full(largest + 1, len(ids), np.int64)
    for start in reversed(range(0, len(ids), _PART)):
        part = ids[start : start + _PART]
        first[part[::-1]] = np.arange(start + len(part) - 1, start - 1, -1)  # of equal ids, the last stays
    known = np.flatnonzero(first < len(ids))
    names = np.empty(largest + 1, np.uint32)
    names[known[np.argsort(first[known])]] = np.arange(len(known), dtype=np.uint32)
    numbered = np.empty(len(ids), np.uint32)
    for start in range(0, len(ids), _PART):
        numbered[start : start + _PART] = names[ids[start : start + _PART]]
    return numbered


def next_turn_rows(session: Int32Column) -> Int64Column:
    """Return the row of the session's next turn for each row; −1 for last turns."""
    following = np.full(len(session), -1, np.int64)
    order = np.argsort(session, kind="stable")
    same = session[order[1:]] == session[order[:-1]]
    following[order[:-1][same]] = order[1:][same]
    following.flags.writeable = False
    return following
