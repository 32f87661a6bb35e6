"""The twin as an engine of a replay, on steps that were recorded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from understudy.cli import main
from understudy.clock import ScriptedClock
from understudy.errors import ConfigError
from understudy.qwen3.limits import SchedulerConfig
from understudy.qwen3.runner import run_workload
from understudy.qwen3.twin import build_twin
from understudy.qwen3.workloads import RAMP, generate_workload
from understudy.timing.recorded.load import load_of
from understudy.timing.recorded.record import Record

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.kv import KvLayout
    from understudy.timing.recorded.load import StepLoad

HEADER = {"num_blocks": 400, "block_size": 16, "max_num_seqs": 16, "max_num_batched_tokens": 256}


class Plain:
    """Times of a made-up device."""

    def step_ms(self, step: StepLoad) -> float:
        return 3.0 + 0.02 * step.tokens + 1e-4 * step.context_tokens

    def launch_ms(self, step: StepLoad) -> float:  # noqa: ARG002
        return 0.1


def layout() -> KvLayout:
    from understudy.kv import KvLayout

    return KvLayout(16, 1, 1, 1)


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    clock = ScriptedClock()
    engine = build_twin(SchedulerConfig(256, 16, 4096), 401, layout(), Plain(), clock)
    played = run_workload(engine, generate_workload(RAMP[:4], 60, 5000, longest=3000), clock)
    engine.close()
    path = tmp_path / "steps.jsonl"
    Record.of(played.steps, None, **HEADER).write(path)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [
        {
            "timestamp": 40.0 * number,
            "input_length": 320,
            "output_length": 12,
            "hash_ids": [number % 3 * 10 + block for block in range(20)],
        }
        for number in range(30)
    ]
    rows.append(
        {"timestamp": 1300.0, "input_length": 100_000, "output_length": 4, "hash_ids": list(range(6250))}
    )
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*words: str | Path) -> int:
    return main([str(word) for word in words])


def test_a_trace_is_played_by_the_twin_and_reported(
    steps: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    command = ("replay", trace, "--trace-block-size", "16", "--engine", "qwen3", "--step-times", steps)
    assert run(*command, "--json", report) == 0
    told = json.loads(report.read_text())
    assert told["requests"]["completed"] == 30
    assert told["requests"]["rejected"] == 1
    assert told["run"]["engine"]["kind"] == "qwen3 twin"
    assert told["run"]["engine"]["num_blocks"] == 400
    assert told["ttft_ms"]["mean"] > 3.0
    assert "TTFT" in capsys.readouterr().out
    assert run(*command, "--digest") == 0
    first = capsys.readouterr().out
    assert run(*command, "--digest") == 0
    assert capsys.readouterr().out == first  # the same run has the same digest
    assert run(*command, "--digest", "--num-gpu-blocks", "40") == 0
    assert capsys.readouterr().out != first


def test_recorded_steps_time_a_simulated_engine(
    steps: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The chain from a record to a replay of the default engine, on any number of workers."""
    report = tmp_path / "report.json"
    command = ("replay", trace, "--trace-block-size", "16", "--timing", steps, "--num-gpu-blocks", "400")
    assert run(*command, "--block-size", "16", "--workers", "2", "--json", report) == 0
    told = json.loads(report.read_text())
    assert told["requests"]["completed"] == 30
    assert told["run"]["times"]["from"].startswith("recorded steps")
    record = Record.read(steps).fit()
    least = record.step_ms(load_of([], [321]))
    assert told["itl_ms"]["p50"] == pytest.approx(least, rel=0.05)  # mostly alone: 3.0 + 0.02 + 0.03 ms
    assert told["run"]["times"]["outside_domain_share"] < 1
    capsys.readouterr()
    steps.write_text(steps.read_text().splitlines()[0] + "\n{}\n")
    assert run(*command) == 2
    assert "steps.jsonl:2: the step lacks" in capsys.readouterr().err


def test_time_in_steps_larger_than_the_recorded_ones_is_told(
    steps: Path, trace: Path, tmp_path: Path
) -> None:
    lines = steps.read_text().splitlines()
    small = [line for line in lines[1:] if sum(c[1] for c in json.loads(line)["chunks"]) < 200]
    steps.write_text("\n".join([lines[0], *small]) + "\n")
    shares = []
    for budget in ("64", "256"):
        report = tmp_path / f"{budget}.json"
        command = ("replay", trace, "--trace-block-size", "16", "--engine", "qwen3", "--step-times", steps)
        assert run(*command, "--max-num-batched-tokens", budget, "--json", report) == 0
        shares.append(json.loads(report.read_text())["run"]["times"]["outside_domain_share"])
    assert shares[0] == 0
    assert 0 < shares[1] < 1


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (("--workers", "2"), "one worker"),
        (("--watermark", "0.1"), "--watermark"),
        (("--events", "events.jsonl"), "--events"),
        (("--num-g2-blocks", "50"), "--host-blocks"),
    ],
)
def test_what_the_twin_has_not_is_refused(
    steps: Path, trace: Path, more: tuple[str, ...], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("replay", trace, "--trace-block-size", "16", "--engine", "qwen3", "--step-times", steps)
    assert run(*command, *more) == 2
    assert word in capsys.readouterr().err


def test_without_steps_it_says_how_to_record_them(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("replay", trace, "--trace-block-size", "16", "--engine", "qwen3") == 2
    assert "qwen3 bench --record" in capsys.readouterr().err


def test_a_record_is_read_as_it_was_written_and_what_is_none_is_named(steps: Path) -> None:
    record = Record.read(steps)
    assert record.about == HEADER
    assert record.steps[0]["at_ms"] >= 0
    lines = steps.read_text().splitlines()
    steps.write_text("\n".join([*lines[:3], "[]"]))
    with pytest.raises(ConfigError, match=r"steps.jsonl:4: not a recorded step"):
        Record.read(steps)
    older = lines[3].replace('"ahead"', '"behind"')
    steps.write_text("\n".join([*lines[:3], older]))
    with pytest.raises(ConfigError, match=r"steps.jsonl:4: the step lacks 'ahead'; record it again"):
        Record.read(steps)
    steps.write_text('{"kind": "something"}\n')
    with pytest.raises(ConfigError, match="not a record of steps"):
        Record.read(steps)


def test_a_real_engine_records_its_steps_and_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 300,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    file = tmp_path / "steps.jsonl"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert (
        run(
            *("qwen3", "bench", tmp_path, "--random-weights", "1", "--device", "cpu", "--num-blocks", "40"),
            *("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--record", file, "--requests", "12"),
            *("--host-blocks", "60"),
        )
        == 0
    )
    record = Record.read(file)
    assert record.link is not None
    assert record.about["num_blocks"] == 39
    tokens = sum(tokens for step in record.steps for _, tokens, _ in step["chunks"])
    assert tokens > 8 * 8
    assert all(step["ms"] > 0 for step in record.steps)
    said = capsys.readouterr()
    assert "steps of 12 requests" in said.out
    assert "\rwarming up 8 of 8 requests" in said.err
    assert "\rrecording 12 of 12 requests" in said.err
    rows = [
        {"timestamp": 10.0 * n, "input_length": 40, "output_length": 5, "hash_ids": [n, n + 1, n + 2]}
        for n in range(9)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for how in (("--engine", "qwen3", "--step-times", file), ("--timing", file, "--num-gpu-blocks", "39")):
        report = tmp_path / "report.json"
        command = ("replay", trace, "--trace-block-size", "16", "--block-size", "16", *how)
        assert run(*command, "--json", report) == 0
        told = json.loads(report.read_text())
        assert told["requests"]["completed"] == 9
        assert "recorded" in told["run"]["times"]["from"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model", "Llama-3.1-8B", "--gpu", "H100"], "reads its times and KV sizes from --step-times"),
        (["--g2", "512", "--kv-bytes-per-token", "131072"], "reads its times and KV sizes from --step-times"),
    ],
)
def test_times_and_weights_of_another_origin_are_refused(
    more: list[str], message: str, steps: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--trace-block-size", "16", "--engine", "qwen3", "--step-times", str(steps), *more]
    assert main(["replay", str(trace), *flags]) == 2
    assert message in capsys.readouterr().err


def test_step_times_belong_to_the_twin(steps: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace), "--step-times", str(steps)]) == 2
    assert "--step-times needs --engine qwen3" in capsys.readouterr().err


def test_the_tables_are_measured_on_cuda_without_being_told_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    class Built(Exception):
        """The engine would be built now."""

    def build(*_given: object) -> None:
        raise Built

    monkeypatch.setattr("understudy.cli.qwen3._build_engine", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("qwen3", "bench", "Qwen3-0.6B", "--random-weights", "1") == 2
    assert "CUDA" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(Built):
        run("qwen3", "bench", "Qwen3-0.6B", "--random-weights", "1")
