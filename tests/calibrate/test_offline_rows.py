"""Tables of offline throughput: all requests at once, tokens per second and GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from calibrate.rows import SMALL_ROW, predicted, table
from understudy.calibrate.tables import Table
from understudy.cli import main
from understudy.errors import ConfigError, InvalidArgument
from understudy.timing.deployment import Parallelism

if TYPE_CHECKING:
    from pathlib import Path

ROW = {
    "model": "qwen3-30b-a3b",
    "gpu": "H100",
    "parallel": "TP2",
    "weights": "fp8",
    "isl": "64",
    "osl": "4",
    "num_prompts": "6",
    "output_tok_s_per_gpu": "1000",
    "length_rule": "fixed",
}


def test_a_row_of_throughput_sends_all_requests_at_once(tmp_path: Path) -> None:
    found = Table.read(table(tmp_path / "in.csv", ROW))
    one = found.experiment(0)
    assert (one.name, one.backend) == ("qwen3-30b-a3b H100 TP2 fp8 64x4", "trtllm")
    assert (one.deployment.parallel, one.deployment.weights) == (Parallelism(tensor=2), "fp8")
    assert one.loads[0].concurrency == 6
    assert set(one.loads[0].workload.prompt_tokens.tolist()) == {64}
    assert found.columns_out == ("key", "ttft_ms", "tpot_ms", "output_tok_s_per_gpu")
    assert found.ignored_columns == ["length_rule"]


@pytest.mark.parametrize(
    ("text", "parallel"),
    [
        ("TP4", Parallelism(tensor=4)),
        ("tp2 pp2", Parallelism(tensor=2, pipeline=2)),
        ("TP4EP4", Parallelism(tensor=4, expert=4)),
        ("DEP4", Parallelism(data=4, expert=4)),
    ],
)
def test_parallel_sizes_have_the_words_of_tensorrt_llm(
    tmp_path: Path, text: str, parallel: Parallelism
) -> None:
    found = Table.read(table(tmp_path / "in.csv", {**ROW, "parallel": text})).experiment(0)
    assert found.deployment.parallel == parallel


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"parallel": "many"}, "parallel must be sizes such as TP4"),
        ({"parallel": "DEP4 TP2"}, "gives the GPUs twice"),
        ({"gpu": "abacus"}, "gpu 'abacus' is not known"),
        ({"num_prompts": ""}, "num_prompts is empty; fill the cell"),
    ],
)
def test_a_row_of_throughput_is_refused_by_its_column(
    tmp_path: Path, change: dict[str, str], match: str
) -> None:
    with pytest.raises(InvalidArgument, match=rf"in\.csv:2: .*{match}"):
        Table.read(table(tmp_path / "in.csv", {**ROW, **change})).experiment(0)


def test_a_missing_column_of_throughput_is_named(tmp_path: Path) -> None:
    rest = {name: cell for name, cell in ROW.items() if name != "num_prompts"}
    with pytest.raises(ConfigError, match="column num_prompts is missing"):
        Table.read(table(tmp_path / "in.csv", rest))


def test_the_name_of_a_gpu_in_the_table_is_read_as_it_is_meant(tmp_path: Path) -> None:
    found = Table.read(table(tmp_path / "in.csv", {**ROW, "gpu": "RTX6000", "parallel": "TP1"})).experiment(0)
    assert found.deployment.gpu.name == "RTX PRO 6000"
    assert "RTX6000 read as RTX PRO 6000" in found.notes


def test_rates_are_requests_and_tokens_over_the_whole_time(tmp_path: Path) -> None:
    row = {**SMALL_ROW, "least_length": "1", "num_prompts": "3", "req_per_s": "9", "output_tok_s": "8"}
    found = Table.read(table(tmp_path / "in.csv", {**row, "tp_size": "2"}))
    means = predicted(found)[0]
    assert found.columns_out == ("key", "ttft_ms", "tpot_ms", "req_per_s", "output_tok_s")
    assert means["output_tok_s"] == pytest.approx(3 * means["req_per_s"])
    assert means["output_tok_s_per_gpu"] == pytest.approx(means["output_tok_s"] / 2)
    # One request at a time: the span of three is three times one.
    assert 1 / means["req_per_s"] == pytest.approx(means["e2e_ms"] / 1e3, rel=0.05)


def test_predict_prints_the_rate_next_to_the_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(table(tmp_path / "in.csv", ROW))]) == 0
    printed = capsys.readouterr()
    head, row = printed.out.splitlines()
    assert head == "key,ttft_ms,tpot_ms,output_tok_s_per_gpu"
    assert row.startswith("qwen3-30b-a3b H100 TP2 fp8 64x4,")
    assert "length_rule" in printed.err
