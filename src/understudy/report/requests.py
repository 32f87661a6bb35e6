"""Write the rows of a report: one JSON line per request, with all per-request columns."""

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
from understudy.report.tiers import tier_hits
from understudy.run.schema import NEVER, Column, list_columns
from understudy.run.tier_columns import BELOW, TierColumns
from understudy.run.timeline import FinishReason, Status, Timeline

if TYPE_CHECKING:
    from os import PathLike

    from pandas import DataFrame

    from understudy.report.data import ReportData
    from understudy.run.handoff_columns import HandOffColumns

CHUNK_ROWS = 50_000  # limits the number of Python objects at a time

_NAMES: dict[str, list[str | None]] = {
    "status": [status.name.lower() for status in Status],
    "finish_reason": [reason.name.lower() if reason else None for reason in FinishReason],
}


def write_requests(report: ReportData, path: str | PathLike[str]) -> None:
    """Write one line per request of `report`, in workload order.

    Times are milliseconds on the run's clock, durations milliseconds; null means "never" or "none". `request` is the
    row of the workload, from 0. With tiers, a line has the tokens found on each tier at the first admission.
    """
    encoder = msgspec.json.Encoder()
    with create(path) as file:
        for start in range(0, len(report.columns), CHUNK_ROWS):
            rows = _rows(report, slice(start, start + CHUNK_ROWS))
            file.write(encoder.encode_lines(rows))  # NaN is written as null


def request_frame(report: ReportData) -> DataFrame:
    """Return the rows as a pandas DataFrame. ConfigError if pandas is not installed."""
    return import_pandas().DataFrame(_rows_as_columns(report, slice(0, len(report.columns))))


def import_pandas() -> Any:
    """Import pandas, an optional dependency. ConfigError names the extra if it is not installed."""
    try:
        import pandas  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise ConfigError("to_pandas needs pandas; pip install 'understudy[pandas]'") from error
    return pandas


def key_of(declared: Column, part: int = 0) -> str:
    """Return the key of a column in a line: `_ns` becomes `_ms`, and parts are named by their tier."""
    name = (
        f"{declared.name.removesuffix('_ns')}_ms"
        if declared.about.unit in ("ns", "time ns")
        else declared.name
    )
    return f"{name}_{BELOW[part].name.lower()}" if declared.parts > 1 else name


def _rows(report: ReportData, part: slice) -> list[Any]:
    values = _rows_as_columns(report, part)
    return list(map(_row_type(tuple(values)), *values.values()))


def _rows_as_columns(report: ReportData, part: slice) -> dict[str, Any]:
    timeline = report.columns
    numbers = range(len(timeline))[part]
    ids = timeline.request_ids
    values: dict[str, Any] = {
        "request": numbers,
        "request_id": [None] * len(numbers) if ids is None else ids[part],
        "reason": [timeline.reject_reasons.get(row) for row in numbers],
        **_convert_columns(timeline, part),
        **{field.name: getattr(report.latencies, field.name)[part].tolist() for field in fields(Latencies)},
    }
    if timeline.tiers is not None:
        values |= _convert_columns(timeline.tiers, part) | _prompt_sources(timeline, part)
    if timeline.handoff is not None:
        values |= _convert_columns(timeline.handoff, part)
    return values


@cache
def _row_type(keys: tuple[str, ...]) -> Any:
    return msgspec.defstruct("RequestRow", keys, frozen=True, gc=False)


def _convert_columns(record: Timeline | TierColumns | HandOffColumns, part: slice) -> dict[str, list[Any]]:
    return {
        key_of(declared, at): _convert_values(declared, array[part])
        for declared in list_columns(type(record))
        if declared.about.per == "request"
        for at, array in enumerate(declared.arrays(record))
    }


def _convert_values(declared: Column, array: Any) -> list[Any]:
    """Convert the values of a column for JSON."""
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


def _prompt_sources(timeline: Timeline, part: slice) -> dict[str, list[int]]:
    """Return the prompt tokens found on each tier and computed, at the first admission; 0 if never admitted."""
    found = {tier: tier_hits(timeline, tier, first=True)[part] for tier in (Tier.G1, *BELOW)}
    rest = timeline.prompt_tokens[part] - np.sum(list(found.values()), axis=0)
    return {
        **{f"prompt_from_{tier.name.lower()}": tokens.tolist() for tier, tokens in found.items()},
        "prompt_computed": np.where(timeline.first_admit_ns[part] == NEVER, 0, rest).tolist(),
    }
