"""Verdicts, each rule both ways: it speaks with its number where it should, and is silent where all is well."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

import understudy
from model.unlimited_cache import UnlimitedCache
from replay.building import conversations, crowd, single_turns
from report.building import Row, timeline
from report.tier_building import tiered
from understudy.cli import main
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.report import Report, Slo, group_verdicts, tier_verdicts
from understudy.report import verdicts as rules
from understudy.report.html import page
from understudy.report.no_verdict import describe_no_verdict
from understudy.run.facts import RunFacts
from understudy.run.timeline import Status
from understudy.tiers import TiersConfig
from understudy.workload import Normal, Poisson
from understudy.workload.reuse import unlimited_hit_tokens
from workload.building import row, trace_file

if TYPE_CHECKING:
    from understudy.report.tiers import TierUse
    from understudy.report.verdict import Verdict
    from understudy.workload import Workload


def report(*rows: Row, run: RunFacts | None = None, slo: Slo | None = None, **overrides: Any) -> Report:
    return Report.build(timeline(*rows, **overrides), run, slo)


DONE = Row([10, 20])
REFUSED = Row(status=Status.REJECTED, worker=-1, requested=5)


def found(verdict: Verdict | None) -> str:
    assert verdict is not None
    return str(verdict)


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
    assert main(["replay", str(DEMO), "--workers", "4", "--slo-itl-ms", "7.5"]) == 0
    out = capsys.readouterr().out
    assert "No bottleneck found: SLO attainment 100.0 %, " in out
    share = r"attainment 100\.0 % → \d+\.\d %"
    assert re.search(
        rf"A smaller fleet is not enough; replayed: --workers 1: {share}, --workers 2: {share}\.", out
    )
    assert main(["replay", str(DEMO), "--workers", "4"]) == 0
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


SLOW = VllmConfig(
    block_size=16, num_gpu_blocks=400, timing=Constant(prefill_ms=100.0, decode_ms=20.0), max_num_seqs=4
)


def test_a_queue_that_grows_is_an_overload_with_workers_enough_to_hold_it() -> None:
    load = crowd(600, arrivals=Poisson(qps=20))
    over = understudy.replay(load, SLOW)
    said = found(rules.overloaded(over))
    assert "the queue grew in" in said
    enough = int(said.split("about ")[1].split(" workers")[0])
    assert enough > 1
    assert rules.overloaded(understudy.replay(load, SLOW, workers=enough)) is None
    # The queue of a closed loop does not grow, but clients wait in it.
    closed = found(rules.overloaded(understudy.replay(load, SLOW, load=understudy_closed(50))))
    assert re.match(
        r"Requests spend 9\d\.\d % of their time in queues \(mean \d\.\d+ s\): they wait for one", closed
    )
    assert "of the 4 running requests to end (--max-num-seqs)." in closed
    assert "fewer concurrent sessions (--concurrency)" in closed
    assert rules.overloaded(understudy.replay(load, SLOW, load=understudy_closed(4))) is None


def test_queues_that_take_a_tenth_of_the_time_get_no_tick(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert main(["replay", str(DEMO), "--num-gpu-blocks", "512", "--workers", "2"]) == 0
    out = capsys.readouterr().out
    assert (
        "▲ Requests spend 33.8 % of their time in queues (mean 3.81 s): they wait for the KV cache (KV usage at most "
        "100.0 %, 35 preemptions). --workers 8: mean TTFT 3,926 → 79 ms (replayed). --num-gpu-blocks 1024: mean TTFT "
        "3,926 → 103 ms (replayed)."
    ) in out
    assert "✓" not in out
    assert main(["replay", str(DEMO), "--num-gpu-blocks", "1024", "--workers", "2"]) == 0
    assert "✓ No bottleneck found: 0.2 % of the E2E time in queues" in capsys.readouterr().out


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


def understudy_closed(concurrency: int) -> Any:
    from understudy.workload import ClosedLoop

    return ClosedLoop(concurrency=concurrency)


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
    cache, expected = UnlimitedCache(block_size), {}
    order = load.arrival_order()
    for number in range(len(load)) if order is None else order.tolist():
        ids = (
            load.prompt_hash_ids(number).repeat(load.trace_block_size)[: load.prompt_tokens[number]].tolist()
        )
        expected[number] = cache.hit_tokens(ids)
        cache.insert(ids)
    ours = unlimited_hit_tokens(load, block_size)
    # Ours counts whole blocks of the trace; the model counts a part of one too, where prompts of one content differ.
    for number, hits in expected.items():
        assert hits - load.trace_block_size - block_size < ours[number] <= hits


TIERS = {"kv_bytes_per_token": 1 << 20, "tiers": [{"tier": "g2", "blocks": 400, "link": {"down_gbps": 0.2}}]}


def test_a_tier_that_hurts_is_named() -> None:
    engine = VllmConfig(block_size=16, num_gpu_blocks=60)
    slow = TiersConfig.from_dict({**TIERS, "offload": {"mode": "evict"}})
    bad = understudy.replay(crowd(80), engine, tiers=slow, compare_without_tiers=True)
    said = found(tier_verdicts.tier_hurts(bad))
    assert "TTFT is +" in said
    assert "write_through" in said
    alone = found(tier_verdicts.tier_hurts(replace(bad, without_tiers=None)))
    assert "for blocks that were being offloaded" in alone
    fast = TiersConfig.from_dict(
        {
            "kv_bytes_per_token": 16,
            "tiers": [{"tier": "g2", "blocks": 400}],
            "offload": {"mode": "write_through"},
        }
    )
    assert (
        tier_verdicts.tier_hurts(understudy.replay(crowd(80), engine, tiers=fast, compare_without_tiers=True))
        is None
    )
    assert tier_verdicts.tier_hurts(report(DONE)) is None


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


def test_a_link_without_room_to_spare_is_named() -> None:
    full = Report.build(tiered())
    assert full.tiers is not None
    quiet = replace(
        full.tiers, links=tuple(replace(link, window_utilisation=[0.5] * 10) for link in full.tiers.links)
    )
    busy = replace(
        full.tiers,
        links=tuple(
            replace(link, window_utilisation=[1.0] * 3 + [0.1] * 7, bandwidth_gbps=14.0)
            for link in full.tiers.links
        ),
    )
    assert tier_verdicts.link_at_its_limit(replace(full, tiers=quiet)) is None
    assert "at its limit of 14 GB/s for 30.0 % of the time" in found(
        tier_verdicts.link_at_its_limit(replace(full, tiers=busy))
    )
    assert tier_verdicts.link_at_its_limit(report(DONE)) is None


def test_steps_that_prefill_can_miss_the_goal_that_others_meet() -> None:
    tokens = [*range(10, 110, 10), 400]  # nine gaps of 10 ms, one of 300
    facts = RunFacts(engine={"max_num_batched_tokens": 8192})
    late = Row([10, 400])
    said = found(rules.steps_too_long(report(Row(tokens), late, slo=Slo(itl_ms=50), run=facts)))
    assert "18.2 % of the gaps exceed the ITL objective of 50 ms" in said
    assert "Lower --max-num-batched-tokens (now 8,192); TTFT will rise." in said
    assert rules.steps_too_long(report(Row(tokens), late, slo=Slo(itl_ms=400))) is None
    assert (
        rules.steps_too_long(report(Row(tokens), late, slo=Slo(itl_ms=5))) is None
    )  # every step is too long
    assert rules.steps_too_long(report(Row(tokens), late)) is None
    assert rules.steps_too_long(report(Row(tokens), slo=Slo(itl_ms=50))) is None  # its mean meets the goal


DEMO = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"


def missing(count: int, bad: Row, good: Row, *, total: int = 100, **goals: float) -> Verdict | None:
    rows = [bad] * count + [good] * (total - count)
    return rules.goal_missed(report(*rows, slo=Slo(**goals), run=RunFacts(engine={"max_num_seqs": 64})))


def test_the_goal_that_most_requests_miss_is_named_with_what_takes_their_time() -> None:
    quick = Row([100, 120, 140])
    queued = Row([1000, 1020, 1040], admit_ms=900)
    computed = Row([1000, 1020, 1040], admit_ms=200)
    slow = Row([100, 200, 300])
    said = found(missing(40, queued, quick, ttft_ms=500, itl_ms=50))
    assert (
        "40.0 % of the requests miss the objective of 500 ms for TTFT: they waited 900 ms of 1 s to be sched"
        in said
    )
    assert "Use more workers (now 1) to shorten the queue." in said
    said = found(missing(40, computed, quick, ttft_ms=500))
    assert "for TTFT: their prefill took 800 ms of 1 s, on average. Raise the prefix hit ratio" in said
    said = found(missing(7, slow, quick, ttft_ms=500, itl_ms=50))
    assert (
        "7.0 % of the requests miss the objective of 50 ms for ITL: theirs is 100.0 ms, on average." in said
    )
    assert "Lower --max-num-seqs (now 64)" in said
    said = found(missing(30, Row([200, 300, 900], admit_ms=100), quick, e2e_ms=400))
    assert "objective of 400 ms for E2E: their decode took 700 ms of 900 ms, on average." in said


def test_a_goal_that_nearly_all_meet_is_not_missed() -> None:
    quick, queued = Row([100, 120]), Row([1000, 1020], admit_ms=900)
    assert missing(4, queued, quick, ttft_ms=500) is None
    assert missing(5, queued, quick, ttft_ms=500) is not None
    assert missing(10, queued, quick, total=19, ttft_ms=500) is None  # too few to say
    assert missing(40, queued, quick, ttft_ms=1000) is None  # the limit is within
    assert rules.goal_missed(report(*[queued] * 50)) is None


def test_a_replay_that_misses_its_goals_says_which_and_one_that_queues_is_overloaded() -> None:
    engine = VllmConfig(num_gpu_blocks=512)
    both = understudy.replay(DEMO, engine, workers=2, slo=Slo(ttft_ms=500, itl_ms=50))
    alone = understudy.replay(DEMO, engine, workers=2, slo=Slo(ttft_ms=500))
    share = f"{float((both.columns.first_token_ns - both.columns.arrival_ns > 500e6).mean()):.1%}"
    for one in (both, alone):
        first = one.verdicts[0]
        assert first.rule == "goal_missed"
        assert (
            share.replace("%", " %") + " of the requests miss the objective of 500 ms for TTFT"
            in first.finding
        )
        assert first.remedy.startswith("Use more workers (now 2)")
    assert rules.overloaded(both) is None
    assert "of their total time" in found(rules.overloaded(understudy.replay(DEMO, engine)))


def test_verdicts_stand_in_the_table_the_page_and_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(timestamp=i) for i in range(9)] + [row(timestamp=9, input_length=1024)]
    argv = ["replay", str(trace_file(tmp_path, *rows)), "--num-gpu-blocks", "11"]
    argv += ["--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    assert main(argv) == 0
    said = "1 of 10 requests (10.0 %) were rejected"
    assert said in " ".join(capsys.readouterr().out.split())
    assert said in (tmp_path / "r.html").read_text()
    verdict = json.loads((tmp_path / "r.json").read_text())["verdicts"][0]
    assert verdict["rule"] == "rejected"
    assert said in verdict["finding"]


def test_a_window_whose_tail_is_gone_is_named_with_what_full_attention_had() -> None:
    window = understudy.KvCacheGroup(kind="sliding_window", block_size=16, window=64)
    full = understudy.KvCacheGroup(kind="full", block_size=16)
    load = conversations(30, output_tokens=Normal(mean=150, std=10))
    sparse = understudy.replay(load, VllmConfig(kv_cache_groups=(window, full), num_gpu_blocks=4000))
    dense = understudy.replay(
        load,
        VllmConfig(kv_cache_groups=(window, full), num_gpu_blocks=4000, prefix_cache_retention_interval=None),
    )
    assert "full attention alone had" in found(group_verdicts.group_tail_gone(sparse))
    assert group_verdicts.group_tail_gone(dense) is None
    facts = sparse.run.kv_groups
    assert facts is not None
    assert facts.hit_ratio == pytest.approx(sparse.prefix_hit_ratio.total)
    assert [group.kind for group in facts.groups] == ["sliding_window", "full_attention"]
    assert facts.groups[0].held_blocks_peak <= facts.groups[1].held_blocks_peak
    assert '<section class="card full"><div class="head"><h2>KV cache groups</h2>' in page(sparse)
    assert sparse.to_dict()["run"]["kv_groups"]["shortened_ratio"] > 0
    host = {"tiers": [{"tier": "g2", "blocks": 400}], "kv_bytes_per_token": 1024, "offload": {"mode": "vllm"}}
    below = understudy.replay(
        load,
        VllmConfig(kv_cache_groups=(window, full), num_gpu_blocks=600, prefix_cache_retention_interval=None),
        tiers=TiersConfig.from_dict(host),
    )
    verdict = group_verdicts.group_tail_gone(below)
    assert "of the prompt tokens hit, and" in found(verdict)  # on any tier
    assert "hit, and" in found(group_verdicts.group_tail_gone(sparse))
    assert verdict is not None
    assert verdict.remedy == "More blocks may help."


def test_every_rule_is_tested_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    modules = {
        rules.__name__: "rules",
        tier_verdicts.__name__: "tier_verdicts",
        group_verdicts.__name__: "group_verdicts",
    }
    assert all(f"{modules[rule.__module__]}.{rule.__name__}(" in text for rule in rules.RULES)
    assert all(rule.__doc__ for rule in rules.RULES)


def test_a_tier_that_no_request_reads_from_is_named() -> None:
    host = TiersConfig.from_dict({"tiers": [{"tier": "g2", "blocks": 500}], "model": "Llama-3.1-8B"})
    calm = crowd(60, arrivals=Poisson(qps=5))
    unread = understudy.replay(calm, VllmConfig(num_gpu_blocks=4000), tiers=host)
    said = found(tier_verdicts.tier_never_read(unread))
    assert "No request read from g2" in said
    assert "none was loaded back" in said
    assert tier_verdicts.tier_never_read(understudy.replay(calm, VllmConfig(num_gpu_blocks=4000))) is None
    # A tier that is not read is named next to one that is.
    assert unread.tiers is not None
    g1, g2 = unread.tiers.tiers
    g3 = replace(g2, tier="g3", stored_blocks=580_853)
    g2 = replace(g2, hit_tokens_total=64)

    def judge(*tiers: TierUse) -> Verdict | None:
        assert unread.tiers is not None
        return tier_verdicts.tier_never_read(replace(unread, tiers=replace(unread.tiers, tiers=(g1, *tiers))))

    said = found(judge(g2, g3))
    assert said.startswith(
        "No request read from g3: 580,853 blocks were stored, and none was loaded back. Leave"
    )
    assert judge(g2, replace(g3, stored_blocks=0)) is None
    said = found(judge(replace(g2, hit_tokens_total=0), replace(g3, hit_tokens_total=64)))
    assert said.startswith("No request read from g2: ")
    assert "Leave" not in said


def test_a_concurrency_that_is_never_reached_is_named() -> None:
    load = crowd(30, arrivals=Poisson(qps=5))
    engine = VllmConfig(num_gpu_blocks=4000)
    said = found(rules.limit_never_reached(understudy.replay(load, engine, load=understudy_closed(50))))
    assert "The concurrency of 50 was never reached: at most 30 requests were in flight." in said
    assert rules.limit_never_reached(understudy.replay(load, engine, load=understudy_closed(4))) is None
    assert rules.limit_never_reached(understudy.replay(load, engine)) is None
