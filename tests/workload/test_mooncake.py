from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any

import pytest

from understudy.errors import ConfigError, InvalidArgument
from understudy.workload import mooncake_rows, read_mooncake
from workload.building import read, row, trace_file

if TYPE_CHECKING:
    from pathlib import Path


def test_a_row_becomes_a_request(tmp_path: Path) -> None:
    w = read(tmp_path, row(timestamp=7, input_length=600, output_length=3, hash_ids=[40, 41]))
    assert (w.arrival_ns.tolist(), w.prompt_tokens.tolist(), w.output_tokens.tolist()) == (
        [7_000_000],
        [600],
        [3],
    )
    assert (w.hash_ids.tolist(), w.hash_offsets.tolist()) == ([0, 1], [0, 2])
    assert w.trace_block_size == 512
    assert w.has_arrivals
    assert w.request_ids is w.session_ids is w.output_token_ids is w.strict_priority is w.policy_class is None


def test_aliases_mean_the_same(tmp_path: Path) -> None:
    w = read(
        tmp_path,
        row(session_id="s"),
        {
            "created_time": 9, "input_tokens": 600, "output_tokens": 3, "hash_ids": [0, 1], "delay_ms": 2,
            "session_id": "s",
        },
        row(timestamp=..., created_time=5),
    )  # fmt: skip
    assert w.prompt_tokens.tolist() == [600, 600, 600]
    assert w.output_tokens.tolist() == [3, 3, 3]
    assert w.delay_ns.tolist() == [0, 2_000_000, 0]
    assert w.arrival_ns.tolist() == [0, 0, 5_000_000]


@pytest.mark.parametrize(
    ("key", "alias", "value"),
    [
        ("input_length", "input_tokens", 600),
        ("output_length", "output_tokens", 3),
        ("timestamp", "created_time", 0),
        ("delay", "delay_ms", 0),
    ],
)
def test_a_key_and_its_alias_together_are_refused(tmp_path: Path, key: str, alias: str, value: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"trace\.jsonl:2: has both {key} and {alias}"):
        read(tmp_path, row(), row(**{key: value, alias: value}))


def test_blank_lines_are_skipped_and_still_counted(tmp_path: Path) -> None:
    w = read(tmp_path, "", row(), "  ", "\t", row(), "")
    assert len(w) == 2
    with pytest.raises(InvalidArgument, match=r"trace\.jsonl:4: output_length must be at least 0, got -3"):
        read(tmp_path, "", row(), "  ", row(output_length=-3))


def test_windows_line_ends_and_a_missing_last_newline_are_fine(tmp_path: Path) -> None:
    path = trace_file(tmp_path, row(), row())
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n").rstrip())
    assert len(read_mooncake(path)) == 2


def test_an_empty_trace_is_an_empty_workload(tmp_path: Path) -> None:
    assert len(read(tmp_path)) == 0
    assert len(read(tmp_path, "", "   ")) == 0


def test_a_gzipped_trace_reads_like_the_plain_one(tmp_path: Path) -> None:
    plain = trace_file(tmp_path, row(), row(timestamp=4))
    zipped = tmp_path / "trace.jsonl.gz"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert (
        read_mooncake(zipped).arrival_ns.tolist()
        == read_mooncake(plain).arrival_ns.tolist()
        == [0, 4_000_000]
    )


def test_a_broken_gzip_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    whole = gzip.compress(b'{"output_length": 1, "hash_ids": [1]}\n' * 100)
    for content in (b"plain text", whole[:-12], whole[:20] + b"\xff" * 9 + whole[29:]):
        path.write_bytes(content)
        with pytest.raises(InvalidArgument, match=r"cannot read trace .*trace\.jsonl\.gz"):
            read_mooncake(path)


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"cannot read trace .*nowhere\.jsonl"):
        read_mooncake(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(output_length=-3), "output_length must be at least 0, got -3"),
        (row(output_length=...), "output_length is required"),
        (row(output_length=2**31), "output_length must fit int32, got 2147483648"),
        (row(output_length=2**70), "output_length must fit 64 bits, got 1180591620717411303424"),
        (row(output_length="3"), r"output_length: Expected `int \| null`, got `str`"),
        (row(output_length=2.5), r"output_length: Expected `int \| null`, got `float`"),
        (row(output_length=True), r"output_length: Expected `int \| null`, got `bool`"),
        (row(input_length=0), "input_length must be at least 1, got 0"),
        (row(input_length=-1), "input_length must be at least 1, got -1"),
        (row(input_length=1025), "input_length 1025 exceeds 2 hash_ids of 512 tokens.*clamp_input_length"),
        (row(input_length=512), "input_length 512 needs 1 hash_ids of 512 tokens, got 2.*drop_surplus"),
        (row(hash_ids=...), "hash_ids is required"),
        (row(hash_ids=None), "hash_ids is required"),
        (row(hash_ids=[]), "hash_ids must not be empty"),
        (row(hash_ids=[1, -2]), "hash_ids must lie in 0 … 2^64−1, got -2"),
        (row(hash_ids=[1, 2**64]), "hash_ids must lie in 0 … 2^64−1, got 18446744073709551616"),
        (row(hash_ids=[1, 2.5]), r"hash_ids\[1\]: Expected `int`, got `float`"),
        (row(hash_ids=[1, [2]]), r"hash_ids\[1\]: Expected `int`, got `array`"),
        (row(hash_ids=7), "hash_ids: Expected `array`, got `int`"),
        (row(timestamp=-1), "timestamp must be at least 0 ms"),
        (row(timestamp=1e13), "timestamp must be at least 0 ms and below 2^63 ns"),
        (row(timestamp=10**400), "timestamp"),
        (row(timestamp=...), "timestamp is missing, but other first turns have one"),
        (row(delay=5), "delay must be absent or 0 on a session's first turn, got 5"),
        (row(delay=-5), "delay must be at least 0 ms"),
        (row(abort_after_ms=-1), "abort_after_ms must be at least 0 ms"),
        (row(priority=2**31), "priority must fit int32"),
        (row(strict_priority=-1), "strict_priority must lie in"),
        (row(output_token_ids=[1, 2]), "output_token_ids must have one entry per output token, 3, got 2"),
        (row(output_token_ids=[1, 2, 2**32]), "output_token_ids must lie in 0 … 2^32−1, got 4294967296"),
        (row(output_token_ids=[1, 2, "a"]), r"output_token_ids\[2\]: Expected `int`, got `str`"),
        (row(output_in_next_turn=True), "output_in_next_turn needs a following turn"),
        (row(session_id=5), r"session_id: Expected `str \| null`, got `int`"),
        (row(wait_for=[]), "unknown key 'wait_for'; it may change arrivals or prompts; known are timestamp"),
        (row(timestamp_ms=5), "unknown key 'timestamp_ms'; timestamp may be meant; known are timestamp, created_time"),
        (row(model="m", output_length="3"), r"output_length: Expected `int \| null`, got `str`"),
        ("[]", "Expected `object`, got `array`"),
        ("{", "Input data was truncated"),
        ('{"timestamp": NaN}', "JSON is malformed"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, bad: dict[str, Any] | str, message: str) -> None:
    message = message.replace("2^", r"2\^")
    with pytest.raises(InvalidArgument, match=rf"trace\.jsonl:3: .*({message})"):
        read(tmp_path, row(), row(), bad, row())


def test_keys_that_mean_nothing_here_are_counted_and_named_once(tmp_path: Path) -> None:
    known = [row(), row(), row()]
    more = [row(model="m", tags={"timestamp": 1}), row(model="n"), row()]
    plain, found = read(tmp_path, *known), read(tmp_path, *more)
    assert found.digest == plain.digest
    assert found.notes == ("unknown keys were not read: model (in 2 rows), tags (in 1 row)",)
    assert plain.notes == ()


def test_text_that_is_not_utf8_is_named_by_its_line(tmp_path: Path) -> None:
    path = trace_file(tmp_path, row(), row(session_id="x"))
    path.write_bytes(path.read_bytes().replace(b'"x"', b'"\xff"'))
    with pytest.raises(InvalidArgument, match=r"trace\.jsonl:2: "):
        read_mooncake(path)


def test_an_object_over_two_lines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"trace\.jsonl:2: "):
        read(tmp_path, row(), '{"timestamp": 0, "output_length": 1,', '"hash_ids": [1]}')


def test_two_objects_on_one_line_are_refused(tmp_path: Path) -> None:
    good = '{"timestamp": 0, "output_length": 1, "hash_ids": [1]}'
    with pytest.raises(InvalidArgument, match=r"trace\.jsonl:2: "):
        read(tmp_path, good, good + good)


def test_one_bad_line_in_a_million_is_found(tmp_path: Path) -> None:
    good = '{"timestamp": 12, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}'
    lines = [good] * 1_000_000
    path = trace_file(tmp_path, *lines)
    assert len(read_mooncake(path)) == 1_000_000
    for line, bad, message in (
        (999_990, good.replace("3,", "-3,"), "output_length must be at least 0, got -3"),
        (876_543, good.replace("12,", "12;"), "malformed"),
        (700_001, good.replace("timestamp", "time"), "unknown key 'time'"),
    ):
        lines[line - 1] = bad
        with pytest.raises(InvalidArgument, match=rf"trace\.jsonl:{line}: .*{message}"):
            read_mooncake(trace_file(tmp_path, *lines))


def test_a_line_longer_than_a_chunk_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_rows, "_CHUNK_BYTES", 16)
    w = read(tmp_path, row(timestamp=1), "", row(timestamp=2, priority=3), row(timestamp=3, session_id="s"))
    assert w.arrival_ns.tolist() == [1_000_000, 2_000_000, 3_000_000]
    assert w.priority.tolist() == [0, 3, 0]
    assert w.session_ids == ["request_1", "request_3", "s"]


def test_input_length_above_the_blocks_is_clamped_only_when_asked_and_counted(tmp_path: Path) -> None:
    w = read(tmp_path, row(input_length=2000), row(), clamp_input_length=True)
    assert w.prompt_tokens.tolist() == [1024, 600]
    assert (w.clamped_prompts, w.dropped_hash_ids) == (1, 0)


def test_surplus_hash_ids_are_dropped_only_when_asked_and_counted(tmp_path: Path) -> None:
    w = read(
        tmp_path, row(input_length=100, hash_ids=[5, 6, 7]), row(hash_ids=[7, 8]), drop_surplus_hash_ids=True
    )
    assert w.hash_offsets.tolist() == [0, 1, 3]
    assert w.hash_ids.tolist() == [0, 1, 2]
    assert (w.clamped_prompts, w.dropped_hash_ids) == (0, 2)


def test_surplus_and_too_few_hash_ids_do_not_cancel_out(tmp_path: Path) -> None:
    rows = row(input_length=100, hash_ids=[5, 6]), row(input_length=600, hash_ids=[7])
    with pytest.raises(InvalidArgument, match=r"trace\.jsonl:1: input_length 100 needs 1 hash_ids"):
        read(tmp_path, *rows, clamp_input_length=True)
    with pytest.raises(InvalidArgument, match=r"trace\.jsonl:2: input_length 600 exceeds"):
        read(tmp_path, *rows, drop_surplus_hash_ids=True)


def test_a_missing_input_length_fills_the_blocks(tmp_path: Path) -> None:
    w = read(
        tmp_path, row(input_length=...), row(input_length=None, hash_ids=[1]), row(), trace_block_size=512
    )
    assert w.prompt_tokens.tolist() == [1024, 512, 600]


def test_zero_output_is_legal(tmp_path: Path) -> None:
    assert read(tmp_path, row(output_length=0, output_token_ids=[])).output_tokens.tolist() == [0]


def test_the_trace_block_size_is_an_option(tmp_path: Path) -> None:
    assert read(tmp_path, row(input_length=5, hash_ids=[1, 2]), trace_block_size=4).trace_block_size == 4
    for wrong in (0, -1, 2.0, True, "4"):
        with pytest.raises(ConfigError, match=r"trace_block_size must be (at least 1|a whole number)"):
            read(tmp_path, trace_block_size=wrong)


def test_hash_ids_are_numbered_by_first_appearance(tmp_path: Path) -> None:
    w = read(tmp_path, row(hash_ids=[9, 3]), row(hash_ids=[9, 2**40]), row(hash_ids=[3, 0]))
    assert w.hash_ids.tolist() == [0, 1, 0, 2, 1, 3]


def test_ids_above_32_and_63_bits_stay_distinct(tmp_path: Path) -> None:
    big = [2**32, 2**33, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]
    w = read(tmp_path, *(row(input_length=512, hash_ids=[value]) for value in [*big, *big]))
    assert w.hash_ids.tolist() == [0, 1, 2, 3, 4, 5] * 2


def test_milliseconds_may_be_fractions_and_are_rounded_once(tmp_path: Path) -> None:
    w = read(tmp_path, row(timestamp=0.1), row(timestamp=1234.5678901), row(timestamp=1_700_000_000_000.25))
    assert w.arrival_ns.tolist() == [100_000, 1_234_567_890, 1_700_000_000_000_250_000]


def test_a_block_size_that_the_lengths_show_is_used_with_a_note(tmp_path: Path) -> None:
    """Converted logs have hash ids of 16 tokens; the default of 512 does not fit them."""
    lines = [row(input_length=100 + 7 * n, hash_ids=list(range(-(-(100 + 7 * n) // 16)))) for n in range(20)]
    found = read_mooncake(trace_file(tmp_path, *lines))
    assert found.trace_block_size == 16
    assert found.notes == (
        "hash ids have 16 tokens each: no other power of two fits the prompts' lengths (--trace-block-size)",
    )
    given = read_mooncake(trace_file(tmp_path, *lines), trace_block_size=16)
    assert given.digest == found.digest
    assert given.notes == ()


def test_a_block_size_is_not_inferred_from_few_rows_or_against_a_flag(tmp_path: Path) -> None:
    lines = [row(input_length=100 + 7 * n, hash_ids=list(range(-(-(100 + 7 * n) // 16)))) for n in range(20)]
    with pytest.raises(InvalidArgument, match="needs 1 hash_ids of 512 tokens"):
        read_mooncake(trace_file(tmp_path, *lines[:5]))
    with pytest.raises(InvalidArgument, match="needs 2 hash_ids of 64 tokens"):
        read_mooncake(trace_file(tmp_path, *lines), trace_block_size=64)
    with pytest.raises(InvalidArgument, match="input_length 9000 exceeds 2 hash_ids of 512 tokens"):
        read_mooncake(trace_file(tmp_path, *lines, row(input_length=9000)))


def test_times_until_a_client_aborts_are_kept_as_nanoseconds(tmp_path: Path) -> None:
    aborts = read(tmp_path, row(abort_after_ms=1.5), row(), row(abort_after_ms=0)).abort_after_ns
    assert aborts is not None
    assert aborts.tolist() == [1_500_000, -1, 0]
    assert read(tmp_path, row()).abort_after_ns is None
