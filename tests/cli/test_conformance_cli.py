"""`understudy conformance`: what it prints and how it ends."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from understudy.cli import main

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm"


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """Two small scenarios with their recordings."""
    for part, ending in (("scenarios", "json"), ("golden", "jsonl.gz")):
        (tmp_path / part).mkdir()
        for name in ("single", "priority_phantom_hit"):
            shutil.copy(GOLDEN / part / f"{name}.{ending}", tmp_path / part)
    return tmp_path


def doctor(recordings: Path, name: str) -> None:
    path = recordings / "golden" / f"{name}.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    lines[4]["waiting"] = 77
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)


def test_identical_schedules_are_a_line_each_and_exit_code_0(
    recordings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", "vllm", str(recordings)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "same    priority_phantom_hit  16 steps",
        "same    single  20 steps",
        "2 of 2 scenarios identical, 36 steps compared",
    ]


def test_a_difference_is_told_and_the_rest_still_compared(
    recordings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor(recordings, "priority_phantom_hit")
    assert main(["conformance", "vllm", str(recordings)]) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith("differs priority_phantom_hit  step 3: waiting is ")
    assert first.endswith(", recorded 77")
    assert second == "same    single  20 steps"
    assert last == "1 of 2 scenarios identical, 23 steps compared"


def test_a_difference_with_lists_is_printed_as_it_is(
    recordings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Square brackets must not be taken for markup.
    scenario = recordings / "scenarios" / "single.json"
    content = json.loads(scenario.read_text())
    content["requests"][0]["id"] = "[bold]"
    scenario.write_text(json.dumps(content))
    assert main(["conformance", "vllm", str(recordings), "--only", "single"]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert '"[bold]"' in line
    assert line.startswith("differs single  step 0: scheduled is {")
    doctored = recordings / "golden" / "single.jsonl.gz"
    lines = [json.loads(line) for line in gzip.decompress(doctored.read_bytes()).splitlines()]
    for entry in lines[1:-1]:
        entry["scheduled"] = dict.fromkeys(["[bold]"], *entry["scheduled"].values())
    doctored.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    assert main(["conformance", "vllm", str(recordings), "--only", "single"]) == 1
    assert 'new is ["[bold]"], recorded [' in capsys.readouterr().out


def test_scenarios_can_be_chosen_and_checked(recordings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "vllm", str(recordings), "--only", "s*", "--check"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 1 scenarios identical, 20 steps compared"


def test_another_version_can_be_compared(recordings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "vllm", str(recordings), "--vllm-version", "v0.24"]) == 0
    assert main(["conformance", "vllm", str(recordings), "--vllm-version", "v0.23"]) == 1
    assert "free_head" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}/nowhere"], "no scenarios"),
        (["{}", "--only", "x*"], "'x*'"),
        (["{}", "--vllm-version", "v1"], "vllm_version 'v1' is not known"),
    ],
)
def test_bad_arguments_are_a_message_and_exit_code_2(
    recordings: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["conformance", "vllm", *(part.format(recordings) for part in arguments)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("understudy conformance: ")
    assert message in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


def test_a_missing_recording_is_exit_code_2(recordings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recordings / "golden" / "single.jsonl.gz").unlink()
    assert main(["conformance", "vllm", str(recordings)]) == 2
    assert "single.jsonl.gz" in capsys.readouterr().err


def test_another_engine_is_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["conformance", "sglang", "somewhere"])
    assert caught.value.code == 2
    assert "invalid choice: 'sglang'" in capsys.readouterr().err
