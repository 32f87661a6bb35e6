"""A recorded run: when each request came, and how long it was; predictions for every one of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from understudy.calibrate.load import Load, requests
from understudy.errors import InvalidArgument
from understudy.run.offline import run_offline
from understudy.run.times import format_times

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from understudy.engines.config import VllmConfig

_FIELDS = ("request_id", "arrival_s", "input_tokens", "output_tokens")
COLUMNS = ("request_id", "ttft_ms", "tpot_ms", "e2e_ms")
_MOST_S = 4e9
"""Of an arrival, and after the first one: an engine's times end at 2^62 ns, and finer than that no number is."""
_MOST_TOKENS = 2**31 - 1


def read_run(path: Path) -> Load:
    """Requests by line: `request_id`, `arrival_s`, `input_tokens`, `output_tokens`, and `input_token_ids` where they
    are known: without them no two prompts have anything in common.

    InvalidArgument names file, line and key: what is missing, no number, zero, or too large.
    """
    rows: list[dict[str, Any]] = []
    places: list[str] = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    places.append(f"{path}:{number}")
                    rows.append(_read(places[-1], line))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path}: {error}") from error
    if not rows:
        raise InvalidArgument(f"{path} holds no request")
    arrivals = np.array([row["arrival_s"] for row in rows], dtype=np.float64)
    arrivals -= arrivals.min()
    if arrivals.max() > _MOST_S:
        late = int(np.argmax(arrivals))
        raise InvalidArgument(
            f"{places[late]}: arrival_s of {rows[late]['arrival_s']:g} is {arrivals[late]:g} s after the first; "
            f"{_MOST_S:g} s are the most"
        )
    names = [str(row["request_id"]) for row in rows]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidArgument(f"{path}: request_id {twice!r} is there twice")
    tokens: list[list[int]] = [
        row["input_token_ids"] for row in rows if row.get("input_token_ids") is not None
    ]
    if tokens and len(tokens) < len(rows):
        without = next(
            name for name, row in zip(names, rows, strict=True) if row.get("input_token_ids") is None
        )
        raise InvalidArgument(f"{path}: request {without!r} has no input_token_ids, though others have them")
    return requests(
        [row["input_tokens"] for row in rows],
        [row["output_tokens"] for row in rows],
        arrival_s=arrivals,
        tokens=tokens or None,
        request_ids=names,
    )


def _read(where: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InvalidArgument(f"{where}: {error}; the file may be cut off") from error
    if not isinstance(row, dict):
        raise InvalidArgument(f"{where}: expected keys and values")
    for name in _FIELDS:
        if name not in row:
            raise InvalidArgument(f"{where}: {name} is missing; a line has {', '.join(_FIELDS)}")
    for name in ("arrival_s", "input_tokens", "output_tokens"):
        value = row[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidArgument(f"{where}: {name} must be a number, got {value!r}")
        if name == "arrival_s":
            if not -_MOST_S <= value <= _MOST_S:
                raise InvalidArgument(
                    f"{where}: arrival_s must be seconds from {-_MOST_S:g} to {_MOST_S:g}, got {value!r:.40}"
                )
        elif not 1 <= value <= _MOST_TOKENS or value != int(value):
            wanted = f"of at most {_MOST_TOKENS:,}" if value > _MOST_TOKENS else "of at least 1"
            raise InvalidArgument(f"{where}: {name} must be a whole number {wanted}, got {value!r:.40}")
    ids = row.get("input_token_ids")
    if ids is not None:
        if not isinstance(ids, list) or not all(type(one) is int for one in ids):
            raise InvalidArgument(f"{where}: input_token_ids must be a list of whole numbers")
        if len(ids) != row["input_tokens"]:
            raise InvalidArgument(
                f"{where}: input_token_ids has {len(ids)} entries for input_tokens={row['input_tokens']}"
            )
    return row


class PredictedRun(msgspec.Struct, frozen=True):
    """Name, TTFT, TPOT and whole time of each request in ms, in order, and in words where these times come from."""

    requests: list[tuple[str, float, float, float]]
    origin: str


def predict_run(
    load: Load,
    engine: VllmConfig,
    *,
    workers: int = 1,
    ranks: bool = False,
    progress: Callable[[int], None] | None = None,
) -> PredictedRun:
    """Times of each request from when the engine sees it. `ranks` says that workers step together.

    A busy engine reads what has come when a step ends: until then a request is not seen. TPOT of one token is 0.
    """
    run = run_offline(
        load.workload,
        engine,
        workers=workers,
        routing="round_robin" if workers == 1 else "least_loaded",
        ranks=ranks,
        progress=progress,
    )
    columns = run.timeline
    if columns.reject_reasons:
        row, reason = next(iter(columns.reject_reasons.items()))
        raise InvalidArgument(f"request {(columns.request_ids or [])[row]}: {reason}")
    ttft = (columns.first_token_ns - columns.queued_ns) / 1e6
    e2e = (columns.last_token_ns - columns.queued_ns) / 1e6
    gaps = np.maximum(columns.output_tokens - 1, 1)
    tpot = (columns.last_token_ns - columns.first_token_ns) / 1e6 / gaps
    names = load.workload.request_ids or []
    requests = list(zip(names, ttft.tolist(), tpot.tolist(), e2e.tolist(), strict=True))
    return PredictedRun(requests, format_times(run.facts["times"]))
