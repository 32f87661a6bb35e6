"""Traces are known by their bytes, whatever their name says."""

from __future__ import annotations

import codecs
import cProfile
import gzip
from typing import TYPE_CHECKING

import pytest

from understudy.errors import InvalidArgument
from understudy.workload import read_mooncake
from understudy.workload.files import open_trace
from workload.building import assert_same, row, trace_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXTS: dict[str, Callable[[str], bytes]] = {
    "gzip without .gz": lambda text: gzip.compress(text.encode()),
    "with a mark": lambda text: codecs.BOM_UTF8 + text.encode(),
    "UTF-16 with a mark": lambda text: text.encode("utf-16"),
    "UTF-16, low byte first": lambda text: text.encode("utf-16-le"),
    "UTF-16, high byte first": lambda text: text.encode("utf-16-be"),
    "gzipped UTF-16": lambda text: gzip.compress(text.encode("utf-16")),
}


@pytest.mark.parametrize("name", TEXTS)
def test_every_encoding_of_a_trace_gives_the_same_workload(tmp_path: Path, name: str) -> None:
    rows = [row(timestamp=i, request_id=f"räuber {i}") for i in range(3000)]
    plain = trace_file(tmp_path, *rows)
    other = tmp_path / "other"
    other.write_bytes(TEXTS[name](plain.read_text(encoding="utf-8")))
    assert_same(read_mooncake(other), read_mooncake(plain))


def test_half_a_character_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(codecs.BOM_UTF16_LE + '{"a'.encode("utf-16-le") + b"x")
    with pytest.raises(InvalidArgument, match=r"trace\.jsonl"):
        read_mooncake(path)


def test_the_cost_of_a_long_line_in_utf_16_is_linear(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_bytes(("x" * 3_000_000 + "\nend\n").encode("utf-16"))
    with open_trace(path) as file:
        profile = cProfile.Profile()
        lines = profile.runcall(list, file)
    assert [len(line) for line in lines] == [3_000_001, 4]
    calls = sum(entry.callcount for entry in profile.getstats())
    assert calls < 100
