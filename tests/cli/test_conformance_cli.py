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


def test_identical_schedules_are_a_row_a_folder_and_version_and_exit_code_0(
    recordings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", "vllm", str(recordings)]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    (row,) = [line for line in table if "a014e35f38c8" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")][2:] == ["recorded", "2", "2", "36"]
    assert last == "2 of 2 scenarios identical, 36 steps compared"


def test_folders_of_all_kinds_are_found_at_any_depth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, name in (
        ("vllm-eos", "eos_sync_4"),
        ("vllm-async-aborts", "midasync_exact_224"),
        ("vllm-versions/v0.23.0", "ver_tiny_9000"),
    ):
        for part, ending in (("scenarios", "json"), ("golden", "jsonl.gz")):
            (tmp_path / folder / part).mkdir(parents=True)
            shutil.copy(GOLDEN.parent / folder / part / f"{name}.{ending}", tmp_path / folder / part)
    assert main(["conformance", "vllm", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "v0.23.0" in out
    assert out.splitlines()[-1].startswith("3 of 3 scenarios identical")


def test_a_difference_is_told_and_the_rest_still_compared(
    recordings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor(recordings, "priority_phantom_hit")
    assert main(["conformance", "vllm", str(recordings)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "differs ./priority_phantom_hit, step 3"
    assert lines[1].strip() == "waiting"
    assert lines[2].startswith("    here      ")
    assert lines[3] == "    recorded  77"
    assert lines[-1] == "1 of 2 scenarios identical, 23 steps compared"


def test_a_difference_with_lists_is_printed_as_it_is(
    recordings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Square brackets must not be taken for markup.
    scenario = recordings / "scenarios" / "single.json"
    content = json.loads(scenario.read_text())
    content["requests"][0]["id"] = "[bold]"
    scenario.write_text(json.dumps(content))
    assert main(["conformance", "vllm", str(recordings), "--only", "single"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["differs ./single, step 0", "  scheduled"]
    assert '{"[bold]":' in lines[2]
    doctored = recordings / "golden" / "single.jsonl.gz"
    entries = [json.loads(line) for line in gzip.decompress(doctored.read_bytes()).splitlines()]
    for entry in entries[1:-1]:
        entry["scheduled"] = dict.fromkeys(["[bold]"], *entry["scheduled"].values())
    doctored.write_bytes(gzip.compress("\n".join(map(json.dumps, entries)).encode()))
    assert main(["conformance", "vllm", str(recordings), "--only", "single"]) == 1
    assert 'here      ["[bold]"]' in capsys.readouterr().out


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
        (["{}/nowhere"], "nowhere does not exist; name a folder of recordings"),
        (["{}", "--only", "x*"], "'x*'"),
        (["{}", "--vllm-version", "v1"], "--vllm-version 'v1' is not known"),
        (["{}", "--vllm-version", "1.2"], "the newest known release is 0.33"),
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
        main(["conformance", "tensorrt", "somewhere"])
    assert caught.value.code == 2
    assert (
        "ENGINE: 'tensorrt' is not known; choose vllm, sglang, trtllm or planner" in capsys.readouterr().err
    )
