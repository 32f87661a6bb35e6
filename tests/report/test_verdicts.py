"""Verdicts, each rule both ways: it speaks with its number where it should, and is silent where all is well."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

import understudy
from model.unlimited_cache import hits_one_after_another
from replay.building import conversations, crowd, single_turns
from report.building import Row
from report.verdict_building import DEMO, DONE, LARGE, found, report
from understudy._core import BlockVisits
from understudy.cli import main
from understudy.engines.vllm_config import VllmConfig
from understudy.report import agent_verdicts, group_verdicts, late_machine, latency_verdicts, tier_verdicts
from understudy.report import verdicts as rules
from understudy.report.html import page
from understudy.report.no_verdict import describe_no_verdict
from understudy.run.timeline import Status
from understudy.workload import ClosedLoop, Poisson
from understudy.workload.time_order import time_order
from workload.building import row, trace_file

if TYPE_CHECKING:
    from understudy.workload import Workload


REFUSED = Row(status=Status.REJECTED, worker=-1, requested=5)


def test_a_good_run_has_no_verdict() -> None:
    calm = understudy.replay(crowd(200, arrivals=Poisson(qps=5)), VllmConfig(num_gpu_blocks=4000), workers=2)
    assert calm.verdicts == ()
    assert calm.to_dict()["verdicts"] == []
    said = describe_no_verdict(calm)
    share = 100 * calm.queue_ms.mean / calm.e2e_ms.mean
    hits = 100 * calm.prefix_hit_ratio.first_admission
    assert said == (
        f"No bottleneck found: {share:.1f} % of the E2E time in queues, KV usage at most "
        f"{100 * calm.kv.usage_max:.1f} %, 0 preemptions, prefix hits {hits:.1f} %, no block evicted."
    )
    assert said in page(calm)
    assert said in calm._repr_html_()
    console = Console(record=True, width=400, file=io.StringIO())
    calm.print(console)
    assert said in console.export_text()


def test_a_run_without_verdict_names_its_attainment_and_the_smaller_fleets_that_do_not_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["replay", str(DEMO), "--workers", "4", "--slo-itl-ms", "7.5", *LARGE]) == 0
    out = capsys.readouterr().out
    assert "No bottleneck found: SLO attainment 100.0 %, " in out
    share = r"attainment 100\.0 % → \d+\.\d %"
    assert re.search(
        rf"A smaller fleet is not enough; replayed: --workers 1: {share}, --workers 2: {share}\.", out
    )
    assert main(["replay", str(DEMO), "--workers", "4", *LARGE]) == 0
    assert (
        "A smaller fleet is not enough (replayed: --workers 1, --workers 2): mean E2E or TTFT p99 rises by more "
        "than 5 %, or requests are lost."
    ) in capsys.readouterr().out


def test_few_requests_are_not_judged_and_none_get_no_line() -> None:
    assert describe_no_verdict(report(DONE)).startswith(
        "No bottleneck found, but only 1 request completed; most rules need 20."
    )
    assert describe_no_verdict(report()) == ""
    assert describe_no_verdict(report(REFUSED)) == ""


def test_nothing_completed_says_why() -> None:
    bad = report(REFUSED, REFUSED, reject_reasons={0: "needs 9 blocks, a worker has 4"})
    assert "No request completed: 2 rejected. The first one, request 0: needs 9 blocks" in found(
        rules.nothing_completed(bad)
    )
    assert rules.rejected(bad) is None  # said already
    assert rules.nothing_completed(report(DONE, REFUSED)) is None
    assert rules.nothing_completed(report()) is None


def test_rejections_count_from_one_in_a_hundred_on() -> None:
    assert rules.rejected(report(*[DONE] * 99, REFUSED)) is None
    assert "2 of 100 requests (2.0 %) were rejected" in found(
        rules.rejected(report(*[DONE] * 98, REFUSED, REFUSED))
    )


@pytest.mark.parametrize("rows", [[Row([1000, 1020], admit_ms=900)] * 5, [DONE] * 40])
def test_a_run_with_waits_or_preemptions_and_no_verdict_gets_no_tick(rows: list[Row]) -> None:
    calm, waited = report(*[DONE] * 40), report(*rows[:-1], replace(rows[-1], preemptions=1))
    assert (calm.verdicts, waited.verdicts) == ((), ())
    console = Console(record=True, width=400, file=io.StringIO())
    calm.print(console)
    assert "✓ No bottleneck found" in console.export_text()
    waited.print(console)
    assert "✓" not in console.export_text()
    if len(rows) == 40:
        assert describe_no_verdict(waited).startswith("No rule names a bottleneck, but requests waited: ")


def test_a_cache_that_forgets_too_much_is_too_small() -> None:
    families = [[number % 12, 100 + number] for number in range(120)]
    load = single_turns([512] * 120, 4, [50.0 * n for n in range(120)], families, trace_block_size=256)
    small = understudy.replay(load, VllmConfig(block_size=16, num_gpu_blocks=64))
    said = found(rules.cache_too_small(small))
    assert "0.0 % of the prompt tokens hit" in said
    # 108 of 120 prompts begin with a block that was seen: 256 of 512 tokens.
    assert "would hit 45.0 %" in said
    assert (
        rules.cache_too_small(understudy.replay(load, VllmConfig(block_size=16, num_gpu_blocks=6000))) is None
    )


def test_prefixes_that_meet_different_workers_are_scattered() -> None:
    # Twelve contexts of 256 tokens, ten questions each, one after the other: of 120 prompts 108 begin as another did.
    families = [[number // 10, 100 + number] for number in range(120)]
    load = single_turns([512] * 120, 4, [50.0 * n for n in range(120)], families, trace_block_size=256)
    engine = VllmConfig(block_size=16, num_gpu_blocks=200)
    spread = understudy.replay(load, engine, workers=4)
    said = found(rules.scattered_prefixes(spread))
    # Round robin: each worker meets every context, and 72 prompts begin as another of the same worker did.
    assert (
        "even unlimited caches would hit 30.0 % with this routing; one shared cache would hit 45.0 %" in said
    )
    assert spread.to_dict()["run"]["routed_hit_ratio"] == pytest.approx(72 * 256 / (120 * 512))
    assert rules.cache_too_small(spread) is None  # they are large enough for what they see
    assert rules.scattered_prefixes(understudy.replay(load, engine, workers=4, routing="kv")) is None
    assert rules.scattered_prefixes(understudy.replay(load, engine)) is None  # one worker sees all
    # In turn, each context meets one worker only, and is evicted before it comes again.
    in_turn = [[number % 12, 100 + number] for number in range(120)]
    load = single_turns([512] * 120, 4, [50.0 * n for n in range(120)], in_turn, trace_block_size=256)
    tight = understudy.replay(load, VllmConfig(block_size=16, num_gpu_blocks=40), workers=4)
    assert "unlimited caches with the same routing would hit 45.0 %" in found(rules.cache_too_small(tight))
    assert rules.scattered_prefixes(tight) is None


@pytest.mark.parametrize("block_size", [4, 16, 64])
@pytest.mark.parametrize("load", [crowd(60), conversations(15), single_turns([100, 5, 100], content=None)])
def test_what_an_unlimited_cache_hits_is_what_the_slow_model_says(load: Workload, block_size: int) -> None:
    order = time_order(load)
    expected = hits_one_after_another(load, order.tolist(), [0] * len(load), block_size)
    hits = BlockVisits(load, block_size).unlimited(order)
    assert dict(zip(order.tolist(), hits.tolist(), strict=True)) == dict(enumerate(expected))


def test_a_worker_with_far_more_than_its_share_is_hot() -> None:
    rows = [Row([10, 20], worker=0, prompt_tokens=900) for _ in range(40)]
    others = [Row([10, 20], worker=1, prompt_tokens=100) for _ in range(40)]
    said = found(rules.hot_worker(report(*rows, *others, num_workers=2)))
    assert f"Worker 0 is overloaded: it computed {902 / 502:.1f}× the mean tokens" in said
    even = [replace(each, prompt_tokens=900) for each in others]
    assert rules.hot_worker(report(*rows, *even, num_workers=2)) is None
    assert rules.hot_worker(report(*rows)) is None  # there is nobody to compare with
    cached = [replace(each, cached_first=800) for each in rows]
    assert rules.hot_worker(report(*cached, *others, num_workers=2)) is None  # what was cached is no work


def test_preemptions_beyond_one_in_ten_are_a_storm() -> None:
    often = [Row([10, 20], preemptions=3) for _ in range(5)]
    calm = [DONE] * 95
    assert "15 preemptions for 100 requests" in found(rules.preemption_storm(report(*often, *calm)))
    assert rules.preemption_storm(report(*often[:3], *calm)) is None


def test_verdicts_stand_in_the_table_the_page_and_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(timestamp=i) for i in range(9)] + [row(timestamp=9, input_length=1024)]
    argv = ["replay", str(trace_file(tmp_path, *rows)), "--num-gpu-blocks", "11", "--block-size", "64"]
    argv += ["--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    assert main(argv) == 0
    said = "1 of 10 requests (10.0 %) were rejected"
    assert said in " ".join(capsys.readouterr().out.split())
    assert said in (tmp_path / "r.html").read_text()
    verdict = json.loads((tmp_path / "r.json").read_text())["verdicts"][0]
    assert verdict["rule"] == "rejected"
    assert said in verdict["finding"]


def test_every_rule_is_tested_in_these_files() -> None:
    text = "".join(
        path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*verdicts.py")
    )
    modules = {
        rules.__name__: "rules",
        agent_verdicts.__name__: "agent_verdicts",
        latency_verdicts.__name__: "latency_verdicts",
        late_machine.__name__: "late_machine",
        tier_verdicts.__name__: "tier_verdicts",
        group_verdicts.__name__: "group_verdicts",
    }
    assert all(f"{modules[rule.__module__]}.{rule.__name__}(" in text for rule in rules.RULES)
    assert all(rule.__doc__ for rule in rules.RULES)


def test_a_concurrency_that_is_never_reached_is_named() -> None:
    load = crowd(30, arrivals=Poisson(qps=5))
    engine = VllmConfig(num_gpu_blocks=4000)
    said = found(rules.limit_never_reached(understudy.replay(load, engine, load=ClosedLoop(concurrency=50))))
    assert "The concurrency of 50 was never reached: at most 30 requests were in flight." in said
    assert rules.limit_never_reached(understudy.replay(load, engine, load=ClosedLoop(concurrency=4))) is None
    assert rules.limit_never_reached(understudy.replay(load, engine)) is None
