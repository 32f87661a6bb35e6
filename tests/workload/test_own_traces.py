"""Other formats than Mooncake's: request logs, conversations, results of benchmarks, CSVs of lengths."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from understudy.cli import main
from understudy.errors import ConfigError, InvalidArgument
from understudy.workload import read_trace
from understudy.workload.lengths import NO_CONTENT, timestamp_ns
from understudy.workload.text import BytesEncoder, PromptHasher
from workload.building import assert_same

if TYPE_CHECKING:
    from pathlib import Path

SYSTEM = {"role": "system", "content": "You are a patient librarian. " * 20}


def chat(question: str, **more: Any) -> dict[str, Any]:
    return {"messages": [SYSTEM, {"role": "user", "content": question}], **more}


def lines(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def shared_blocks(workload: Any, one: int, other: int) -> int:
    ids = [workload.prompt_hash_ids(row).tolist() for row in (one, other)]
    return next(
        (at for at, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), min(len(ids[0]), len(ids[1]))
    )


# ── Request logs ──


def test_a_log_gives_arrivals_lengths_and_shared_prefixes(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 160, "completion_tokens": 9}
    path = lines(
        tmp_path,
        chat("Where is Melville?" * 5, timestamp=1700000000.5, usage=usage),
        chat("And Woolf, please?" * 5, timestamp=1700000001.25, usage=usage),
        {"prompt": "Something else entirely. " * 30, "timestamp": 1700000002, "usage": usage},
    )
    workload = read_trace(path, "openai")
    assert workload.arrival_ns.tolist() == [0, 750_000_000, 1_500_000_000]
    assert workload.prompt_tokens.tolist() == [160, 160, 160]
    assert workload.output_tokens.tolist() == [9, 9, 9]
    whole = len(workload.prompt_hash_ids(0))
    assert 0 < shared_blocks(workload, 0, 1) < whole
    # The librarian's introduction, in blocks of 16 tokens of about as many bytes as the log tells.
    bytes_per_token = sum(len(text) for text in _texts()) / 480
    assert shared_blocks(workload, 0, 1) == int(
        (len("\n<system>\n" + str(SYSTEM["content"])) + 9) / bytes_per_token / 16
    )
    assert shared_blocks(workload, 0, 2) == 0


def _texts() -> list[str]:
    heads = [
        f"\n<system>\n{SYSTEM['content']}\n<user>\n{text * 5}"
        for text in ("Where is Melville?", "And Woolf, please?")
    ]
    return [*heads, "Something else entirely. " * 30]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda body, answer: {**body, **answer},
        lambda body, answer: {"request": body, "response": answer},
        lambda body, answer: {"body": body, "response": {"body": answer, "status_code": 200}},
    ],
)
def test_request_and_answer_are_found_where_logs_have_them(tmp_path: Path, wrap: Any) -> None:
    answer = {"created": 1700000000, "usage": {"prompt_tokens": 40, "completion_tokens": 7}}
    workload = read_trace(lines(tmp_path, wrap(chat("hello"), answer)), "openai")
    assert (workload.prompt_tokens[0], workload.output_tokens[0], workload.has_arrivals) == (40, 7, True)


def test_lengths_are_counted_where_usage_does_not_tell(tmp_path: Path) -> None:
    answered = {"prompt": "x" * 400, "choices": [{"text": "y" * 80}]}
    asked = {"prompt": "x" * 400, "max_tokens": 33}
    workload = read_trace(lines(tmp_path, answered, asked), "openai")
    assert workload.prompt_tokens.tolist() == [100, 100]
    assert workload.output_tokens.tolist() == [20, 33]
    assert not workload.has_arrivals
    assert any("4 bytes count as a token" in note for note in workload.notes)


@pytest.mark.parametrize(
    ("time", "expected_ns"),
    [
        (1700000000, 1700000000 * 10**9),
        (1700000000123, 1700000000123 * 10**6),
        (1700000000123456, 1700000000123456 * 10**3),
        (1700000000123456789, 1700000000123456789),
        ("2023-11-14T22:13:20.5Z", 1700000000_500_000_000),
        ("2023-11-15T00:13:20+02:00", 1700000000 * 10**9),
        (12.5, 12_500_000_000),
    ],
)
def test_times_are_read_by_their_size_or_their_form(tmp_path: Path, time: Any, expected_ns: int) -> None:
    from understudy.workload.conversations import _Row

    assert _Row("here", {"prompt": "x", "timestamp": time}).time_ns == expected_ns


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"timestamp": 1}, "has neither messages nor a prompt"),
        ({"prompt": "x", "timestamp": 1}, "the output length is missing"),
        ({"prompt": "x", "usage": {"completion_tokens": -1}}, "completion_tokens must be a whole number"),
        ({"messages": ["x"], "max_tokens": 1}, "a message needs a role"),
        ({"prompt": "x", "max_tokens": 1, "timestamp": "soon"}, "is not a time"),
        ([], "expected an object"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, row: Any, message: str) -> None:
    good = {"prompt": "x", "max_tokens": 1, "timestamp": 1}
    with pytest.raises(InvalidArgument, match=f"log.jsonl:2: .*{message}".replace("?", r"\?")):
        read_trace(lines(tmp_path, good, row), "openai")


def test_times_for_some_rows_only_are_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "max_tokens": 1, "timestamp": 1}, {"prompt": "x", "max_tokens": 1}]
    with pytest.raises(InvalidArgument, match=r"log\.jsonl:2: has no time"):
        read_trace(lines(tmp_path, *rows), "openai")


def test_a_local_tokenizer_counts_and_cuts_by_its_own_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the tokenizers extra")
    assert main(["tokenizer", "export", str(tmp_path / "tok")]) == 0
    file = str(tmp_path / "tok" / "tokenizer.json")
    own = tokenizers.Tokenizer.from_file(file)
    story = "Call me Ishmael. Some years ago, never mind how long precisely, " * 8
    texts = [story + "I thought I would sail.", story + "She said nothing, and closed the book.", "Sea."]
    ids = [own.encode(text, add_special_tokens=False).ids for text in texts]
    path = lines(tmp_path, *({"prompt": text, "timestamp": 0, "max_tokens": 3} for text in texts))
    workload = read_trace(path, "openai", tokenizer=file)
    assert workload.prompt_tokens.tolist() == [len(tokens) for tokens in ids]
    size = workload.trace_block_size
    common = next(at for at, (a, b) in enumerate(zip(ids[0], ids[1], strict=False)) if a != b)
    assert shared_blocks(workload, 0, 1) == common // size > 0
    assert shared_blocks(workload, 0, 2) == 0
    assert read_trace(path, "openai").prompt_tokens.tolist() != workload.prompt_tokens.tolist()


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        read_trace(lines(tmp_path, chat("x", max_tokens=1)), "openai", tokenizer="nowhere.json")


def test_equal_prefixes_have_equal_ids_and_others_have_not() -> None:
    encoder = BytesEncoder()
    hasher = PromptHasher(2, encoder.units_per_token)
    one = hasher.ids(encoder.encode("abcdefgh" * 3), 6)
    other = hasher.ids(encoder.encode("abcdefgh" * 2 + "different"), 6)
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    # The same block behind another beginning is another block.
    assert set(hasher.ids(encoder.encode("ABCDEFGH" + "abcdefgh" * 2), 6)).isdisjoint(one)


# ── Conversations ──


def test_a_conversation_is_a_session_whose_prompts_quote_the_answers(tmp_path: Path) -> None:
    talk = [("human", "a" * 100), ("gpt", "b" * 60), ("human", "c" * 50), ("gpt", "d" * 40)]
    path = tmp_path / "sharegpt.json"
    path.write_text(
        json.dumps(
            [
                {"id": "x", "conversations": [{"from": who, "value": text} for who, text in talk]},
                {"id": "y", "conversations": [{"from": "human", "value": "nobody answers"}]},
            ]
        )
    )
    workload = read_trace(path, "sharegpt")
    assert (len(workload), workload.sessions, workload.has_arrivals) == (2, 1, False)
    # "\n<human>\n" has nine bytes.
    assert workload.prompt_tokens.tolist() == [round(109 / 4), round((109 + 60 + 59) / 4)]
    assert workload.output_tokens.tolist() == [
        round(169 / 4) - round(109 / 4),
        round(268 / 4) - round(228 / 4),
    ]
    assert workload.output_in_next is not None
    assert workload.output_in_next.tolist() == [True, False]
    assert any("1 of 2 conversations have no answer" in note for note in workload.notes)


# ── Lengths ──


def test_azure_has_lengths_and_exact_times(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:51,0,9\n"
    )
    workload = read_trace(path, "azure")
    assert workload.arrival_ns.tolist() == [0, 4_314_579_000]
    assert (workload.prompt_tokens.tolist(), workload.output_tokens.tolist()) == ([374, 396], [44, 109])
    assert len(np.unique(workload.hash_ids)) == len(workload.hash_ids)
    assert workload.notes[0] == NO_CONTENT
    assert "1 of 3 are left out" in workload.notes[1]
    assert timestamp_ns("2024-05-10 00:00:00.009930+00:00", "x") % 10**9 == 9_930_000


def test_burstgpt_leaves_out_failures_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n"
        "118.5,GPT-4,417,276,693,API log\n"
    )
    workload = read_trace(path, "burstgpt")
    assert workload.arrival_ns.tolist() == [0, 113_500_000_000]
    assert workload.output_tokens.tolist() == [18, 276]
    assert "1 of 3 are left out: failed requests" in workload.notes[1]


def test_vllms_benchmark_gives_lengths_and_starts(tmp_path: Path) -> None:
    result: dict[str, Any] = {
        "input_lens": [10, 20, 30],
        "output_lens": [1, 2, 0],
        "errors": ["", "", "gone"],
    }
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**result, "start_times": [100.0, 100.25, 100.5]}))
    workload = read_trace(path, "vllm-bench")
    assert workload.arrival_ns.tolist() == [0, 250_000_000]
    assert workload.prompt_tokens.tolist() == [10, 20]
    path.write_text(json.dumps(result))
    assert not read_trace(path, "vllm-bench").has_arrivals
    path.write_text(json.dumps({"input_lens": [1]}))
    with pytest.raises(
        InvalidArgument, match="output_lens is missing; run the benchmark with --save-detailed"
    ):
        read_trace(path, "vllm-bench")


def test_aiperf_gives_lengths_and_starts(tmp_path: Path) -> None:
    def record(start_ns: int, phase: str = "profiling", error: Any = None) -> dict[str, Any]:
        metrics = {
            "input_sequence_length": {"value": 550, "unit": "tokens"},
            "output_sequence_length": {"value": 48, "unit": "tokens"},
        }
        meta = {"request_start_ns": start_ns, "benchmark_phase": phase, "was_cancelled": False}
        return {"metadata": meta, "metrics": metrics, "error": error}

    path = lines(tmp_path, record(5, "warmup"), record(100), record(300), record(400, error={"code": 500}))
    workload = read_trace(path, "aiperf")
    assert workload.arrival_ns.tolist() == [0, 200]
    assert workload.prompt_tokens.tolist() == [550, 550]
    with pytest.raises(InvalidArgument, match=r"log\.jsonl:1: metadata is missing; not a record of AIPerf"):
        read_trace(lines(tmp_path, {"metrics": {}}), "aiperf")


def test_a_csv_with_other_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InvalidArgument, match="column TIMESTAMP is missing; there are"):
        read_trace(path, "azure")
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,many,1\n")
    with pytest.raises(InvalidArgument, match=r"x\.csv:2: ContextTokens must be a whole number"):
        read_trace(path, "azure")


# ── Mooncake ──


@pytest.mark.parametrize(
    "line",
    [
        '{"timestamp": 1, "timestamp": 2, "output_length": 1, "hash_ids": [1]}',
        '{"timestamp": null, "timestamp": 2, "output_length": 1, "hash_ids": [1]}',
        '{"timestamp": 2, "output_length": 1, "hash_ids": [1], "hash_ids": [2]}',
        '{"timestamp": 2, "output_length": 1, "hash_ids": [1], "session_id": "a", "session_id": "b"}',
    ],
)
def test_a_repeated_key_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "output_length": 1, "hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(InvalidArgument, match=r"trace\.jsonl:2: \w+ is given twice"):
        read_trace(path)


def test_a_key_in_a_name_is_no_key(tmp_path: Path) -> None:
    name = 'the "timestamp": of it'
    path = lines(tmp_path, {"timestamp": 0, "output_length": 1, "hash_ids": [1], "request_id": name})
    assert read_trace(path).request_ids == [name]


# ── convert ──


def test_a_converted_log_has_no_text_and_replays_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = {"prompt_tokens": 160, "completion_tokens": 9}
    rows = [chat(f"question {n}", timestamp=1700000000 + n, usage=usage, id=f"secret-{n}") for n in range(5)]
    log, out = lines(tmp_path, *rows), tmp_path / "trace.jsonl"
    assert main(["convert", str(log), str(out), "--format", "openai"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "5 requests" in said.err
    assert "--trace-block-size 16" in said.err
    written = out.read_text()
    assert "librarian" not in written
    assert "secret" not in written
    ours, theirs = read_trace(out, trace_block_size=16), read_trace(log, "openai")
    assert_same(ours, theirs, but=("notes",))
    assert main(["convert", str(log), str(out), "--format", "openai", "--keep-ids"]) == 0
    assert "secret-3" in out.read_text()


def test_converting_over_the_log_itself_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = lines(tmp_path, chat("x", max_tokens=1))
    assert main(["convert", str(log), str(log), "--format", "openai"]) == 2
    assert "OUT would overwrite" in capsys.readouterr().err


def test_a_log_can_be_replayed_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n")
    report = tmp_path / "report.json"
    assert main(["replay", str(path), "--format", "azure", "--json", str(report)]) == 0
    assert "is unknown" in capsys.readouterr().out.replace("\n", " ")
    assert json.loads(report.read_text())["run"]["notes"] == [NO_CONTENT]
