"""Logs of one's own: tables of any shape, exports of gateways, server logs, rows and hours of them."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import understudy as us
from understudy.cli import main
from understudy.errors import ConfigError, InvalidArgument
from understudy.workload import Workload, read_trace
from understudy.workload.doctor import describe_trace, examine
from understudy.workload.guess import guess_format
from understudy.workload.length_rows import write_lengths
from understudy.workload.window import cut_busiest, cut_window

CSV = """request_time,model,prompt_tokens,completion_tokens,status
2026-01-05 09:00:00.000,a,900,120,200
2026-01-05 09:00:07.500,b,50,9,200
2026-01-05 09:00:03.000,a,60,0,500
2026-01-05 09:00:02.000,a,70,8,200
"""
DEMO = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"


def write(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_text(content)
    return path


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def columns_of(workload: Workload) -> list[tuple[float, int, int]]:
    seconds = (workload.arrival_ns / 1e9).tolist()
    return list(zip(seconds, workload.prompt_tokens.tolist(), workload.output_tokens.tolist(), strict=True))


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_a_table_is_guessed_and_sorted_whatever_separates_its_columns(tmp_path: Path, separator: str) -> None:
    path = write(tmp_path, "month.csv", CSV.replace(",", separator))
    assert guess_format(path) == "table"
    found = read_trace(path)
    assert columns_of(found) == [(0.0, 900, 120), (2.0, 70, 8), (7.5, 50, 9)]
    assert "1 of 4 rows are left out: no prompt or no output" in found.notes


def test_columns_of_any_name_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, "t.csv", "when,p,g\n1767600000,10,2\n1767600001.5,20,3\n")
    with pytest.raises(
        InvalidArgument, match=r"no column looks like the number of input tokens; there are when, p, g; "
    ):
        read_trace(path, "table")
    assert guess_format(path) == "table"
    found = read_trace(path, columns="time=when,input=p,output=g")
    assert columns_of(found) == [(0.0, 10, 2), (1.5, 20, 3)]
    with pytest.raises(InvalidArgument, match=r"column x is missing; there are when"):
        read_trace(path, "table", columns="input=x")
    with pytest.raises(ConfigError, match=r"--columns speed=p: not a column"):
        read_trace(path, "table", columns="speed=p")


def test_a_table_of_json_lines_and_one_without_times_are_read(tmp_path: Path) -> None:
    rows = lines(
        {"prompt_tokens": 5, "completion_tokens": 6, "ts": 3},
        {"prompt_tokens": 7, "completion_tokens": 8, "ts": 1},
    )
    path = write(tmp_path, "t.jsonl", rows)
    assert guess_format(path) == "table"
    assert columns_of(read_trace(path)) == [(0.0, 7, 8), (2.0, 5, 6)]
    path = write(tmp_path, "u.csv", "input_tokens,output_tokens\n3,4\n")
    assert not read_trace(path).has_arrivals


@pytest.mark.parametrize(
    ("row", "message"),
    [("2026-01-05 09:00:00,a,many,1,200", "prompt_tokens must be a number of tokens, got 'many'"),
     ("soon,a,1,1,200", "'soon' is not a time")],
)  # fmt: skip
def test_a_wrong_cell_names_its_line(tmp_path: Path, row: str, message: str) -> None:
    path = write(tmp_path, "bad.csv", f"{CSV}{row}\n")
    with pytest.raises(InvalidArgument, match=rf"bad\.csv:6: .*{message}"):
        read_trace(path)


def test_where_keeps_rows_and_refuses_a_key_that_no_row_has(tmp_path: Path) -> None:
    path = write(tmp_path, "month.csv", CSV)
    found = read_trace(path, where=["status=200", "model!=b"])
    assert columns_of(found) == [(0.0, 900, 120), (2.0, 70, 8)]
    assert "2 rows are left out by --where status=200 model!=b" in found.notes
    with pytest.raises(ConfigError, match=r"--where code: no row has this key"):
        read_trace(path, where=["code=1"])
    with pytest.raises(ConfigError, match=r"--where status: no condition"):
        read_trace(path, where=["status"])


def test_parquet_needs_pyarrow_or_is_refused_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1 and more")
    assert guess_format(path) == "table"
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        ConfigError, match=r"needs pyarrow, which is not installed; pip install pyarrow, or export"
    ):
        read_trace(path)


def test_parquet_is_read_where_pyarrow_is_installed(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "t.parquet"
    table = arrow.table({"time": [2.0, 1.0], "prompt_tokens": [5, 6], "completion_tokens": [7, 8]})
    parquet.write_table(table, path)
    assert columns_of(read_trace(path)) == [(0.0, 6, 8), (1.0, 5, 7)]


MESSAGES = [{"role": "user", "content": "Hello there, how are you today?"}]
ANSWER = {"role": "assistant", "content": "Fine."}
EXPORTS: dict[str, dict[str, Any]] = {
    "LiteLLM": {
        "startTime": "2026-01-05T09:00:00.250Z", "endTime": "2026-01-05T09:00:02Z", "messages": json.dumps(MESSAGES),
        "response": json.dumps({"choices": [{"message": ANSWER}]}), "prompt_tokens": 40, "completion_tokens": 7,
    },
    "Langfuse": {
        "startTime": "2026-01-05T09:00:00.250Z", "endTime": "2026-01-05T09:00:02Z", "traceId": "t", "input": MESSAGES,
        "output": ANSWER, "usageDetails": {"input": 40, "output": 7, "total": 47}, "sessionId": "s",
    },
    "Helicone": {
        "request_created_at": "2026-01-05T09:00:00.250Z", "response_created_at": "2026-01-05T09:00:02Z",
        "request_body": {"messages": MESSAGES}, "response_body": {"choices": [{"message": ANSWER}]},
        "prompt_tokens": 40, "completion_tokens": 7,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", EXPORTS)
def test_exports_of_gateways_keep_their_times_and_lengths(tmp_path: Path, name: str) -> None:
    first = EXPORTS[name]
    later = {
        key: value.replace("09:00", "09:01") if isinstance(value, str) else value
        for key, value in first.items()
    }
    path = write(tmp_path, "log.jsonl", lines(first, later))
    assert guess_format(path) == "openai"
    found = read_trace(path)
    assert found.has_arrivals
    assert found.prompt_tokens.tolist() == [40, 40]
    assert found.output_tokens.tolist() == [7, 7]
    assert found.prompt_hash_ids(0).tolist()[:2] == found.prompt_hash_ids(1).tolist()[:2]


def test_a_log_whose_times_are_not_found_names_the_keys_that_look_like_some(tmp_path: Path) -> None:
    row = {
        "began": "2026-01-05T09:00:00Z",
        "messages": MESSAGES,
        "usage": {"prompt_tokens": 9, "completion_tokens": 2},
    }
    path = write(tmp_path, "log.jsonl", lines(row, {**row, "began": "2026-01-05T09:00:04Z"}))
    found = read_trace(path)
    assert not found.has_arrivals
    assert any("began look like times: give --time began" in note for note in found.notes)
    assert (read_trace(path, time="began").arrival_ns / 1e9).tolist() == [0.0, 4.0]


VLLM = (
    "INFO 10-09 08:53:20 [logger.py:42] Received request chat-a: prompt: 'forty bytes of text stand for ten tokens',"
    " params: SamplingParams(n=1, max_tokens=293), prompt_token_ids: None, lora_request: None.\n"
    'INFO:     10.0.0.3:1 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
    "INFO 10-09 08:53:25 [logger.py:42] Received request chatcmpl-b: prompt: 'x', params: SamplingParams(n=1, "
    "max_tokens=8), prompt_token_ids: [1, 2, 3], lora_request: None.\n"
)
SGLANG = (
    "[2026-01-05 09:00:10] INFO: Finish: obj=GenerateReqInput(rid='a'), out={'text': '…', 'meta_info': {'id': 'a', "
    "'prompt_tokens': 33, 'completion_tokens': 21, 'cached_tokens': 0, 'e2e_latency': 4.5}}\n"
    "[2026-01-05 09:00:12] INFO: Finish: obj=GenerateReqInput(rid='b'), out={'text': '', 'meta_info': {'id': 'b', "
    "'prompt_tokens': 12, 'completion_tokens': 5, 'e2e_latency': 1.0}}\n"
)


@pytest.mark.parametrize(
    ("text", "columns"),
    [(VLLM, [(0.0, 10, 293), (5.0, 3, 8)]), (SGLANG, [(0.0, 33, 21), (5.5, 12, 5)])],
    ids=["vllm", "sglang"],
)
def test_server_logs_are_read(tmp_path: Path, text: str, columns: list[tuple[float, int, int]]) -> None:
    path = write(tmp_path, "server.log", text)
    assert guess_format(path) == "server-log"
    assert columns_of(read_trace(path)) == columns


def test_a_server_log_says_what_stands_for_generated_tokens(tmp_path: Path) -> None:
    notes = read_trace(write(tmp_path, "server.log", VLLM)).notes
    assert any(note.startswith("1 prompt lengths are estimated") for note in notes)
    assert any(note.startswith("2 outputs are as long as their max_tokens") for note in notes)
    with pytest.raises(InvalidArgument, match=r"no line is a request of vLLM"):
        read_trace(write(tmp_path, "other.log", "INFO started\n"), "server-log")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_lengths_become_compact_rows_with_the_digest_of_the_log(tmp_path: Path, name: str) -> None:
    source = write(tmp_path, "month.csv", CSV)
    out = tmp_path / name
    assert main(["convert", str(source), str(out)]) == 0
    text = (gzip.decompress(out.read_bytes()) if name.endswith(".gz") else out.read_bytes()).decode()
    assert "hash_ids" not in text
    assert guess_format(out) == "lengths"
    assert read_trace(out).digest == read_trace(source).digest
    assert read_trace(out).notes == read_trace(source).notes
    full = tmp_path / "full.jsonl"
    assert main(["convert", str(source), str(full), "--to", "mooncake"]) == 0
    assert us.replay(full, trace_options={"trace_block_size": 16}).run.digest == us.replay(out).run.digest


def test_rows_of_lengths_refuse_more_than_lengths(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="share content"):
        write_lengths(read_trace(DEMO), tmp_path / "x.jsonl")
    path = write(tmp_path, "bad.jsonl", '{"input_length": 0, "output_length": 1}\n')
    with pytest.raises(InvalidArgument, match=r"bad\.jsonl:1: input_length must be from 1"):
        read_trace(path, "lengths")
    path = write(
        tmp_path,
        "half.jsonl",
        '{"input_length":1,"output_length":1,"timestamp":2}\n{"input_length":1,"output_length":1}\n',
    )
    with pytest.raises(InvalidArgument, match=r"row 2: give all rows a timestamp, or none"):
        read_trace(path, "lengths")


def test_a_window_keeps_the_sessions_that_begin_in_it(tmp_path: Path) -> None:
    rows = "time,prompt_tokens,completion_tokens\n" + "".join(
        f"{hour * 3600 + minute * 60},{100 if hour == 2 else 10},5\n"
        for hour in range(4)
        for minute in range(0, 60, 10)
    )
    found = read_trace(write(tmp_path, "day.csv", rows))
    cut = cut_window(found, 3600, 2 * 3600)
    assert len(cut) == 6
    assert cut.arrival_ns[0] == 0
    assert "6 of 24 requests" in cut.notes[-1]
    busy = cut_busiest(found, 3600)
    assert busy.prompt_tokens.tolist() == [100] * 6
    with pytest.raises(InvalidArgument, match="choose another window"):
        cut_window(found, 10**6)
    assert main(["convert", str(tmp_path / "day.csv"), str(tmp_path / "o.jsonl"), "--busiest", "1h"]) == 0
    assert len(read_trace(tmp_path / "o.jsonl")) == 6


def test_convert_says_which_format_it_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "month.csv", CSV)
    assert main(["convert", str(path), str(tmp_path / "a.jsonl")]) == 0
    assert capsys.readouterr().err.startswith("format table (guessed): 3 requests, ")
    assert main(["convert", str(path), str(tmp_path / "a.jsonl"), "--busiest", "1h", "--from", "1h"]) == 2
    assert "--busiest: contradicts --from and --until" in capsys.readouterr().err


def make(count: int = 120, **columns: Any) -> Workload:
    given: dict[str, Any] = {
        "arrival_ns": np.arange(count) * 1_500_000_001,
        "prompt_tokens": 20 + np.arange(count) % 9,
        "output_tokens": 5 + np.arange(count) % 7,
        "hash_offsets": np.arange(count + 1) * 2,
        "hash_ids": np.repeat(np.arange(count), 2) % 50,
        "trace_block_size": 16,
        "has_arrivals": True,
    }
    return Workload(**{**given, **columns})


ODD: dict[str, dict[str, Any]] = {
    "no times": {"has_arrivals": False, "arrival_ns": np.zeros(120, np.int64)},
    "clocks run backwards": {"arrival_ns": np.arange(120)[::-1] * 1_500_000_001},
    "burst": {"arrival_ns": np.maximum(np.arange(120) - 60, 0) * 1_500_000_001},
    "whole seconds": {"arrival_ns": np.arange(120) // 2 * 10**9},
    "gap": {"arrival_ns": np.arange(120) * 1_500_000_001 + (np.arange(120) > 60) * 10**12},
    "one session": {
        "arrival_ns": np.zeros(120, np.int64),
        "session": np.zeros(120, np.int64),
        "turn": np.arange(120),
    },
    "equal prompts": {"prompt_tokens": np.full(120, 30)},
    "equal outputs": {"output_tokens": np.full(120, 30)},
    "no outputs": {"output_tokens": np.arange(120) // 100},
    "shares no prefix": {"hash_ids": np.arange(240)},
    "longer than the model's": {},
    "few requests": {},
}


@pytest.mark.parametrize("name", ODD)
def test_the_doctor_names_what_is_odd(name: str) -> None:
    workload = make(20) if name == "few requests" else make(**ODD[name])
    found = examine(workload, 30 if name == "longer than the model's" else None)
    assert name in [each.name for each in found]


def test_the_doctor_finds_nothing_in_a_plain_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert examine(make()) == []
    assert describe_trace(make()).startswith("120 requests, over ")
    assert main(["doctor", str(DEMO), "--model", "Llama-3.1-8B"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("format mooncake (guessed): 384 requests, ")
    assert "✓ nothing is odd" in said
