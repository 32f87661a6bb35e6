"""Registry of trace formats. A format is a callable that reads one file; users may register their own.

A reader raises InvalidArgument, with the line, for a bad row; `files.open_trace` opens plain and gzipped
files.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from understudy.errors import ConfigError, InvalidArgument
from understudy.workload.agents.dag import read_dag
from understudy.workload.agents.dynamo import read_dynamo
from understudy.workload.agents.mooncake import read_agentic_mooncake
from understudy.workload.agents.weka import read_weka
from understudy.workload.conversations import read_openai, read_sharegpt
from understudy.workload.delta import read_applied_compute, read_mooncake_delta
from understudy.workload.guess import guess_format
from understudy.workload.length_rows import read_lengths
from understudy.workload.lengths import read_aiperf, read_azure, read_burstgpt, read_vllm_bench
from understudy.workload.mooncake import read_mooncake
from understudy.workload.server_log import read_server_log
from understudy.workload.table import read_table
from understudy.workload.vllm_scenario import read_vllm_scenario
from understudy.workload.workload import Workload

if TYPE_CHECKING:
    import os


TraceReader = Callable[..., Workload]
"""`reader(path, **options)`; its keyword-only parameters are the format's options."""

_readers: dict[str, TraceReader] = {}
_LOOKS_LIKE = {"mooncake-delta": "mooncake", "mooncake": "mooncake-delta"}
"""Formats with the same keys: a file of one is not taken for the other."""


def trace_formats() -> tuple[str, ...]:
    """Return the known format names, sorted."""
    return tuple(sorted(_readers))


def register_format(name: str, reader: TraceReader, *, replace: bool = False) -> None:
    """Make `reader` available as `format=name`.

    Errors: ConfigError when the name is empty, or known and `replace` is false.
    """
    if not name:
        raise ConfigError("format: the name is empty; give one")
    if not callable(reader):
        raise ConfigError(
            f"format {name!r}: the reader must be a function from a path to a Workload, got {reader!r}"
        )
    if name in _readers and not replace:
        raise ConfigError(f"format {name!r} is already registered; pass replace=True to replace it")
    _readers[name] = reader


class ReaderOptions(TypedDict, total=False):
    """Options of the built-in trace readers; a reader rejects those of other formats."""

    trace_block_size: int
    """Tokens per hash id in the file (mooncake) or to generate (openai, sharegpt)."""
    clamp_input_length: bool
    """Shorten prompts that are longer than their hash ids (mooncake)."""
    drop_surplus_hash_ids: bool
    """Drop hash ids beyond the prompt's length (mooncake)."""
    tokenizer: str | None
    """Path of a tokenizer.json to count tokens with (openai, sharegpt)."""
    keep_ids: bool
    """Keep request ids (openai)."""
    columns: str
    """Names of columns, `time=…,input=…,output=…` (table)."""
    time: str
    """Key of the time of a request (openai)."""
    where: Sequence[str]
    """Conditions `KEY=VALUE` that a row must meet (table, openai)."""


class TraceOptions(ReaderOptions, total=False):
    """Options for reading a trace file: its format, and those of the format's reader."""

    format: str
    """Name of the format (default: guessed from the file)."""


def read_trace(
    path: str | os.PathLike[str],
    format: str | None = None,  # noqa: A002
    **options: Unpack[ReaderOptions],
) -> Workload:
    """Read a trace, in file order, with the reader of `format`; `options` are that reader's.

    Parameters:
        path: the file, plain or gzipped.
        format: mooncake, mooncake-delta, applied-compute, weka, agentic-mooncake, dynamo, dag-jsonl, openai, sharegpt,
            vllm-bench, aiperf, azure, burstgpt, table, lengths, server-log, vllm-scenario, or a format that
            `register_format` added. Default: guessed from the start of the file; mooncake where nothing shows another
            one, and for standard input.

    Errors: ConfigError for an unknown format or option (it lists the known ones); InvalidArgument for a bad row or a
    file that cannot be read.

    Example:
        workload = us.read_trace("trace.jsonl", trace_block_size=512)
        print(len(workload), workload.prompt_tokens.mean())
        report = us.replay(workload, workers=2)
    """
    if not isinstance(path, str | PathLike):
        raise ConfigError(f"path must be the path of a trace, got {path!r}")
    if format is None:
        format = guess_format(Path(path)) or "mooncake"  # noqa: A001
    if format not in _readers:
        raise ConfigError(f"format {format!r} is unknown; known are {', '.join(trace_formats())}")
    reader = _readers[format]
    parameters = inspect.signature(reader).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        for option in options:
            if option not in known:
                choices = ", ".join(known) or "none"
                raise ConfigError(f"{option} is not an option of format {format}; known are {choices}")
    try:
        workload = reader(Path(path), **options)
    except InvalidArgument as error:
        likely = guess_format(Path(path))
        if likely is None or likely in (format, _LOOKS_LIKE.get(format)):
            raise
        raise InvalidArgument(f"{error}; the file looks like format {likely} (--format {likely})") from error
    if not isinstance(workload, Workload):
        raise ConfigError(
            f"format {format!r}: the reader must return a Workload, got {type(workload).__name__}"
        )
    return workload


register_format("mooncake", read_mooncake)
register_format("mooncake-delta", read_mooncake_delta)
register_format("applied-compute", read_applied_compute)
register_format("weka", read_weka)
register_format("agentic-mooncake", read_agentic_mooncake)
register_format("dynamo", read_dynamo)
register_format("dag-jsonl", read_dag)
register_format("openai", read_openai)
register_format("sharegpt", read_sharegpt)
register_format("vllm-bench", read_vllm_bench)
register_format("aiperf", read_aiperf)
register_format("azure", read_azure)
register_format("burstgpt", read_burstgpt)
register_format("vllm-scenario", read_vllm_scenario)
register_format("table", read_table)
register_format("lengths", read_lengths)
register_format("server-log", read_server_log)
