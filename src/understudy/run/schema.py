"""Schema of a run's record: each column is declared once, as a field of `Timeline` or of
a record below it (`TierColumns`, `HandOffColumns`, `WorkerLives`, `RequestLosses`).

The declarations determine what is copied from the core, the checks, the digest, the lines of `requests_jsonl` and the
table of columns in docs/metrics.md. A new column is a field of the core's result and a field here. The digest covers
columns without `digested=False`, whole numbers and `tiers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from inspect import get_annotations
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

import numpy as np

from understudy.errors import InvalidArgument
from understudy.workload.columns import RowError, column, first_row

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.workload.columns import BoolColumn, Int64Column

NEVER = -1
"""Value in a column of times for an event that did not happen."""

Per = Literal["request", "gap", "sample", "load", "life", "worker", "loss", "fault"]
Unit = Literal["time ns", "ns", "tokens", "blocks", "bytes", "requests", "gaps", "times", "index", "name"]
"""Unit of a value; `time ns` is a point on the run's clock (or NEVER), `ns` a duration."""

_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class About:
    """Annotation of a column: what a row describes, the unit, and the meaning in one sentence."""

    per: Per
    unit: Unit
    doc: str
    source: Literal["core", "workload"] = "core"
    core_name: str | None = None
    """Name in the core or the workload, if different."""
    digested: bool = True
    """False for columns added later, so that digests stay equal; runs that differ only in such a column have equal
    digests."""


@dataclass(frozen=True, slots=True)
class Column:
    """A declared column. `parts` is above 1 for a field that is a tuple of that many arrays."""

    name: str
    dtype: type[np.generic]
    about: About
    parts: int = 1

    def arrays(self, record: object) -> tuple[NDArray[Any], ...]:
        """Return its arrays in `record`; one unless it has parts."""
        value = getattr(record, self.name)
        return value if self.parts > 1 else (value,)


def list_columns(record: type) -> tuple[Column, ...]:
    """List the columns that a class declares, in order."""
    return _read_declarations(record)[0]


def list_totals(record: type) -> tuple[str, ...]:
    """List the names of whole numbers that a class declares, in order."""
    return _read_declarations(record)[1]


@cache
def _read_declarations(record: type) -> tuple[tuple[Column, ...], tuple[str, ...]]:
    found = []
    totals = []
    hints: dict[str, Any] = get_annotations(record, eval_str=True)
    for name, hint in hints.items():
        if hint is int:
            totals.append(name)
        if get_origin(hint) is not Annotated:
            continue
        array, about = get_args(hint)
        parts = get_args(array) if get_origin(array) is tuple else (array,)
        dtype = _find_scalar_type(parts[0])
        if dtype is None:
            raise InvalidArgument(
                f"{record.__name__}.{name}: a column is an array of one numpy type, not {array}"
            )
        found.append(Column(name, dtype, about, len(parts)))
    return tuple(found), tuple(totals)


def _find_scalar_type(hint: Any) -> type[np.generic] | None:
    """Return T of NDArray[T], which is ndarray[shape, dtype[T]] or an alias, depending on numpy's release."""
    if isinstance(hint, type) and issubclass(hint, np.generic):
        return hint
    return next((found for part in get_args(hint) if (found := _find_scalar_type(part)) is not None), None)


def take_columns(record: type, core: object, workload: object, order: Int64Column | None) -> dict[str, Any]:
    """Collect all columns of `record` from their sources, with requests in the workload's order.

    `order` has the workload's rows in the order of the run; None if that is the workload's order.
    """
    taken: dict[str, Any] = {}
    for declared in list_columns(record):
        about = declared.about
        source = core if about.source == "core" else workload
        value = getattr(source, about.core_name or declared.name)
        arrays = value if declared.parts > 1 else (value,)
        if order is not None and about.per == "request" and about.source == "core":
            arrays = tuple(_restore_order(array, order) for array in arrays)
        arrays = tuple(column(declared.name, array, declared.dtype) for array in arrays)
        taken[declared.name] = arrays if declared.parts > 1 else arrays[0]
    return taken


def check_columns(record: object) -> None:
    """Convert the declared columns of a frozen dataclass to read-only arrays.

    Columns per the same item must have one length; InvalidArgument or RowError names the column.
    """
    rows: dict[Per, int] = {}
    for declared in list_columns(type(record)):
        per = declared.about.per
        arrays = declared.arrays(record)
        if len(arrays) != declared.parts:
            raise InvalidArgument(f"{declared.name} needs {declared.parts} columns, got {len(arrays)}")
        made = tuple(column(declared.name, array, declared.dtype, rows.get(per)) for array in arrays)
        rows.setdefault(per, len(made[0]))
        object.__setattr__(record, declared.name, made if declared.parts > 1 else made[0])


def refuse(name: str, bad: BoolColumn, reason: str) -> None:
    """Raise RowError for the first row that is `bad`."""
    row = first_row(np.asarray(bad))
    if row is not None:
        raise RowError(name, row, reason)


def _restore_order(array: NDArray[_Scalar], order: Int64Column) -> NDArray[_Scalar]:
    restored = np.empty_like(array)
    restored[order] = array
    return restored
