"""Metrics of runs small enough to compute by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from report.building import MS, Row, crowd, timeline
from understudy.errors import ConfigError, InvalidArgument
from understudy.report import Report, Slo
from understudy.router import KvRouting
from understudy.run.facts import PoolFacts, RunFacts, TimeFacts
from understudy.run.timeline import Status, Timeline
from understudy.workload import OpenLoop


def report(*rows: Row, slo: Slo | None = None, **overrides: Any) -> Report:
    return Report.build(timeline(*rows, **overrides), slo=slo)


def test_latencies_of_one_request() -> None:
    r = report(Row([10, 11, 12, 110], arrival_ms=2, queued_ms=4, admit_ms=5))
    assert (r.ttft_ms.mean, r.ttst_ms.mean, r.e2e_ms.mean, r.queue_ms.mean) == (8, 1, 108, 3)
    assert r.ttft_queued_ms.mean == 6
    assert r.tpot_ms.mean == pytest.approx(100 / 3)
    assert (r.itl_ms.count, r.itl_ms.p50, r.itl_ms.max) == (3, 1, 98)
    # Gaps 1, 1, 98: p75 is rank ceil(2.25) = 3. A rank that is rounded instead, round(2 · 0.75) = 2, agrees here.
    assert (r.itl_ms.p75, r.itl_ms.p90, r.itl_ms.p95, r.itl_ms.p99) == (98, 98, 98, 98)
    rate = r.output_tokens_per_s_per_user
    assert rate.count == 1
    assert rate.mean == pytest.approx(1000 / r.tpot_ms.mean)


def test_the_slowest_user_is_the_one_with_the_largest_time_per_token() -> None:
    # One gap of 98 ms among short ones is not a user who reads 10 tokens/s.
    r = report(Row([10, 11, 12, 110]), Row([10, 20, 30]))
    rate = r.output_tokens_per_s_per_user
    assert rate.count == 2
    assert rate.min == pytest.approx(1000 / r.tpot_ms.max)
    assert rate.max == pytest.approx(1000 / r.tpot_ms.min)
    assert rate.mean == pytest.approx((30 + 100) / 2)


def test_where_nearest_rank_and_rounded_rank_differ() -> None:
    # TTFT 10, 20, 30, 40: the median is rank ceil(2) = 2, that is 20; the rounded rank round(1.5) = 2 from 0 says 30.
    r = report(*(Row([ms]) for ms in (10, 20, 30, 40)))
    assert r.ttft_ms.p50 == 20


def test_throughput_counts_completed_requests_from_first_arrival_to_last_token() -> None:
    r = report(
        Row([1100, 1200], arrival_ms=1000, prompt_tokens=100),
        Row([1500], arrival_ms=1100, prompt_tokens=50),
        Row(
            [1600, 3000],
            arrival_ms=1200,
            admit_ms=1200,
            status=Status.CANCELLED,
            prompt_tokens=999,
            finish_ms=3100,
        ),
    )
    assert r.duration_s == 2
    assert (r.tokens.input, r.tokens.output) == (150, 3)
    rates = r.throughput
    assert (rates.requests_per_s, rates.input_tokens_per_s, rates.output_tokens_per_s) == (1, 75, 1.5)
    assert rates.total_tokens_per_s == 76.5
    counts = r.requests
    assert (counts.total, counts.completed, counts.cancelled, counts.rejected) == (3, 2, 1, 0)
    assert r.ttft_ms.count == 2


A, B, C = Row([100, 150, 200]), Row([100, 120, 140]), Row([100])


def test_goodput_needs_every_objective() -> None:
    goodput = report(A, B, C, slo=Slo(ttft_ms=150, itl_ms=30)).goodput
    assert goodput is not None
    assert goodput.requests == 2
    assert goodput.ratio == pytest.approx(2 / 3)
    assert (goodput.requests_per_s, goodput.output_tokens_per_s) == (10, 20)


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(itl_ms=50), 3),
        (Slo(itl_ms=49.999999), 2),
        (Slo(ttft_ms=100), 3),
        (Slo(ttft_ms=99.999999), 0),
        (Slo(e2e_ms=140), 2),
        (Slo(e2e_ms=200), 3),
        (Slo(ttft_ms=100, itl_ms=20, e2e_ms=100), 1),
    ],
)
def test_an_objective_includes_its_limit(slo: Slo, good: int) -> None:
    goodput = report(A, B, C, slo=slo).goodput
    assert goodput is not None
    assert goodput.requests == good


def test_a_limit_that_no_double_equals_still_includes_its_boundary() -> None:
    assert 33.3 * 1e6 < 33_300_000
    goodput = report(Row([33.3]), slo=Slo(ttft_ms=33.3)).goodput
    assert goodput is not None
    assert goodput.requests == 1


@pytest.mark.parametrize(
    ("slo", "good"),
    [(Slo(e2e_ms=50), 1), (Slo(e2e_ms=50, ttft_ms=50), 0), (Slo(itl_ms=50), 0), (Slo(e2e_ms=49), 0)],
)
def test_a_request_without_output_is_good_only_under_e2e_alone(slo: Slo, good: int) -> None:
    goodput = report(Row(finish_ms=50), slo=slo).goodput
    assert goodput is not None
    assert goodput.requests == good


def test_a_rejected_request_is_never_good_but_counts_as_asked() -> None:
    goodput = report(C, Row(status=Status.REJECTED, worker=-1), slo=Slo(e2e_ms=1000)).goodput
    assert goodput is not None
    assert (goodput.requests, goodput.ratio) == (1, 0.5)


@pytest.mark.parametrize(
    "limits", [{}, {"ttft_ms": 0}, {"itl_ms": math.nan}, {"e2e_ms": math.inf}, {"ttft_ms": "1"}]
)
def test_a_meaningless_objective_is_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"slo needs at least one|ms must be a positive number"):
        Slo(**limits)


def test_zero_output_requests_have_an_e2e_and_no_token_latencies() -> None:
    r = report(Row(arrival_ms=10, admit_ms=20, finish_ms=50), Row([30], arrival_ms=10))
    assert (r.e2e_ms.count, r.e2e_ms.max, r.ttft_ms.count, r.queue_ms.max) == (2, 40, 1, 10)
    assert r.requests.completed == 2
    assert r.output_tokens.min == 0
    assert r.duration_s == 0.02  # to the last token


def test_single_token_requests_have_no_gaps() -> None:
    r = report(Row([30]), Row([40]))
    assert (r.ttft_ms.count, r.ttst_ms.count, r.tpot_ms.count, r.itl_ms.count) == (2, 0, 0, 0)
    assert math.isnan(r.itl_ms.p99)
    assert r.output_tokens_per_s_per_user.count == 0


def test_tokens_of_one_burst_have_gaps_of_zero_and_alone_no_rate() -> None:
    r = report(Row([10, 10, 10, 20]))
    assert (r.itl_ms.count, r.itl_ms.min, r.itl_ms.p50, r.itl_ms.max) == (3, 0, 0, 10)
    assert (r.output_tokens_per_s_per_user.count, r.output_tokens_per_s_per_user.mean) == (1, 300)
    assert report(Row([10, 10])).output_tokens_per_s_per_user.count == 0


def test_prefix_hits_count_over_admitted_requests() -> None:
    r = report(
        Row([10], prompt_tokens=100, cached_first=64),
        # Preempted with nine tokens of output, it was looked up with 100 tokens, then with 109.
        Row([10], prompt_tokens=100, cached_first=0, cached_total=80, preemptions=1, looked_up=209),
        Row(prompt_tokens=900, status=Status.REJECTED, worker=-1),
    )
    assert r.prefix_hit_ratio.first_admission == 0.32
    assert r.prefix_hit_ratio.total == (64 + 80) / (100 + 209)
    assert r.preemptions == 1


def samples(**columns: list[int]) -> dict[str, Any]:
    rows = len(columns["sample_time_ns"])
    return {f"sample_{name}": [0] * rows for name in ("worker", "running", "waiting")} | columns


def test_kv_usage_is_weighted_by_time_and_averaged_over_workers() -> None:
    # Worker 0: 50 of 100 blocks in the first half, then 100. Worker 1: 40 in the last quarter. Order does not matter.
    r = report(
        Row([100, 200], arrival_ms=100),
        num_workers=2,
        **samples(
            sample_time_ns=[175 * MS, 100 * MS, 150 * MS],
            sample_worker=[1, 0, 0],
            sample_used_blocks=[40, 50, 100],
            sample_cached_blocks=[60, 20, 0],
        ),
    )
    assert r.kv.usage_mean == pytest.approx((0.75 + 0.10) / 2)
    assert r.kv.cached_mean == pytest.approx((0.10 + 0.15) / 2)
    assert r.kv.usage_max == 1


def test_samples_outside_the_run_weigh_nothing() -> None:
    r = report(
        Row([200], arrival_ms=100),
        **samples(
            sample_time_ns=[0, 150 * MS, 900 * MS],
            sample_used_blocks=[100, 50, 0],
            sample_cached_blocks=[0, 0, 0],
        ),
    )
    assert r.kv.usage_mean == pytest.approx(0.75)


@pytest.mark.parametrize(
    "rows", [[], [Row(status=Status.REJECTED, worker=-1)], [Row(status=Status.UNFINISHED)]]
)
def test_a_run_without_completions_has_counts_and_no_rates(rows: list[Row]) -> None:
    r = report(*rows, slo=Slo(ttft_ms=1))
    assert (r.requests.total, r.requests.completed) == (len(rows), 0)
    assert math.isnan(r.ttft_ms.p99)
    assert math.isnan(r.throughput.output_tokens_per_s)
    assert math.isnan(r.prefix_hit_ratio.total)
    assert math.isnan(r.kv.usage_mean)
    assert r.duration_s == 0


def expanded(t: Timeline, column: str) -> Any:
    done = t.status == Status.COMPLETED
    return sorted(((getattr(t, column) - t.arrival_ns)[done & (t.output_tokens > 0)] / 1e6).tolist())


def test_a_crowd_agrees_with_a_plain_computation() -> None:
    t = crowd(700, seed=5)
    r = Report.build(t)
    ttft = expanded(t, "first_token_ns")
    assert r.ttft_ms.p99 == ttft[math.ceil(0.99 * len(ttft)) - 1]
    assert r.ttft_ms.mean == pytest.approx(sum(ttft) / len(ttft))
    assert r.ttft_ms.std == pytest.approx(float(np.std(ttft)))
    assert r.itl_ms.count == r.tokens.output - r.ttft_ms.count
    total = int(t.output_tokens[t.status == Status.COMPLETED].sum())
    assert r.throughput.output_tokens_per_s == pytest.approx(total / r.duration_s)


def test_facts_about_the_run_must_fit_json() -> None:
    with pytest.raises(InvalidArgument, match="run must be JSON-serialisable"):
        Report.build(timeline(), RunFacts(engine={"x": object()}))


def test_facts_by_name_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"run must be RunFacts, got \{'workload'"):
        Report.build(timeline(), {"workload": "chat"})  # type: ignore[arg-type]


def test_facts_that_are_unknown_are_not_written() -> None:
    assert RunFacts().to_dict() == {}
    facts = RunFacts(workload="chat", seed=0, engine={"block_size": 16, "max_num_seqs": None})
    assert facts.to_dict() == {
        "workload": "chat",
        "seed": 0,
        "engine": {"block_size": 16, "max_num_seqs": None},
    }


def test_facts_keep_the_json_of_loads_times_pools_and_routing() -> None:
    facts = RunFacts(
        online=True,
        routing=KvRouting(temperature=0.5),
        load=OpenLoop(),
        pools=(PoolFacts("small", 2, "synchronous", {"block_size": 16}),),
        times=TimeFacts("a table", 0.0),
    ).to_dict()
    assert facts["online"] is True
    assert (facts["routing"]["kind"], facts["routing"]["temperature"]) == ("kv", 0.5)
    assert facts["load"] == {"kind": "open_loop", "arrival_rate_scale": 1.0}
    assert facts["pools"] == [
        {"name": "small", "workers": 2, "scheduling": "synchronous", "engine": {"block_size": 16}}
    ]
    assert facts["times"] == {"from": "a table", "outside_domain_share": 0.0, "front_end_ms": 0.0}
