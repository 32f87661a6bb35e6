"""Predictions: the load of a benchmark is replayed as it was run, row by row and request by request."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.rows import ROW, SMALL_ROW, SMALL_STAGES, STAGES, predicted, table
from understudy.calibrate.load import build_load, constant_stages, random_lengths
from understudy.calibrate.predict import Prediction, predict_table
from understudy.calibrate.simulate import simulate
from understudy.calibrate.tables import Table
from understudy.cli import main
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, InvalidArgument
from understudy.timing.capacity import kv_blocks
from understudy.timing.deployment import Deployment, Parallelism
from understudy.timing.find_architecture import find_architecture
from understudy.timing.gpus import find_gpu

TEN_MS = VllmConfig(
    timing=Constant(prefill_ms=0.0, decode_ms=10.0),
    block_size=16,
    async_scheduling=True,
    enable_prefix_caching=False,
)


# --- loads ----------------------------------------------------------------------------------------------


def test_a_client_waits_for_the_front_end_before_and_after_the_engine() -> None:
    load = build_load([10, 10], [3, 3], concurrency=1)
    seen = simulate(load, TEN_MS, front_end_ms=6.0)
    assert seen.ttft_ms.tolist() == [16.0, 16.0]
    assert seen.tpot_ms.tolist() == [10.0, 10.0]
    assert seen.e2e_ms.tolist() == [36.0, 36.0]


def test_random_lengths_are_uniform_below_the_nominal_ones() -> None:
    load = random_lengths(1000, 500, least=0.8, concurrency=4, prompts=400, seed=0)
    w = load.workload
    assert [w.prompt_tokens.min(), w.prompt_tokens.max()] == [800, 1000]
    assert 890 < w.prompt_tokens.mean() < 910
    assert 445 < w.output_tokens.mean() < 455
    with pytest.raises(ConfigError, match="least must be in"):
        random_lengths(10, 10, least=0.0, concurrency=1, prompts=1, seed=0)


def test_stages_have_constant_rates_one_after_another_and_prompts_that_repeat() -> None:
    load = constant_stages(100, 10, rates_per_s=[2, 4], stage_seconds=[3, 2], distinct_prompts=5)
    arrivals = load.workload.arrival_ns / 1e9
    assert np.allclose(arrivals[:6], np.arange(6) / 2)
    assert np.allclose(arrivals[6:], 3 + np.arange(8) / 4)
    assert len(set(load.workload.hash_ids.tolist())) == 5


# --- tables ---------------------------------------------------------------------------------------------


def test_rows_of_both_layouts_are_predicted(tmp_path: Path) -> None:
    closed = Table.read(
        table(tmp_path / "closed.csv", ROW, {**ROW, "key": "b", "conc": "8", "max_num_seqs": "8"})
    )
    low, high = predicted(closed)
    assert 5 < low["tpot_ms"] < high["tpot_ms"] < 20
    assert 20 < low["ttft_ms"] < 200
    staged = predicted(Table.read(table(tmp_path / "stages.csv", STAGES)))[0]
    assert staged["itl_ms"] == pytest.approx((staged["e2e_ms"] - staged["ttft_ms"]) / 39)


def test_a_prediction_does_not_look_at_what_was_measured(tmp_path: Path) -> None:
    plain = predict_table(Table.read(table(tmp_path / "a.csv", ROW)))
    told = predict_table(
        Table.read(table(tmp_path / "b.csv", {**ROW, "ttft_ms": "1", "tpot_ms": "1", "stratum": "z"}))
    )
    assert plain == told


@pytest.mark.parametrize("cell", ["", "nan", "fast", "-3", "inf"])
def test_a_row_whose_measurement_nobody_can_read_is_predicted_and_not_compared_with(
    tmp_path: Path, cell: str
) -> None:
    found = Table.read(table(tmp_path / "in.csv", {**ROW, "ttft_ms": cell, "tpot_ms": "9.5"})).experiment(0)
    assert found.measurement("tpot_ms") == 9.5
    with pytest.raises(
        InvalidArgument, match=r"in\.csv:2: ttft_ms must be a number above 0 .*remove the row"
    ):
        found.measurement("ttft_ms")


def test_the_same_table_gives_the_same_bytes(tmp_path: Path) -> None:
    source = table(tmp_path / "in.csv", ROW)
    for name in ("one.csv", "two.csv"):
        assert main(["predict", str(source), "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / "one.csv").read_bytes() == (tmp_path / "two.csv").read_bytes()
    assert (tmp_path / "one.csv").read_text().startswith("key,ttft_ms,tpot_ms\na,")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model_path": "Nobody-7B"}, r"in\.csv:2: model 'Nobody-7B' is neither"),
        ({"system": "abacus"}, r"in\.csv:2: gpu 'abacus' is not known"),
        ({"quant": "int3"}, r"in\.csv:2: weight type 'int3' is not known"),
        ({"tp_size": "3"}, r"in\.csv:2: tensor_parallel_size=3 does not divide the 32 heads"),
        ({"isl": "many"}, r"in\.csv:2: isl must be a number, got 'many'"),
        ({"conc": "0"}, r"in\.csv:2: conc must be finite and above 0"),
        ({"osl": ""}, r"in\.csv:2: osl is empty"),
        ({"isl": " nan "}, r"in\.csv:2: isl is 'nan', which means empty"),
        ({"system": "N/A"}, r"in\.csv:2: system is 'N/A', which means empty"),
        ({"conc": "", "key": "nothing"}, r"in\.csv:2: conc is empty"),
        ({"isl": "1e12"}, r"in\.csv:2: isl must be a whole number up to"),
        ({"system": "h100_pcie"}, r"in\.csv:2: gpu 'h100_pcie' is not known"),
        ({"model_path": "Llama-3.1-405B"}, r"in\.csv:2: Llama-3.1-405B in bf16 takes .* leaves no room"),
    ],
)
def test_a_bad_row_is_refused_with_its_file_line_and_column(
    tmp_path: Path, change: dict[str, str], match: str
) -> None:
    found = Table.read(table(tmp_path / "in.csv", {**ROW, **change}))
    with pytest.raises(InvalidArgument, match=match):
        found.experiment(0)


@pytest.mark.parametrize(
    "change",
    [
        {"kv_cache_dtype": "", "max_num_seqs": "", "max_num_batched_tokens": "", "tp_size": ""},
        {"key": "x_1024x128_c4_cfg1#2", "conc": ""},
        {"quant": "auto"},
        {"max_num_seqs": "nan", "moe_ep_size": "NaN", "tp_size": "None", "max_num_batched_tokens": " - "},
        {"model_path": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "unheard_of": "7"},
        {"quant": "", "precision": "BFloat16"},
        {"quant": "FP8-Dynamic", "kv_cache_dtype": "fp8_e4m3"},
        {"system": "NVIDIA H200", "model_path": "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic"},
        {"ttft_ms": "nan", "tpot_ms": "-1"},
        {"quant": "float8_e4m3fn", "kv_cache_dtype": "fp8_e5m2", "tp_size": "2"},
        {"quant": "W8A8", "kv_cache_dtype": "BFloat16", "system": "A100-SXM4-80GB"},
        {"quant": "nvfp4", "system": "H200", "kv_cache_dtype": "auto"},
        {"quant": "", "model_path": "nvidia/Llama-3.1-8B-Instruct-NVFP4", "system": "gb200_sxm"},
        {"model_path": "Qwen/Qwen3-32B", "quant": "fp8", "system": "rtx_pro_6000_server"},
        {
            "model_path": "mistralai/Mixtral-8x7B-Instruct-v0.1",
            "quant": "fp16",
            "tp_size": "2",
            "system": "a100",
        },
        {"model_path": "MiniMaxAI/MiniMax-M2.5", "quant": "nvfp4", "tp_size": "2", "system": "b200_sxm"},
        {"system": "L40S", "conc": "1", "isl": "1", "osl": "2"},
        {"model_path": "openai/gpt-oss-20b", "quant": "w4a16_mxfp4"},
        {"model_path": "Qwen/Qwen3-30B-A3B-Instruct-2507", "moe_tp_size": "1", "moe_ep_size": "2"},
    ],
)
def test_rows_with_gaps_and_other_spellings_are_predicted(tmp_path: Path, change: dict[str, str]) -> None:
    found = predict_table(Table.read(table(tmp_path / "in.csv", {**ROW, "osl": "16", **change})))[0]
    assert isinstance(found, Prediction), found
    assert found.means["ttft_ms"] > found.means["tpot_ms"] > 0


def test_a_row_may_name_the_release_that_it_ran_with(tmp_path: Path) -> None:
    row = {
        **SMALL_ROW,
        "model_path": "MiniMaxAI/MiniMax-M2.5",
        "quant": "fp8",
        "system": "b200_sxm",
        "tp_size": "2",
    }
    rows = [{**row, "backend_version": version} for version in ("0.19.0", "0.17.0", "v0.17.0", "", "nan")]
    now, before, alike, *unsaid = predict_table(Table.read(table(tmp_path / "in.csv", *rows)))
    assert isinstance(now, Prediction)
    assert isinstance(before, Prediction)
    assert before.means["tpot_ms"] > 1.05 * now.means["tpot_ms"]
    assert alike == before
    assert unsaid == [now, now]


def test_experts_of_more_gpus_than_a_rank_has_are_those_of_several_ranks(tmp_path: Path) -> None:
    row = {**ROW, "model_path": "Qwen3-30B-A3B", "moe_tp_size": "1", "moe_ep_size": "4", "tp_size": "2"}
    one = Table.read(table(tmp_path / "in.csv", row)).experiment(0)
    assert one.deployment.parallel == Parallelism(tensor=2, data=2, expert=4)
    odd = Table.read(table(tmp_path / "odd.csv", {**row, "tp_size": "8"}))
    with pytest.raises(InvalidArgument, match="moe_ep_size = 4 is not a multiple of tp_size=8"):
        odd.experiment(0)


def test_columns_without_effect_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {**SMALL_ROW, "note": "x", "empty": "", "ttft_ms": "3"}
    assert main(["predict", str(table(tmp_path / "in.csv", row)), "-o", str(tmp_path / "out.csv")]) == 0
    assert "columns without effect on predictions: stratum, note\n" in capsys.readouterr().err


def test_a_table_is_read_as_spreadsheets_write_it(tmp_path: Path) -> None:
    rates = table(tmp_path / "in.csv", {**STAGES, "stage_rates_per_s": "[4, 8]", "stage_seconds": "5;5"})
    text = rates.read_text()
    (tmp_path / "marked.csv").write_text("\ufeff" + text.replace("model,", " model ,", 1) + "\n,,\n")
    plain = table(tmp_path / "plain.csv", STAGES)
    assert predict_table(Table.read(tmp_path / "marked.csv")) == predict_table(Table.read(plain))


def test_what_only_the_replay_finds_is_named_with_its_row(tmp_path: Path) -> None:
    found = predict_table(Table.read(table(tmp_path / "in.csv", {**STAGES, "max_model_len": "64"})))[0]
    assert isinstance(found, InvalidArgument)
    assert re.match(r".*in\.csv:2: request 0 of the load", str(found))


CELLS = {
    "key": ["a", "", "x_c2_y", "x_c0"],
    "system": ["h100_sxm", "B200", "gb200", "gh200", "l40s", "a100", "", "?", "mi300x"],
    "model_path": [
        "llama8b",
        "Qwen3-0.6B",
        "openai/gpt-oss-20b",
        "deepseek-ai/DeepSeek-V3",
        "",
        "x",
        ".",
        "Qwen/Qwen3-30B-A3B",
    ],
    "quant": ["bf16", "fp8", "nvfp4", "mxfp4", "awq", "", "int8", "fp7", "auto"],
    "kv_cache_dtype": ["bf16", "fp8", "", "auto", "int3", "fp8_e5m2"],
    "isl": ["1", "16", "64.0", "0", "-1", "", "1e99", "nan", "1.5", "9999999"],
    "osl": ["1", "3", "0", "", "inf", "9999999"],
    "conc": ["1", "2", "0", "", "2.5", "9999999"],
    "tp_size": ["1", "2", "3", "64", "", "0"],
    "moe_tp_size": ["1", "2", "", "5"],
    "moe_ep_size": ["1", "2", "", "7"],
    "max_num_batched_tokens": ["8192", "1", "", "0", "9999999"],
    "max_num_seqs": ["4", "1", "", "x"],
}
STAGE_CELLS = {
    "model": CELLS["model_path"],
    "hardware": CELLS["system"],
    "dtype": CELLS["quant"],
    "tp": CELLS["tp_size"],
    "prompt_tokens": CELLS["isl"],
    "max_tokens": CELLS["osl"],
    "max_model_len": ["", "4096", "8", "0"],
    "stage_rates_per_s": ["2", "1 2", "", "0", "1e9", "1e-9", "a b", "2;", "nan"],
    "stage_seconds": ["1", "1 1", "", "1e9", "0", "-3"],
    "distinct_prompts": ["1", "3", "", "0", "9999999"],
    "client_output_tokens": ["", "1", "0", "2.5", "x"],
}


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_every_row_is_predicted_or_refused_by_its_line(data: st.DataObject) -> None:
    base, cells = data.draw(st.sampled_from([(SMALL_ROW, CELLS), (SMALL_STAGES, STAGE_CELLS)]))
    changed = data.draw(st.lists(st.sampled_from(sorted(cells)), max_size=3, unique=True))
    row = {**base, **{name: data.draw(st.sampled_from(cells[name])) for name in changed}}
    layout: Any = "closed_loop" if base is SMALL_ROW else "stages"
    found = predict_table(Table(Path("in.csv"), layout, [row]), threads=1)[0]
    if isinstance(found, Prediction):
        spread = ("tpot_ms", "itl_ms")
        if int(float(row.get("osl") or row.get("max_tokens") or 2)) > 1:
            assert all(np.isfinite(value) for value in found.means.values())
        assert all(value > 0 for name, value in found.means.items() if name not in spread)
        assert found.means["ttft_ms"] > 0
    else:
        assert isinstance(found, InvalidArgument)
        assert str(found).startswith("in.csv:2: ")


def test_a_bad_row_does_not_harm_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = table(tmp_path / "in.csv", {**ROW, "key": "bad", "model_path": "deepseek-ai/DeepSeek-V3.2"}, ROW)
    assert main(["predict", str(source), "-o", str(tmp_path / "out.csv")]) == 2
    assert "sparse attention" in (errors := capsys.readouterr().err)
    assert "1 of 2 rows are left out" in errors
    assert [line.split(",")[0] for line in (tmp_path / "out.csv").read_text().splitlines()] == ["key", "a"]


def test_answers_of_one_token_have_no_time_between_tokens(tmp_path: Path) -> None:
    found = predicted(Table.read(table(tmp_path / "in.csv", {**ROW, "osl": "1"})))[0]
    assert np.isnan(found["tpot_ms"])
    assert found["ttft_ms"] == found["e2e_ms"]


def test_a_table_is_known_by_its_ending_in_capitals_too(tmp_path: Path) -> None:
    source = table(tmp_path / "IN.CSV", {**ROW, "osl": "4"})
    assert main(["predict", str(source), "-o", str(tmp_path / "out.csv")]) == 0
    assert (tmp_path / "out.csv").read_text().startswith("key,ttft_ms,tpot_ms\na,")


def test_a_table_without_a_column_or_a_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="column system is missing"):
        Table.read(
            table(tmp_path / "in.csv", {name: value for name, value in ROW.items() if name != "system"})
        )
    (tmp_path / "empty.csv").write_text(",".join(ROW) + "\n")
    with pytest.raises(ConfigError, match="has no row"):
        Table.read(tmp_path / "empty.csv")


# --- capacity -------------------------------------------------------------------------------------------


def test_blocks_that_fit_agree_with_a_recorded_engine() -> None:
    deployment = Deployment(model=find_architecture("Llama-3.1-8B"), gpu=find_gpu("RTX 4090"), weights="bf16")
    blocks = kv_blocks(
        deployment, block_size=16, max_num_batched_tokens=2048, max_num_seqs=256, gpu_memory_utilization=0.9
    )
    assert blocks == pytest.approx(2587, rel=0.05)


def test_a_model_that_does_not_fit_is_refused_with_the_remedy() -> None:
    deployment = Deployment(
        model=find_architecture("Llama-3.1-70B"), gpu=find_gpu("H100"), weights="bf16", parallel=Parallelism()
    )
    with pytest.raises(ConfigError, match=r"Llama-3.1-70B in bf16 takes 1.*tensor_parallel_size"):
        kv_blocks(
            deployment,
            block_size=16,
            max_num_batched_tokens=8192,
            max_num_seqs=256,
            gpu_memory_utilization=0.92,
        )
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        kv_blocks(
            deployment, block_size=16, max_num_batched_tokens=8192, max_num_seqs=256, gpu_memory_utilization=0
        )
