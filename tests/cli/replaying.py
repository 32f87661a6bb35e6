"""Command lines of `understudy replay`, and what they print."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from understudy.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def arguments(trace: Path, *more: str) -> list[str]:
    return ["replay", str(trace), "--trace-block-size", "64", *more]


def report_of(tmp_path: Path, trace: Path, *more: str) -> dict[str, Any]:
    """The JSON report of a run."""
    path = tmp_path / "report.json"
    assert main(arguments(trace, "--quiet", "--json", str(path), *more)) == 0
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def refused(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """The message of a command line that ends with exit code 2, in one line and without a traceback."""
    capsys.readouterr()
    assert main(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("understudy replay: ")
    assert "Traceback" not in said.err
    return said.err
