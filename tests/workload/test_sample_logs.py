"""The sample logs: made by their script, and each goes all the way from a log to a table."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from understudy.cli import main

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "examples" / "logs"
FORMATS = {
    "requests.jsonl": "openai",
    "sharegpt.json": "sharegpt",
    "vllm_bench.json": "vllm-bench",
    "profile_export.jsonl": "aiperf",
    "azure.csv": "azure",
    "burstgpt.csv": "burstgpt",
    "mooncake.jsonl": "mooncake",
}


def test_the_committed_logs_are_what_their_script_makes(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "examples" / "make_logs.py"))["main"](tmp_path)
    assert {path.name for path in LOGS.iterdir()} == set(FORMATS)
    for name in FORMATS:
        assert (tmp_path / name).read_bytes() == (LOGS / name).read_bytes(), name


@pytest.mark.parametrize("name", FORMATS)
def test_a_log_of_each_format_is_replayed_converted_and_as_it_is(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    form, size = FORMATS[name], "512" if name == "mooncake.jsonl" else "16"
    load = ["--concurrency", "4"] if form == "sharegpt" else []
    trace = tmp_path / "trace.jsonl"
    assert main(["convert", str(LOGS / name), str(trace), "--format", form]) == 0
    said = capsys.readouterr().err
    assert ("prefix caching is unknown" in said) == (form in ("vllm-bench", "aiperf", "azure", "burstgpt"))
    assert "lighthouse" not in trace.read_text()
    assert main(["replay", str(trace), "--trace-block-size", size, "--digest", *load]) == 0
    converted = capsys.readouterr().out
    assert main(["replay", str(LOGS / name), "--format", form, "--digest", *load]) == 0
    assert capsys.readouterr().out == converted


@pytest.mark.parametrize("page", ["README.md", "docs/traces.md"])
def test_your_own_trace_in_five_lines_runs_as_it_stands(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "examples" / "logs"
    logs.mkdir(parents=True)
    (logs / "requests.jsonl").write_bytes((LOGS / "requests.jsonl").read_bytes())
    monkeypatch.chdir(tmp_path)
    text = (ROOT / page).read_text(encoding="utf-8")
    block = next(block for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if "convert" in block)
    lines = [line for line in block.replace("\\\n", "").splitlines() if line.startswith("understudy")]
    assert len(lines) >= 4
    for line in lines:
        assert main(shlex.split(line, comments=True)[1:]) == 0, line
    assert "Times from" in capsys.readouterr().out
