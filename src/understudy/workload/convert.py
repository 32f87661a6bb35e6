"""`understudy.convert`: turn a log of any format into a trace without its text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from understudy.errors import ConfigError, InvalidArgument
from understudy.workload.agents.mooncake import write_agentic_mooncake
from understudy.workload.formats import read_trace
from understudy.workload.guess import guess_format
from understudy.workload.length_rows import is_lengths_only, write_lengths
from understudy.workload.window import cut_busiest, cut_window
from understudy.workload.write import write_mooncake

if TYPE_CHECKING:
    import os

    from understudy.workload.formats import ReaderOptions
    from understudy.workload.workload import Workload


def convert(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    format: str | None = None,  # noqa: A002
    start_s: float | None = None,
    end_s: float | None = None,
    busiest_s: float | None = None,
    **options: Unpack[ReaderOptions],
) -> Workload:
    """Read a log of any known format, cut a window out of it, write it without its text, and return it.

    Parameters:
        path: the log, plain or gzipped.
        out: file to write: rows of lengths for a log without content, else a Mooncake trace; None: none.
        format: name of the format (default: guessed from the file).
        start_s: sessions that begin earlier after the first request are left out, s.
        end_s: sessions that begin this long after the first request, or later, are left out, s.
        busiest_s: keep the window of this length with the most tokens, s.
        options: those of the format's reader, such as `columns`, `time`, `where` and `tokenizer`.

    Errors: ConfigError for an unknown format or option, or two windows; InvalidArgument for a bad row, or an empty log.

    Example:
        workload = us.convert("trace.jsonl", "busy.jsonl", busiest_s=60)
        print(len(workload), workload.notes)
    """
    if busiest_s is not None and (start_s is not None or end_s is not None):
        raise ConfigError("busiest_s: contradicts start_s and end_s, which name the window; give one")
    workload = read_trace(path, format, **options)
    if not len(workload):
        raise InvalidArgument(f"{path} contains no requests; give a log with at least one")
    if busiest_s is not None:
        workload = cut_busiest(workload, busiest_s)
    elif start_s is not None or end_s is not None:
        workload = cut_window(workload, start_s or 0.0, end_s)
    if out is None:
        return workload
    if workload.graph is not None:
        write_agentic_mooncake(workload, out, format or guess_format(Path(path)) or "mooncake")
    elif is_lengths_only(workload):
        write_lengths(workload, out)
    else:
        write_mooncake(workload, out)
    return workload
