"""Whole deployments are predicted without what was fitted to them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from calibrate.rows import ROW, SMALL_ROW, table

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from measured.deployments import Deployed, format_scores, leave_out, read_tables, without
from understudy.timing.find_architecture import find_architecture
from understudy.timing.fitted_factors import read_fitted
from understudy.timing.gpus import find_gpu
from understudy.timing.presets import preset

MEASURED = {"tpot_ms": "8", "ttft_ms": "60"}
EXPERTS = {**SMALL_ROW, **MEASURED, "model_path": "gpt-oss-120b", "quant": "mxfp4", "tp_size": "2"}


def test_a_deployment_is_predicted_without_its_own_numbers_and_others_keep_theirs() -> None:
    def experts(model: str) -> float:
        return preset(find_architecture(model), find_gpu("H100"), "mxfp4", "bf16").efficiencies.experts

    own = experts("gpt-oss-120b")
    with without(Deployed("gpt-oss-120b", "H100", "vllm", "mxfp4"), read_fitted()):
        assert experts("gpt-oss-120b") != own
    with without(Deployed("gpt-oss-120b", "H200", "vllm", "mxfp4"), read_fitted()):
        assert experts("gpt-oss-120b") == own
    with without(Deployed("gpt-oss-120b", "H100", "sglang", "mxfp4"), read_fitted()):
        assert experts("gpt-oss-120b") == own
    assert experts("gpt-oss-120b") == own


def test_errors_are_counted_by_deployment_and_unknown_loads_have_no_ttft(tmp_path: Path) -> None:
    dense = {**ROW, **MEASURED, "osl": "4", "backend": "vllm", "ttft_usable": "1", "speculation": ""}
    rows = [
        dense,
        {**dense, "key": "b", "ttft_usable": "0"},
        {**dense, "key": "c", "speculation": "unknown"},
        {**dense, "key": "d", "backend": "sglang"},
        {**dense, "key": "e", "model_path": "no-such-model"},
    ]
    scores = leave_out(read_tables([table(tmp_path / "in.csv", *rows)], None), draws=1)
    found = {name: (len(one.tokens), len(one.first), one.refused) for name, one in scores.items()}
    assert found == {
        Deployed("Llama-3.1-8B", "H100", "vllm", "bf16"): (2, 1, 0),
        Deployed("Llama-3.1-8B", "H100", "sglang", "bf16"): (1, 1, 0),
        Deployed("no-such-model", "h100_sxm", "vllm", ""): (0, 0, 1),
    }
    assert format_scores(scores).row_count == 5


def test_corrected_cells_replace_those_of_the_table_and_may_be_of_another(tmp_path: Path) -> None:
    rows = table(tmp_path / "in.csv", {**ROW, **MEASURED})
    corrections = table(
        tmp_path / "cells.csv",
        {"key": "a", "column": "conc", "was": "4", "is": "9"},
        {"key": "elsewhere", "column": "conc", "was": "4", "is": "7"},
    )
    (found,) = read_tables([rows], corrections)
    assert [row["conc"] for row in found.rows] == ["9"]


@pytest.mark.parametrize("only", ["H100", "llama", "vllm bf16"])
def test_some_deployments_can_be_chosen_by_words_of_their_names(tmp_path: Path, only: str) -> None:
    rows = [{**SMALL_ROW, **MEASURED}, EXPERTS | {"key": "b", "system": "h200_sxm"}]
    scores = leave_out(read_tables([table(tmp_path / "in.csv", *rows)], None), only=only)
    assert [name.model for name, one in scores.items() if one.tokens] == ["Llama-3.1-8B"]
