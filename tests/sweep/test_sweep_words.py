"""The text of a sweep explains itself: its words, a command for every fleet, what to do without an answer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from understudy.cli import main

if TYPE_CHECKING:
    from collections.abc import Sequence

TRACE = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"
GOAL = ("--slo-ttft-ms", "100", "--slo-itl-ms", "30")
SIZES = ("--block-size", "64", "--max-num-batched-tokens", "8192")
GPU = ("--model", "Qwen3-32B", "--gpu", "H200")


def sweep(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: Sequence[str]
) -> tuple[str, dict[str, Any]]:
    """Return text and JSON of a sweep of the demo trace."""
    path = tmp_path / "sweep.json"
    assert main(["sweep", str(TRACE), *words, "--jobs", "1", "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return capsys.readouterr().out, found


def test_every_word_of_the_table_is_explained_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text, _ = sweep(capsys, tmp_path, ["--vary", "workers=1..8", *GOAL, *SIZES])
    head = next(line for line in text.splitlines() if line.endswith("  flags"))
    legend = text.partition("\nColumns:\n")[2].partition("\n\n")[0]
    assert text.count("out tok/s: ") == 1
    for column in ("in time", "in time req/s", "out tok/s", "TTFT p99", "ITL p99"):
        assert column in head
    for word in ("in time: ", "in time req/s: ", "out tok/s: ", "TTFT: ", "ITL: ", "p99: "):
        assert word in legend
    assert "Front (the best fleet of each cost): " in text
    assert re.search(r"\d+\.\d\d percentage points above the goal", text)
    assert re.search(r"next smaller fleet: .* \d+\.\d\d percentage points below the goal", text)
    for undefined in ("margin", "goodput", "points short"):
        assert undefined not in text


def test_a_goal_is_stated_in_percent(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text, _ = sweep(capsys, tmp_path, ["--vary", "workers=1,2", *GOAL, "--goal", "0.5"])
    assert "goal: TTFT ≤ 100 ms and ITL ≤ 30 ms for 50 % of requests\n" in text


def test_every_point_of_the_front_has_its_flags_and_its_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--vary", "workers=1..4", "routing=round_robin,kv", *GOAL]
    text, found = sweep(capsys, tmp_path, flags)
    (answer,) = found["answers"]
    blocks = text[text.index("Engines of the ") :]
    for trial in answer["front"]:
        if answer["best"] is not None and trial["flags"] == answer["best"]["flags"]:
            assert all(command in text for command in trial["commands"])
            continue
        named = " ".join(f"{name}={value}" for name, value in trial["flags"].items())
        block = blocks[blocks.index(f"  {named} (") :].splitlines()[1]
        assert block == f"    {trial['engines'][0]['engines']} x engine: {trial['engines'][0]['command']}"


def test_without_an_answer_the_text_says_by_how_much_the_nearest_misses_and_what_to_change(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--vary", "workers=1..2", "--slo-ttft-ms", "100", "--slo-itl-ms", "20", *GPU]
    text, found = sweep(capsys, tmp_path, flags)
    assert "Answer: no fleet of the space meets the goal\n" in text
    near = found["answers"][0]["smaller"]
    assert f"{100 * (0.99 - near['good']):.2f} percentage points below the goal" in text
    (widen,) = re.findall(r"^  widen the space: (.*)$", text, re.MULTILINE)
    (relax,) = re.findall(r"^  or relax the goal: (.*)$", text, re.MULTILINE)
    assert "--vary workers=" in widen
    share = re.search(r"--goal ([0-9.]+)", relax)
    assert share is not None
    limit = re.search(r"--slo-itl-ms ([0-9.]+)", relax)
    assert limit is not None
    assert near["itl_ms"]["p99"] <= float(limit[1]) <= 1.01 * near["itl_ms"]["p99"]
    again, _ = sweep(capsys, tmp_path, [*flags, "--goal", share[1]])
    assert "Answer (fewest GPUs): " in again


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--vary", "max-num-seqs=2,4"], "--vary workers="),
        (["--splits", "2", "--kv-bytes-per-token", "1000"], "--splits 4"),
        (["--vary", "prefill-workers=1", "decode-workers=1,2", "--kv-bytes-per-token", "1000"], "--splits 6"),
    ],
)
def test_the_remedy_names_the_flag_that_sizes_the_fleet(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], said: str
) -> None:
    text, _ = sweep(capsys, tmp_path, [*flags, "--slo-ttft-ms", "0.001"])
    assert re.search(rf"^  widen the space: .*{re.escape(said)}", text, re.MULTILINE)


def test_requests_that_fit_no_worker_need_memory_and_not_workers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--vary", "workers=1..2", "--num-gpu-blocks", "4", *GOAL]
    text, found = sweep(capsys, tmp_path, flags)
    rejected = found["answers"][0]["smaller"]["rejected"]
    assert rejected > 0
    assert f"  {rejected:,} requests fit no worker, and more workers do not help them: " in text
    assert "give each more memory (--num-gpu-blocks)" in text


def test_fleets_of_pools_grow_in_their_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "pools.yaml"
    config.write_text(
        "pools:\n  - {name: a, workers: 1, engine: {}}\n  - {name: b, workers: 1, engine: {}}\n"
    )
    flags = ["--config", str(config), "--vary", "routing=round_robin,least_loaded", "--slo-ttft-ms", "0.001"]
    text, _ = sweep(capsys, tmp_path, flags)
    assert "widen the space: more workers in a pool (workers of pools, in --config)" in text


def test_the_estimate_of_kv_blocks_is_printed_as_a_replay_prints_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    words = ["--workers", "2", "--max-num-seqs", "64", *GPU, "--no-advice", "--quiet", "--json", str(report)]
    assert main(["replay", str(TRACE), *words]) == 0
    (note,) = [
        note for note in json.loads(report.read_text())["run"]["notes"] if note.startswith("estimated")
    ]
    flags = ["--vary", "workers=1,2", "max-num-seqs=64,1024", "--slo-ttft-ms", "5000", *GPU]
    text, found = sweep(capsys, tmp_path, flags)
    assert note in text
    assert any(note in one for one in found["notes"])
