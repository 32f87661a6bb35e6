"""Predictions of a run that was recorded request by request, and lines of it that are refused."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from calibrate.test_predict import TEN_MS
from understudy.calibrate.recorded import predict_run, read_run
from understudy.cli import main
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import InvalidArgument
from understudy.timing.coefficients import StepCoefficients
from understudy.timing.physical import Physical
from understudy.timing.recorded.record import Record

if TYPE_CHECKING:
    from pathlib import Path


def run_file(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_times_of_a_recorded_run_count_from_when_the_engine_sees_the_request(tmp_path: Path) -> None:
    rows = [
        {"request_id": "a", "arrival_s": 5.0, "input_tokens": 10, "output_tokens": 10},
        {"request_id": "b", "arrival_s": 5.014, "input_tokens": 10, "output_tokens": 2},
    ]
    load = read_run(run_file(tmp_path / "run.jsonl", rows))
    found = {name: rest for name, *rest in predict_run(load, TEN_MS).requests}
    assert found["a"] == [10.0, 10.0, 100.0]
    # It comes at 14, is seen at 20, when the first step that it can be in is the one from 30 to 40.
    assert found["b"] == [20.0, 10.0, 30.0]


def test_prompts_of_a_recorded_run_share_what_their_tokens_share(tmp_path: Path) -> None:
    first = list(range(40))
    prompts = {"a": first, "b": [*first[:37], 7, 7, 7, 7], "c": [9, *first]}
    rows = [
        {
            "request_id": name,
            "arrival_s": float(place),
            "input_tokens": len(prompt),
            "output_tokens": 2,
            "input_token_ids": prompt,
        }
        for place, (name, prompt) in enumerate(prompts.items())
    ]
    load = read_run(run_file(tmp_path / "run.jsonl", rows))
    timing = Physical(coefficients=StepCoefficients(token_ms=1.0, captures=()))
    engine = VllmConfig(timing=timing, block_size=16)
    ttft = {name: ttft for name, ttft, *_ in predict_run(load, engine).requests}
    assert ttft == {"a": 40.0, "b": 41.0 - 32, "c": 41.0}  # two whole blocks of the first are found again
    del rows[1]["input_token_ids"]
    with pytest.raises(InvalidArgument, match="request 'b' has no input_token_ids, but others have them"):
        read_run(run_file(tmp_path / "run.jsonl", rows))


def test_a_recorded_run_may_be_in_any_order_and_begin_with_a_mark(tmp_path: Path) -> None:
    rows = [
        {"request_id": i, "arrival_s": 100.0 + i / 50, "input_tokens": 300 + i, "output_tokens": 5}
        for i in range(6)
    ]
    inputs = [run_file(tmp_path / "sorted.jsonl", rows), run_file(tmp_path / "mixed.jsonl", rows[::-1])]
    inputs[1].write_text("\ufeff" + inputs[1].read_text())
    first, second = (predict_run(read_run(path), TEN_MS).requests for path in inputs)
    assert [name for name, *_ in second] == ["5", "4", "3", "2", "1", "0"]
    assert sorted(first) == sorted(second)


def test_a_recorded_run_is_predicted_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"request_id": f"r{i}", "arrival_s": i / 10, "input_tokens": 500, "output_tokens": 20}
        for i in range(5)
    ]
    path = run_file(tmp_path / "run.jsonl", rows)
    assert main(["predict", str(path), "--model", "Llama-3.1-8B", "--gpu", "RTX PRO 6000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "request_id,ttft_ms,tpot_ms,e2e_ms"
    assert [line.split(",")[0] for line in lines[1:]] == ["r0", "r1", "r2", "r3", "r4"]
    assert main(["predict", str(path), "--model", "Llama-3.1-8B"]) == 2
    assert "needs step times; give --model and --gpu, or --timing" in capsys.readouterr().err


def test_one_output_token_has_no_time_per_output_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"request_id": f"r{i}", "arrival_s": float(i), "input_tokens": 500, "output_tokens": tokens}
        for i, tokens in enumerate((1, 20))
    ]
    path = run_file(tmp_path / "run.jsonl", rows)
    [(_, ttft, tpot, e2e), (_, _, other, _)] = predict_run(read_run(path), TEN_MS).requests
    assert math.isnan(tpot)
    assert (ttft, other) == (e2e, 10.0)
    where = ["--model", "Llama-3.1-8B", "--gpu", "H100"]
    assert main(["predict", str(path), *where]) == 0
    said = capsys.readouterr()
    without, with_tpot = (line.split(",")[2] for line in said.out.splitlines()[1:])
    assert without == ""
    assert f"TPOT {float(with_tpot):.1f} ms" in said.err
    assert main(["predict", str(run_file(path, rows[:1])), *where]) == 0
    assert ", TPOT –, E2E " in capsys.readouterr().err


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """Steps of a made-up device, 3 ms and 0.02 ms a token each."""
    loads: list[dict[str, Any]] = [
        {"chunks": [], "decodes": [["a", 100 + 10 * place] for place in range(size)]} for size in range(1, 17)
    ]
    loads += [{"chunks": [["a", tokens, 0]], "decodes": []} for tokens in range(100, 900, 50)]
    rows = [
        {**load, "shared": 0, "ahead": True, "launch_ms": 0.0, "ms": 3 + 0.02 * tokens}
        for load in loads
        for tokens in [sum(chunk[1] for chunk in load["chunks"]) + len(load["decodes"])]
    ]
    path = tmp_path / "steps.jsonl"
    Record.of(rows).write(path)
    return path


def test_recorded_steps_time_a_recorded_run(
    steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_file(
        tmp_path / "run.jsonl",
        [{"request_id": "a", "arrival_s": 0, "input_tokens": 500, "output_tokens": 11}],
    )
    command = ["predict", str(path), "--timing", str(steps)]
    assert main([*command, "--num-gpu-blocks", "1000"]) == 0
    told = capsys.readouterr()
    assert told.err.startswith("times from recorded steps: ")
    name, ttft_ms, tpot_ms, _ = told.out.splitlines()[1].split(",")
    assert name == "a"
    assert float(ttft_ms) == pytest.approx(13, rel=0.1)
    assert float(tpot_ms) == pytest.approx(3.02, rel=0.1)
    assert main([*command, "--model", "Llama-3.1-8B", "--gpu", "H100"]) == 0
    assert capsys.readouterr().out == told.out  # only blocks follow from those, and one request has enough


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "does not set the number of KV blocks; give --num-gpu-blocks, or --model and --gpu"),
        (
            ["--num-gpu-blocks", "100", "--model", "Llama-3.1-8B"],
            "--model: the number of blocks needs both --model and",
        ),
        (
            ["--num-gpu-blocks", "100", "--tensor-parallel-size", "2"],
            "--tensor-parallel-size: the number of blocks needs both",
        ),
        (
            ["--num-gpu-blocks", "100", "--model", "Llama-3.1-8B", "--gpu", "H100"],
            "--gpu has no effect with --timing and --num-gpu-blocks, which replace its times",
        ),
        (["--num-gpu-blocks", "0"], "--num-gpu-blocks must be at least 1, got 0"),
    ],
)
@pytest.mark.parametrize("timing", ["steps.jsonl", "polynomial"])
def test_times_of_no_gpu_need_to_know_the_blocks_and_nothing_else(
    timing: str, flags: list[str], says: str, steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"request_id": "a", "arrival_s": 0, "input_tokens": 500, "output_tokens": 11}
    path = run_file(tmp_path / "run.jsonl", [row])
    named = str(steps) if timing == steps.name else timing
    assert main(["predict", str(path), "--timing", named, *flags]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"input_tokens": ...}, r"run\.jsonl:1: input_tokens is missing"),
        ({"output_tokens": 0}, "output_tokens must be a whole number of at least 1, got 0"),
        ({"arrival_s": "noon"}, "arrival_s must be a number, got 'noon'"),
        ({"arrival_s": math.nan}, "arrival_s must be seconds from .*, got nan"),
        ({"arrival_s": math.inf}, r"run\.jsonl:1: arrival_s must be seconds from -4e\+09 to 4e\+09, got inf"),
        (
            {"arrival_s": 1e12},
            r"run\.jsonl:1: arrival_s must be seconds from -4e\+09 to 4e\+09, got 1000000000000",
        ),
        ({"arrival_s": 10**400}, r"run\.jsonl:1: arrival_s must be seconds .*, got 10{39}$"),
        (
            {"input_tokens": 10**12},
            r"input_tokens must be a whole number of at most 2,147,483,647, got 10{12}$",
        ),
        ({"output_tokens": 1e300}, "output_tokens must be a whole number of at most 2,147,483,647, got 1e"),
        ({"input_token_ids": [1, 2]}, "input_token_ids has 2 entries for input_tokens=10"),
        ({"input_token_ids": "a b"}, "input_token_ids must be a list of whole numbers"),
    ],
)
def test_a_bad_line_of_a_run_is_refused(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    row = {"request_id": "a", "arrival_s": 0.0, "input_tokens": 10, "output_tokens": 10, **change}
    path = run_file(
        tmp_path / "run.jsonl", [{name: value for name, value in row.items() if value is not ...}]
    )
    with pytest.raises(InvalidArgument, match=match):
        read_run(path)


@pytest.mark.parametrize("arrival_s", [-3.9e9, 1e10, 1e12, 1e300])
def test_an_arrival_that_is_ages_after_the_first_is_refused_by_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arrival_s: float
) -> None:
    rows = [
        {"request_id": i, "arrival_s": at, "input_tokens": 9, "output_tokens": 2}
        for i, at in enumerate((0.0, 3e9, arrival_s))
    ]
    path = run_file(tmp_path / "run.jsonl", rows)
    assert main(["predict", str(path), "--model", "Llama-3.1-8B", "--gpu", "H100"]) == 2
    said = capsys.readouterr().err
    line = 2 if arrival_s < 0 else 3
    assert f"{path}:{line}: arrival_s " in said
    assert said.count("\n") == 1


def test_a_run_that_is_cut_off_or_names_a_request_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"request_id": "a", "arriv')
    with pytest.raises(InvalidArgument, match="may be truncated"):
        read_run(path)
    row = {"request_id": "a", "arrival_s": 0.0, "input_tokens": 10, "output_tokens": 10}
    with pytest.raises(InvalidArgument, match="request_id 'a' is repeated"):
        read_run(run_file(path, [row, row]))
