"""Whatever stands in somebody's log, a reader returns a workload or says in one sentence what is wrong, and where."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from understudy.errors import UnderstudyError
from understudy.workload import Workload, read_trace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OPENAI = {
    "timestamp": 1700000000.5,
    "request": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        "tools": [{"name": "f"}],
        "max_tokens": 12,
    },
    "response": {"choices": [{"message": {"content": "Good day.", "tool_calls": [{"id": "a"}]}}]},
    "id": "r1",
}
WITH_USAGE = {"created": 5, "prompt": "Hello", "usage": {"prompt_tokens": 9, "completion_tokens": 12}}
SHAREGPT = [
    {
        "id": "x",
        "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Good day."}],
    }
]
BENCH = {
    "input_lens": [10, 20],
    "output_lens": [5, 6],
    "start_times": [100.0, 100.2],
    "errors": ["", "timed out"],
}
AIPERF = {
    "metadata": {"request_start_ns": 1, "benchmark_phase": "profiling", "was_cancelled": False},
    "metrics": {"input_sequence_length": {"value": 550}, "output_sequence_length": {"value": 48}},
    "error": None,
}
MOONCAKE = {
    "timestamp": 0,
    "input_length": 600,
    "output_length": 5,
    "hash_ids": [1, 2],
    "session_id": "s",
    "priority": 1,
    "max_tokens": 9,
}
AGENT = {
    "num_turns": 1,
    "input_prompt_length": 100,
    "assistant_response_length": [10],
    "tool_call_output_length": [30],
    "tool_call_latency": [1.5],
    "final_assistant_response_length": 7,
}
SAMPLES: dict[str, list[Any]] = {
    "openai": [OPENAI, WITH_USAGE],
    "sharegpt": [SHAREGPT],
    "vllm-bench": [BENCH],
    "aiperf": [AIPERF],
    "mooncake": [MOONCAKE],
    "mooncake-delta": [{name: MOONCAKE[name] for name in MOONCAKE if name not in ("priority", "max_tokens")}],
    "applied-compute": [AGENT],
}
ODD: list[Any] = [
    *(None, True, -1, 0, 1.5, 10**30, 1e300, -0.0, float("nan"), float("inf")),
    *("", "x", "\ud800", "1e400", [], [None], [[]], {}, {"a": 1}, "2023-13-45T99:00:00"),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def put(sample: Any, path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return odd
    changed = copy.deepcopy(sample)
    holder = changed
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = odd
    return changed


def readable(path: Path, form: str, **options: Any) -> None:
    said = ""
    workload: Workload | None = None
    try:
        workload = read_trace(path, form, **options)
    except UnderstudyError as error:
        said = str(error)
    if workload is None:
        assert said
        assert "\n" not in said
        return
    assert isinstance(workload, Workload)
    assert np.all(workload.arrival_ns >= 0)


@pytest.mark.parametrize("form", SAMPLES)
def test_any_odd_value_anywhere_is_taken_or_refused_in_a_sentence(form: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    for sample in SAMPLES[form]:
        path.write_text(json.dumps(sample) + "\n")
        assert len(read_trace(path, form)), "the sample itself is fine"
        for place in places(sample):
            for odd in ODD:
                path.write_text(json.dumps(put(sample, place, odd)) + "\n")
                readable(path, form)


@pytest.mark.parametrize(
    ("form", "header", "row"),
    [
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens", ["2023-11-16 18:15:46.6805900", "374", "44"]),
        (
            "burstgpt",
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
            ["5", "ChatGPT", "472", "18", "490", "Conversation log"],
        ),
    ],
)
def test_any_odd_cell_is_taken_or_refused_in_a_sentence(
    form: str, header: str, row: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "log.csv"
    odd_cells = ["", " ", "-1", "1.5", "nan", "inf", "1e400", "9" * 30, '"', "x", "2023-13-45 99:00:00", "0"]
    for place in range(len(row)):
        for odd in odd_cells:
            cells = [odd if place == number else cell for number, cell in enumerate(row)]
            path.write_text(f"{header}\n{','.join(row)}\n{','.join(cells)}\n")
            readable(path, form)
    for text in (
        "",
        header,
        f"{header}\n{row[0]}\n",
        f"{header}\n{','.join([*row, 'more'])}\n",
        "\x00",
        '"' + "x" * 200_000,
    ):
        path.write_text(text)
        readable(path, form)


@pytest.mark.parametrize("form", ["openai", "sharegpt"])
def test_a_block_of_no_tokens_is_refused(form: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(json.dumps(SAMPLES[form][0]))
    sizes: list[Any] = [0, -1, "16", 1.5]
    for size in sizes:
        with pytest.raises(UnderstudyError, match="trace_block_size must be"):
            read_trace(path, form, trace_block_size=size)


@pytest.mark.parametrize(
    ("named", "likely"),
    [
        *(("mooncake", form) for form in SAMPLES if not form.startswith("mooncake")),
        ("openai", "mooncake"),
        ("azure", "openai"),
        ("burstgpt", "aiperf"),
    ],
)
def test_a_log_of_another_format_is_told_which(named: str, likely: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(json.dumps(SAMPLES[likely][0]))
    with pytest.raises(UnderstudyError, match=rf"looks like format {likely} \(--format {likely}\)"):
        read_trace(path, named)
