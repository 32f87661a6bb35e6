"""Traces whose rows tell only what is new: prompts grow by it, and by the answers before."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import understudy
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import InvalidArgument
from understudy.workload import ClosedLoop, Workload, read_trace

if TYPE_CHECKING:
    from pathlib import Path


def lines(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def delta(session: str, new: list[int], output: int, **more: Any) -> dict[str, Any]:
    return {"session_id": session, "hash_ids": new, "output_length": output, **more}


def tokens_of(workload: Workload, row: int) -> list[int]:
    ids = workload.prompt_hash_ids(row).repeat(workload.trace_block_size)
    return [int(one) for one in ids[: workload.prompt_tokens[row]]]


def test_a_prompt_is_all_deltas_and_answers_before_it(tmp_path: Path) -> None:
    path = lines(
        tmp_path,
        delta("a", [1, 2], 20, timestamp=0, input_length=90),
        delta("b", [1], 8, timestamp=5),
        delta("a", [3], 30, delay=7),
        delta("a", [1], 4, delay=9, input_length=10),
    )
    grown = read_trace(path, "mooncake-delta", trace_block_size=64)
    assert grown.session.tolist() == [0, 1, 0, 0]  # as in the file
    assert grown.prompt_tokens.tolist() == [90, 64, 90 + 20 + 64, 90 + 20 + 64 + 30 + 10]
    assert grown.output_tokens.tolist() == [20, 8, 30, 4]
    assert grown.delay_ns.tolist() == [0, 0, 7_000_000, 9_000_000]
    assert grown.arrival_ns.tolist() == [0, 5_000_000, 0, 0]
    assert grown.output_in_next is not None
    assert grown.output_in_next.tolist() == [True, False, True, False]
    assert grown.session_ids == ["a", "b"]
    # A prompt begins with the one before it, and sessions with the same delta begin alike.
    assert tokens_of(grown, 2)[:90] == tokens_of(grown, 0)
    assert tokens_of(grown, 3)[:174] == tokens_of(grown, 2)
    assert tokens_of(grown, 1) == tokens_of(grown, 0)[:64]


def test_turns_find_their_past_in_the_cache(tmp_path: Path) -> None:
    turns = [
        delta("a", [number], 16, **({"timestamp": 0} if number == 0 else {"delay": 1})) for number in range(5)
    ]
    grown = read_trace(lines(tmp_path, *turns), "mooncake-delta", trace_block_size=64)
    report = understudy.replay(grown, VllmConfig(block_size=16, num_gpu_blocks=100))
    # Turn k finds the k·80 tokens before it, less the last token of an answer, which no step computed.
    assert report.columns.cached_tokens_first.tolist() == [0, 64, 144, 224, 304]


def test_a_session_of_tools_is_one_request_more_than_its_turns(tmp_path: Path) -> None:
    row = {
        "num_turns": 2,
        "input_prompt_length": 100,
        "assistant_response_length": [10, 20],
        "tool_call_output_length": [30, 0],
        "tool_call_latency": [1.5, 0.25],
        "final_assistant_response_length": 7,
    }
    grown = read_trace(lines(tmp_path, row, row), "applied-compute")
    assert not grown.has_arrivals
    assert grown.prompt_tokens.tolist() == [100, 140, 160] * 2
    assert grown.output_tokens.tolist() == [10, 20, 7] * 2
    assert grown.delay_ns.tolist() == [0, 1_500_000_000, 250_000_000] * 2
    assert not set(tokens_of(grown, 2)) & set(tokens_of(grown, 5))  # sessions share nothing
    report = understudy.replay(grown, load=ClosedLoop(concurrency=1))
    assert report.requests.completed == 6
    for name, wrong in (("tool_call_latency", [1]), ("num_turns", -1), ("input_prompt_length", 0)):
        with pytest.raises(
            InvalidArgument,
            match=r"trace\.jsonl:1: .*" + ("num_turns" if name == "tool_call_latency" else name),
        ):
            read_trace(lines(tmp_path, {**row, name: wrong}), "applied-compute")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"priority": 1}, "priority is not supported"),
        ({"strict_priority": 1}, "strict_priority is not supported"),
        ({"abort_after_ms": 3}, "abort_after_ms is not supported"),
        ({"max_tokens": 3}, "max_tokens is not supported"),
        ({"policy_class": "x"}, "policy_class is not supported"),
        ({"lora": "x"}, "lora is not supported"),
        ({"output_token_ids": [1, 2, 3]}, "output_token_ids is not supported"),
        ({"accepted_drafts": [1]}, "accepted_drafts is not supported"),
        ({"hash_ids": "x"}, ""),
    ],
)
def test_what_a_delta_cannot_say_is_refused_by_its_line(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    first, last = delta("a", [1], 3, timestamp=0), delta("b", [1], 3, timestamp=0)
    path = lines(tmp_path, first, first | {"session_id": "c"}, {**last, **more})
    with pytest.raises(InvalidArgument, match=rf"trace\.jsonl:3: .*{message}"):
        read_trace(path, "mooncake-delta")


def test_a_whole_trace_is_no_delta(tmp_path: Path) -> None:
    turns = [
        delta("a", [1], 3, timestamp=0, output_in_next_turn=False),
        delta("b", [1], 3, timestamp=0, input_length=512, output_in_next_turn=True),
        delta("b", [1, 2], 3, delay=1),
    ]
    with pytest.raises(InvalidArgument, match=r"trace\.jsonl:2: output_in_next_turn is not supported"):
        read_trace(lines(tmp_path, *turns), "mooncake-delta")
    assert len(read_trace(lines(tmp_path, turns[0]), "mooncake-delta")) == 1  # false says nothing
