"""Ids and names of files reach a terminal as text: they cannot move its cursor or change its title."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from understudy.cli import main
from understudy.text import visible

if TYPE_CHECKING:
    from pathlib import Path

NAME = "[bold]\x1b[2J\x07\u202e"
HOSTILE = "[/bold]\x1b[2J\x1b]0;title\x07\u202e\x9b31m"


def test_visible_text_keeps_letters_and_shows_controls() -> None:
    assert visible("größe 日本 [/bold]") == "größe 日本 [/bold]"
    assert visible("a\tb\n") == "a\tb\n"
    assert visible(HOSTILE) == "[/bold]\\x1b[2J\\x1b]0;title\\x07\\u202e\\x9b31m"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / f"{NAME}.jsonl"
    rows = [
        {
            "timestamp": number * 20,
            "input_length": 192,
            "output_length": 20,
            "hash_ids": [number % 5, 100 + number, 200 + number],
            "request_id": f"{HOSTILE}{number}",
            "session_id": f"{HOSTILE}s{number}",
        }
        for number in range(30)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["replay", "TRACE", "--save-run", "RUN"],
        ["replay", "TRACE.missing"],
        ["cache", "TRACE", "--policies", "lru"],
        ["sweep", "TRACE", "--vary", "workers=1..2", "--slo-ttft-ms", "5000", "--jobs", "1"],
        ["explain", "RUN", "--slowest", "3"],
        ["explain", "RUN", "--request", "0"],
        ["explain", "RUN", "--request", f"{HOSTILE}3"],
        ["explain", "RUN", "--request", f"{HOSTILE}none"],
        ["diff", "RUN", "RUN"],
        ["convert", "TRACE", "OUT", "--format", "openai"],
    ],
    ids=" ".join,
)
def test_no_command_prints_control_characters_of_a_trace(
    words: list[str], trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / f"{NAME}.npz", tmp_path / f"{NAME}.out"
    size = ["--trace-block-size", "64"]
    if "RUN" in words and words[0] != "replay":
        assert main(["replay", str(trace), *size, "--save-run", str(run), "--quiet"]) == 0
    named = {"TRACE": str(trace), "RUN": str(run), "OUT": str(out), "TRACE.missing": f"{trace}.missing"}
    capsys.readouterr()
    main(
        [
            *(named.get(word, word) for word in words),
            *(size if words[0] in ("replay", "cache", "sweep") else []),
        ]
    )
    said = capsys.readouterr()
    for text in (said.out, said.err):
        assert not [one for one in "\x1b\x07\x9b\u202e" if one in text], ascii(text)
