"""Read the load of any benchmark file or recorded run, for verbs that need no measured times."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.calibrate.load import Load, random_lengths
from understudy.calibrate.readers import aiperf, guidellm, own_report, read_benchmarks, vllm_bench
from understudy.calibrate.recorded import read_run
from understudy.checks import whole_number
from understudy.defaults import LEAST_LENGTH
from understudy.errors import ConfigError
from understudy.workload import read_trace
from understudy.workload.lengths import NO_CONTENT

if TYPE_CHECKING:
    from pathlib import Path

_PROMPTS_PER_SLOT = 10
_START_BYTES = 65_536


class NamedLoad(msgspec.Struct, frozen=True):
    """A load with its name and the engine settings that its file records."""

    name: str
    load: Load
    engine: dict[str, int] = {}
    notes: tuple[str, ...] = ()
    means: dict[str, float] = {}
    """Measured means of ttft_ms, tpot_ms and e2e_ms, those that the file has."""


def build_closed_loop(
    isl: int, osl: int, concurrency: int, prompts: int | None = None, least: float | None = None
) -> NamedLoad:
    """Build a closed loop of lengths in tokens, drawn from `least` of them on (default: `LEAST_LENGTH`).

    `prompts` defaults to ten per slot.
    """
    lengths = {"--isl": isl, "--osl": osl, "--concurrency": concurrency}
    for name, value in lengths.items():
        whole_number(name, value, 1, 10_000_000)
    count = _PROMPTS_PER_SLOT * concurrency if prompts is None else whole_number("--num-prompts", prompts, 1)
    share = LEAST_LENGTH if least is None else least
    load = random_lengths(isl, osl, least=share, concurrency=concurrency, prompts=count, seed=0)
    varied = "all equal" if share == 1 else f"from {share:g} of each"
    return NamedLoad(f"isl {isl}, osl {osl}, concurrency {concurrency}, lengths {varied}", load)


def is_benchmark(path: Path) -> bool:
    """Whether the file starts like a benchmark that `read_benchmarks` knows; other files may be recorded runs."""
    if path.suffix.lower() == ".csv":
        names = {name.strip() for name in _read_header(path)}
        return not names & {"key", "exp_id"} and bool(names & {"conc", "concurrency", "max_concurrency"})
    content = _read_first_object(path)
    return content is not None and any(
        matches(content)
        for matches in (
            aiperf.is_record,
            aiperf.is_summary,
            guidellm.is_report,
            own_report.is_report,
            own_report.is_request,
            vllm_bench.is_result,
        )
    )


def _read_header(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            return next(csv.reader([file.read(_START_BYTES).partition("\n")[0]]), [])
    except (OSError, ValueError, csv.Error):
        return []


def _read_first_object(path: Path) -> dict[str, Any] | None:
    """Read the object in the first line, else the whole file as one object; None if neither is one."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            start = file.read(_START_BYTES)
            try:
                content: Any = json.loads(start.partition("\n")[0])
            except ValueError:
                content = json.loads(start + file.read())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _find_format_without_times(path: Path) -> str | None:
    """Return the trace format of a benchmark that has lengths and arrivals of its requests, and no times."""
    content = _read_first_object(path) or {}
    if content.get("input_lens") is not None and content.get("ttfts") is None and content.get("start_times"):
        return "vllm-bench"
    if aiperf.is_record(content) and '"time_to_first_token"' not in path.read_text(encoding="utf-8"):
        return "aiperf"
    return None


def read_loads(
    path: Path, *, least_length: float | None = None, data_parallel_size: int = 1
) -> list[NamedLoad]:
    """Read the loads of a benchmark file, which may lack measured times. Errors as `read_benchmarks`."""
    if (form := _find_format_without_times(path)) is not None:
        note = "it has no measured times, so predictions stand alone"
        return [NamedLoad(path.name, Load(read_trace(path, format=form)), notes=(note,))]
    found = read_benchmarks(path, least_length=least_length, data_parallel_size=data_parallel_size)
    return [NamedLoad(one.file, one.load, one.engine, one.notes, one.means) for one in found]


def read_only_load(path: Path) -> Load:
    """Read a file with one load: a benchmark or a recorded run; its workload has the notes.

    Errors: ConfigError for several benchmarks; InvalidArgument for a file that cannot be read.
    """
    if not is_benchmark(path):
        load, notes = read_run(path), tuple[str, ...]()
        if load.workload.trace_block_size < 1 << 20:  # the prompts' tokens are known
            return load
    else:
        found = read_loads(path)
        if len(found) > 1:
            raise ConfigError(
                f"{path} contains {len(found)} benchmarks, and a replay has one load; use `understudy predict`"
            )
        load, notes = found[0].load, found[0].notes
    return msgspec.structs.replace(load, workload=replace(load.workload, notes=(NO_CONTENT, *notes)))
