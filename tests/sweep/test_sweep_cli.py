"""`understudy sweep`: its space, its refusals, its answer, and what a crash costs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from understudy.api import replay
from understudy.cli import main
from understudy.report import Slo

TRACE = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"
GOAL = ["--slo-ttft-ms", "100", "--slo-itl-ms", "30"]
SIZES = ["--block-size", "64", "--max-num-batched-tokens", "8192"]
"""Sizes with which two workers meet the goal and one does not."""


def sweep(tmp_path: Path, *flags: str, trace: Path = TRACE) -> dict[str, Any]:
    path = tmp_path / "sweep.json"
    assert main(["sweep", str(trace), "--quiet", "--jobs", "1", *GOAL, *flags, "--json", str(path)]) == 0
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def refuse(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["sweep", str(TRACE), *flags]) == 2
    return capsys.readouterr().err


def test_every_candidate_is_the_replay_with_its_flags(tmp_path: Path) -> None:
    result = sweep(tmp_path, "--vary", "workers=1,3", "routing=round_robin,kv", "--num-gpu-blocks", "2048")
    assert [trial["flags"] for trial in result["trials"]] == [
        {"workers": workers, "routing": routing} for workers in (1, 3) for routing in ("round_robin", "kv")
    ]
    report = tmp_path / "report.json"
    flags = ["--workers", "3", "--routing", "kv", "--num-gpu-blocks", "2048", "--quiet", "--no-advice"]
    assert main(["replay", str(TRACE), *flags, *GOAL, "--json", str(report)]) == 0
    expected = json.loads(report.read_text())
    last = result["trials"][-1]
    assert last["digest"] == expected["run"]["digest"]
    assert last["good"] == expected["goodput"]["ratio"]
    assert last["ttft_ms"]["p99"] == expected["ttft_ms"]["p99"]


@pytest.mark.parametrize(
    "flags",
    [
        "--vary g2-bytes=64GiB,1GiB,0 --offload-mode vllm",
        "--vary g2=unlimited,1000,none",
        "--vary kv-offloading-size=64,1,0",
    ],
)
def test_the_answer_has_the_smallest_host_of_equally_good_fleets(tmp_path: Path, flags: str) -> None:
    fleet = ("--num-gpu-blocks", "9000", "--kv-bytes-per-token", "4096", "--goal", "0.01", *SIZES)
    result = sweep(tmp_path, *flags.split(), *fleet)
    assert result["invalid"] == []
    assert len({trial["good"] for trial in result["trials"]}) == 1
    (best,) = result["answers"][0]["best"]["flags"].values()
    assert best in (0, "none")
    with_host = sweep(tmp_path, *re.sub(",(0|none)", "", flags).split(), *fleet)
    (best,) = with_host["answers"][0]["best"]["flags"].values()
    assert best in ("1GiB", 1000, 1)


def test_the_answer_is_the_cheapest_that_meets_the_goal(tmp_path: Path) -> None:
    result = sweep(tmp_path, "--vary", "workers=1..8", "max-num-seqs=4,64", *SIZES)
    meeting = [trial for trial in result["trials"] if trial["good"] >= 0.99]
    failing = [trial for trial in result["trials"] if trial["good"] < 0.99]
    assert meeting
    assert failing
    (answer,) = result["answers"]
    assert answer["best"]["gpus"] == min(trial["gpus"] for trial in meeting)
    assert answer["best"]["margin"] == answer["best"]["good"] - 0.99
    assert answer["smaller"]["gpus"] == answer["best"]["gpus"] - 1
    assert answer["smaller"]["margin"] < 0
    costs = [trial["gpus"] for trial in answer["front"]]
    shares = [trial["good"] for trial in answer["front"]]
    assert costs == sorted(set(costs))
    assert shares == sorted(set(shares))


def test_every_load_has_an_answer_of_its_own(tmp_path: Path) -> None:
    result = sweep(tmp_path, "--vary", "workers=1..8", "arrival-rate-scale=0.5,4")
    assert [answer["load"] for answer in result["answers"]] == [
        {"arrival-rate-scale": 0.5},
        {"arrival-rate-scale": 4},
    ]
    few, many = (answer["best"] or answer["smaller"] for answer in result["answers"])
    assert few["gpus"] < many["gpus"]


def test_prices_decide_between_gpus(tmp_path: Path) -> None:
    flags = ["--model", "Llama-3.1-8B", "--vary", "gpu=H100,H200", "workers=1,2", "--gpu-hour"]
    result = sweep(tmp_path, *flags, "H100=9", "H200=1")
    assert {trial["cost_per_hour"] for trial in result["trials"]} == {9, 18, 1, 2}
    nearest = result["answers"][0]["best"] or result["answers"][0]["smaller"]
    assert nearest["flags"]["gpu"] == "H200"


def test_invalid_combinations_have_their_reason_and_are_not_run(tmp_path: Path) -> None:
    flags = ["--model", "Llama-3.1-70B", "--gpu", "H100", "--vary", "tensor-parallel-size=1,3,4"]
    result = sweep(tmp_path, *flags)
    assert [trial["flags"]["tensor-parallel-size"] for trial in result["trials"]] == [4]
    reasons = {each["flags"]["tensor-parallel-size"]: each["reason"] for each in result["invalid"]}
    assert "leaves no room for KV blocks" in reasons[1]
    assert reasons[3] == "--tensor-parallel-size=3 does not divide the 64 heads of Llama-3.1-70B"


def test_flags_of_sglang_and_settings_vary_too(tmp_path: Path) -> None:
    flags = ["--engine", "sglang", "--vary", "schedule-policy=fcfs,lpm", "disable-radix-cache=no,yes"]
    assert len(sweep(tmp_path, *flags)["trials"]) == 4
    flags = ["--model", "Llama-3.1-8B", "--gpu", "H100", "--vary", "engine.max_num_seqs=8,16", "g2=,512"]
    assert len(sweep(tmp_path, *flags)["trials"]) == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vary", "worker=1..4", *GOAL], "worker: not a flag that a sweep can vary; did you mean workers?"),
        (["--vary", "html=a,b", *GOAL], "html: not a flag that a sweep can vary"),
        (
            ["--vary", "workers=1..4", "--workers", "2", *GOAL],
            "--workers: contradicts --vary workers; give one",
        ),
        (["--vary", "workers=1..x", *GOAL], "workers: '1..x' is not a number"),
        (["--vary", "engine=vllm,trt", *GOAL], "engine: 'trt' is not known; choose vllm or sglang"),
        (["--vary", "enable-prefix-caching=maybe", *GOAL], "neither yes nor no"),
        (["--vary", "workers=1..4"], "a sweep needs a goal"),
        ([*GOAL], "--vary: missing"),
        (["--vary", "workers=0", *GOAL], "every combination is invalid"),
        (["--vary", "workers=1..4", "--goal", "99", *GOAL], "--goal must be a share"),
        (["--vary", "workers=1..4", "--gpu-hour", "H300=3", *GOAL], "'H300' is not known"),
        (["--vary", "workers=1..4", "--engine", "qwen3", *GOAL], "a sweep simulates vllm or sglang"),
    ],
)
def test_a_sweep_refuses_by_name(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert message in refuse(capsys, *flags)


def test_a_second_sweep_reuses_the_store_and_only_its_own_settings(tmp_path: Path) -> None:
    store = ["--store", str(tmp_path / "sweep.jsonl")]
    first = sweep(tmp_path, "--vary", "workers=1..3", *store)
    assert (first["found"], first["ran"]) == (0, 3)
    second = sweep(tmp_path, "--vary", "workers=1..4", *store)
    assert (second["found"], second["ran"]) == (3, 1)
    assert second["trials"][:3] == first["trials"]
    other = sweep(tmp_path, "--vary", "workers=1..4", "--max-num-seqs", "7", *store)
    assert (other["found"], other["ran"]) == (0, 4)


def test_a_killed_sweep_resumes_with_the_same_answer(tmp_path: Path) -> None:
    """Kill -9 loses at most the candidates that were running, and leaves no process behind."""
    store, done = tmp_path / "sweep.jsonl", tmp_path / "done.json"
    flags = ["--vary", "workers=1..40", "max-num-seqs=8,64", "--jobs", "2", "--store", str(store), *GOAL]
    command = [
        sys.executable,
        "-m",
        "understudy",
        "sweep",
        str(TRACE),
        "--quiet",
        *flags,
        "--json",
        str(done),
    ]
    driver = subprocess.Popen(command)
    while not store.exists() or store.read_bytes().count(b"\n") < 5:
        assert driver.poll() is None, "finished before it could be killed"
        time.sleep(0.005)
    children = list_children(driver.pid)
    assert len(children) == 2
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    before = store.read_bytes().count(b"\n")
    assert before < 80
    deadline = time.monotonic() + 30
    while any(map(is_running, children)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, children))
    assert subprocess.run(command, check=False).returncode == 0
    resumed = json.loads(done.read_text())
    assert (resumed["found"], resumed["ran"]) == (before, 80 - before)
    whole = sweep(tmp_path, "--vary", "workers=1..40", "max-num-seqs=8,64")
    for kept in (resumed, whole):
        for trial in kept["trials"]:
            del trial["cpu_s"]
        for answer in kept["answers"]:
            for trial in (*answer["front"], answer["best"], answer["smaller"]):
                trial and trial.pop("cpu_s", None)
    assert resumed["answers"] == whole["answers"]
    assert resumed["trials"] == whole["trials"]


def list_children(process_id: int) -> list[int]:
    listed = Path(f"/proc/{process_id}/task/{process_id}/children").read_text()
    return [int(child) for child in listed.split()]


def is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_the_text_names_answer_margin_and_next_smaller_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--vary", "workers=1..8", "max-num-seqs=4,64", "--jobs", "1", *GOAL, *SIZES]
    assert main(["sweep", str(TRACE), *flags]) == 0
    text = capsys.readouterr().out
    for part in (
        "Answer (fewest GPUs): ",
        "above the goal",
        "next smaller fleet: ",
        "below the goal",
        "<- answer",
    ):
        assert part in text
    assert "Flags that mattered" in text
    assert len(text[text.index("Front") : text.index("Commands of the answer")].strip().splitlines()) <= 14


@pytest.mark.parametrize(
    ("flags", "source"),
    [
        ([], "a generic polynomial (Dynamo mocker), NOT a real GPU"),
        (["--model", "Qwen3-32B", "--gpu", "H200"], "preset: Qwen3-32B"),
    ],
)
def test_text_json_and_page_name_the_source_of_step_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], source: str
) -> None:
    files = {name: tmp_path / f"sweep.{name}" for name in ("json", "html")}
    outputs = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    argv = [str(TRACE), "--vary", "workers=1,2", "--jobs", "1", *GOAL, *flags, *outputs]
    assert main(["sweep", *argv]) == 0
    (times,) = json.loads(files["json"].read_text())["times"]
    report = tmp_path / "report.json"
    assert main(["replay", str(TRACE), *flags, "--quiet", "--no-advice", "--json", str(report)]) == 0
    assert times.startswith(json.loads(report.read_text())["run"]["times"]["from"])
    assert source in times
    assert f"times from {times}" in capsys.readouterr().out
    assert times in files["html"].read_text()


def test_a_candidate_counts_rejected_requests_as_late(tmp_path: Path) -> None:
    result = sweep(tmp_path, "--vary", "max-model-len=512,1000000")
    short, long = result["trials"]
    assert short["rejected"] > 0
    assert short["good"] <= 1 - short["rejected"] / short["requests"]
    assert long["good"] == replay(TRACE, slo=Slo(ttft_ms=100, itl_ms=30)).goodput.ratio  # type: ignore[union-attr]


def test_no_process_of_a_sweep_outlives_it(tmp_path: Path) -> None:
    others = set(list_children(os.getpid()))  # of tests that ran before in this process
    sweep(tmp_path, "--vary", "workers=1,2")
    assert set(list_children(os.getpid())) <= others


def test_the_manifest_is_that_of_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.yaml"
    sweep(tmp_path, "--vary", "workers=1..4", "--manifest", str(path), *SIZES)
    assert "# understudy sweep: workers=2; 2 GPUs" in path.read_text()
    path.unlink()
    assert main(["sweep", str(TRACE), "--vary", "workers=1", *GOAL, "--jobs=1", "--manifest", str(path)]) == 2
    printed = capsys.readouterr()
    assert "no fleet of the space meets the goal" in printed.err
    assert "nearest: 1 GPU" in printed.out
    assert not path.exists()


@pytest.mark.parametrize("search", [["--search", "bisect"], ["--search", "halving"], ["--random", "6"]])
def test_another_search_replays_fewer_and_says_so(tmp_path: Path, search: list[str]) -> None:
    flags = ["--vary", "workers=1..9", *search, "--store", str(tmp_path / "sweep.jsonl")]
    result = sweep(tmp_path, *flags)
    assert result["search"] == search[-1] if "--search" in search else "random"
    assert 0 < len(result["trials"]) < 9
    assert f"{len(result['trials'])} of 9 combinations whole" in result["notes"][0]
    again = sweep(tmp_path, *flags)
    assert (again["ran"], again["answers"]) == (0, result["answers"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vary", "max-num-seqs=1..2001"], "2,001 combinations are more than the 2,000 of a full grid"),
        (["--vary", "workers=1..4", "--random", "2", "--optuna", "2"], "--random: contradicts --optuna"),
        (["--vary", "workers=1..4", "--random", "0"], "--random must be at least 1"),
        (["--vary", "routing=kv,random", "--search", "bisect"], "no flag to bisect"),
    ],
)
def test_a_search_refuses_by_name(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert message in refuse(capsys, *flags, *GOAL)


def test_prefill_and_decode_workers_count_as_gpus(tmp_path: Path) -> None:
    flags = ["--vary", "prefill-workers=1,2", "decode-workers=1,3", "--kv-bytes-per-token", "1000"]
    result = sweep(tmp_path, *flags)
    assert [trial["gpus"] for trial in result["trials"]] == [2, 4, 3, 5]


def test_long_latencies_are_printed_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--vary", "workers=1,2", "--arrival-rate-scale", "500", "--max-num-seqs", "2", "--jobs", "1"]
    assert main(["sweep", str(TRACE), *GOAL, *flags]) == 0
    printed = capsys.readouterr().out
    assert "no fleet of the space meets the goal" in printed
    assert "e+0" not in printed
    assert "Engines of the other points" not in printed  # there is no answer from which they differ
