"""Read what rows of both layouts have: limits of the engine, the weight type, and how many requests are possible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.errors import InvalidArgument
from understudy.timing.weight_types import weight_type

if TYPE_CHECKING:
    from understudy.calibrate.table_row import TableRow
    from understudy.timing.architecture import Architecture

MAX_REQUESTS = 1_000_000
"""Limit of one experiment, to check its rates before sampling from them."""


def read_limits(row: TableRow) -> dict[str, Any]:
    """Return the limits of the engine that a row has."""
    names = ("max_num_seqs", "max_num_batched_tokens")
    return {name: row.count(name) for name in names if row.text(name, default="")}


def check_requests(row: TableRow, column: str, requests: float) -> None:
    """Raise InvalidArgument for more requests than an experiment may have, before any is drawn."""
    if not 1 <= requests <= MAX_REQUESTS:
        raise InvalidArgument(
            f"{row.where}: {column} gives {requests:,.0f} requests; 1 to {MAX_REQUESTS:,} are supported"
        )


def read_weight_type(row: TableRow, model: Architecture, *columns: str) -> str:
    """Return the weight type that a row names, or the model's own."""
    named = row.text(*columns, default="auto")
    if named.lower() == "auto":
        return model.weights
    kind = weight_type(named).name
    # For an mxfp4 model, "fp4" can only mean mxfp4.
    return "mxfp4" if model.weights == "mxfp4" and kind == "nvfp4" else kind
