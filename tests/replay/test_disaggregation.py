"""Prefill and decode pools on a virtual clock."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from understudy.engines.sglang_config import SglangConfig
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, PolicyError
from understudy.report.report import Report
from understudy.run.disaggregation import Disaggregation
from understudy.run.handoff_columns import Way
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.pools import WorkerPool
from understudy.run.run_plan import RunPlan
from understudy.workload import ClosedLoop, Workload
from understudy.workload.mooncake import read_mooncake

SMALL = VllmConfig(block_size=16, num_gpu_blocks=400, max_num_batched_tokens=256, max_num_seqs=16)
SYNC = VllmConfig(
    block_size=16, num_gpu_blocks=400, max_num_batched_tokens=256, max_num_seqs=16, async_scheduling=False
)
BYTES = 1000


def make_workload(tmp_path: Any, seed: int, requests: int = 40, gap_ms: float = 30.0) -> Workload:
    """Requests of random lengths, some of which begin alike."""
    draw = random.Random(seed)
    lines, now = [], 0.0
    for _ in range(requests):
        blocks = draw.randint(1, 12)
        shared = draw.randint(0, blocks)
        ids = [draw.randint(1, 3) * 100 + i for i in range(1)] * (shared > 0)
        ids += [draw.randint(1000, 10**6) for _ in range(blocks - len(ids))]
        tokens = (blocks - 1) * 16 + draw.randint(1, 16)
        now += draw.expovariate(1 / gap_ms)
        lines.append(
            f'{{"timestamp": {round(now)}, "input_length": {tokens}, "output_length": {draw.randint(1, 40)}, '
            f'"hash_ids": {ids}}}'
        )
    path = tmp_path / f"trace{seed}.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_mooncake(path, trace_block_size=16)


def run(workload: Workload, engine: VllmConfig = SYNC, **how: Any) -> OfflineRun:
    """Run 2 prefill and 2 decode workers, unless `how` says otherwise."""
    settings: dict[str, Any] = {"prefill_workers": 2, "decode_workers": 2, "kv_bytes_per_token": BYTES}
    keys = set(Disaggregation.__struct_fields__) & set(how)
    settings |= {name: how.pop(name) for name in keys}
    return run_offline(RunPlan(workload, engine, disaggregation=Disaggregation(**settings), **how))


def test_every_request_goes_through_both_pools_and_completes(tmp_path: Any) -> None:
    workload = make_workload(tmp_path, 1)
    timeline = run(workload, check=True).timeline
    columns = timeline.handoff
    assert columns is not None
    assert timeline.completed.all()
    assert (columns.way == Way.REMOTE).all()
    assert set(columns.prefill_worker.tolist()) == {0, 1}
    assert set(timeline.worker.tolist()) <= {2, 3}
    assert (timeline.output_tokens == workload.output_tokens).all()


def test_a_worker_without_roles_is_as_before(tmp_path: Any) -> None:
    assert run_offline(RunPlan(make_workload(tmp_path, 1), SYNC, workers=2)).timeline.handoff is None


@pytest.mark.parametrize("engine", [SYNC, SMALL], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("seed", range(8))
def test_fast_forward_and_stepping_give_the_same_run(tmp_path: Any, seed: int, engine: VllmConfig) -> None:
    draw = random.Random(seed)
    workload = make_workload(tmp_path, seed, gap_ms=draw.choice([5.0, 40.0, 200.0]))
    blocks = draw.choice([16, 40, 400])
    tight = VllmConfig.from_dict(
        {
            "block_size": 16,
            "num_gpu_blocks": blocks,
            "max_num_batched_tokens": draw.choice([64, 512]),
            "max_num_seqs": draw.choice([2, 16]),
            "async_scheduling": engine.async_scheduling is not False,
        }
    )
    how: dict[str, Any] = {
        "link_gbps": draw.choice([math.inf, 0.001, 0.0001]),
        "backend_gbps": draw.choice([math.inf, 0.0005]),
        "link_latency_ms": draw.choice([0.0, 1.5]),
        "hop_ms": draw.choice([0.0, 2.0]),
        "rule": draw.choice(["always", "uncached:40", "ratio:0.5", "isl_bounding"]),
        "decode_routing": draw.choice(["round_robin", "least_loaded", "kv"]),
        "lease_s": draw.choice([1, 30]),
    }
    routing = draw.choice(["round_robin", "kv"])
    first = run(workload, tight, check=True, routing=routing, **how)
    second = run(workload, tight, fast_forward=False, routing=routing, **how)
    assert first.facts.digests == second.facts.digests
    assert first.timeline.completed.all()


def test_the_deep_check_replays_a_disaggregated_run(tmp_path: Any) -> None:
    found = run(make_workload(tmp_path, 3), check="deep", link_gbps=0.001)
    assert found.notes


def test_parts_of_the_time_to_the_first_token_add_up_to_it(tmp_path: Any) -> None:
    timeline = run(make_workload(tmp_path, 2), SMALL, link_gbps=0.0005, hop_ms=3.0).timeline
    columns = timeline.handoff
    assert columns is not None
    parts = columns.ttft_parts_ns(timeline.arrival_ns, timeline.first_token_ns)
    assert all((part >= 0).all() for part in parts.values())
    rows = columns.remote
    assert np.array_equal(
        np.sum(list(parts.values()), axis=0), (timeline.first_token_ns - timeline.arrival_ns)[rows]
    )
    assert (parts["hop"] == 3_000_000).all()


def test_a_hand_off_alone_takes_its_bytes_over_the_slower_link(tmp_path: Any) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 100, "output_length": 4, "hash_ids": [1, 2, 3, 4, 5, 6, 7]}\n'
    )
    timeline = run(read_mooncake(path, trace_block_size=16), link_gbps=0.001, link_latency_ms=2.0).timeline
    columns = timeline.handoff
    assert columns is not None
    assert columns.bytes.tolist() == [7 * 16 * BYTES]  # whole blocks, the partial one too
    assert (columns.landed_ns - columns.posted_ns).tolist() == [2_000_000 + 7 * 16 * BYTES * 1000]


def test_hand_offs_at_one_time_share_the_way_out(tmp_path: Any) -> None:
    path = tmp_path / "two.jsonl"
    line = '{"timestamp": 0, "input_length": 96, "output_length": 4, "hash_ids": [%s]}\n'
    path.write_text("".join(line % ", ".join(str(n * 10 + i) for i in range(6)) for n in (1, 2)))
    workload = read_mooncake(path, trace_block_size=16)
    shared = run(workload, prefill_workers=1, link_gbps=0.0001, decode_routing="round_robin").timeline.handoff
    alone = run(workload, prefill_workers=2, link_gbps=0.0001, decode_routing="round_robin").timeline.handoff
    assert shared is not None
    assert alone is not None
    took = (shared.landed_ns - shared.posted_ns).max() / (alone.landed_ns - alone.posted_ns).max()
    assert 1.9 < took <= 2.0


def test_a_decode_worker_polls_after_the_last_byte(tmp_path: Any) -> None:
    """An idle one iterates every millisecond: the schedule after the poll that finds the blocks is the first."""
    path = tmp_path / "one.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 96, "output_length": 4, "hash_ids": [1, 2, 3, 4, 5, 6]}\n'
    )
    columns = run(read_mooncake(path, trace_block_size=16), link_gbps=0.0001).timeline.handoff
    assert columns is not None
    waited = columns.decode_admit_ns - columns.landed_ns
    assert ((waited >= 1_000_000) & (waited <= 2_000_000)).all()
    assert ((columns.decode_admit_ns - columns.posted_ns) % 1_000_000 == 0).all()


def test_short_prompts_stay_with_the_decode_worker_by_the_rule(tmp_path: Any) -> None:
    workload = make_workload(tmp_path, 5)
    columns = run(workload, rule="uncached:64").timeline.handoff
    assert columns is not None
    remote = columns.way == Way.REMOTE
    assert remote.any()
    assert not remote.all()
    assert not (remote & (workload.prompt_tokens < 64)).any()


def test_llm_ds_rule_with_zero_tokens_never_hands_off(tmp_path: Any) -> None:
    columns = run(make_workload(tmp_path, 5), rule="llm-d:0").timeline.handoff
    assert columns is not None
    assert (columns.way == Way.LOCAL).all()


class Odd:
    """A rule of a user's."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def remote(self, prompt_tokens: int, cached_tokens: int, session: int) -> bool:
        self.calls.append((prompt_tokens, cached_tokens, session))
        return prompt_tokens % 2 == 1


def test_a_rule_of_your_own_decides(tmp_path: Any) -> None:
    workload, rule = make_workload(tmp_path, 6), Odd()
    columns = run(workload, rule=rule).timeline.handoff
    assert columns is not None
    assert len(rule.calls) == len(workload)
    assert ((columns.way == Way.REMOTE) == (workload.prompt_tokens % 2 == 1)).all()


def test_a_rule_that_answers_something_else_is_named(tmp_path: Any) -> None:
    class Wrong:
        def remote(self, *_: int) -> str:
            return "yes"

    with pytest.raises(PolicyError, match=r"remote\(\) must return True or False"):
        run(make_workload(tmp_path, 6), rule=Wrong())


def test_sessions_and_closed_loops_wait_for_the_decode_worker(tmp_path: Any) -> None:
    timeline = run(make_workload(tmp_path, 7), load=ClosedLoop(4), link_gbps=0.001).timeline
    assert timeline.completed.all()
    ends = np.sort(timeline.finish_ns)
    starts = np.sort(timeline.arrival_ns)
    assert (starts[4:] >= ends[:-4]).all()


def test_a_request_that_no_decode_worker_can_hold_is_rejected_at_once(tmp_path: Any) -> None:
    path = tmp_path / "one.jsonl"
    ids = list(range(30))
    path.write_text(f'{{"timestamp": 0, "input_length": 480, "output_length": 4, "hash_ids": {ids}}}\n')
    engine = VllmConfig(block_size=16, num_gpu_blocks=20)
    pools = [
        WorkerPool(name="p", role="prefill", engine=SYNC),
        WorkerPool(name="d", role="decode", engine=engine),
    ]
    found = run_offline(
        RunPlan(read_mooncake(path, trace_block_size=16), pools=pools, disaggregation=Disaggregation())
    )
    assert "(decode pool)" in found.timeline.reject_reasons[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prefill_workers": 1}, "decode_workers: give the numbers of both"),
        ({"rule": "sometimes"}, "rule must be always, uncached:TOKENS"),
        ({"link_gbps": 0}, "link_gbps must be above 0"),
        ({"hop_ms": -1}, "hop_ms must be 0 to"),
        ({"order": "both"}, "order must be prefill_first or decode_first"),
        ({"lease_s": 0}, "lease_s"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Disaggregation(**settings)


def test_pools_that_cannot_hand_off_are_refused_by_name(tmp_path: Any) -> None:
    workload = make_workload(tmp_path, 1, requests=3)
    prefill = WorkerPool(name="p", role="prefill", engine=SYNC)
    decode = WorkerPool(name="d", role="decode", engine=SYNC)
    old = VllmConfig(block_size=16, vllm_version="0.32.0")
    cases: list[tuple[list[WorkerPool], str]] = [
        ([prefill, WorkerPool(name="w", engine=SYNC)], "w needs a role"),
        (
            [prefill, WorkerPool(name="s", role="decode", engine=SglangConfig(block_size=16))],
            "need one kind of engine",
        ),
        ([prefill, WorkerPool(name="d", role="decode", engine=old)], "known of 0.33 only"),
        ([prefill, prefill], "one with role decode"),
    ]
    for pools, words in cases:
        with pytest.raises(ConfigError, match=words):
            run_offline(RunPlan(workload, pools=pools, disaggregation=Disaggregation()))
    with pytest.raises(ConfigError, match="pool p has the role prefill"):
        run_offline(RunPlan(workload, pools=[prefill, decode]))
    with pytest.raises(ConfigError, match="a link with a limit needs it"):
        run_offline(RunPlan(workload, pools=[prefill, decode], disaggregation=Disaggregation(link_gbps=1.0)))


def test_the_report_shows_ways_bytes_and_where_the_time_went(tmp_path: Any) -> None:
    found = run(make_workload(tmp_path, 9), link_gbps=0.001, rule="uncached:64")
    report = Report.build(found.timeline, found.facts)
    handoff = report.handoff
    assert handoff is not None
    assert handoff.remote + handoff.local == len(found.timeline)
    assert handoff.bytes > 0
    assert math.isclose(sum(handoff.ttft_parts_ms.values()), handoff.ttft_ms)
    assert [pool.role for pool in handoff.pools] == ["prefill", "decode"]
    assert report.to_dict()["handoff"]["remote"] == handoff.remote


def test_verdicts_name_the_side_that_waits(tmp_path: Any) -> None:
    slow = run(make_workload(tmp_path, 9), link_gbps=0.00005)
    assert [
        verdict.rule for verdict in Report.build(slow.timeline, slow.facts).verdicts if "hand" in verdict.rule
    ]
    crowded = run(make_workload(tmp_path, 9, gap_ms=1.0), prefill_workers=1, decode_workers=3)
    found = Report.build(crowded.timeline, crowded.facts).verdicts
    assert any(verdict.finding.startswith("Prefill workers are the bottleneck") for verdict in found)
    assert not any(verdict.rule == "hot_worker" for verdict in found)


def test_a_file_of_the_user_routes_decode_workers(tmp_path: Any) -> None:
    file = tmp_path / "last.py"
    file.write_text("class Last:\n    def choose(self, request, view):\n        return int(view.ready[-1])\n")
    workload = make_workload(tmp_path, 1, gap_ms=20.0)
    found = run(workload, decode_workers=3, decode_routing=f"{file}:Last")
    assert len(set(found.timeline.worker.tolist())) == 1


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        ("nearest", "decode_routing must be one of round_robin"),
        ({"event_delay_ms": 5}, "decode_routing must be a name"),
        ("nowhere.py:Router", "decode_routing nowhere.py:Router: there is no file"),
    ],
)
def test_a_wrong_decode_routing_is_refused_by_its_name(tmp_path: Any, routing: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(make_workload(tmp_path, 1, gap_ms=20.0), decode_routing=routing)
