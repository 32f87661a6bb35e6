"""Every figure of docs/sizing.md is printed by a command of the page: quoted lines, and bold figures in its text.

`answers.page_claims` has the rules. The text of a section that quotes outputs has no other figures: a digit stands in
bold, in code, or in a name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from answers.page_claims import (
    Claim,
    Part,
    describe_differences,
    find_difference,
    find_unchecked,
    split_sections,
)
from test_snippets import ROOT, commands, run_command
from understudy.report.advise import advise

if TYPE_CHECKING:
    from pathlib import Path

PAGE = ROOT / "docs" / "sizing.md"


def test_every_figure_of_the_page_is_printed_by_its_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "trace.jsonl").write_bytes((ROOT / "examples" / "logs" / "mooncake.jsonl").read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    assert advise.__kwdefaults__ is not None
    monkeypatch.setitem(
        advise.__kwdefaults__, "limit_s", 600.0
    )  # remedies are replayed on a slow machine too
    problems = []
    for heading, parts in split_sections(PAGE.read_text(encoding="utf-8")):
        printed = ""
        for part in parts:
            if part.language == "sh":
                for program, *words in commands("sh", part.text, tmp_path):
                    run_command(program, words, monkeypatch)
                said = capsys.readouterr()
                printed += f"{said.out}\n{said.err}\n"
        if printed.strip():
            problems += describe_differences(heading, parts, printed)
        if any(part.language == "text" for part in parts):
            problems += [f"{heading}: no command is asked for {word}" for word in find_unchecked(parts)]
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize(
    ("claim", "printed", "found"),
    [
        ("$4,380 per month", "  $4,380 per\n month (730 h)", None),
        ("$4,380 per month", "  $4,390 per month (730 h)\nmargin: 3 points", "$4,390 per month (730 h)"),
        ("97 %", "197 % of 97 GPUs", "197 % of 97 GPUs"),
    ],
)
def test_a_changed_figure_is_reported_with_the_new_one(claim: str, printed: str, found: str | None) -> None:
    assert find_difference(Claim(claim, claim), printed) == found


def test_figures_that_nothing_checks_are_found() -> None:
    text = "Two H200 meet it in **97.9 %** of `--users 2`, and 3 at [page 4](four.md).\n"
    assert find_unchecked([Part("", text), Part("text", "17 GPUs\n")]) == ["3"]


def test_the_parts_of_a_page_are_told_apart() -> None:
    page = "# One\n\n```sh\n# a comment\nls\n```\nText.\n\n## Two\n```text\n1 … 2\n```\n"
    assert list(split_sections(page)) == [
        ("", [Part("", "")]),
        ("# One", [Part("", "\n"), Part("sh", "# a comment\nls\n"), Part("", "Text.\n\n")]),
        ("## Two", [Part("", ""), Part("text", "1 … 2\n"), Part("", "")]),
    ]
