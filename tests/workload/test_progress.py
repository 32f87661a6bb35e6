"""Whoever waits for a large trace is told how far it is; what is read and written stays the same."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from understudy.cli import main
from understudy.cli.progress import counter
from understudy.workload import read_trace, write_mooncake
from understudy.workload.progress import reporting_progress

LOGS = Path(__file__).parents[2] / "examples" / "logs"
FORMATS = {
    "requests.jsonl": "openai",
    "sharegpt.json": "sharegpt",
    "azure.csv": "azure",
    "mooncake.jsonl": "mooncake",
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_reading_hashing_and_writing_are_told_to_their_ends(name: str, zipped: bool, tmp_path: Path) -> None:
    source = tmp_path / (f"{name}.gz" if zipped else name)
    content = (LOGS / name).read_bytes()
    source.write_bytes(gzip.compress(content) if zipped else content)
    plain = read_trace(source, FORMATS[name])
    write_mooncake(plain, tmp_path / "plain.jsonl")

    heard: dict[str, list[tuple[int, int]]] = {}
    with reporting_progress(lambda what, done, of: heard.setdefault(what, []).append((done, of))):
        workload = read_trace(source, FORMATS[name])
        write_mooncake(workload, tmp_path / "told.jsonl")

    assert (tmp_path / "told.jsonl").read_bytes() == (tmp_path / "plain.jsonl").read_bytes()
    parts = (
        ["reading", "hashing", "writing"]
        if FORMATS[name] in ("openai", "sharegpt")
        else ["reading", "writing"]
    )
    assert list(heard) == parts
    assert heard["reading"][-1] == (source.stat().st_size,) * 2
    assert heard["writing"][-1] == (len(workload),) * 2
    for told in heard.values():
        assert told == sorted(told)
        assert told[-1][0] == told[-1][1] > 0


def test_a_large_log_is_told_piece_by_piece(tmp_path: Path) -> None:
    log = tmp_path / "large.jsonl"
    log.write_bytes((LOGS / "requests.jsonl").read_bytes() * 60)
    size = log.stat().st_size
    assert size > 3 << 20
    heard: dict[str, list[int]] = {}
    with reporting_progress(lambda what, done, _: heard.setdefault(what, []).append(done)):
        read_trace(log, "openai")
    assert len([done for done in heard["reading"] if 0 < done < size]) >= 3
    assert len(heard["hashing"]) > 3600 // 256


def test_nothing_is_told_afterwards(tmp_path: Path) -> None:
    heard: list[str] = []
    with reporting_progress(lambda what, *_: heard.append(what)):
        pass
    read_trace(LOGS / "requests.jsonl", "openai")
    assert heard == []


def test_a_file_that_is_not_there_is_named_as_ever(tmp_path: Path) -> None:
    said = []
    for told in (None, lambda *_: None):
        with reporting_progress(told), pytest.raises(Exception, match="No such file") as raised:
            read_trace(tmp_path / "nothing.jsonl", "openai")
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_convert_shows_bars_on_a_terminal_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["convert", str(LOGS / "requests.jsonl"), str(tmp_path / "out.jsonl"), "--format", "openai"]
    assert main(command) == 0
    plain, without = (tmp_path / "out.jsonl").read_bytes(), capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert main(command) == 0
    seen = capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == plain
    for part in ("reading", "hashing", "writing"):
        assert part in seen
        assert part not in without


def test_a_counter_writes_a_line_a_percent_and_clears_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with counter("measuring", 1000, "rows") as told:
        assert told is None
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with counter("measuring", 1000, "rows") as told:
        assert told is not None
        for done in range(1001):
            told(done)
    lines = capsys.readouterr().err.split("\r")[1:]
    assert lines[0] == "measuring 0 of 1,000 rows\x1b[K"
    assert lines[-2:] == ["measuring 1,000 of 1,000 rows\x1b[K", "\x1b[K"]
    assert len(lines) == 102
