"""`understudy sweep --splits`: the best split of GPUs into prefill and decode workers, or none."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from understudy.api import replay
from understudy.cli import main
from understudy.engines.vllm_config import VllmConfig
from understudy.report import Slo
from understudy.run.disaggregation import Disaggregation

TRACE = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"
BLOCKS = ["--num-gpu-blocks", "2048", "--kv-bytes-per-token", "1000"]
BLOCKS += ["--block-size", "64", "--max-num-batched-tokens", "8192"]


def sweep(tmp_path: Path, *flags: str, trace: Path = TRACE) -> dict[str, Any]:
    path = tmp_path / "sweep.json"
    assert main(["sweep", str(trace), "--quiet", "--jobs", "1", *flags, "--json", str(path)]) == 0
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def write_trace(path: Path, output: int) -> None:
    """Write requests of 2,000 to 6,000 prompt tokens without common prefixes."""
    draw, now, lines = random.Random(1), 0.0, []
    for row in range(80):
        now += draw.expovariate(1 / 60)
        tokens = draw.randint(2000, 6000)
        ids = [row * 1000 + block for block in range(-(-tokens // 512))]
        sizes = f'"input_length": {tokens}, "output_length": {output}'
        lines.append(f'{{"timestamp": {round(now)}, {sizes}, "hash_ids": {ids}}}')
    path.write_text("\n".join(lines) + "\n")


def replay_split(trace: Path, split: str, slo: Slo) -> float:
    """Replay one split without the sweep; return the share of requests within the goals."""
    prefill, _, decode = split.partition("+")
    settings: dict[str, Any] = {"workers": int(prefill)}
    if decode:
        settings = {
            "disaggregation": Disaggregation(prefill_workers=int(prefill), decode_workers=int(decode))
        }
    engine = VllmConfig(block_size=64, num_gpu_blocks=2048, max_num_batched_tokens=8192)
    goodput = replay(str(trace), engine, routing="least_loaded", slo=slo, **settings).goodput
    assert goodput is not None
    return goodput.ratio


@pytest.mark.parametrize(
    ("output", "ttft_ms", "itl_ms", "best"),
    [(30, 1000, 10, "2+4"), (30, 3000, 9, "1+5"), (30, 500, 12, "2+4"), (100, 500, 12, "6")],
)
def test_the_answer_is_the_best_of_all_splits(
    tmp_path: Path, output: int, ttft_ms: int, itl_ms: int, best: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, output)
    goal = ["--slo-ttft-ms", str(ttft_ms), "--slo-itl-ms", str(itl_ms), "--goal", "0.95"]
    engine = [*BLOCKS[:2], *BLOCKS[4:], "--routing", "least_loaded"]
    result = sweep(tmp_path, "--splits", "6", *goal, *engine, trace=trace)
    splits = ["6", "1+5", "2+4", "3+3", "4+2", "5+1"]
    assert [str(trial["flags"]["split"]) for trial in result["trials"]] == splits
    assert {trial["gpus"] for trial in result["trials"]} == {6}
    shares = {split: replay_split(trace, split, Slo(ttft_ms=ttft_ms, itl_ms=itl_ms)) for split in splits}
    assert [trial["good"] for trial in result["trials"]] == list(shares.values())
    (answer,) = result["answers"]
    chosen = answer["best"] or answer["smaller"]
    assert (answer["best"] is not None) == (max(shares.values()) >= 0.95)
    assert str(chosen["flags"]["split"]) == best == max(shares, key=lambda split: shares[split])


def test_fewer_gpus_that_meet_the_goal_are_preferred(tmp_path: Path) -> None:
    result = sweep(tmp_path, "--splits", "2..6+2", "--slo-ttft-ms", "20000", *BLOCKS)
    assert [str(trial["flags"]["split"]) for trial in result["trials"]] == [
        *("2", "1+1"),
        *("4", "1+3", "2+2", "3+1"),
        *("6", "1+5", "2+4", "3+3", "4+2", "5+1"),
    ]
    assert result["answers"][0]["best"]["gpus"] == 2


def test_rules_are_varied_together_with_splits(tmp_path: Path) -> None:
    flags = ["--vary", "disaggregation=always,uncached:64", "--kv-link-gbps", "1", "--slo-ttft-ms", "100"]
    result = sweep(tmp_path, "--splits", "2", *flags, *BLOCKS)
    assert [tuple(trial["flags"].values()) for trial in result["trials"]] == [
        (2, "always"),
        (2, "uncached:64"),
        ("1+1", "always"),
        ("1+1", "uncached:64"),
    ]
    without, same, *_ = result["trials"]
    assert without["digest"] == same["digest"]
    assert result["ran"] == 3  # workers without roles have no rule


def test_gpus_are_divided_by_those_of_a_worker(tmp_path: Path) -> None:
    flags = ["--model", "Llama-3.1-8B", "--gpu", "H100", "--tensor-parallel-size", "2"]
    result = sweep(tmp_path, "--splits", "6", *flags, "--slo-ttft-ms", "1000", "--max-tokens", "2")
    assert [str(trial["flags"]["split"]) for trial in result["trials"]] == ["3", "1+2", "2+1"]
    assert {trial["gpus"] for trial in result["trials"]} == {6}


def test_all_splits_are_listed_the_best_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "sweep.html"
    flags = ["--splits", "3", "--slo-ttft-ms", "100", "--jobs", "1", *BLOCKS, "--html", str(page)]
    assert main(["sweep", str(TRACE), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    begin = next(place for place, line in enumerate(lines) if line.startswith("Splits (prefill + decode"))
    rows = lines[begin + 2 : begin + 5]
    assert {row.split("split=")[1].split()[0] for row in rows} == {"3", "1+2", "2+1"}
    shares = [float(row.split("%")[0].split()[-1]) for row in rows]
    assert shares == sorted(shares, reverse=True)
    assert "split" in page.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--splits", "1"], "--splits: '1' is no number of GPUs for 2 or more workers of 1; write it as 8"),
        (["--splits", "many"], "--splits: 'many' is no number of GPUs"),
        (["--splits", "6", "--workers", "2"], "--workers: contradicts --splits, which sets the workers"),
        (["--splits", "6", "--vary", "prefill-workers=1,2"], "--prefill-workers: contradicts --splits"),
        (["--splits", "6", "--vary", "tensor-parallel-size=1,2"], "sweep each size by itself"),
        (["--splits", "6", "--tensor-parallel-size", "4"], "for 2 or more workers of 4"),
        (["--vary", "split=2+2"], "--vary split: not a flag that a sweep can vary"),
    ],
)
def test_splits_that_cannot_be_are_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    model = ["--model", "Llama-3.1-8B", "--gpu", "H100"]
    assert main(["sweep", str(TRACE), *flags, *model, "--slo-ttft-ms", "100"]) == 2
    assert message in capsys.readouterr().err
