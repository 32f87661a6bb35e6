"""us.cache, us.explain and us.calibrate have the results of the commands, and print like them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import understudy as us
from understudy.cli import main
from understudy.errors import ConfigError, InvalidArgument, WrongState

TRACE = Path(__file__).parents[1] / "examples" / "demo_trace.jsonl"


def read(text: bytes | str) -> Any:
    return json.loads(text)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("", {}),
        ("--sizes 200blocks,900blocks --policies lru,optimal --warm-up 0.5", {
            "sizes": ["200blocks", "900blocks"], "policies": ["lru", "optimal"], "warm_up": 0.5}),
        ("--model Llama-3.1-8B --sizes 1,2 --prompts-only --knee-points 0.5", {
            "model": "Llama-3.1-8B", "sizes": [1, 2], "prompts_only": True, "knee_points": 0.5}),
        ("--model Llama-3.1-8B --gpu H100 --workers 2 --routing kv --host-gib 4 --no-replays", {
            "model": "Llama-3.1-8B", "gpu": "H100", "workers": 2, "routing": "kv", "host_gib": 4, "replays": False}),
        ("--num-gpu-blocks 600 --block-size 32 --users 0.5 --no-replays", {
            "num_gpu_blocks": 600, "block_size": 32, "users": 0.5, "replays": False}),
    ],
)  # fmt: skip
def test_a_cache_study_equals_the_commands(
    words: str, given: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", str(TRACE), *words.split(), "--quiet", "--json", "-"]) == 0
    study = us.cache(TRACE, **given)
    assert read(study.to_json()) == read(capsys.readouterr().out)
    assert repr(study).startswith("<CacheStudy of demo_trace.jsonl: ")
    assert "hit" in str(study)


def test_an_explanation_equals_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.npz"
    report = us.replay(TRACE, workers=2, outputs=us.Outputs(save_run=run))
    asked: list[tuple[list[str], dict[str, Any]]] = [
        (["--slowest", "3", "--misses"], {"slowest": 3, "misses": True}),
        (["--request", "17"], {"request": 17}),
    ]
    for words, given in asked:
        assert main(["explain", str(run), *words, "--json", "-"]) == 0
        told = read(capsys.readouterr().out)
        found = us.explain(run, **given)
        assert read(found.to_json()) == told
        assert us.explain(report, **given).parts_ns == found.parts_ns
    assert repr(found).startswith("<Explanation of 1 request: ")
    assert str(found).startswith("request 17 on worker ")
    with pytest.raises(WrongState, match="this report has no steps"):
        us.explain(us.replay(TRACE))


def test_a_calibration_equals_the_commands(tmp_path: Path) -> None:
    bench, mine, theirs = (tmp_path / name for name in ("bench.csv", "mine.yaml", "theirs.yaml"))
    bench.write_text("isl,osl,conc,mean_ttft_ms,mean_tpot_ms\n500,50,4,40,9\n500,50,16,70,12\n")
    words = ["--model", "Llama-3.1-8B", "--gpu", "H100", "--max-num-seqs", "64"]
    assert main(["calibrate", str(bench), *words, "-o", str(theirs)]) == 0
    found = us.calibrate(bench, model="Llama-3.1-8B", gpu="H100", settings={"max_num_seqs": 64})
    found.save(mine)
    assert mine.read_text() == theirs.read_text()
    assert repr(found).startswith("<Calibration of ")
    again = us.calibrate([bench], timing=mine, settings={"max_num_seqs": 64})
    assert again.scores == found.scores
    assert "TTFT" in str(again)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: us.cache(TRACE, policies=["mru"]), "policies: 'mru' is not known"),
        (lambda: us.cache(TRACE, sizes=["many"]), "'many' is not a size"),
        (lambda: us.cache(TRACE, model="Llama-3.1-8B", kv_bytes_per_token=9), "kv_bytes_per_token: model sets"),
        (lambda: us.cache(TRACE, host_gib=4), "host-gib: the size of the device's cache is not known"),
        (lambda: us.calibrate([]), "benchmarks: there is nothing to fit"),
        (lambda: us.calibrate(TRACE), "model, gpu: a fit needs both"),
        (lambda: us.calibrate(TRACE, timing="x", gpu="H100"), "gpu: timing already names"),
        (lambda: us.calibrate(TRACE, settings={"seqs": 3}), "settings: seqs is not known"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(call: Any, message: str) -> None:
    with pytest.raises((ConfigError, InvalidArgument), match=message):
        call()
