"""A comparison of runs crowns no winner without a difference, and finds a difference that is there."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

import understudy
from understudy.cli import main
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import InvalidArgument
from understudy.report.compare import compare
from understudy.report.goodput import Slo
from understudy.report.measured import find_unmeasured
from understudy.tiers.settings import TiersConfig
from understudy.workload import (
    ClosedLoop,
    Normal,
    Poisson,
    SharedRatio,
    SyntheticSpec,
    Workload,
    synthesise,
    write_mooncake,
)

ENGINE = VllmConfig(num_gpu_blocks=2000, timing=Constant(prefill_ms=40.0, decode_ms=10.0), max_num_seqs=8)


def make_load(seed: int, qps: float = 8.0, sessions: int = 150) -> Workload:
    return synthesise(
        SyntheticSpec(
            sessions=sessions,
            prompt_tokens=Normal(mean=300, std=120),
            output_tokens=Normal(mean=20, std=8),
            arrivals=Poisson(qps=qps),
            prefixes=SharedRatio(groups=3, ratio=0.5),
            content_seed=seed,
            arrival_seed=seed,
        )
    )


def conclude(one: Any, other: Any) -> str:
    return compare(one, other, names=("one", "other")).conclusion()


def count_winners(cases: range) -> tuple[int, int]:
    """Return how often one of two seeds of random routing is called best, and how often they differ at all."""
    crowned = differing = 0
    for case in cases:
        load = make_load(case, qps=6.0 + case % 5)
        one, other = (
            understudy.replay(load, ENGINE, workers=3, routing="random", seed=1_000 * case + seed)
            for seed in (1, 2)
        )
        differing += one.run.digest != other.run.digest
        crowned += "is best" in conclude(one, other)
    return crowned, differing


def test_seeds_of_one_fleet_are_not_told_apart() -> None:
    crowned, differing = count_winners(range(60))
    assert differing == 60
    assert crowned <= 3  # 95 % confidence: at most one case in twenty


@pytest.mark.soak
def test_a_thousand_seeds_of_one_fleet_are_not_told_apart() -> None:
    crowned, _ = count_winners(range(1_000))
    assert crowned <= 50


@pytest.mark.parametrize("seed", range(8))
def test_a_shift_of_a_fifth_is_found(seed: int) -> None:
    slower = msgspec.structs.replace(ENGINE, timing=Constant(prefill_ms=48.0, decode_ms=12.0))
    load = make_load(seed)
    fast, slow = (understudy.replay(load, engine, workers=3) for engine in (ENGINE, slower))
    assert conclude(slow, fast).startswith("other is best: mean TTFT")
    assert conclude(fast, slow).startswith("one is best: mean TTFT")


def test_a_third_run_does_not_crown_one_of_two_equal_ones() -> None:
    load = make_load(1)
    fast, slow = (understudy.replay(load, ENGINE, workers=workers) for workers in (3, 1))
    hardly = understudy.replay(
        load, msgspec.structs.replace(ENGINE, timing=Constant(prefill_ms=40.01, decode_ms=10.0)), workers=3
    )
    said = compare(fast, hardly, slow, names=("fast", "hardly", "slow")).conclusion()
    assert "is best" not in said
    assert "No difference" in said
    assert "fast and hardly" in said


def test_different_workloads_are_refused_unless_accepted() -> None:
    one, other = (understudy.replay(make_load(seed), ENGINE) for seed in (1, 2))
    with pytest.raises(InvalidArgument, match=r"^workload: .*; .*--accept-different-workloads"):
        compare(one, other)
    accepted = compare(one, other, accept_different_workloads=True)
    assert "is best" not in accepted.conclusion()
    assert "different workloads" in accepted.conclusion()
    assert "different workloads" in accepted.to_html()


def test_another_load_of_one_workload_crowns_no_winner() -> None:
    load = make_load(1)
    calm = understudy.replay(load, ENGINE, load=ClosedLoop(2))
    busy = understudy.replay(load, ENGINE, load=ClosedLoop(8))
    said = conclude(calm, busy)
    assert "is best" not in said
    assert "load" in said


def test_other_objectives_crown_no_winner() -> None:
    load = make_load(1)
    strict, lax = (
        understudy.replay(load, ENGINE, workers=3, routing="random", seed=seed, slo=Slo(ttft_ms=ttft_ms))
        for seed, ttft_ms in ((1, 45.0), (2, 60_000.0))
    )
    assert strict.goodput is not None
    assert strict.goodput.ratio < 0.9
    said = conclude(strict, lax)
    assert "is best" not in said
    assert "objectives differ" in said
    compared = compare(strict, lax)
    assert ("slo.ttft_ms", [45.0, 60_000.0]) in compared.settings()


def test_unused_tiers_do_not_hide_which_run_is_best() -> None:
    load = make_load(1)
    host = TiersConfig.from_dict({"tiers": [{"tier": "g2", "blocks": 1000}], "kv_bytes_per_token": 1000})
    one = understudy.replay(load, ENGINE, workers=1)
    four = understudy.replay(load, ENGINE, workers=4, tiers=host)
    said = conclude(one, four)
    assert said.startswith("Host memory bought nothing: no block was read back. other is best: mean TTFT")


def test_a_run_that_loses_requests_is_not_best_by_latency() -> None:
    load = make_load(1)
    whole = understudy.replay(load, ENGINE)
    most = int(load.prompt_tokens.max())
    short = understudy.replay(load, msgspec.structs.replace(ENGINE, max_model_len=most // 2))
    assert short.requests.completed < whole.requests.completed
    assert conclude(short, whole).startswith("other is best: completed requests")


def test_saved_reports_conclude_as_reports_do(tmp_path: Any) -> None:
    load = make_load(3)
    reports = [understudy.replay(load, ENGINE, workers=workers) for workers in (2, 3)]
    for name, report in zip(("a", "b"), reports, strict=True):
        report.to_json(tmp_path / f"{name}.json")
    saved = compare(tmp_path / "a.json", tmp_path / "b.json").conclusion()
    assert saved == compare(*reports, names=("a", "b")).conclusion()


def test_without_sums_by_group_the_noise_is_unknown_and_small_differences_name_no_winner(
    tmp_path: Any,
) -> None:
    load = make_load(3)
    paths = []
    for name, prefill_ms in (("a", 40.0), ("b", 41.0), ("c", 80.0)):
        engine = msgspec.structs.replace(ENGINE, timing=Constant(prefill_ms=prefill_ms, decode_ms=10.0))
        content = understudy.replay(load, engine, workers=4).to_dict()
        del content["groups"]
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_bytes(msgspec.json.encode(content))
    said = compare(*paths[:2]).conclusion()
    assert "is best" not in said
    assert "noise is not known" in said
    assert compare(paths[0], paths[2]).conclusion().startswith("a is best: mean TTFT")


def test_engines_are_not_compared_by_times_of_one_of_them(tmp_path: Any, capsys: Any) -> None:
    trace = tmp_path / "trace.jsonl"
    write_mooncake(make_load(5, sessions=40), trace)
    paths = [str(tmp_path / f"{engine}.json") for engine in ("vllm", "sglang")]
    for engine, path in zip(("vllm", "sglang"), paths, strict=True):
        flags = ["--engine", engine, "--model", "Llama-3.1-8B", "--gpu", "H100", "--quiet", "--no-advice"]
        assert main(["replay", str(trace), *flags, "--json", path]) == 0
    assert main(["compare", *paths]) == 2
    said = capsys.readouterr().err
    assert "engine: the times of SGLang were measured with vLLM (preset" in said
    assert "--accept-unmeasured" in said
    assert main(["compare", *paths, "--accept-unmeasured"]) == 0
    assert "Not measured: the times of SGLang" in " ".join(capsys.readouterr().out.split())


def test_engines_are_not_compared_on_a_gpu_that_was_never_measured() -> None:
    own = "preset: DeepSeek-R1 in fp8, uncalibrated: {} was never measured: data sheet, measured with {}"
    runs = [[("vllm", own.format("MI300X", "vLLM"))], [("sglang", own.format("MI300X", "SGLang"))]]
    problem = find_unmeasured(runs)
    assert problem is not None
    assert problem.startswith("the times of vLLM were never measured there (preset")
    assert find_unmeasured(runs[:1] * 2) is None
    stages = "preset: Llama-3.1-70B on 4 x H100, uncalibrated: 2 stages of a pipeline, whose times were never measured"
    assert find_unmeasured([[("vllm", stages)], [("sglang", own.format("H100", "SGLang"))]]) is not None


def test_a_sweep_does_not_choose_an_engine_by_times_of_the_other(tmp_path: Any, capsys: Any) -> None:
    trace, saved = tmp_path / "trace.jsonl", tmp_path / "sweep.json"
    write_mooncake(make_load(5, sessions=40), trace)
    argv = ["sweep", str(trace), "--vary", "engine=vllm,sglang", "workers=1,2", "--slo-ttft-ms", "500"]
    argv += ["--quiet", "--json", str(saved)]
    fleet = ["--model", "Llama-3.1-8B", "--gpu", "H100"]
    assert main([*argv, *fleet]) == 2
    said = capsys.readouterr().err
    assert "--vary engine: the times of SGLang were measured with vLLM (preset" in said
    assert "--accept-unmeasured" in said
    assert main([*argv, *fleet, "--accept-unmeasured"]) == 0
    [note] = [note for note in json.loads(saved.read_text())["notes"] if "engines" in note]
    assert note.startswith("engines are not comparable: the times of SGLang")
    constants = "engine.timing={kind: constant, prefill_ms: 10, decode_ms: 5}"  # the user's own, for both
    assert main([*argv, "--set", constants]) == 0


def test_a_difference_of_runs_says_whether_it_is_above_the_noise(tmp_path: Any, capsys: Any) -> None:
    trace, saved = tmp_path / "trace.jsonl", tmp_path / "diff.json"
    write_mooncake(make_load(7), trace)
    runs = {"one": ("1", "40"), "other": ("2", "40"), "slow": ("1", "48")}
    for name, (seed, prefill_ms) in runs.items():
        timing = f"engine.timing={{kind: constant, prefill_ms: {prefill_ms}, decode_ms: 10}}"
        flags = [
            "--workers",
            "3",
            "--routing",
            "random",
            "--seed",
            seed,
            "--set",
            timing,
            "--quiet",
            "--no-advice",
        ]
        assert main(["replay", str(trace), *flags, "--save-run", str(tmp_path / f"{name}.npz")]) == 0
    for name, is_clear in (("other", False), ("slow", True)):
        paths = [str(tmp_path / "one.npz"), str(tmp_path / f"{name}.npz")]
        assert main(["diff", *paths]) == 0
        assert ("no difference above the noise" in capsys.readouterr().out) != is_clear
        assert main(["diff", *paths, "--json", str(saved)]) == 0
        capsys.readouterr()
        found = json.loads(saved.read_text())
        change = (found["latency_ns"]["b"] - found["latency_ns"]["a"]) / found["ended"]["both"] / 1e6
        assert found["mean_change"]["mean_ms"] == pytest.approx(change)
        assert found["mean_change"]["low_ms"] < change < found["mean_change"]["high_ms"]
        assert found["mean_change"]["above_noise"] == is_clear
