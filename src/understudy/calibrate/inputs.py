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
from understudy.errors import ConfigError
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


def build_closed_loop(isl: int, osl: int, concurrency: int, prompts: int | None = None) -> NamedLoad:
    """Build a closed loop of equal lengths in tokens; `prompts` defaults to ten per slot."""
    lengths = {"--isl": isl, "--osl": osl, "--concurrency": concurrency}
    for name, value in lengths.items():
        whole_number(name, value, 1, 10_000_000)
    count = _PROMPTS_PER_SLOT * concurrency if prompts is None else whole_number("--num-prompts", prompts, 1)
    load = random_lengths(isl, osl, least=1.0, concurrency=concurrency, prompts=count, seed=0)
    return NamedLoad(f"isl {isl}, osl {osl}, concurrency {concurrency}", load)


def is_benchmark(path: Path) -> bool:
    """Whether the file starts like a benchmark that `read_benchmarks` knows; other files may be recorded runs."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            start = file.read(_START_BYTES)
            if path.suffix.lower() == ".csv":
                header = next(csv.reader([start.partition("\n")[0]]), [])
                names = {name.strip() for name in header}
                return not names & {"key", "exp_id"} and bool(
                    names & {"conc", "concurrency", "max_concurrency"}
                )
            try:
                content: Any = json.loads(start.partition("\n")[0])
            except ValueError:
                content = json.loads(start + file.read())
    except (OSError, ValueError, RecursionError, csv.Error):
        return False
    return isinstance(content, dict) and any(
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


def read_loads(
    path: Path, *, least_length: float | None = None, data_parallel_size: int = 1
) -> list[NamedLoad]:
    """Read the loads of a benchmark file. Errors as `read_benchmarks`."""
    found = read_benchmarks(path, least_length=least_length, data_parallel_size=data_parallel_size)
    return [NamedLoad(one.file, one.load, one.engine, one.notes) for one in found]


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
