"""What `understudy replay` writes, and what it never writes over."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from understudy.cli import main
from workload.building import row, trace_file

if TYPE_CHECKING:
    from pathlib import Path

OTHERS = (
    "--requests-jsonl",
    "--html",
    "--events",
    "--raw-events",
    "--kv-trace",
    "--record-steps",
    "--decisions",
)
FLAGS = ("--json", *OTHERS)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return trace_file(tmp_path, row(), row(timestamp=5))


@pytest.mark.parametrize("flag", FLAGS)
def test_no_flag_overwrites_what_is_read(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    config = tmp_path / "fleet.yaml"
    config.write_text("workers: 2\n")
    for path in (trace, config):
        before = path.read_bytes()
        assert main(["replay", str(trace), "--config", str(config), flag, str(path)]) == 2
        assert f"{flag} would overwrite {path}" in capsys.readouterr().err
        assert path.read_bytes() == before


@pytest.mark.parametrize(
    "flags",
    [
        ["--routing", "FILE.py:Mine"],
        ["--format", "openai", "--tokenizer", "FILE"],
        ["--timing", "FILE"],
        ["--set", "engine.timing={kind: interpolated, path: FILE}"],
        ["--planner-profile-data", "FILE"],
        ["--model", "FILE.json", "--g2", "10"],
    ],
    ids=lambda flags: " ".join(flags),
)
def test_nor_any_other_file_that_a_run_reads(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    for name in ("file", "file.py", "file.json"):
        (tmp_path / name).write_text("{}")
    given = [flag.replace("FILE", str(tmp_path / "file")) for flag in flags]
    path = next(
        tmp_path / name for name in ("file.py", "file.json", "file") if any(name in flag for flag in given)
    )
    assert main(["replay", str(trace), *given, "--json", str(path)]) == 2
    assert "would overwrite" in capsys.readouterr().err
    assert path.read_text() == "{}"


@pytest.mark.parametrize(
    "argv",
    [
        ["replay", "TRACE", "--model", "FOLDER", "--g2", "10", "--json"],
        ["replay", "TRACE", "--model", "FOLDER", "--gpu", "H100", "--html"],
        ["replay", "TRACE", "--set", "model=FOLDER", "--g2", "10", "--html"],
        ["replay", "TRACE", "--set", "gpu.name=H100", "--set", "model=FOLDER", "--json"],
        ["events", "emit", "TRACE", "--set", "gpu.name=H100", "--set", "model=FOLDER", "--out"],
        ["calibrate", "TRACE", "--model", "FOLDER/config.json", "--gpu", "H100", "-o"],
        ["predict", "TRACE", "--model", "FOLDER", "--gpu", "H100", "-o"],
    ],
    ids=" ".join,
)
def test_nor_the_file_of_a_model_whose_folder_is_named(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shape = folder / "config.json"
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 64}
    before = json.dumps({**sizes, "vocab_size": 9})
    shape.write_text(before)
    given = [word.replace("TRACE", str(trace)).replace("FOLDER", str(folder)) for word in argv]
    assert main([*given, str(shape)]) == 2
    assert "would overwrite" in capsys.readouterr().err
    assert shape.read_text() == before


def test_emitted_events_overwrite_no_trace(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = trace.read_bytes()
    assert main(["events", "emit", str(trace), "--out", str(trace)]) == 2
    assert "--out would overwrite" in capsys.readouterr().err
    assert trace.read_bytes() == before
    for act in (["emit", str(trace), "--out"], ["tap", "tcp://127.0.0.1:1", "--record"]):
        assert main(["events", *act, str(tmp_path / "nowhere" / "file")]) == 2
        assert "the folder does not exist" in capsys.readouterr().err


def test_a_converted_trace_overwrites_no_tokenizer(tmp_path: Path, trace: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    assert main(["convert", str(trace), str(path), "--format", "openai", "--tokenizer", str(path)]) == 2
    assert path.read_text() == "{}"


def test_two_outputs_of_one_name_are_refused_before_the_run(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out"
    for one, other in zip(FLAGS, FLAGS[1:] + FLAGS[:1], strict=True):
        assert main(["replay", str(trace), one, str(path), other, str(path)]) == 2
        assert "would overwrite" in capsys.readouterr().err
        assert not path.exists()


def test_a_run_that_fails_leaves_what_was_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(input_length=16, output_length=30, hash_ids=[i]) for i in range(2)]
    stuck = "{block_size: 4, num_gpu_blocks: 12, max_num_batched_tokens: 20, enable_chunked_prefill: false}"
    steps = tmp_path / "steps.jsonl"
    steps.write_text("of the run before")
    argv = ["replay", str(trace_file(tmp_path, *rows)), "--record-steps", str(steps)]
    argv += ["--set", f"engine={stuck}", "--set", "engine.enable_prefix_caching=false"]
    assert main(argv) == 2
    assert "no progress" in capsys.readouterr().err
    assert steps.read_text() == "of the run before"


def test_a_report_on_standard_output_stands_there_alone(
    trace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(trace), "--json", "-"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["requests"]["completed"] == 2
    assert "TTFT" in said.err


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_a_digest_and_an_output_do_not_share_standard_output(
    trace: Path, capfd: pytest.CaptureFixture[str], flag: str, name: str
) -> None:
    assert main(["replay", str(trace), "--routing", "kv", flag, name, "--digest"]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert f"--digest: {flag} also writes to standard output; name a file for {flag}" in said.err


def test_notices_of_written_files_are_no_output(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(trace), "--json", str(tmp_path / "r.json")]) == 0
    said = capsys.readouterr()
    assert "written" not in said.out
    assert "r.json" in said.err.replace("\n", "")


def test_a_trace_comes_from_standard_input_too(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(trace), "--digest"]) == 0
    digest = capsys.readouterr().out
    for content in (trace.read_bytes(), gzip.compress(trace.read_bytes())):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert main(["replay", "-", "--digest"]) == 0
        assert capsys.readouterr().out == digest


@pytest.mark.parametrize("verb", [["replay", "-", "--json"], ["convert", "-"]])
def test_a_trace_on_standard_input_is_not_overwritten_either(trace: Path, verb: list[str]) -> None:
    before = trace.read_bytes()
    with trace.open("rb") as stdin:
        command = [sys.executable, "-m", "understudy", *verb, str(trace)]
        said = subprocess.run(command, stdin=stdin, capture_output=True, text=True, check=False)
    assert said.returncode == 2
    assert "which is read for TRACE" in said.stderr.replace("\n", "")
    assert trace.read_bytes() == before


# ── Nothing to report ──


def test_an_empty_trace_is_refused_unless_that_is_fine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, report = trace_file(tmp_path), tmp_path / "report.json"
    assert main(["replay", str(path), "--json", str(report)]) == 2
    assert "contains no requests" in capsys.readouterr().err
    assert not report.exists()
    assert main(["replay", str(path), "--allow-empty"]) == 0
    assert "0 of 0" in capsys.readouterr().out


def test_a_trace_whose_every_request_is_rejected_fails_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, requests = trace_file(tmp_path, row(), row(timestamp=1)), tmp_path / "requests.jsonl"
    argv = ["replay", str(path), "--num-gpu-blocks", "2", "--requests-jsonl", str(requests)]
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert "every request was rejected" in said
    assert "num_gpu_blocks=2" in said
    assert len(requests.read_text().splitlines()) == 2  # what happened is told all the same
    assert main([*argv, "--allow-empty"]) == 0


def test_memory_that_does_not_suffice_is_one_message(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("understudy.api.run_offline", no_memory)
    assert main(["replay", str(trace)]) == 2
    assert "memory" in capsys.readouterr().err
