"""Hand-offs that fail, leases that expire, and clients that abort, in a replay."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from replay.test_disaggregation import SMALL, make_workload, run
from understudy.cli import main
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.report.report import Report
from understudy.run.handoff_columns import HandOffColumns, Way
from understudy.run.timeline import Status
from understudy.tiers.settings import TiersConfig
from understudy.workload import ClosedLoop, Workload
from understudy.workload.mooncake import read_mooncake

if TYPE_CHECKING:
    from understudy.run.offline import OfflineRun

MS = 1_000_000
LONG = '{"timestamp": 0, "input_length": 96, "output_length": 40, "hash_ids": [1, 2, 3, 4, 5, 6]}\n'


def columns_of(found: OfflineRun) -> HandOffColumns:
    assert found.timeline.handoff is not None
    return found.timeline.handoff


def require_nothing_left(found: OfflineRun) -> None:
    """Every request has ended, and the last sample of each worker shows no request and no block in use."""
    timeline, columns = found.timeline, columns_of(found)
    assert (timeline.status != Status.UNFINISHED).all()
    for worker in set(timeline.sample_worker.tolist()):
        last = np.flatnonzero(timeline.sample_worker == worker)[-1]
        left = (timeline.sample_running, timeline.sample_waiting, timeline.sample_used_blocks)
        assert [int(one[last]) for one in left] == [0, 0, 0], worker
        assert columns.sample_kept_blocks[last] == 0


# ── Failed reads ──


def test_a_decode_worker_computes_prompts_whose_read_failed(tmp_path: Any) -> None:
    workload = make_workload(tmp_path, 1)
    found = run(
        workload, check=True, transfer_failure_rate=0.3, kv_load_failure_policy="recompute", lease_s=2
    )
    columns, timeline = columns_of(found), found.timeline
    fallback = columns.way == Way.FALLBACK
    assert 0 < fallback.sum() < len(workload)
    assert timeline.completed.all()
    assert (timeline.output_tokens == workload.output_tokens).all()
    assert timeline.expired_leases == fallback.sum()  # the prefill worker is not notified
    require_nothing_left(found)


def test_requests_whose_read_failed_end_with_an_error_by_default(tmp_path: Any) -> None:
    workload = make_workload(tmp_path, 1)
    found = run(workload, check=True, transfer_failure_rate=0.3, lease_s=2)
    columns, timeline = columns_of(found), found.timeline
    failed = columns.way == Way.FAILED
    assert 0 < failed.sum() < len(workload)
    assert ((timeline.status == Status.FAILED) == failed).all()
    assert (timeline.output_tokens[failed] == 0).all()
    assert (timeline.finish_ns[failed] >= columns.landed_ns[failed]).all()
    assert timeline.completed[~failed].all()
    require_nothing_left(found)


def test_seed_and_request_decide_which_reads_fail(tmp_path: Any) -> None:
    workload = make_workload(tmp_path, 2)

    def failing(**how: Any) -> list[bool]:
        found = run(workload, transfer_failure_rate=0.4, **how)
        return [bool(way == Way.FAILED) for way in columns_of(found).way]

    first = failing(seed=5)
    assert first == failing(seed=5, link_gbps=0.001, decode_workers=1, engine=SMALL)
    assert first != failing(seed=6)


def test_every_read_fails_at_rate_one_and_none_at_zero(tmp_path: Any) -> None:
    workload = make_workload(tmp_path, 3, requests=10)
    assert (columns_of(run(workload, transfer_failure_rate=1)).way == Way.FAILED).all()
    never = run(workload, transfer_failure_rate=0.0)
    assert never.facts.digest == run(workload).facts.digest


def test_parts_of_the_ttft_leave_out_failed_hand_offs(tmp_path: Any) -> None:
    found = run(
        make_workload(tmp_path, 2),
        link_gbps=0.0005,
        transfer_failure_rate=0.3,
        kv_load_failure_policy="recompute",
    )
    columns, timeline = columns_of(found), found.timeline
    parts = columns.ttft_parts_ns(timeline.arrival_ns, timeline.first_token_ns)
    rows = columns.way == Way.REMOTE
    assert all((part >= 0).all() for part in parts.values())
    assert np.array_equal(
        np.sum(list(parts.values()), axis=0), (timeline.first_token_ns - timeline.arrival_ns)[rows]
    )


def test_the_report_counts_failures_and_names_them(tmp_path: Any) -> None:
    found = run(
        make_workload(tmp_path, 9),
        rule="uncached:20",
        transfer_failure_rate=0.5,
        kv_load_failure_policy="recompute",
    )
    report = Report.build(found.timeline, found.facts)
    handoff = report.handoff
    assert handoff is not None
    assert handoff.fallback > 0
    assert handoff.failed == report.requests.failed == 0
    assert handoff.remote + handoff.local + handoff.fallback == len(found.timeline)
    assert any(verdict.rule == "handoff_failures" for verdict in report.verdicts)
    ended = run(make_workload(tmp_path, 9), transfer_failure_rate=0.5)
    report = Report.build(ended.timeline, ended.facts)
    assert report.handoff is not None
    assert report.requests.failed == report.handoff.failed > 0
    assert report.requests.completed + report.requests.failed == report.requests.total
    assert "--kv-load-failure-policy recompute" in "".join(map(str, report.verdicts))


def test_reads_after_a_lease_are_counted(tmp_path: Any) -> None:
    workload = make_workload(tmp_path, 4, requests=25)
    found = run(workload, hop_ms=2500.0, lease_s=1, check=True)
    assert found.timeline.expired_leases == found.timeline.late_notifications == len(workload)
    assert found.timeline.completed.all()
    report = Report.build(found.timeline, found.facts)
    assert "read blocks after the end of their lease" in "".join(map(str, report.verdicts))
    assert run(workload, hop_ms=500.0, lease_s=1).timeline.late_notifications == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"transfer_failure_rate": 1.5}, r"transfer_failure_rate must be a share"),
        ({"transfer_failure_rate": math.nan}, "transfer_failure_rate must be a share"),
        ({"kv_load_failure_policy": "retry"}, "kv_load_failure_policy must be fail or recompute"),
    ],
)
def test_wrong_settings_of_failures_are_named(tmp_path: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(make_workload(tmp_path, 1, requests=1), **settings)


# ── Aborts ──


def one_request(tmp_path: Any, abort_after_ms: float) -> Workload:
    path = tmp_path / "one.jsonl"
    path.write_text(LONG.replace("}", f', "abort_after_ms": {abort_after_ms}}}'), encoding="utf-8")
    return read_mooncake(path, trace_block_size=16)


SLOW: dict[str, Any] = {
    "link_gbps": 0.0001,
    "hop_ms": 50.0,
    "prefill_workers": 1,
    "decode_workers": 1,
    "lease_s": 3,
}
"""Settings of a run in which every stage of a request takes long."""


def test_a_client_aborts_on_each_leg_and_no_block_is_lost(tmp_path: Any) -> None:
    """Between arrival and end: on the prefill worker, on the way, while the blocks are read, and while it decodes."""
    whole = run(read_mooncake(write(tmp_path, LONG), trace_block_size=16), **SLOW)
    columns, timeline = columns_of(whole), whole.timeline
    done, posted, landed, end = (
        int(one[0]) // MS
        for one in (columns.prefill_done_ns, columns.posted_ns, columns.landed_ns, timeline.finish_ns)
    )
    legs = {
        "prefill": (done // 2, 0, -1),
        "hop": (done + 20, 1, -1),
        "reading": ((posted + landed) // 2, 0, landed),
        "decoding": ((landed + end) // 2, 0, landed),
    }
    for leg, (at_ms, expired, moved) in legs.items():
        found = run(one_request(tmp_path, at_ms), check=True, **SLOW)
        assert found.timeline.status.tolist() == [Status.CANCELLED], leg
        assert found.timeline.finish_ns.tolist() == [at_ms * MS], leg
        assert found.timeline.expired_leases == expired, leg
        assert (columns_of(found).landed_ns[0] >= 0) == (moved >= 0), leg
        assert (found.timeline.output_tokens[0] > 0) == (leg == "decoding")
        require_nothing_left(found)
    late = run(one_request(tmp_path, end + 1), check=True, **SLOW)
    assert late.facts.digest == whole.facts.digest


def write(tmp_path: Any, text: str) -> Any:
    path = tmp_path / "trace.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_request_aborted_before_it_pulls_frees_the_prefill_worker_at_once(tmp_path: Any) -> None:
    """The decode worker has no slot; when its client leaves, a message without a read frees the blocks."""
    first, second = (
        LONG.replace("[1, 2, 3, 4, 5, 6]", ids).replace("40,", "400,")
        for ids in ("[1, 2, 3, 4, 5, 6]", "[11, 12, 13, 14, 15, 16]")
    )
    workload = read_mooncake(
        write(tmp_path, first + second.replace("}", ', "abort_after_ms": 1500}')), trace_block_size=16
    )
    engine = VllmConfig(block_size=16, num_gpu_blocks=400, max_num_seqs=1, async_scheduling=False)
    found = run(workload, engine, prefill_workers=1, decode_workers=1, lease_s=30, check=True)
    assert found.timeline.status.tolist() == [Status.COMPLETED, Status.CANCELLED]
    assert columns_of(found).posted_ns[1] == -1
    assert found.timeline.expired_leases == 0
    require_nothing_left(found)


def test_sessions_and_closed_loops_go_on_after_an_abort(tmp_path: Any) -> None:
    workload = make_workload(tmp_path, 7)
    workload = replace(workload, abort_after_ns=np.full(len(workload), 300 * MS))
    timeline = run(workload, load=ClosedLoop(2), link_gbps=0.001).timeline
    assert set(timeline.status.tolist()) == {Status.COMPLETED, Status.CANCELLED}
    cut = timeline.status == Status.CANCELLED
    assert (timeline.finish_ns[cut] == timeline.arrival_ns[cut] + 300 * MS).all()


def draw_run(tmp_path: Any, seed: int) -> tuple[Workload, VllmConfig, dict[str, Any]]:
    """Random settings of a fleet with aborts and failures."""
    draw = random.Random(seed)
    gap_ms = draw.choice([5.0, 40.0, 200.0])
    workload = make_workload(tmp_path, seed, gap_ms=gap_ms)
    chance = draw.choice([0.0, 0.3, 0.9])
    aborts = [
        draw.choice([0, draw.randrange(3000 * MS)]) if draw.random() < chance else -1
        for _ in range(len(workload))
    ]
    if chance:
        workload = replace(workload, abort_after_ns=np.array(aborts, np.int64))
    engine = VllmConfig.from_dict(
        {
            "block_size": 16,
            "num_gpu_blocks": draw.choice([16, 40, 400]),
            "max_num_batched_tokens": draw.choice([64, 512]),
            "max_num_seqs": draw.choice([2, 16]),
            "async_scheduling": draw.random() < 0.5,
        }
    )
    how: dict[str, Any] = {
        "seed": seed,
        "link_gbps": draw.choice([math.inf, 0.001, 0.0001]),
        "link_latency_ms": draw.choice([0.0, 1.5]),
        "hop_ms": draw.choice([0.0, 2.0, 1500.0]),
        "rule": draw.choice(["always", "uncached:40", "ratio:0.5"]),
        "order": draw.choice(["prefill_first", "decode_first"]),
        "routing": draw.choice(["round_robin", "kv", "least_loaded"]),
        "decode_routing": draw.choice(["round_robin", "least_loaded", "kv"]),
        "lease_s": draw.choice([1, 6]),
        "transfer_failure_rate": draw.choice([0.0, 0.3, 1.0]),
        "kv_load_failure_policy": draw.choice(["fail", "recompute"]),
        "load": draw.choice([None, ClosedLoop(6)]),
    }
    return workload, engine, how


@pytest.mark.parametrize("seed", range(24))
def test_no_block_or_request_is_lost_whatever_is_aborted_or_fails(tmp_path: Any, seed: int) -> None:
    workload, engine, how = draw_run(tmp_path, seed)
    first = run(workload, engine, check=True, **how)
    require_nothing_left(first)
    second = run(workload, engine, fast_forward=False, **how)
    assert first.facts.digests == second.facts.digests


@pytest.mark.parametrize("seed", range(3))
def test_aborts_and_failures_work_with_tiers(tmp_path: Any, seed: int) -> None:
    workload, engine, how = draw_run(tmp_path, 100 + seed)
    links = {"down_gbps": 0.005, "up_gbps": 0.005}
    tiers = TiersConfig.from_dict(
        {"tiers": [{"tier": "g2", "blocks": 100, "link": links}], "kv_bytes_per_token": 1000}
    )
    workload = replace(workload, abort_after_ns=np.where(np.arange(len(workload)) % 3 == 0, 300 * MS, -1))
    found = run(workload, engine, check=True, tiers=tiers, **how)
    assert (found.timeline.status != Status.UNFINISHED).all()
    assert (found.timeline.status == Status.CANCELLED).any()


def test_flags_provoke_failures(tmp_path: Any) -> None:
    path = write(tmp_path, LONG.replace("}", ', "request_id": "a"}') + LONG)
    split = ["--prefill-workers", "1", "--decode-workers", "1", "--seed", "3", "--transfer-failure-rate", "1"]
    saved = tmp_path / "report.json"
    command = ["replay", str(path), "--trace-block-size", "16", "--block-size", "16", "--json", str(saved)]
    assert main([*command, *split, "--quiet"]) == 0
    assert json.loads(saved.read_text())["requests"]["failed"] == 2
    assert main([*command, *split, "--kv-load-failure-policy", "recompute", "--quiet"]) == 0
    assert json.loads(saved.read_text())["handoff"]["fallback"] == 2
