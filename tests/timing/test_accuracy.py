"""Errors near a deployment, and the range of an answer that every output carries."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from understudy.cli import main
from understudy.timing.accuracy import find_accuracy, read_errors
from understudy.timing.find_architecture import find_architecture
from understudy.timing.fitted_factors import Target, read_fitted
from understudy.timing.gpus import find_gpu
from understudy.timing.presets import preset

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))
sys.path.append(str(ROOT / "benchmarks"))

import accuracy_tables  # noqa: E402
import write_accuracy  # noqa: E402
from harness.result import FOLDER, read_result  # noqa: E402

MINIMAX = Target(engine="vllm", gpu="H100", model="MiniMax-M2.5", weights="fp8", has_experts=True)


def test_a_measured_deployment_has_the_range_of_its_own_rows() -> None:
    found = find_accuracy(MINIMAX)
    assert found.own is not None
    assert found.own.target == MINIMAX
    assert found.tpot_percent == found.own.own.tpot.p90
    assert f"nine of ten its {found.own.rows} measured rows" in found.text()
    assert found.own not in found.near


def test_another_deployment_has_the_range_of_its_neighbours_without_them() -> None:
    other = Target(engine="vllm", gpu="H200", model="MiniMax-M2.5", weights="fp8", has_experts=True)
    found = find_accuracy(other)
    assert found.own is None
    assert found.near[0].target == MINIMAX
    ranges = sorted((one.left_out or one.own).tpot.p90 for one in found.near)
    assert found.tpot_percent == ranges[1]


def test_a_gpu_without_a_measured_relative_has_no_range() -> None:
    found = find_accuracy(
        Target(engine="vllm", gpu="L4", model="Llama-3.1-8B", weights="bf16", has_experts=False)
    )
    assert found.tpot_percent is None
    assert found.text() == "no error is known: nothing near it was measured"


def test_errors_are_of_the_deployments_that_were_fitted() -> None:
    fitted = {(one.model, one.gpu, one.engine, one.weights, one.rows) for one in read_fitted().deployments}
    scored = {(one.model, one.gpu, one.engine, one.weights, one.rows) for one in read_errors()}
    assert scored == fitted


def test_reports_predictions_and_sweeps_carry_the_range(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, report = tmp_path / "trace.jsonl", tmp_path / "report.json"
    rows = [{"timestamp": 0, "input_length": 500, "output_length": 4, "hash_ids": [i]} for i in range(3)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--model", "Llama-3.1-8B", "--gpu", "H100"]
    said = preset(find_architecture("Llama-3.1-8B"), find_gpu("H100"), "bf16", "bf16").range_text
    assert said.startswith("range TPOT ± ")
    assert main(["replay", str(trace), *flags, "--json", str(report), "--quiet"]) == 0
    assert said in json.loads(report.read_text())["run"]["times"]["from"]
    for words in (
        ["predict", "--isl", "100", "--osl", "10", "--concurrency", "2"],
        ["sweep", str(trace), "--slo-e2e-ms", "1e6", "--vary", "workers=1"],
    ):
        capsys.readouterr()
        assert main([*words, *flags]) == 0
        printed = capsys.readouterr()
        assert said in " ".join(f"{printed.out} {printed.err}".split()), words[0]


def test_the_verb_prints_neighbours_and_the_range(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accuracy", "DeepSeek-R1", "H200", "sglang", "--weight-dtype", "fp8"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("uncalibrated: SGLang was never measured on H200")
    assert "\nrange TPOT ± " in printed
    assert "\nDeepSeek-R1 in fp8 on H200 with TensorRT-LLM " in printed
    assert main(["accuracy", "Llama-3.1-8B", "L4", "vllm"]) == 0
    assert "no error is known" in capsys.readouterr().out
    assert main(["accuracy", "Llama-3.1-8B", "H100", "tgi"]) == 2
    assert "tgi" in capsys.readouterr().err


def test_the_page_is_the_one_that_the_script_writes(capsys: pytest.CaptureFixture[str]) -> None:
    assert write_accuracy.PAGE.read_text() == write_accuracy.write_page()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["write_accuracy.py", "--check"])
        assert write_accuracy.main() == 0
        patch.setattr(write_accuracy, "write_page", lambda: "other")
        assert write_accuracy.main() == 1
    assert "is stale; run python tools/write_accuracy.py" in capsys.readouterr().err


def test_every_table_of_the_page_comes_from_stored_numbers() -> None:
    text = write_accuracy.TEXT.read_text()
    written = {line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")}
    heads = {"name", "load", "", "---"}
    assert not [name for name in written if "%" in name], "errors belong into a stored table"
    assert heads & written == heads
    for name in accuracy_tables.render_tables():
        assert text.count(f"<!-- table: {name} -->") == 1


def test_the_page_lists_every_goal_with_its_number_and_whether_it_is_met() -> None:
    table = accuracy_tables.render_goals()
    result = read_result(FOLDER / "timing_goals.json")
    wanted = sum(len(row.numbers) for row in result.rows)
    lines = table.splitlines()[2:]
    assert len(lines) == wanted
    assert sum(line.endswith("| missed |") for line in lines) == len(result.missed)


def test_the_page_leads_with_the_models_that_people_ask_for_and_medians_of_what_was_left_out() -> None:
    page = (ROOT / "docs" / "accuracy.md").read_text()
    table = accuracy_tables.render_deployments(read_errors())
    assert table in page
    assert page.index("Medians over the") < page.index("## Goals") < page.index("## Definitions")
    names = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")][
        1:
    ]
    assert [name.split()[0] for name in (names[0], names[-1])] == ["DeepSeek-R1", "Llama-3.1-8B"]
    assert names[:2] == ["DeepSeek-R1 fp8, B200, SGLang", "DeepSeek-R1 nvfp4, B200, SGLang"]
    assert len(names) == len(read_errors())
    left = sorted(one.left_out.tpot.median for one in read_errors() if one.left_out is not None)
    rows = sum(one.rows for one in read_errors() if one.left_out is not None)
    middle = (left[len(left) // 2] + left[(len(left) - 1) // 2]) / 2
    said = (
        f"Medians over the {len(left)} deployments that can be left out ({rows:,} rows): TPOT {middle:.1f} %"
    )
    assert said in table
