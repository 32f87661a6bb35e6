"""The rows of a report: one JSON line per request, with every column of the record that has a row a request."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from understudy._core import Tier
from understudy.errors import ConfigError
from understudy.outputs import create
from understudy.report.latency import NS_PER_MS, Latencies
from understudy.report.tiers import hits_of
from understudy.run.schema import NEVER, Column, columns_of
from understudy.run.tier_columns import BELOW, TierColumns
from understudy.run.timeline import FinishReason, Status, Timeline

if TYPE_CHECKING:
    from os import PathLike

    from understudy.report.report import Report

CHUNK_ROWS = 50_000  # rows that are Python objects at one time

_NAMES: dict[str, list[str | None]] = {
    "status": [status.name.lower() for status in Status],
    "finish_reason": [reason.name.lower() if reason else None for reason in FinishReason],
}


def write_requests(report: Report, path: str | PathLike[str]) -> None:
    """Write a line per request of `report`, in workload order.

    Times are milliseconds on the run's clock, spans milliseconds; null is "never" or "has none". `request` is the row
    of the workload, from 0. With tiers, a line says where the prompt was found at the first admission.
    """
    encoder = msgspec.json.Encoder()
    with create(path) as file:
        for start in range(0, len(report.columns), CHUNK_ROWS):
            rows = _rows(report, slice(start, start + CHUNK_ROWS))
            file.write(encoder.encode_lines(rows))  # NaN is written as null


def request_frame(report: Report) -> Any:
    """A pandas DataFrame of the same rows. ConfigError where pandas is not there."""
    try:
        import pandas as pd  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise ConfigError("to_pandas needs pandas: pip install pandas") from error
    return pd.DataFrame(_rows_as_columns(report, slice(0, len(report.columns))))


def key_of(declared: Column, part: int = 0) -> str:
    """What a line calls a column: nanoseconds are told in milliseconds, and parts are those of the lower tiers."""
    name = (
        f"{declared.name.removesuffix('_ns')}_ms"
        if declared.about.unit in ("ns", "time ns")
        else declared.name
    )
    return f"{name}_{BELOW[part].name.lower()}" if declared.parts > 1 else name


def _rows(report: Report, part: slice) -> list[Any]:
    values = _rows_as_columns(report, part)
    return list(map(_row_type(tuple(values)), *values.values()))


def _rows_as_columns(report: Report, part: slice) -> dict[str, Any]:
    timeline = report.columns
    numbers = range(len(timeline))[part]
    ids = timeline.request_ids
    values: dict[str, Any] = {
        "request": numbers,
        "request_id": [None] * len(numbers) if ids is None else ids[part],
        "reason": [timeline.reject_reasons.get(row) for row in numbers],
        **_columns(timeline, part),
        **{field.name: getattr(report.latencies, field.name)[part].tolist() for field in fields(Latencies)},
    }
    if timeline.tiers is not None:
        values |= _columns(timeline.tiers, part) | _found(timeline, part)
    return values


@cache
def _row_type(keys: tuple[str, ...]) -> Any:
    return msgspec.defstruct("RequestRow", keys, frozen=True, gc=False)


def _columns(record: Timeline | TierColumns, part: slice) -> dict[str, list[Any]]:
    return {
        key_of(declared, at): _values(declared, array[part])
        for declared in columns_of(type(record))
        if declared.about.per == "request"
        for at, array in enumerate(declared.arrays(record))
    }


def _values(declared: Column, array: Any) -> list[Any]:
    """The values as JSON has them."""
    match declared.about.unit:
        case "time ns":
            return np.where(array == NEVER, np.nan, array / NS_PER_MS).tolist()  # type: ignore[no-any-return]
        case "ns":
            return (array / NS_PER_MS).tolist()  # type: ignore[no-any-return]
        case "name":
            return [_NAMES[declared.name][value] for value in array.tolist()]
        case "index":
            return [None if value == NEVER else value for value in array.tolist()]
    return array.tolist()  # type: ignore[no-any-return]


def _found(timeline: Timeline, part: slice) -> dict[str, list[int]]:
    """Where the prompt came from at the first admission; what was never admitted was not computed either."""
    found = {tier: hits_of(timeline, tier, first=True)[part] for tier in (Tier.G1, *BELOW)}
    rest = timeline.prompt_tokens[part] - np.sum(list(found.values()), axis=0)
    return {
        **{f"prompt_from_{tier.name.lower()}": tokens.tolist() for tier, tokens in found.items()},
        "prompt_computed": np.where(timeline.first_admit_ns[part] == NEVER, 0, rest).tolist(),
    }
