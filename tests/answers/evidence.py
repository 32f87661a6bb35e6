"""Run a command on a case, and read what it printed and wrote."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    from answers.random_cases import Case
    from answers.random_traces import Row

NS = 1_000_000


class CommandFailed(Exception):
    """A command did not end with exit code 0."""


def run(*arguments: str) -> str:
    """Run a command in this process and return its standard output."""
    written, err = io.BytesIO(), io.StringIO()
    out = io.TextIOWrapper(written, encoding="utf-8")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: object = main(list(arguments))
        except SystemExit as exit_:
            code = exit_.code
        except Exception as error:  # a defect: every error of the command has a message of its own
            raise CommandFailed(f"{type(error).__name__} in understudy {arguments[0]}: {error}") from error
    if code != 0:
        raise CommandFailed(f"exit code {code}: {err.getvalue().strip()}")
    out.flush()
    return written.getvalue().decode()


def write_trace(rows: list[Row], path: Path) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@dataclass
class Evidence:
    """What `understudy replay` said about a case, in all of its outputs."""

    case: Case
    folder: Path
    printed: str

    @cached_property
    def report(self) -> dict[str, Any]:
        """The JSON report."""
        report: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        return report

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """One object per request, in the order of the trace."""
        return [json.loads(line) for line in (self.folder / "requests.jsonl").read_text().splitlines()]

    @cached_property
    def saved(self) -> dict[str, Any]:
        """The columns of the saved run: its steps, and the tokens of each request in each batch."""
        with np.load(self.folder / "run.npz") as columns:
            return {name: columns[name].tolist() for name in columns.files if name != "header"}

    @cached_property
    def page(self) -> str:
        """The HTML page."""
        return (self.folder / "report.html").read_text()


_FILES = {
    "json": "report.json",
    "requests-jsonl": "requests.jsonl",
    "html": "report.html",
    "save-run": "run.npz",
}


def replay(case: Case, folder: Path, *, every_output: bool = False) -> Evidence:
    """Replay a case and write the report and the requests; on request the page and the saved run, too."""
    folder.mkdir(parents=True, exist_ok=True)
    trace = write_trace(list(case.rows), folder / "trace.jsonl")
    names = list(_FILES) if every_output else ["json", "requests-jsonl"]
    outputs = [part for name in names for part in (f"--{name}", str(folder / _FILES[name]))]
    how = ["--no-advice", "--allow-empty", *([] if every_output else ["--quiet"])]
    printed = run("replay", str(trace), *case.arguments(), *outputs, *how)
    return Evidence(case, folder, printed)


def ns(time_ms: float | None) -> int | None:
    """Convert milliseconds of a line to whole nanoseconds."""
    return None if time_ms is None else round(time_ms * NS)
