"""Rows of a table say which engine they ran with: its blocks, graphs, ranks and speculation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from calibrate.rows import ROW, SMALL_ROW, predicted, table
from understudy.calibrate.tables import Table
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import InvalidArgument
from understudy.timing.deployment import Parallelism

if TYPE_CHECKING:
    from pathlib import Path

EXPERTS = {**SMALL_ROW, "model_path": "Qwen3-30B-A3B"}


def test_a_row_says_how_many_prompts_it_sends_and_how_short_they_are(tmp_path: Path) -> None:
    row = {**ROW, "num_prompts": "12", "least_length": "1"}
    load = Table.read(table(tmp_path / "in.csv", row)).experiment(0).loads[0]
    assert (len(load.workload), load.concurrency) == (12, 4)
    assert set(load.workload.prompt_tokens.tolist()) == {1024}
    at_once = Table.read(table(tmp_path / "at.csv", {**row, "key": "all", "conc": ""})).experiment(0).loads[0]
    assert at_once.concurrency == 12


def test_a_row_says_which_engine_it_ran_and_with_which_blocks_and_graphs(tmp_path: Path) -> None:
    row = {**ROW, "block_size": "32", "num_gpu_blocks": "900", "max_cudagraph_capture_size": "1024"}
    rows = [{**row, "backend": name} for name in ("", "vllm", "sglang", "TensorRT-LLM")]
    found = [Table.read(table(tmp_path / "in.csv", *rows)).experiment(place) for place in range(4)]
    assert [one.backend for one in found] == ["vllm", "vllm", "sglang", "trtllm"]
    assert [type(one.engine).__name__ for one in found] == [
        "VllmConfig",
        "VllmConfig",
        "SglangConfig",
        "VllmConfig",
    ]
    assert {(one.engine.block_size, one.engine.num_gpu_blocks) for one in found} == {(32, 900)}
    assert found[0].captures is not None
    assert found[0].captures[-1] == 1024
    listed = {**ROW, "cudagraph_capture_sizes": "[1, 8, 4]"}
    assert Table.read(table(tmp_path / "l.csv", listed)).experiment(0).captures == (1, 4, 8)


def test_graphs_of_larger_steps_have_no_floor_of_launches(tmp_path: Path) -> None:
    row = {**ROW, "system": "b200_sxm", "quant": "fp8", "osl": "8", "conc": "1"}
    rows = [{**row, "max_cudagraph_capture_size": size} for size in ("512", "2048", "")]
    small, large, usual = predicted(Table.read(table(tmp_path / "in.csv", *rows)))
    assert large["ttft_ms"] < 0.9 * small["ttft_ms"]
    assert usual == small


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"backend": "tgi"}, "backend 'tgi' is not known; known are vllm, sglang, trtllm"),
        ({"least_length": "1.5"}, "least_length must be a share of at most 1"),
        ({"speculation": "mtp"}, "needs a method .* number of drafts .* acceptance_per_position"),
        ({"speculation": "eagle3 num_speculative_tokens=3"}, "needs a method .* acceptance_per_position"),
        ({"pp_size": "99"}, "pipeline_parallel_size=99 exceeds the 32 layers"),
        ({"pp_size": "2", "backend": "sglang"}, "pipelines of SGLang are not simulated"),
        ({"dcp_size": "2"}, "dcp_size: context parallelism is not simulated"),
        ({"attention_dp_size": "2"}, "attention_dp_size=2 is for experts that ranks share"),
        (
            {"cudagraph_capture_sizes": "1 2", "max_cudagraph_capture_size": "8"},
            "both give the captured sizes",
        ),
        ({"cudagraph_capture_sizes": ","}, "cudagraph_capture_sizes has no number; write some"),
        ({"cudagraph_capture_sizes": "1.5;2"}, "cudagraph_capture_sizes must be whole numbers"),
        ({"gpu_memory_utilization": "95"}, "must be a share of at most 1, got 95; for 95 % write 0.95"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_its_column(
    tmp_path: Path, change: dict[str, str], match: str
) -> None:
    with pytest.raises(InvalidArgument, match=rf"in\.csv:2: .*{match}"):
        Table.read(table(tmp_path / "in.csv", {**ROW, **change})).experiment(0)


def test_ranks_of_attention_are_data_parallel_ranks_that_share_experts(tmp_path: Path) -> None:
    row = {**EXPERTS, "tp_size": "2", "attention_dp_size": "4"}
    whole = {**row, "moe_tp_size": "1", "moe_ep_size": "8"}
    wrong = {**row, "moe_tp_size": "1", "moe_ep_size": "4"}
    found = Table.read(table(tmp_path / "in.csv", row, whole, wrong))
    assert found.experiment(0).deployment.parallel == Parallelism(tensor=2, data=4, expert=1)
    assert found.experiment(1).deployment.parallel == Parallelism(tensor=2, data=4, expert=8)
    with pytest.raises(InvalidArgument, match="attention_dp_size=4 ranks of tp_size=2 have 8 GPUs"):
        found.experiment(2)


def test_stages_of_a_row_share_its_layers(tmp_path: Path) -> None:
    rows = [
        {**ROW, "tp_size": tensor, "pp_size": stages}
        for tensor, stages in (("1", "2"), ("2", "1"), ("1", "1"))
    ]
    found = Table.read(table(tmp_path / "in.csv", *rows))
    piped, tensor, alone = (found.experiment(place) for place in range(3))
    assert piped.deployment.parallel == Parallelism(tensor=1, pipeline=2)
    assert isinstance(piped.engine, VllmConfig)
    assert piped.engine.pipeline_parallel_size == 2
    assert piped.engine.num_gpu_blocks > 2 * alone.engine.num_gpu_blocks
    times = [one.predict(one.preset().efficiencies)["tpot_ms"] for one in (piped, tensor, alone)]
    assert times[1] < times[0]  # a token passes both stages
    assert piped.preset().origin.startswith("2 stages of a pipeline, whose times were never measured")
    assert piped.preset().range_text == "no error is known of a pipeline"


def test_speculation_has_the_acceptance_of_the_row(tmp_path: Path) -> None:
    row = {
        **ROW,
        "model_path": "openai/gpt-oss-120b",
        "quant": "mxfp4",
        "speculation": "eagle3 num_speculative_tokens=2",
        "acceptance_per_position": "0.7 0.4",
    }
    found = Table.read(table(tmp_path / "in.csv", row, {**row, "speculation": "unknown"}))
    engine = found.experiment(0).engine
    assert isinstance(engine, VllmConfig)
    assert engine.speculative_config is not None
    assert engine.speculative_config.acceptance_per_position == (0.7, 0.4)
    plain, unknown = found.experiment(0), found.experiment(1)
    assert unknown.notes == (
        "without speculation, because the table does not know whether the engine speculated",
    )
    faster, slower = (one.predict(one.preset().efficiencies)["tpot_ms"] for one in (plain, unknown))
    assert faster < slower


def test_a_position_of_which_no_draft_was_accepted_is_a_measurement(tmp_path: Path) -> None:
    row = {
        **ROW,
        "speculation": "ngram num_speculative_tokens=2",
        "acceptance_per_position": "0.7 0",
    }
    engine = Table.read(table(tmp_path / "in.csv", row)).experiment(0).engine
    assert isinstance(engine, VllmConfig)
    assert engine.speculative_config is not None
    assert engine.speculative_config.acceptance_per_position == (0.7, 0)


def test_mtp_without_numbers_has_those_of_recipes_and_published_acceptance(tmp_path: Path) -> None:
    row = {
        **SMALL_ROW,
        "model_path": "deepseek-ai/DeepSeek-R1",
        "system": "b200_sxm",
        "quant": "fp8",
        "tp_size": "8",
    }
    alone = {**row, "moe_ep_size": "1", "speculation": "mtp (inferred: faster twin)"}
    ranks = {**alone, "tp_size": "1", "attention_dp_size": "8", "moe_tp_size": "1", "moe_ep_size": "8"}
    rows = [
        *({**alone, "backend": name} for name in ("vllm", "sglang", "trtllm")),
        {**ranks, "backend": "trtllm"},
        {**alone, "speculation": "mtp num_speculative_tokens=2"},
        {**alone, "acceptance_per_position": "0.7 0.4"},
    ]
    found = Table.read(
        table(
            tmp_path / "in.csv",
            *({"attention_dp_size": "", "acceptance_per_position": "", **one} for one in rows),
        )
    )
    configs = []
    for place in range(len(rows)):
        engine = found.experiment(place).engine
        assert isinstance(engine, VllmConfig)
        assert engine.speculative_config is not None
        configs.append(engine.speculative_config)
    assert [one.num_speculative_tokens for one in configs] == [1, 3, 3, 1, 2, 2]
    assert configs[1].rates == (0.85, 0.63, 0.63)
    assert configs[5].rates == pytest.approx((0.7, 0.4 / 0.7))
    notes = "; ".join(found.experiment(1).notes)
    assert "3 drafts a step assumed (SGLang's own choice: three draft steps)" in notes
    assert "acceptance 0.85, 0.63, 0.63 assumed, each if those before it were accepted" in notes
    assert "scheduled as by vLLM, because speculation of SGLang is not simulated" in notes
    assert found.experiment(5).notes == ()
    sped, plain = (
        Table.read(table(tmp_path / "t.csv", {**row, "osl": "40", "speculation": text})).experiment(0)
        for text in ("mtp", "")
    )
    assert (
        sped.predict(sped.preset().efficiencies)["tpot_ms"]
        < plain.predict(plain.preset().efficiencies)["tpot_ms"]
    )
