"""Fast ways to read plain rows of a trace: they read as the general decoder does, or leave a row to it."""

from __future__ import annotations

import io

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from understudy._core import read_plain_rows
from understudy.workload import mooncake_rows


@given(
    st.lists(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4), min_size=1, max_size=6),
    st.booleans(),
)
def test_bulk_conversion_of_ids_agrees_with_the_plain_one(lists: list[list[int]], spaced: bool) -> None:
    text = [str(ids) if spaced else str(ids).replace(" ", "") for ids in lists]
    fast = mooncake_rows._read_plain_id_lists([Raw(ids) for ids in text])
    if any(value == 2**64 - 1 for ids in lists for value in ids):
        assert fast is None
    else:
        assert fast is not None
        assert fast[0].tolist() == [len(ids) for ids in lists]
        assert fast[1].tolist() == [value for ids in lists for value in ids]


@pytest.mark.parametrize(
    "texts",
    [
        ["[]"],
        ["[1]", "[]"],
        ["[ ]"],
        ["[1,[2]]"],
        ["[[1],[2]]"],
        ["", "[1,[2]]"],
        ["[1,[2]]", ""],
        ["[-1]"],
        ["null"],
    ],
)
def test_bulk_conversion_declines_what_is_not_a_plain_list(texts: list[str]) -> None:
    assert mooncake_rows._read_plain_id_lists([Raw(text) for text in texts]) is None


_PLAIN = {"timestamp": "0", "input_length": "600", "output_length": "3", "hash_ids": "[7, 8]"}


def line_of(**values: str) -> str:
    return "{" + ", ".join(f'"{key}": {value}' for key, value in {**_PLAIN, **values}.items()) + "}\n"


@pytest.mark.parametrize(
    "lines",
    [
        line_of(),
        line_of(timestamp="999999999999", output_length="0", hash_ids="[0]"),
        '{ "hash_ids" :[ 1,2 ] , "output_length":1,"timestamp" : 5,"input_length":999999999999999999 }  \n',
        line_of() + line_of(hash_ids="[18]", input_length="1"),
        line_of().rstrip(),
    ],
)
def test_plain_rows_read_like_any_others(lines: str) -> None:
    plain = read_plain_rows(lines.encode())
    assert plain is not None
    (expected,) = mooncake_rows.read_chunks(io.BytesIO((lines.rstrip() + "\r\n").encode()), "t")
    columns = ("timestamp_ms", "input_length", "output_length", "hash_counts", "hash_ids")
    for values, name in zip(plain, columns, strict=True):
        assert values.dtype == getattr(expected, name).dtype
        assert values.tolist() == getattr(expected, name).tolist()


@pytest.mark.parametrize(
    "lines",
    [
        "\n",
        line_of() + "\n",
        line_of() + "x",
        line_of().rstrip() + line_of(),
        line_of(timestamp="1.0"),
        line_of(timestamp="null"),
        line_of(timestamp="-1"),
        line_of(timestamp="01"),
        line_of(timestamp=""),
        line_of(timestamp="1000000000000"),
        line_of(input_length="0"),
        line_of(output_length="1234567890123456789"),
        line_of(hash_ids="[]"),
        line_of(hash_ids="[1,]"),
        line_of(hash_ids="[1 2]"),
        line_of(hash_ids="[1"),
        line_of(session_id='"s"'),
        line_of().replace('"timestamp": 0, ', ""),
        line_of().replace("}", ', "timestamp": 1}'),
        line_of().replace("timestamp", "timestamps"),
        line_of().replace(":", ""),
        line_of().replace("}", ",}"),
        line_of()[:-2],
    ],
)
def test_whatever_is_not_plain_is_left_to_the_decoder(lines: str) -> None:
    assert read_plain_rows(lines.encode()) is None


@given(st.text('{}[]:,"0123456789 \n', max_size=60), st.integers(0, 80), st.integers(0, 80))
def test_a_line_torn_anywhere_is_read_right_or_not_at_all(noise: str, start: int, stop: int) -> None:
    torn = (line_of()[:start] + noise + line_of()[stop:]).encode()
    plain = read_plain_rows(torn)
    if plain is not None:
        rows = [msgspec.json.decode(line) for line in torn.splitlines()]
        assert plain[0].tolist() == [row["timestamp"] for row in rows]
        assert plain[1].tolist() == [row["input_length"] for row in rows]
        assert plain[2].tolist() == [row["output_length"] for row in rows]
        assert plain[4].tolist() == [value for row in rows for value in row["hash_ids"]]
