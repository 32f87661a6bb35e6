"""The tutorial's commands run as they stand, and no page links into nothing."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from answers.page_claims import describe_differences, split_sections
from understudy.cli import main

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_every_command_of_the_tutorial_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    text = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    commands = [
        line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()
    ]
    assert len(commands) == 6
    for command in commands:
        program, *argv = shlex.split(command)
        assert program == "understudy"
        assert main(argv) == 0, command
    out = capsys.readouterr().out
    problems = [
        problem
        for heading, parts in split_sections(text)
        for problem in describe_differences(heading, parts, out)
    ]
    assert not problems, "\n" + "\n".join(problems)
    attained = next(line for line in out.splitlines() if line.strip().startswith("SLO attainment"))
    assert attained.count("%") == 3  # of every run that is compared
    assert "–" not in attained
    assert {path.name for path in tmp_path.iterdir()} == {
        "examples",
        "one.json",
        "two.json",
        "four.json",
        "compare.html",
        "report.html",
    }


def test_no_page_links_to_one_that_is_not_there() -> None:
    for page in DOCS.rglob("*.md"):
        for link in re.findall(
            r"\]\(([a-z0-9_/.-]+\.(?:md|svg|py|yaml))(?:#[a-z-]+)?\)", page.read_text(encoding="utf-8")
        ):
            assert (page.parent / link).is_file(), f"{page.name} links to {link}"
