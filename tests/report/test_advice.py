"""Verdicts try their remedies: only those that help are printed, the best first, with what they gave."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

import understudy
from replay.building import conversations, crowd
from understudy.cli import main
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, PolicyError
from understudy.report import Report, Slo
from understudy.report.advise import advise
from understudy.report.remedies import Setup
from understudy.report.trial import Trial, compare, format_failure
from understudy.workload import ClosedLoop, Normal, OpenLoop, Poisson, SharedRatio

TRACE = str(Path(__file__).parents[2] / "examples" / "demo_trace.jsonl")


vllm = partial(VllmConfig, block_size=64, max_num_batched_tokens=8192, max_num_seqs=256)
SLOW = VllmConfig(
    num_gpu_blocks=400, block_size=64, timing=Constant(prefill_ms=100.0, decode_ms=20.0), max_num_seqs=4
)


class Bench:
    """A run with its settings, and the changes that were replayed."""

    def __init__(self, workload: Any, workers: int = 1, engine: VllmConfig = SLOW, **settings: Any) -> None:
        self.workload, self.workers, self.engine, self.settings = workload, workers, engine, settings
        self.changes: list[dict[str, Any]] = []
        self.report = self.replay({})

    def replay(self, changes: dict[str, Any]) -> Report:
        if changes:
            self.changes.append(changes)
        given = dict(changes)
        engine = {name: given.pop(name) for name in list(given) if name not in ("workers", "routing", "load")}
        settings = {"workers": self.workers, **self.settings, **given}
        return understudy.replay(self.workload, msgspec.structs.replace(self.engine, **engine), **settings)

    def advise(self, **more: Any) -> Report:
        setup = Setup(
            workers=self.workers,
            routing=self.settings.get("routing", "round_robin"),
            load=self.settings.get("load", OpenLoop()),
            engine=self.engine,
            can_add_blocks=True,
            has_sessions=False,
        )
        return advise(self.report, setup, self.replay, **more)


OVERLOAD = crowd(300, arrivals=Poisson(qps=20))


CALM = crowd(100, arrivals=Poisson(qps=2))


GROUPS = (
    understudy.KvCacheGroup(kind="sliding_window", block_size=16, window=64),
    understudy.KvCacheGroup(kind="full", block_size=16),
)


@pytest.mark.parametrize(
    ("blocks", "retention", "helpful"),
    [
        (600, 0, ("--num-gpu-blocks 2400", "--num-gpu-blocks 1200")),
        (600, None, ("--num-gpu-blocks 1200", "--num-gpu-blocks 2400")),
        (4000, 0, ("--prefix-cache-retention-interval none",)),
    ],
)
def test_lost_tails_of_groups_are_kept_by_what_a_replay_shows_to_help(
    blocks: int, retention: int | None, helpful: tuple[str, ...]
) -> None:
    engine = VllmConfig(
        kv_cache_groups=GROUPS, num_gpu_blocks=blocks, prefix_cache_retention_interval=retention
    )
    bench = Bench(conversations(30, output_tokens=Normal(mean=150, std=10)), engine=engine)
    (verdict,) = (one for one in bench.advise().verdicts if one.rule == "group_tail_gone")
    flags = re.findall(r"(--[a-z-]+ \w+): prefix hits [\d.]+ % → [\d.]+ % \(replayed\)", verdict.remedy)
    assert tuple(flags) == helpful
    tried = [change for change in bench.changes if "prefix_cache_retention_interval" in change]
    assert len(tried) == (retention is not None)


def test_a_remedy_is_printed_with_what_its_replay_gave() -> None:
    bench = Bench(OVERLOAD, 2, slo=Slo(ttft_ms=500))
    found = bench.advise()
    before = bench.report.goodput
    after = bench.replay({"workers": 4}).goodput
    assert before is not None
    assert after is not None
    said = f"--workers 4: attainment {100 * before.ratio:.1f} % → {100 * after.ratio:.1f} % (replayed)."
    assert said in found.verdicts[0].remedy


def test_remedies_that_do_not_help_are_not_printed_and_the_best_is_first() -> None:
    found = Bench(OVERLOAD, 2, slo=Slo(ttft_ms=500)).advise()
    assert found.advice is not None
    useless = [one.change for one in found.advice.trials if not one.helps]
    useful = sorted((one for one in found.advice.trials if one.helps), key=lambda one: -one.after)
    assert useless
    assert useful
    for verdict in found.verdicts:
        assert not any(f"{change}:" in verdict.remedy for change in useless)
    places = [found.verdicts[0].remedy.find(one.change) for one in useful]
    assert places == sorted(places)


@pytest.mark.parametrize("routing", ["session_affinity", "kv", "least_loaded"])
def test_a_setting_that_the_run_has_is_not_recommended(routing: str) -> None:
    bench = Bench(OVERLOAD, 2, routing=routing, slo=Slo(ttft_ms=500))
    bench.advise()
    assert {"routing": routing} not in bench.changes


def test_without_goals_remedies_are_judged_by_the_time_to_first_token() -> None:
    found = Bench(OVERLOAD).advise()
    assert "--workers 2: mean TTFT " in found.verdicts[0].remedy


def test_the_time_is_bounded_and_shown() -> None:
    bench = Bench(OVERLOAD, 2, slo=Slo(ttft_ms=500))
    found = bench.advise(limit_s=0.0)
    assert bench.changes == []
    assert found.advice is not None
    assert found.advice.untried > 0
    counts = "not tried: by the size of its trace, a replay counts as "
    assert re.search(rf"{counts}[\d.]+ ms, and the limit is 0 s$", str(found.advice))
    assert [one.remedy for one in found.verdicts] == [one.remedy for one in bench.report.verdicts]
    one = found.advice.replay_s
    for count in (1, 3):
        bench.changes.clear()
        limited = bench.advise(limit_s=(count + 0.5) * one)
        assert len(bench.changes) == count
        assert limited.advice is not None
        assert limited.advice.untried == found.advice.untried - count


def test_a_fleet_that_is_too_large_is_named_with_the_numbers_of_the_smaller_one() -> None:
    slo = Slo(ttft_ms=5_000)
    found = Bench(CALM, 4, vllm(num_gpu_blocks=4000), slo=slo).advise()
    [verdict] = found.verdicts
    assert verdict.rule == "oversized"
    assert verdict.finding == "Oversized: one worker would do instead of 4."
    assert verdict.remedy == "--workers 1: attainment 100.0 % → 100.0 % (replayed)."


def test_an_oversized_fleet_is_named_before_other_findings() -> None:
    scattered = crowd(200, arrivals=Poisson(qps=4), prefixes=SharedRatio(groups=60, ratio=0.9))
    engine = VllmConfig(num_gpu_blocks=400, block_size=16)
    found = Bench(scattered, 8, engine, slo=Slo(ttft_ms=5_000)).advise()
    rules = [verdict.rule for verdict in found.verdicts]
    assert rules[0] == "oversized"
    assert "scattered_prefixes" in rules
    assert found.verdicts[0].finding == "Oversized: one worker would do instead of 8."


def test_a_smaller_fleet_is_not_tried_where_goals_are_missed() -> None:
    bench = Bench(OVERLOAD, 2, slo=Slo(ttft_ms=500))
    assert "oversized" not in [verdict.rule for verdict in bench.advise().verdicts]
    assert {"workers": 1} not in bench.changes


def test_an_overload_whose_goals_are_met_is_judged_by_the_time_to_first_token() -> None:
    found = Bench(OVERLOAD, slo=Slo(e2e_ms=10_000_000)).advise()
    assert found.verdicts[0].rule == "overloaded"
    assert re.search(
        r"--workers 4: mean TTFT [\d,]+ → \d+ ms, attainment 100\.0 % → ", found.verdicts[0].remedy
    )


def test_a_small_cache_is_judged_by_its_hits_even_if_all_goals_are_met() -> None:
    engine = vllm(num_gpu_blocks=150)
    queues, verdict = Bench(conversations(60), 1, engine, slo=Slo(ttft_ms=50_000)).advise().verdicts
    assert queues.rule == "overloaded"
    assert verdict.rule == "cache_too_small"
    assert re.fullmatch(
        r"--num-gpu-blocks 300: prefix hits 38\.1 % → 7\d\.\d %, attainment 100\.0 % → 100\.0 % \(replayed\)\.",
        verdict.remedy,
    )


def test_long_steps_are_judged_by_the_gaps_that_exceed_the_goal() -> None:
    long = crowd(
        100,
        arrivals=Poisson(qps=2),
        prompt_tokens=Normal(mean=6000, std=1000),
        output_tokens=Normal(mean=6, std=2),
    )
    [verdict] = Bench(long, 1, vllm(num_gpu_blocks=8000), slo=Slo(itl_ms=40)).advise().verdicts
    assert verdict.rule == "steps_too_long"
    assert verdict.remedy == (
        "--max-num-batched-tokens 512: late gaps 4.6 % → 0.0 %, attainment 99.0 % → 99.0 % (replayed). "
        "--workers 2: late gaps 4.6 % → 0.4 %, attainment 99.0 % → 99.0 % (replayed)."
    )


def test_gaps_that_grow_with_the_batch_are_shortened_by_workers() -> None:
    short = crowd(
        200,
        arrivals=Poisson(qps=4),
        prompt_tokens=Normal(mean=2000, std=10),
        output_tokens=Normal(mean=300, std=100),
        prefixes=SharedRatio(groups=1, ratio=0.99),
    )
    engine = vllm(num_gpu_blocks=8000)
    alone = Bench(short, 1, engine).report
    bench = Bench(short, 1, engine, slo=Slo(itl_ms=float(alone.itl_ms.p90)))
    found = [one for one in bench.advise().verdicts if one.rule == "steps_too_long"]
    assert [one.remedy.startswith("--workers 2: late gaps") for one in found] == [True]
    assert "decode for more requests" in found[0].finding


def test_a_remedy_that_gains_its_measure_and_loses_the_goals_does_not_help() -> None:
    bench = Bench(OVERLOAD, 6, slo=Slo(ttft_ms=500))
    worse = bench.replay({"max_num_seqs": 1})
    storm = replace(bench.report, preemptions=1000)
    trial = compare("--max-num-seqs 1", "preemption_storm", storm, worse)
    assert trial.after < trial.before
    assert not trial.helps


def test_only_a_finding_whose_remedies_all_fail_says_so_and_names_its_measure() -> None:
    bench = Bench(OVERLOAD, 2, slo=Slo(ttft_ms=500))

    def change_nothing(changes: dict[str, Any]) -> Report:
        assert changes
        return bench.report

    bench.replay = change_nothing  # type: ignore[method-assign]
    remedy = bench.advise().verdicts[0].remedy
    assert remedy.startswith("No replayed change lowers mean TTFT by 1 % or more: --workers 4 or 8, ")
    helped = Bench(OVERLOAD, 2, slo=Slo(ttft_ms=500)).advise().verdicts[0].remedy
    assert "No replayed change" not in helped


def test_a_failure_leaves_out_changes_that_help_with_another_finding() -> None:
    bench = Bench(conversations(60), 2, vllm(num_gpu_blocks=100), slo=Slo(ttft_ms=100))
    replay, same = bench.replay, bench.report.prefix_hit_ratio

    def raise_attainment_only(changes: dict[str, Any]) -> Report:
        return replace(replay(changes), prefix_hit_ratio=same)

    bench.replay = raise_attainment_only  # type: ignore[method-assign]
    found = bench.advise()
    assert found.advice is not None
    [remedy] = (one.remedy for one in found.verdicts if one.rule == "cache_too_small")
    helpful = {one.change for one in found.advice.trials if one.helps}
    assert "--num-gpu-blocks 200" in helpful
    assert remedy == "No replayed change raises prefix hits by 1 point or more: --routing kv."


def test_a_failure_names_a_gain_that_losses_outweigh() -> None:
    gained = [
        Trial("--routing kv", "prefix hits", 0.1, 0.2, helps=False),
        Trial("without pool b", "prefix hits", 0.1, 0.1, helps=False),
    ]
    assert format_failure(gained) == (
        "No replayed change raises prefix hits by 1 point or more above the noise and without losses elsewhere: "
        "--routing kv, without pool b."
    )
    balance = [Trial("--routing kv", "busiest worker", 2.0, 2.0, helps=False)]
    assert format_failure(balance).startswith(
        "No replayed change lowers the load of the busiest worker by 1 % or more: "
    )


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        # 4 × 32 blocks of 64 tokens of 128 KiB
        ("--model Llama-3.1-8B --gpu H100 --block-size 64 --num-gpu-blocks 32", "1GiB"),
        ("--model Llama-3.1-8B --gpu H100 --block-size 16 --num-gpu-blocks 96", "768MiB"),
        ("--engine sglang --model Llama-3.1-8B --gpu H100 --page-size 64 --max-total-tokens 2048", "1GiB"),
        ("--block-size 64 --num-gpu-blocks 32", None),  # KV bytes per token are not known
        ("--model Llama-3.1-8B --gpu H100 --block-size 64 --g2 64 --num-gpu-blocks 32", None),
    ],
)
def test_host_memory_is_tried_for_a_small_cache_where_the_run_allows_it(
    tmp_path: Path, flags: str, size: str | None
) -> None:
    trace, saved = tmp_path / "t.jsonl", tmp_path / "r.json"
    lines = [
        {
            "timestamp": 1000 * i,
            "input_length": 1024,
            "output_length": 4,
            "hash_ids": [2 * (i % 5), 2 * (i % 5) + 1],
        }
        for i in range(64)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["replay", str(trace), "--quiet", *flags.split(), "--json", str(saved)]) == 0
    content = json.loads(saved.read_text())
    if "--g2" not in flags:
        assert "cache_too_small" in [one["rule"] for one in content["verdicts"]]
    tried = {one["change"]: one for one in content.get("advice", {"trials": ()})["trials"]}
    hosts = [change for change in tried if "--g2" in change]
    assert hosts == ([] if size is None else [f"--g2-bytes {size}"])
    if size is not None:
        assert tried[hosts[0]]["helps"]
        assert tried[hosts[0]]["after"] > 0.8


def test_half_of_the_workers_may_do_too() -> None:
    [verdict] = Bench(OVERLOAD, 12, slo=Slo(ttft_ms=500)).advise().verdicts
    assert verdict.finding == "Oversized: 6 workers would do instead of 12."


def test_a_fleet_of_the_right_size_is_not_oversized() -> None:
    bench = Bench(OVERLOAD, 6, slo=Slo(ttft_ms=500))
    found = bench.advise()
    assert bench.changes == [{"workers": 1}, {"workers": 3}]
    assert found.verdicts == ()
    assert found.advice is not None
    assert not any(one.helps for one in found.advice.trials)


def test_without_goals_a_smaller_fleet_must_be_about_as_fast() -> None:
    bench = Bench(CALM, 4, VllmConfig(num_gpu_blocks=4000))
    found = bench.advise()
    assert {"workers": 1} in bench.changes
    assert bench.replay({"workers": 1}).e2e_ms.mean > 1.05 * bench.report.e2e_ms.mean
    assert "one worker" not in "".join(map(str, found.verdicts))


@pytest.mark.parametrize(
    "error", [ConfigError("workers: 4 do not fit"), PolicyError("worker 1"), KeyError(3)]
)
def test_a_change_that_contradicts_other_settings_or_a_users_class_is_left_out(error: Exception) -> None:
    bench = Bench(OVERLOAD, 2, slo=Slo(ttft_ms=500))
    replay = bench.replay

    def refuse_workers(changes: dict[str, Any]) -> Report:
        if "workers" in changes:
            raise error
        return replay(changes)

    bench.replay = refuse_workers  # type: ignore[method-assign]
    found = bench.advise()
    assert found.advice is not None
    assert found.advice.untried == 0
    assert not any("--workers" in one.change for one in found.advice.trials)
    assert not any("were not replayed" in one.remedy for one in found.verdicts)


def test_remedies_of_an_overload_are_judged_by_latency_where_no_change_reaches_the_goal() -> None:
    bench = Bench(OVERLOAD, 2, slo=Slo(ttft_ms=1))
    more = bench.replay({"workers": 8})
    assert bench.report.goodput is not None
    assert bench.report.goodput.ratio == 0.0
    trial = compare("--workers 8", "overloaded", bench.report, more)
    assert (trial.measure, trial.helps) == ("mean TTFT", True)


def test_a_closed_loop_tries_fewer_sessions() -> None:
    bench = Bench(OVERLOAD, 1, load=ClosedLoop(concurrency=40), slo=Slo(ttft_ms=500))
    bench.advise()
    assert any(isinstance(one.get("load"), ClosedLoop) for one in bench.changes)


def test_the_table_the_page_and_the_json_show_it_and_a_flag_skips_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    saved, page = tmp_path / "r.json", tmp_path / "r.html"
    argv = ["replay", TRACE, "--num-gpu-blocks", "512", "--workers", "2", "--slo-ttft-ms", "500"]
    assert main([*argv, "--json", str(saved), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "(replayed)" in out
    assert "remedies replayed in" in out
    content = json.loads(saved.read_text())
    assert content["advice"]["trials"]
    assert content["advice"]["limit_s"] == 10
    assert any("(replayed)" in verdict["remedy"] for verdict in content["verdicts"])
    assert "remedies replayed in" in page.read_text()
    assert '<code class="flag">--workers 4</code>: attainment' in page.read_text()
    assert main([*argv, "--no-advice", "--json", str(saved)]) == 0
    assert "(replayed)" not in capsys.readouterr().out
    assert "advice" not in json.loads(saved.read_text())
