"""Lines of `replay --requests-jsonl` as a benchmark: workers stand apart, prefix hits are refused, and a share of a
peak above 1 is told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from calibrate import files
from calibrate.test_fit import FLAGS, START, TRUTH
from timing.test_hardware import CALIBRATED
from understudy.calibrate.fit import fit
from understudy.calibrate.readers import read_benchmarks
from understudy.cli import main
from understudy.errors import InvalidArgument
from understudy.timing.timing_file import TimingFile

if TYPE_CHECKING:
    from pathlib import Path

WHAT = [
    "--model",
    "Llama-3.1-8B",
    "--gpu",
    "H100",
    "--max-num-seqs",
    "64",
    "--max-num-batched-tokens",
    "4096",
]


def two_workers(path: Path, **more: Any) -> Path:
    """What two workers saw, each of a load of its own; lines are in the order of arrival."""
    lines = []
    for worker, seed in enumerate((1, 2)):
        load = files.open_load(40, seed=seed)
        alone = files.own_requests(path, load, files.measure(load, TRUTH)).read_text().splitlines()
        lines += [{**json.loads(line), "worker": worker, "cached_tokens_first": 0, **more} for line in alone]
    lines.sort(key=lambda line: float(line["arrival_ms"]))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_each_worker_is_a_benchmark_of_its_own(tmp_path: Path) -> None:
    first, second = read_benchmarks(two_workers(tmp_path / "requests.jsonl"))
    assert (first.file, second.file) == ("requests.jsonl (worker 0)", "requests.jsonl (worker 1)")
    expected = [files.open_load(40, seed=seed).workload.prompt_tokens.tolist() for seed in (1, 2)]
    assert [one.load.workload.prompt_tokens.tolist() for one in (first, second)] == expected
    found = fit([first, second], files.DEPLOYMENT, START, FLAGS, iterations=5)
    for number in found.file.fitted:
        if number.name in ("weights", "compute"):
            spread = max(3 * number.plus_minus_percent / 100, 0.03)
            assert number.value == pytest.approx(getattr(TRUTH, number.name), rel=spread), number.name
    assert found.notes == ()


def test_data_parallel_ranks_are_one_benchmark_together(tmp_path: Path) -> None:
    path = two_workers(tmp_path / "requests.jsonl")
    [together] = read_benchmarks(path, data_parallel_size=2)
    assert (together.file, len(together.load.workload)) == ("requests.jsonl", 80)
    with pytest.raises(
        InvalidArgument, match=r"requests\.jsonl: worker has 2 values, but data_parallel_size is 3;"
    ):
        read_benchmarks(path, data_parallel_size=3)


@pytest.mark.parametrize("verb", [["calibrate"], ["calibrate", "check"]])
def test_prefix_hits_are_refused_and_say_what_to_do(
    verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = two_workers(tmp_path / "requests.jsonl", cached_tokens_first=64)
    timing = str(tmp_path / "timing.yaml")
    (tmp_path / "timing.yaml").write_text(CALIBRATED.text())
    flags = ["--timing", timing] if "check" in verb else [*WHAT, "-o", timing]
    assert main([*verb, str(path), *flags]) == 2
    told = capsys.readouterr().err
    assert "requests.jsonl:1: cached_tokens_first is 64" in told
    assert "--no-enable-prefix-caching" in told


def test_what_tiers_loaded_is_a_hit_too(tmp_path: Path) -> None:
    path = two_workers(tmp_path / "requests.jsonl", prompt_computed=1)
    with pytest.raises(
        InvalidArgument, match=r"requests\.jsonl:1: prompt_computed is 1 of \d+ prompt_tokens"
    ):
        read_benchmarks(path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"worker": -1}, "worker must be at least 0"),
        ({"worker": "a"}, "worker must be a number"),
        ({"worker": 0.5}, "worker must be a whole number"),
        ({"cached_tokens_first": "x"}, "cached_tokens_first must be a number"),
    ],
)
def test_columns_that_cannot_be_are_refused(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=rf"requests\.jsonl:1: {match}"):
        read_benchmarks(two_workers(tmp_path / "requests.jsonl", **change))


def test_a_share_above_its_peak_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = files.open_load(40)
    faster = msgspec.structs.replace(TRUTH, weights=2.5, compute=3.0, step_ms=0.1, layer_us=0.5)
    path = files.own_requests(tmp_path / "requests.jsonl", load, files.measure(load, faster))
    assert main(["calibrate", str(path), *WHAT, "-o", str(tmp_path / "timing.yaml")]) == 0
    told = capsys.readouterr().err
    found = {one.name: one.value for one in TimingFile.read(tmp_path / "timing.yaml").fitted}
    assert found["compute"] <= 1
    assert "times the peak of a H100" in told
    assert "held at the preset" in told
