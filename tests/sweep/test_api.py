"""`us.sweep` finds what the command finds, and keeps its name when its room is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import understudy as us
from understudy.cli import main
from understudy.errors import ConfigError

TRACE = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"


def test_python_finds_what_the_command_finds(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    words = ["--model", "Llama-3.1-8B", "--gpu", "H100", "--vary", "workers=1,2", "max-num-seqs=8,64"]
    words += ["--slo-ttft-ms", "200", "--gpu-hour", "H100=2.5", "--jobs", "1", "--quiet", "--json", str(path)]
    assert main(["sweep", str(TRACE), *words]) == 0
    found = us.sweep(
        TRACE,
        {"workers": [1, 2], "max_num_seqs": [8, 64]},
        model="Llama-3.1-8B",
        gpu="H100",
        slo={"ttft_ms": 200},
        prices={"H100": 2.5},
        jobs=1,
    )
    told, mine = (drop_times(json.loads(content)) for content in (path.read_bytes(), found.to_json()))
    assert told.pop("notes") != []
    mine.pop("notes")
    assert mine == told


def drop_times(value: Any) -> Any:
    """Return JSON values without the times that a sweep took."""
    if isinstance(value, dict):
        return {name: drop_times(one) for name, one in value.items() if name not in ("cpu_s", "wall_s")}
    return [drop_times(one) for one in value] if isinstance(value, list) else value


def test_a_sweep_by_bisection_continues_from_its_store(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "slo": {"ttft_ms": 200},
        "search": "bisect",
        "store": tmp_path / "s.jsonl",
        "jobs": 1,
    }
    first = us.sweep(TRACE, {"workers": [1, 2, 3, 4, 5]}, **given)
    again = us.sweep(TRACE, {"workers": [1, 2, 3, 4, 5]}, **given)
    assert again.ran == 0
    assert again.answers[0].best is not None
    assert first.answers[0].best is not None
    assert again.answers[0].best.summary == first.answers[0].best.summary


@pytest.mark.parametrize(
    ("vary", "more", "message"),
    [
        ({}, {}, "vary: nothing varies"),
        ({"workers": []}, {}, "vary: workers needs a list of values"),
        ({"workers": [1]}, {"search": "luck"}, "search must be grid or bisect"),
        ({"workers": [1]}, {"settings": {"workers": 2}}, "vary: workers is given for all fleets too"),
        ({"speed": [1]}, {}, "every combination is invalid; the first: .*speed"),
    ],
)
def test_a_wrong_argument_is_named(vary: dict[str, Any], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        us.sweep(TRACE, vary, slo={"ttft_ms": 200}, jobs=1, **more)


def test_a_public_function_keeps_its_name_when_its_room_is_imported_first() -> None:
    code = (
        "import understudy as us\nfrom understudy.sweep.candidate import Candidate\nimport understudy.sweep.space\n"
        "from understudy import sweep\nprint(callable(us.sweep), sweep is us.sweep, Candidate.__name__)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["True", "True", "Candidate"]


def test_capacity_and_convert_are_those_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["capacity", "--model", "gpt-oss-120b", "--gpu", "H200", "--max-model-len", "131072", "--json"])
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert us.capacity("gpt-oss-120b", "H200", max_model_len=131072).to_dict() == told
    mine, theirs = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    us.convert(TRACE, mine, busiest_s=60)
    assert main(["convert", str(TRACE), str(theirs), "--busiest", "60s"]) == 0
    assert mine.read_bytes() == theirs.read_bytes()
    with pytest.raises(ConfigError, match="busiest_s: contradicts start_s"):
        us.convert(TRACE, busiest_s=60, start_s=1)
