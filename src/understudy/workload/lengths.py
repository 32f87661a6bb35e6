"""Readers of traces with lengths and arrivals only: Azure's and BurstGPT's CSVs, and detailed benchmark results.

Such a trace has no content: no two prompts share a block, so the benefit of prefix caching is unknown. The workload's
notes say so.
"""

from __future__ import annotations

import csv
import io
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from understudy.errors import InvalidArgument
from understudy.workload.files import open_trace
from understudy.workload.text import unique_ids
from understudy.workload.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

NO_CONTENT = (
    "the trace has no prompts, only lengths and arrivals, so the benefit of prefix caching is unknown"
)
_BLOCK = 16
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:?\d\d)?")


def read_azure(path: Path) -> Workload:
    """Read an Azure LLM inference trace: `TIMESTAMP,ContextTokens,GeneratedTokens`; drop rows without a prompt.

    Errors: InvalidArgument `FILE:LINE: …`.
    """
    rows = [
        (
            timestamp_ns(text["TIMESTAMP"], where),
            *_read_tokens(text, where, "ContextTokens", "GeneratedTokens"),
        )
        for where, text in _read_csv(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
    ]
    return _build_workload(rows, lambda prompt, _: prompt > 0, "rows without a prompt")


def read_burstgpt(path: Path) -> Workload:
    """Read BurstGPT: `Timestamp` (s), `Request tokens`, `Response tokens`; drop requests without a response.

    Errors: InvalidArgument `FILE:LINE: …`.
    """
    rows = []
    for where, text in _read_csv(path, ("Timestamp", "Request tokens", "Response tokens")):
        rows.append(
            (
                _parse_seconds(text["Timestamp"], where),
                *_read_tokens(text, where, "Request tokens", "Response tokens"),
            )
        )
    return _build_workload(
        rows, lambda prompt, output: prompt > 0 and output > 0, "failed requests (without a response)"
    )


def read_vllm_bench(path: Path) -> Workload:
    """Read a result of `vllm bench serve --save-result --save-detailed`: input_lens, output_lens, start_times.

    Without start_times the workload has no arrivals and runs closed loop. Failed requests are dropped; a note has
    their number.
    Errors: InvalidArgument names the file and the key.
    """
    result = json_file(path)
    if not isinstance(result, dict):
        raise InvalidArgument(f"{path}: expected one result, an object with input_lens and output_lens")
    for key in ("input_lens", "output_lens"):
        if not isinstance(result.get(key), list):
            raise InvalidArgument(f"{path}: {key} is missing; run the benchmark with --save-detailed")
    prompts, outputs, starts = result["input_lens"], result["output_lens"], result.get("start_times")
    if not isinstance(starts, list | None):
        raise InvalidArgument(f"{path}: start_times must be a list of seconds")
    if len(prompts) != len(outputs) or (starts is not None and len(starts) != len(prompts)):
        raise InvalidArgument(f"{path}: input_lens, output_lens and start_times have different lengths")
    errors = result.get("errors") or [""] * len(prompts)
    if not isinstance(errors, list) or len(errors) != len(prompts):
        raise InvalidArgument(f"{path}: errors must be a list as long as input_lens")
    rows = []
    for number, (prompt, output, error) in enumerate(zip(prompts, outputs, errors, strict=True)):
        where = f"{path}: request {number}"
        tokens = token_count(prompt, "input_lens", where), token_count(output, "output_lens", where)
        start = 0 if starts is None else time_ns(starts[number], "start_times", where)
        rows.append((start, tokens[0], 0 if error else tokens[1]))
    return _build_workload(
        rows,
        lambda prompt, output: prompt > 0 and output > 0,
        "failed requests",
        has_arrivals=starts is not None,
    )


def read_aiperf(path: Path) -> Workload:
    """Read AIPerf's `profile_export.jsonl`, one record per request; drop failed and warm-up requests.

    Errors: InvalidArgument `FILE:LINE: …`.
    """
    rows = []
    for where, record in json_lines(path):
        try:
            meta, metrics = record["metadata"], record["metrics"]
            if meta.get("benchmark_phase", "profiling") != "profiling":
                continue
            failed = record.get("error") is not None or meta.get("was_cancelled", False)
            lengths = [
                0 if failed else token_count(int(metrics[name]["value"]), name, where)
                for name in ("input_sequence_length", "output_sequence_length")
            ]
            start = time_ns(meta["request_start_ns"], "request_start_ns", where, scale=1)
            rows.append((start, lengths[0], lengths[1]))
        except KeyError as error:
            raise InvalidArgument(f"{where}: {error.args[0]} is missing; not a record of AIPerf") from error
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InvalidArgument(
                f"{where}: not a record of AIPerf ({error}); it needs request_start_ns in metadata, and in metrics a "
                "value for input_sequence_length and output_sequence_length"
            ) from error
    return _build_workload(rows, lambda prompt, _: prompt > 0, "failed requests")


def timestamp_ns(text: str, where: str) -> int:
    """Parse a date and time with up to nine digits of a second into exact nanoseconds; UTC without a zone."""
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise InvalidArgument(f"{where}: {text!r} is not a time such as 2023-11-16 18:15:46.6805900")
    day, time, fraction, zone = found.groups()
    zone = "+00:00" if zone in (None, "Z") else zone
    try:
        whole = datetime.fromisoformat(f"{day}T{time}{zone}").astimezone(UTC)
    except ValueError as error:
        raise InvalidArgument(f"{where}: {text!r}: {error}") from error
    return int(whole.timestamp()) * 10**9 + int((fraction or "0").ljust(9, "0")[:9])


def time_ns(value: Any, name: str, where: str, scale: int = 10**9) -> int:
    """Return `value` times `scale` in nanoseconds, rounded once; a double cannot represent dates in ns.

    InvalidArgument unless it is a number from 0 that fits 63 bits in nanoseconds.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value * scale < 2**63:
        raise InvalidArgument(f"{where}: {name} must be a time as a number from 0, got {value!r}")
    whole = int(value)
    return whole * scale + round((value - whole) * scale)


def token_count(value: Any, name: str, where: str) -> int:
    """Check that `value` is a number of tokens and return it; else InvalidArgument."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise InvalidArgument(f"{where}: {name} must be a whole number from 0 to 2^31−1, got {value!r}")
    return value


def _build_workload(
    rows: Sequence[tuple[int, int, int]], is_kept: Any, dropped_rows: str, *, has_arrivals: bool = True
) -> Workload:
    """Build a workload from (time in ns, prompt, output); drop rows for which `is_kept` is false."""
    good = [row for row in rows if is_kept(row[1], row[2])]
    first = min((row[0] for row in good), default=0)
    prompts = np.array([row[1] for row in good], np.int64)
    offsets, ids = unique_ids(prompts, _BLOCK)
    dropped = len(rows) - len(good)
    return Workload(
        arrival_ns=np.array([row[0] - first if has_arrivals else 0 for row in good], np.int64),
        prompt_tokens=prompts.astype(np.int32),
        output_tokens=np.array([row[2] for row in good], np.int64),
        hash_offsets=offsets,
        hash_ids=ids,
        trace_block_size=_BLOCK,
        has_arrivals=has_arrivals,
        notes=(
            NO_CONTENT,
            *((f"{dropped:,} of {len(rows):,} are left out: {dropped_rows}",) if dropped else ()),
        ),
    )


def _read_csv(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    with open_trace(path) as file, io.TextIOWrapper(file, encoding="utf-8", newline="") as text:
        rows = csv.DictReader(text)
        try:
            found = rows.fieldnames or ()
            for name in columns:
                if name not in found:
                    present = f"there are {', '.join(found)[:200]}" if found else "the file is empty"
                    raise InvalidArgument(f"{path}: column {name} is missing; {present}")
            for row in rows:
                where = f"{path}:{rows.line_num}"
                for name in columns:
                    if not row[name]:
                        raise InvalidArgument(f"{where}: {name} is missing")
                yield where, row
        except csv.Error as error:
            raise InvalidArgument(f"{path}:{rows.line_num}: {error}") from error


def _read_tokens(row: dict[str, str], where: str, *names: str) -> tuple[int, int]:
    values = []
    for name in names:
        try:
            value = int(row[name])
        except ValueError:
            raise InvalidArgument(f"{where}: {name} must be a whole number, got {row[name]!r}") from None
        values.append(token_count(value, name, where))
    prompt, output = values
    return prompt, output


def _parse_seconds(text: str, where: str) -> int:
    try:
        value = float(text)
    except ValueError:
        raise InvalidArgument(f"{where}: Timestamp must be a number of seconds, got {text!r}") from None
    return time_ns(value, "Timestamp", where)


def json_file(path: Path) -> Any:
    """Return the value of a JSON file. InvalidArgument names the file."""
    with open_trace(path) as file:
        data = file.read()
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{path}: {error}") from error


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (FILE:LINE, value) for every line that is not blank. InvalidArgument names file and line."""
    with open_trace(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield f"{path}:{number}", msgspec.json.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise InvalidArgument(f"{path}:{number}: {error}") from error
