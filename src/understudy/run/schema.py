"""The record of a run, declared once: a column is an annotated field of `Timeline` or `TierColumns`.

From the declaration follow what is taken from the core, what is checked, what the digest covers, the lines of
`requests_jsonl` and the table of columns in docs/metrics.md. A new column is a field of the core's result and a field
here. The digest covers columns, unless they say `digested=False`, and whole numbers; no other fields but `tiers`.
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
"""Stands in a column of times for what did not happen."""

Per = Literal["request", "gap", "sample", "load"]
Unit = Literal["time ns", "ns", "tokens", "blocks", "requests", "gaps", "times", "index", "name"]
"""What a value counts; a `time ns` is a moment on the run's clock (or NEVER), a `ns` a span."""

_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class About:
    """What an annotation says of a column: one row per what, in which unit, and its meaning in a sentence."""

    per: Per
    unit: Unit
    doc: str
    source: Literal["core", "workload"] = "core"
    core_name: str | None = None
    """In the core, or in the workload, where it is called otherwise."""
    digested: bool = True
    """False for what came later, so that runs keep the digests that they had before it: those that differ in it alone
    have equal digests."""


@dataclass(frozen=True, slots=True)
class Column:
    """A declared column. `parts` is above 1 for a field that holds as many arrays side by side."""

    name: str
    dtype: type[np.generic]
    about: About
    parts: int = 1

    def arrays(self, record: object) -> tuple[NDArray[Any], ...]:
        """Its arrays in `record`, one unless it has parts."""
        value = getattr(record, self.name)
        return value if self.parts > 1 else (value,)


def columns_of(record: type) -> tuple[Column, ...]:
    """The columns that a class declares, in order."""
    return _declared(record)[0]


def totals_of(record: type) -> tuple[str, ...]:
    """The whole numbers that a class declares, in order."""
    return _declared(record)[1]


@cache
def _declared(record: type) -> tuple[tuple[Column, ...], tuple[str, ...]]:
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
        dtype = _scalar_of(parts[0])
        if dtype is None:
            raise InvalidArgument(
                f"{record.__name__}.{name}: a column is an array of one numpy type, not {array}"
            )
        found.append(Column(name, dtype, about, len(parts)))
    return tuple(found), tuple(totals)


def _scalar_of(hint: Any) -> type[np.generic] | None:
    """The T of NDArray[T], which is ndarray[shape, dtype[T]] or an alias of that, by the release of numpy."""
    if isinstance(hint, type) and issubclass(hint, np.generic):
        return hint
    return next((found for part in get_args(hint) if (found := _scalar_of(part)) is not None), None)


def take_columns(record: type, core: object, workload: object, order: Int64Column | None) -> dict[str, Any]:
    """Every column of `record` from where it comes, requests in the workload's own order.

    `order` has the workload's rows as they were played; None where that was their order.
    """
    taken: dict[str, Any] = {}
    for declared in columns_of(record):
        about = declared.about
        source = core if about.source == "core" else workload
        value = getattr(source, about.core_name or declared.name)
        arrays = value if declared.parts > 1 else (value,)
        if order is not None and about.per == "request" and about.source == "core":
            arrays = tuple(_restored(array, order) for array in arrays)
        arrays = tuple(column(declared.name, array, declared.dtype) for array in arrays)
        taken[declared.name] = arrays if declared.parts > 1 else arrays[0]
    return taken


def check_columns(record: object) -> None:
    """Make every declared column of a frozen dataclass a read-only array of its dtype; those per the same are as long.

    Errors: InvalidArgument or RowError, naming the column.
    """
    rows: dict[Per, int] = {}
    for declared in columns_of(type(record)):
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


def _restored(array: NDArray[_Scalar], order: Int64Column) -> NDArray[_Scalar]:
    restored = np.empty_like(array)
    restored[order] = array
    return restored
