"""Every figure of docs/sizing.md is printed by a command of the page: quoted lines, and bold figures in its text.

- A ```text block quotes commands that stand before it in the same section. `…` stands for what was left out.
- A bold phrase in the text of a section occurs in the output of the section's commands.
- The text of a section that quotes outputs has no other figures: a digit stands in bold, in code, or in a name.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, NamedTuple

import pytest

from test_snippets import ROOT, commands, run_command
from understudy.report.advice import advise

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = ROOT / "docs" / "sizing.md"
FENCED = re.compile(r"^```(\w*)\n(.*?)^```\n?", re.MULTILINE | re.DOTALL)
BOLD = re.compile(r"\*\*(.+?)\*\*", re.DOTALL)
FREE = re.compile(r"`[^`]*`|!?\[[^]]*\]\([^)]*\)|\*\*.+?\*\*|\b[A-Z]+[a-z]*\d+[-\w.]*", re.DOTALL)
"""Parts of a text whose digits are no figures to check: code, links, checked figures, and names such as H200."""


class Part(NamedTuple):
    """A fenced block of a section (`sh`, `text`, …), or text between two of them (no language)."""

    language: str
    text: str


def split_sections(page: str) -> Iterator[tuple[str, list[Part]]]:
    """Yield each heading with the parts below it."""
    hidden = FENCED.sub(lambda match: re.sub(r"(?m)^#", "\0", match[0]), page)
    for section in re.split(r"(?m)^(?=#+ )", hidden):
        heading, _, body = section.replace("\0", "#").partition("\n")
        pieces = FENCED.split(body)
        parts = [Part("", pieces[0])]
        for language, block, text in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
            parts += [Part(language, block), Part("", text)]
        yield heading, parts


def quoted(parts: list[Part]) -> Iterator[str]:
    """Yield what the parts claim to be printed: pieces of quoted lines, and bold figures."""
    for part in parts:
        if part.language == "text":
            yield from (piece for line in part.text.splitlines() for piece in line.split("…"))
        elif not part.language:
            yield from BOLD.findall(part.text)


def find_difference(claim: str, printed: str) -> str | None:
    """Return what is printed in place of a claim, None if the claim is printed. Line ends and spaces do not count."""
    words = re.escape(" ".join(claim.split()))
    if re.search(rf"(?<![\d.,]){words}(?!\d|[.,]\d)", " ".join(printed.split())):
        return None
    lines = [" ".join(line.split()) for line in printed.splitlines() if line.strip()]
    return max(lines, key=lambda line: difflib.SequenceMatcher(None, claim, line).ratio(), default="nothing")


def find_unchecked(parts: list[Part]) -> list[str]:
    """Return the words of a text whose figures no command is asked for."""
    text = "\n".join(part.text for part in parts if not part.language)
    return re.findall(r"\S*\d\S*", FREE.sub("", text))


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
        problems += [
            f"{heading}: the page says\n    {claim.strip()}\n  printed is\n    {found}"
            for claim in filter(str.strip, quoted(parts) if printed.strip() else ())
            if (found := find_difference(claim, printed)) is not None
        ]
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
    assert find_difference(claim, printed) == found


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
