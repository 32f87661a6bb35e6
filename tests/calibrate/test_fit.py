"""Calibration: numbers come back out of simulated benchmarks, in every format; what cannot be fitted is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from calibrate import files
from understudy.calibrate.engine_flags import EngineFlags
from understudy.calibrate.fit import fit
from understudy.calibrate.least_squares import solve
from understudy.calibrate.load import random_lengths
from understudy.calibrate.readers import read_benchmarks
from understudy.cli import main
from understudy.errors import ConfigError
from understudy.run.facts import TimeFacts
from understudy.run.times import format_times
from understudy.timing.presets import preset
from understudy.timing.timing_file import FittedNumber, TimingFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from understudy.calibrate.load import Load
    from understudy.calibrate.simulate import Outcome

    Writer = Callable[[Path, Load, Outcome], Path]

START = preset(files.DEPLOYMENT.model, files.DEPLOYMENT.gpu, "bf16", "bf16").efficiencies
TRUTH = msgspec.structs.replace(START, weights=0.7, compute=0.6, step_ms=1.3)
FLAGS = EngineFlags(max_num_seqs=files.SEQS, max_num_batched_tokens=files.BATCHED)
DETAILED: dict[str, tuple[str, Writer]] = {
    "vllm": ("bench.json", files.vllm_detailed),
    "aiperf": ("profile_export.jsonl", files.aiperf_records),
    "guidellm": ("benchmarks.json", files.guidellm),
    "understudy": ("requests.jsonl", files.own_requests),
}


def test_least_squares_finds_a_line_and_says_how_well() -> None:
    x = np.linspace(1, 2, 20)
    truth = 3 * x**0.5

    def residuals(values: Any) -> Any:
        return np.log(values[0] * x ** values[1] / truth)

    found = solve(residuals, np.array([1.0, 1.0]), prior=np.array([5.0, 5.0]), noise=0.001)
    assert found.values == pytest.approx([3, 0.5], rel=0.01)
    assert (found.deviations() < 0.05).all()


def test_what_the_residuals_do_not_depend_on_stays_at_its_prior() -> None:
    found = solve(
        lambda values: np.log(values[:1] / 2), np.array([1.0, 7.0]), prior=np.array([1.0, 0.3]), noise=0.01
    )
    assert found.values == pytest.approx([2, 7], rel=0.01)
    assert found.deviations()[1] == pytest.approx(0.3)


def test_an_error_that_residuals_have_in_common_does_not_average_out() -> None:
    def residuals(values: Any) -> Any:
        return np.full(100, np.log(values[0] / 2))

    found = solve(residuals, np.array([1.0]), prior=np.array([1.0]), noise=0.02)
    assert found.deviations() == pytest.approx([0.003], rel=0.01)
    assert found.deviations(np.full((100, 1), 0.02)) == pytest.approx([0.0302], rel=0.01)


def test_a_prior_that_outweighs_the_data_is_in_the_uncertainty() -> None:
    # One residual that hardly depends on the number: it stays near its start, as far off as it may be.
    found = solve(
        lambda values: 0.01 * np.log(values / 3), np.array([1.0]), prior=np.array([0.5]), noise=0.02
    )
    assert found.deviations() == pytest.approx([0.5], rel=0.05)


@pytest.mark.parametrize("writer", DETAILED)
def test_known_numbers_come_back_from_every_request_of(writer: str, tmp_path: Path) -> None:
    name, write = DETAILED[writer]
    load = files.open_load()
    path = write(tmp_path / name, load, files.measure(load, TRUTH))
    [benchmark] = read_benchmarks(path)
    assert benchmark.detailed
    assert benchmark.load.workload.prompt_tokens.tolist() == load.workload.prompt_tokens.tolist()
    found = fit([benchmark], files.DEPLOYMENT, START, FLAGS, iterations=5)
    for number in found.file.fitted:
        if number.name in ("weights", "compute"):
            assert number.determined
            truth = getattr(TRUTH, number.name)
            spread = max(3 * number.plus_minus_percent / 100, 0.03)
            assert number.value == pytest.approx(truth, rel=spread), number.name
    [scored] = found.file.inputs
    assert abs(scored.tpot_percent or 99) < 1
    assert abs(scored.ttft_percent or 99) < 3


def as_vllm(path: Path, load: Load, seen: Outcome) -> Path:
    return files.vllm_plain(
        path.with_suffix(".json"), load, seen, random_range_ratio=0.8, max_num_seqs=str(files.SEQS)
    )


def as_aiperf(path: Path, load: Load, seen: Outcome) -> Path:
    return files.aiperf_summary(path.with_suffix(".json"), load, seen)


def as_table(path: Path, load: Load, seen: Outcome) -> Path:
    isl, osl = (
        round(float(column.mean()) / 0.9)
        for column in (load.workload.prompt_tokens, load.workload.output_tokens)
    )
    path = path.with_suffix(".csv")
    path.write_text(
        "isl,osl,conc,mean_ttft_ms,mean_tpot_ms,max_num_seqs\n"
        f"{isl},{osl},{load.concurrency},{seen.mean('ttft_ms')},{seen.mean('tpot_ms')},{files.SEQS}\n"
    )
    return path


@pytest.mark.parametrize("write", [as_vllm, as_aiperf, as_table])
def test_known_numbers_come_back_from_three_summaries(write: Writer, tmp_path: Path) -> None:
    shapes = {"low": (1024, 256, 4), "high": (1024, 256, 48), "long": (3000, 128, 16)}
    benchmarks = []
    for name, (isl, osl, concurrency) in shapes.items():
        load = random_lengths(isl, osl, least=0.8, concurrency=concurrency, prompts=10 * concurrency, seed=3)
        benchmarks += read_benchmarks(write(tmp_path / name, load, files.measure(load, TRUTH)))
    assert not benchmarks[0].detailed
    if write is not as_aiperf:
        assert benchmarks[0].engine == {"max_num_seqs": files.SEQS}
    found = fit(benchmarks, files.DEPLOYMENT, START, FLAGS, iterations=5)
    values = {number.name: number for number in found.file.fitted}
    # Lengths are drawn anew: a summary does not have them.
    spread = max(3 * values["weights"].plus_minus_percent / 100, 0.05)
    assert values["weights"].value == pytest.approx(TRUTH.weights, rel=spread)
    assert values["weights"].determined
    for scored in found.file.inputs:
        assert abs(scored.tpot_percent or 99) < 3
        assert abs(scored.ttft_percent or 99) < 13


def test_lengths_that_a_summary_does_not_have_are_in_its_uncertainty(tmp_path: Path) -> None:
    known = []
    for isl, osl in ((6000, 4), (3000, 4), (128, 512)):
        load = random_lengths(isl, osl, least=0.2, concurrency=1, prompts=4, seed=3)
        path = tmp_path / f"row{isl}"
        known += read_benchmarks(as_table(path, load, files.measure(load, TRUTH)), least_length=0.2)
    assert [len(one.other_draws) for one in known] == [2, 2, 2]
    certain = [msgspec.structs.replace(one, other_draws=()) for one in known]
    wide, narrow = (
        {one.name: one for one in fit(some, files.DEPLOYMENT, START, FLAGS, iterations=3).file.fitted}
        for some in (known, certain)
    )
    for name in ("weights", "compute"):
        assert narrow[name].determined
        assert wide[name].plus_minus_percent > narrow[name].plus_minus_percent


def test_summaries_of_aiperf_and_of_a_table_are_read(tmp_path: Path) -> None:
    load = random_lengths(800, 100, least=1.0, concurrency=8, prompts=40, seed=0)
    seen = files.measure(load, START)
    [aiperf] = read_benchmarks(files.aiperf_summary(tmp_path / "profile_export_aiperf.json", load, seen))
    assert aiperf.load.concurrency == 8
    assert aiperf.means["tpot_ms"] == pytest.approx(seen.mean("tpot_ms"))
    table = tmp_path / "rows.csv"
    table.write_text("isl,osl,conc,mean_ttft_ms,mean_tpot_ms,tp\n800,100,8,30.5,8.25,1\n800,100,16,40,9,1\n")
    rows = read_benchmarks(table)
    assert [row.load.concurrency for row in rows] == [8, 16]
    assert rows[0].means == {"ttft_ms": 30.5, "tpot_ms": 8.25}
    assert rows[0].load.workload.prompt_tokens.min() >= 640


# --- the command line -----------------------------------------------------------------------------------


def test_a_newcomer_fits_checks_and_looks_at_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = files.open_load(30)
    bench = files.vllm_detailed(tmp_path / "bench.json", load, files.measure(load, TRUTH))
    other = files.open_load(20, seed=9)
    more = files.guidellm(tmp_path / "more.json", other, files.measure(other, TRUTH))
    timing, html = tmp_path / "timing.yaml", tmp_path / "fit.html"
    flags = ["--max-num-seqs", "64", "--max-num-batched-tokens", "4096"]
    what = ["--model", "Llama-3.1-8B", "--gpu", "H100", *flags, "-o", str(timing), "--html", str(html)]
    assert main(["calibrate", str(bench), *what]) == 0
    assert "determined by the data" in capsys.readouterr().out
    file = TimingFile.read(timing)
    assert file.inputs[0].file == "bench.json"
    assert len(file.inputs[0].sha256) == 64
    assert file.timing().origin.source == "calibrated"
    assert file.domain.requests == 30
    page = html.read_text()
    assert page.count("<svg") == 5
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert main(["calibrate", "check", str(more), "--timing", str(timing), *flags]) == 0
    assert "more.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "determined", "said"),
    [
        (1.336, False, "no: 66 % above the preset"),
        (0.402, False, "no: 50 % below the preset"),
        (0.81, False, "no: it stayed at the preset"),
        (0.803, False, "no: held at the preset"),
        (1.336, True, "yes"),
    ],
)
def test_a_number_that_is_not_determined_is_described_by_its_distance_from_the_preset(
    value: float, determined: bool, said: str
) -> None:
    number = FittedNumber(name="kv", value=value, plus_minus_percent=48, preset=0.803, determined=determined)
    assert number.describe_determination() == said


def test_a_warning_is_on_the_page_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = files.open_load(20)
    truth = msgspec.structs.replace(TRUTH, weights=1.6)  # faster than the memory: another GPU
    bench = files.vllm_detailed(tmp_path / "bench.json", load, files.measure(load, truth))
    timing, html = tmp_path / "timing.yaml", tmp_path / "fit.html"
    flags = ["--max-num-seqs", "64", "--max-num-batched-tokens", "4096", "--html", str(html)]
    what = ["--model", "Llama-3.1-8B", "--gpu", "H100"]
    assert main(["calibrate", str(bench), *what, *flags, "-o", str(timing)]) == 0
    warning = "times the peak of a H100"
    assert warning in capsys.readouterr().err
    assert warning in html.read_text()
    html.unlink()
    assert main(["calibrate", "check", str(bench), *flags, "--timing", str(timing)]) == 0
    assert warning in capsys.readouterr().err
    assert warning in html.read_text()


def test_commands_that_contradict_themselves_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in (
        (["bench.json", "--model", "Llama-3.1-8B", "--gpu", "H100"], "-o is missing"),
        (["bench.json", "-o", str(tmp_path / "t.yaml")], "--model and --gpu are needed"),
        (["check", "bench.json"], "needs benchmarks and --timing"),
        (["b.json", "--model", "Llama-3.1-8B", "--gpu", "H100", "-o", str(tmp_path / "t.yaml")], "b.json"),
    ):
        assert main(["calibrate", *arguments]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "is empty"),
        ("understudy_timing: 2\n", "understudy_timing must be 1 for this version, got 2"),
        ("kind: physical\n", "is not a timing file"),
        ("understudy_timing: 1\ndate: today\n", "missing required field"),
    ],
)
def test_a_file_that_is_no_timing_file_is_refused(tmp_path: Path, content: str, match: str) -> None:
    path = tmp_path / "timing.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=match if content else "is not a timing file"):
        TimingFile.read(path)
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file or directory$"):
        TimingFile.read(tmp_path / "nowhere.yaml")


def test_times_in_words_are_as_exact_as_they_are_good_for() -> None:
    times = TimeFacts("a benchmark", outside_domain_share=0.0, front_end_ms=4.480771)
    assert format_times(times).endswith("TTFT and E2E include 4.48 ms between client and engine")
