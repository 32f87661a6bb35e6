"""Verdicts on queues and missed objectives, each rule both ways."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import understudy
from replay.building import crowd
from report.building import Row
from report.verdict_building import DEMO, LARGE, found, report
from understudy.cli import main
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.report import Slo, late_machine, latency_verdicts
from understudy.run.facts import RunFacts
from understudy.workload import ClosedLoop, Poisson

if TYPE_CHECKING:
    import pytest

    from understudy.report.verdict import Verdict


SLOW = VllmConfig(
    block_size=16, num_gpu_blocks=400, timing=Constant(prefill_ms=100.0, decode_ms=20.0), max_num_seqs=4
)


def test_lateness_counts_in_simulated_time_relative_to_the_ttft() -> None:
    rows = [Row([100, 200])]  # a TTFT of 100 ms
    for speed, late_ms, is_late in (
        (1.0, 9.0, False),
        (1.0, 11.0, True),
        (5.0, 3.0, True),
        (0.5, 11.0, False),
    ):
        facts = RunFacts(speedup=speed, lateness_ms={"token_p99": late_ms, "step_end_p99": 0.1})
        verdict = late_machine.machine_late(report(*rows, run=facts))
        assert (verdict is not None) == is_late
    assert late_machine.machine_late(report(*rows)) is None


def test_a_queue_that_grows_is_an_overload_with_workers_enough_to_hold_it() -> None:
    load = crowd(600, arrivals=Poisson(qps=20))
    over = understudy.replay(load, SLOW)
    said = found(latency_verdicts.overloaded(over))
    assert "the queue grew in" in said
    enough = int(said.split("about ")[1].split(" workers")[0])
    assert enough > 1
    assert latency_verdicts.overloaded(understudy.replay(load, SLOW, workers=enough)) is None
    # The queue of a closed loop does not grow, but clients wait in it.
    closed = found(
        latency_verdicts.overloaded(understudy.replay(load, SLOW, load=ClosedLoop(concurrency=50)))
    )
    assert re.match(
        r"Requests spend 9\d\.\d % of their time in queues \(mean \d\.\d+ s\): they wait for one", closed
    )
    assert "of the 4 running requests to end (--max-num-seqs)." in closed
    assert "fewer concurrent sessions (--concurrency)" in closed
    assert latency_verdicts.overloaded(understudy.replay(load, SLOW, load=ClosedLoop(concurrency=4))) is None


def test_queues_that_take_a_tenth_of_the_time_get_no_tick(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert main(["replay", str(DEMO), "--num-gpu-blocks", "512", "--workers", "2", *LARGE]) == 0
    out = capsys.readouterr().out
    assert (
        "▲ Requests spend 33.8 % of their time in queues (mean 3.81 s): they wait for the KV cache (KV usage at most "
        "100.0 %, 35 preemptions). --workers 8: mean TTFT 3,926 → 79 ms (replayed). --num-gpu-blocks 1024: mean TTFT "
        "3,926 → 103 ms (replayed)."
    ) in out
    assert "✓" not in out
    assert main(["replay", str(DEMO), "--num-gpu-blocks", "1024", "--workers", "2", *LARGE]) == 0
    assert "✓ No bottleneck found: 0.2 % of the E2E time in queues" in capsys.readouterr().out


def test_steps_that_prefill_can_miss_the_goal_that_others_meet() -> None:
    tokens = [*range(10, 110, 10), 400]  # nine gaps of 10 ms, one of 300
    facts = RunFacts(engine={"max_num_batched_tokens": 8192})
    late = Row([10, 400])
    said = found(latency_verdicts.steps_too_long(report(Row(tokens), late, slo=Slo(itl_ms=50), run=facts)))
    assert "18.2 % of the gaps exceed the ITL objective of 50 ms" in said
    assert "Lower --max-num-batched-tokens (now 8,192); TTFT will rise." in said
    assert latency_verdicts.steps_too_long(report(Row(tokens), late, slo=Slo(itl_ms=400))) is None
    assert (
        latency_verdicts.steps_too_long(report(Row(tokens), late, slo=Slo(itl_ms=5))) is None
    )  # every step is too long
    assert latency_verdicts.steps_too_long(report(Row(tokens), late)) is None
    assert (
        latency_verdicts.steps_too_long(report(Row(tokens), slo=Slo(itl_ms=50))) is None
    )  # its mean meets the goal


def missing(count: int, bad: Row, good: Row, *, total: int = 100, **goals: float) -> Verdict | None:
    rows = [bad] * count + [good] * (total - count)
    return latency_verdicts.goal_missed(
        report(*rows, slo=Slo(**goals), run=RunFacts(engine={"max_num_seqs": 64}))
    )


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


def test_answers_of_one_token_that_miss_a_goal_have_no_gaps_to_judge() -> None:
    late = Row([1000], admit_ms=200)
    assert "for TTFT: their prefill took 800 ms" in found(missing(40, late, Row([100]), ttft_ms=500))
    assert "for E2E: their prefill took 800 ms" in found(missing(40, late, Row([100]), e2e_ms=500))


def test_objectives_that_few_requests_miss_each_are_missed_together() -> None:
    rows = [Row([1000, 1020], admit_ms=900)] + [Row([100, 200, 300])] + [Row([100, 120])] * 98
    slo = Slo(ttft_ms=500, itl_ms=50)
    assert (
        latency_verdicts.goal_missed(report(*rows, slo=slo, run=RunFacts(engine={"max_num_seqs": 64})))
        is not None
    )


def test_a_goal_that_nearly_all_meet_is_not_missed() -> None:
    quick, queued = Row([100, 120]), Row([1000, 1020], admit_ms=900)
    assert missing(1, queued, quick, ttft_ms=500) is None
    assert missing(2, queued, quick, ttft_ms=500) is not None
    assert missing(10, queued, quick, total=19, ttft_ms=500) is None  # too few to say
    assert missing(40, queued, quick, ttft_ms=1000) is None  # the limit is within
    assert latency_verdicts.goal_missed(report(*[queued] * 50)) is None


def test_a_replay_that_misses_its_goals_says_which_and_one_that_queues_is_overloaded() -> None:
    engine = VllmConfig(num_gpu_blocks=512, block_size=64, max_num_batched_tokens=8192)
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
    assert latency_verdicts.overloaded(both) is None
    assert "of their total time" in found(latency_verdicts.overloaded(understudy.replay(DEMO, engine)))
