"""Read recorded runs (arrivals and lengths of requests) and predict the times of each request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from understudy.calibrate.load import Load, build_load
from understudy.errors import InvalidArgument
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.run.times import format_times

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from understudy.engines.engine_config import EngineConfig

_FIELDS = ("request_id", "arrival_s", "input_tokens", "output_tokens")
COLUMNS = ("request_id", "ttft_ms", "tpot_ms", "e2e_ms")
_MAX_S = 4e9
"""Largest arrival, also relative to the first: the engine's clock ends at 2^62 ns."""
_MAX_TOKENS = 2**31 - 1


def read_run(path: Path) -> Load:
    """Read one request per line: `request_id`, `arrival_s`, `input_tokens`, `output_tokens`, `input_token_ids`.

    Without the optional `input_token_ids`, no two prompts share a prefix. InvalidArgument names file, line and key of
    a missing or invalid value.
    """
    rows: list[dict[str, Any]] = []
    places: list[str] = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    places.append(f"{path}:{number}")
                    rows.append(_read_row(places[-1], line))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path}: {error}") from error
    if not rows:
        raise InvalidArgument(f"{path} contains no requests")
    arrivals = np.array([row["arrival_s"] for row in rows], dtype=np.float64)
    arrivals -= arrivals.min()
    if arrivals.max() > _MAX_S:
        late = int(np.argmax(arrivals))
        raise InvalidArgument(
            f"{places[late]}: arrival_s of {rows[late]['arrival_s']:g} is {arrivals[late]:g} s after the first; "
            f"at most {_MAX_S:g} s are supported"
        )
    names = [str(row["request_id"]) for row in rows]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidArgument(f"{path}: request_id {twice!r} is repeated")
    tokens: list[list[int]] = [
        row["input_token_ids"] for row in rows if row.get("input_token_ids") is not None
    ]
    if tokens and len(tokens) < len(rows):
        without = next(
            name for name, row in zip(names, rows, strict=True) if row.get("input_token_ids") is None
        )
        raise InvalidArgument(
            f"{path}: request {without!r} has no input_token_ids, but others have them; give all or none"
        )
    return build_load(
        [row["input_tokens"] for row in rows],
        [row["output_tokens"] for row in rows],
        arrival_s=arrivals,
        tokens=tokens or None,
        request_ids=names,
    )


def _read_row(where: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where}: {error}; the file may be truncated") from error
    if not isinstance(row, dict):
        raise InvalidArgument(f"{where}: must be a JSON object")
    for name in _FIELDS:
        if name not in row:
            raise InvalidArgument(f"{where}: {name} is missing; a line has {', '.join(_FIELDS)}")
    for name in ("arrival_s", "input_tokens", "output_tokens"):
        value = row[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidArgument(f"{where}: {name} must be a number, got {value!r}")
        if name == "arrival_s":
            if not -_MAX_S <= value <= _MAX_S:
                raise InvalidArgument(
                    f"{where}: arrival_s must be seconds from {-_MAX_S:g} to {_MAX_S:g}, got {value!r:.40}"
                )
        elif not 1 <= value <= _MAX_TOKENS or value != int(value):
            wanted = f"of at most {_MAX_TOKENS:,}" if value > _MAX_TOKENS else "of at least 1"
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
    """Name, TTFT, TPOT and E2E (ms) of each request, in order, and the source of the step times."""

    requests: list[tuple[str, float, float, float]]
    origin: str


def predict_run(
    load: Load,
    engine: EngineConfig,
    *,
    workers: int = 1,
    ranks: bool = False,
    at_client: bool = False,
    progress: Callable[[int], None] | None = None,
) -> PredictedRun:
    """Predict the times of each request in the engine, or `at_client`, which adds the front-end time of the timing.

    The engine's times begin when it reads the request: a busy engine reads new requests at the end of a step. `workers`
    are data-parallel ranks, among which the engine's front end chooses; `ranks` means that they step together. TPOT of
    one token is NaN.
    """
    run = run_offline(
        RunPlan(
            load.workload,
            msgspec.structs.replace(engine, data_parallel_size=workers),
            load=load.loop(0.0),
            ranks=ranks,
            progress=progress,
        )
    )
    columns = run.timeline
    names = load.workload.request_ids or list(map(str, range(len(load.workload))))
    if columns.reject_reasons:
        row, reason = next(iter(columns.reject_reasons.items()))
        raise InvalidArgument(f"request {names[row]}: {reason}")
    began_ns = columns.arrival_ns if at_client else columns.queued_ns
    ttft = (columns.first_token_ns - began_ns) / 1e6
    e2e = (columns.last_token_ns - began_ns) / 1e6
    gaps = columns.output_tokens - 1
    spans = (columns.last_token_ns - columns.first_token_ns) / 1e6
    tpot = np.where(gaps > 0, spans / np.maximum(gaps, 1), np.nan)
    requests = list(zip(names, ttft.tolist(), tpot.tolist(), e2e.tolist(), strict=True))
    return PredictedRun(requests, format_times(run.facts.times))
