"""`predict` and `capacity` take speculation, and mean by it what `replay` does."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from answers.evidence import run
from answers.predict_audit import equal_requests, predict_closed_loop, spell
from understudy.cli import main

if TYPE_CHECKING:
    from pathlib import Path

ON_H100 = {"model": "Llama-3.1-8B", "gpu": "H100"}
EAGLE = json.dumps({"method": "eagle3", "num_speculative_tokens": 3, "accept_rates": [0.7, 0.5, 0.3]})
ASSUMED = json.dumps({"method": "mtp", "num_speculative_tokens": 2})


def drafting(config: str = EAGLE) -> dict[str, str]:
    return {**ON_H100, "speculative-config": config}


def blocks_of(flags: dict[str, str], folder: Path) -> int:
    """KV blocks of a replay."""
    trace = folder / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in equal_requests(100, 4, 2)))
    how = ("--trace-block-size", "16", "--no-advice", "--quiet", "--json", "-")
    return int(json.loads(run("replay", str(trace), *how, *spell(flags)))["run"]["engine"]["num_gpu_blocks"])


def test_drafts_shorten_predicted_answers_and_lengthen_prompts() -> None:
    plain = predict_closed_loop(ON_H100, 1000, 60, 1, least=1)
    drafted = predict_closed_loop(drafting(), 1000, 60, 1, least=1)
    assert drafted[0] > plain[0]  # the drafter computes the prompt, too
    assert drafted[1] < 0.7 * plain[1]


@pytest.mark.parametrize(
    ("config", "words"), [(EAGLE, "as given, 0.7, 0.5, 0.3"), (ASSUMED, "assumed, 0.85")]
)
def test_a_prediction_says_whether_its_acceptance_is_assumed(
    config: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--isl", "100", "--osl", "4", "--concurrency", "1"]
    assert main(["predict", *load, *spell(drafting(config))]) == 0
    err = capsys.readouterr().err
    assert f"acceptance is {words}" in err
    assert "every step ends with" in err
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in equal_requests(100, 4, 2)))
    of_a_trace = ["--format", "mooncake", "--trace-block-size", "16"]
    assert main(["predict", str(trace), *of_a_trace, *spell(drafting(config))]) == 0
    assert f"acceptance is {words}" in capsys.readouterr().err


def test_all_verbs_leave_a_drafter_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--isl", "100", "--osl", "4", "--concurrency", "1"]
    assert main(["predict", *load, *spell(drafting())]) == 0
    said = re.search(r"([\d,]+) KV blocks of 16 tokens", capsys.readouterr().err)
    assert said is not None
    predicted = int(said[1].replace(",", ""))
    planned = json.loads(run("capacity", "--max-model-len", "8192", "--json", *spell(drafting())))
    assert predicted == blocks_of(drafting(), tmp_path) == planned["num_blocks"] - 1
    assert predicted < 0.96 * blocks_of(ON_H100, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["predict", "TABLE", *spell(drafting())],
            "acceptance_per_position (closed loops) for --speculative-config",
        ),
        (["predict", "--isl", "9", "--osl", "9", "--concurrency", "1", *spell(drafting("{}"))], "method"),
        (
            ["predict", "--isl", "9", "--osl", "9", "--concurrency", "1", *spell(drafting("[1]"))],
            "--speculative-config must be a mapping",
        ),
        (
            [
                *("capacity", "--max-model-len", "99", "--model", "Llama-3.1-8B", "--kv-memory", "20GiB"),
                *("--speculative-config", EAGLE),
            ],
            "a drafter's part of --kv-memory is not known",
        ),
        (
            ["capacity", "--max-model-len", "99", *spell({**drafting(), "model": "gpt-oss-20b"})],
            "--disable-hybrid-kv-cache-manager",
        ),
    ],
)
def test_speculation_that_has_no_meaning_is_refused(
    arguments: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.csv"
    table.write_text("key,system,model_path,isl,osl,conc\na,H100,Llama-3.1-8B,100,10,1\n")
    assert main([str(table) if word == "TABLE" else word for word in arguments]) == 2
    assert problem in " ".join(capsys.readouterr().err.split())
