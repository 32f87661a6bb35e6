"""Prefill and decode workers of SGLang on a virtual clock: both sides joined over links that transfers share."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from replay.building import ONE_MS
from replay.test_disaggregation import BYTES, make_workload
from understudy.engines.sglang_config import SglangConfig
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, WrongState
from understudy.report.report import Report
from understudy.router import KvRouting
from understudy.run.disaggregation import Disaggregation
from understudy.run.handoff_columns import Way
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.pools import WorkerPool
from understudy.run.run_plan import RunPlan
from understudy.run.timeline import Status
from understudy.tiers import TiersConfig
from understudy.workload import ClosedLoop, Workload
from understudy.workload.mooncake import read_mooncake

MS = 1_000_000
FIRST = int(os.environ.get("SGLANG_FAST_FORWARD_FIRST", "0"))
SEEDS = int(os.environ.get("SGLANG_FAST_FORWARD_COUNT", "60"))
"""Random configurations, from seed `FIRST`."""
ENGINE = SglangConfig(
    block_size=16, num_gpu_blocks=400, max_num_seqs=16, chunked_prefill_size=64, num_reserved_decode_tokens=32
)
NORMAL = SglangConfig(
    block_size=16,
    num_gpu_blocks=400,
    max_num_seqs=16,
    chunked_prefill_size=64,
    num_reserved_decode_tokens=32,
    disable_overlap_schedule=True,
    timing=ONE_MS,
)


def run(workload: Workload, engine: SglangConfig = ENGINE, **how: Any) -> OfflineRun:
    """Run 2 prefill and 2 decode workers, unless `how` says otherwise."""
    settings: dict[str, Any] = {"prefill_workers": 2, "decode_workers": 2, "kv_bytes_per_token": BYTES}
    settings |= {name: how.pop(name) for name in set(Disaggregation.__struct_fields__) & set(how)}
    return run_offline(RunPlan(workload, engine, disaggregation=Disaggregation(**settings), **how))


def read_line(tmp_path: Any, *lines: str) -> Workload:
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_mooncake(path, trace_block_size=16)


SIX_PAGES = '{"timestamp": 0, "input_length": 96, "output_length": 4, "hash_ids": [1, 2, 3, 4, 5, 6]}'


@pytest.mark.parametrize("engine", [ENGINE, NORMAL], ids=["overlap", "normal"])
def test_every_request_is_computed_by_one_pool_and_decoded_by_the_other(
    tmp_path: Any, engine: SglangConfig
) -> None:
    workload = make_workload(tmp_path, 1)
    timeline = run(workload, engine, check=True).timeline
    columns = timeline.handoff
    assert columns is not None
    assert timeline.completed.all()
    assert (columns.way == Way.REMOTE).all()
    assert set(columns.prefill_worker.tolist()) == {0, 1}
    assert set(timeline.worker.tolist()) <= {2, 3}
    assert (timeline.output_tokens == workload.output_tokens).all()


def random_run(tmp_path: Any, seed: int) -> tuple[Workload, SglangConfig, dict[str, Any]]:
    """Draw requests, pools from tight to wide, links, routers and aborts."""
    draw = random.Random(f"sglang pools {seed}")
    workload = make_workload(tmp_path, seed, gap_ms=draw.choice([2.0, 20.0, 200.0]))
    radix = draw.random() < 0.4
    policy: Any = draw.choice(["fcfs", "lpm", "lof"])
    engine = SglangConfig(
        block_size=16,
        num_gpu_blocks=draw.choice([24, 40, 400]),
        max_num_seqs=draw.choice([2, 16]),
        chunked_prefill_size=draw.choice([-1, 32, 512]),
        schedule_policy=policy,
        enable_priority_scheduling=policy != "lpm" and draw.random() < 0.3,
        disable_overlap_schedule=draw.random() < 0.4,
        num_reserved_decode_tokens=draw.choice([0, 8, 64]),
        disaggregation_decode_enable_radix_cache=radix,
        disaggregation_decode_extra_slots=draw.choice([None, 0, 3]),
        disaggregation_decode_polling_interval=draw.choice([1, 1, 3]),
        disaggregation_decode_retraction_backup=draw.choice([None, "cpu_tensor"]),
        timing=ONE_MS if draw.random() < 0.3 else SglangConfig().timing,
    )
    how: dict[str, Any] = {
        "prefill_workers": draw.choice([1, 2]),
        "decode_workers": draw.choice([1, 2]),
        "link_gbps": draw.choice([math.inf, 0.001, 0.0001]),
        "backend_gbps": draw.choice([math.inf, 0.0005]),
        "link_latency_ms": draw.choice([0.0, 1.5]),
        "order": draw.choice(["prefill_first", "decode_first"]),
        "decode_routing": draw.choice(["round_robin", "least_loaded", "kv"]),
        "routing": draw.choice(["round_robin", "least_loaded", KvRouting()]),
        "load": draw.choice([None, None, ClosedLoop(5)]),
    }
    return workload, engine, how


def stall_or_run(workload: Workload, engine: SglangConfig, **how: Any) -> dict[str, str] | str:
    """Return the digests, or the error of a run that stops for ever as SGLang does."""
    try:
        found = run(workload, engine, **how)
    except WrongState as error:
        return str(error)
    ended = found.timeline.status != Status.UNFINISHED
    assert ended.all()
    return found.facts.digests


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, 10))
def test_fast_forward_and_stepping_give_the_same_run(tmp_path: Any, first: int) -> None:
    for seed in range(first, min(first + 10, FIRST + SEEDS)):
        workload, engine, how = random_run(tmp_path, seed)
        fast = stall_or_run(workload, engine, check=True, **how)
        assert fast == stall_or_run(workload, engine, fast_forward=False, **how), seed


@pytest.mark.parametrize("seed", range(100, 116))
def test_requests_end_once_whatever_is_aborted_or_fails(tmp_path: Any, seed: int) -> None:
    workload, engine, how = random_run(tmp_path, seed)
    draw = random.Random(seed)
    after = [draw.choice([-1, -1, 0, 5 * MS, 200 * MS]) for _ in range(len(workload))]
    workload = replace(workload, abort_after_ns=np.array(after, np.int64))
    how["transfer_failure_rate"] = draw.choice([0.0, 0.3, 1.0])
    first = stall_or_run(workload, engine, check=True, **how)
    assert first == stall_or_run(workload, engine, fast_forward=False, **how)


def test_the_deep_check_compares_states_of_fast_forwards(tmp_path: Any) -> None:
    notes = run(make_workload(tmp_path, 3, gap_ms=200.0), NORMAL, check="deep", link_gbps=0.001).notes
    assert any("fast-forwards equal the same steps" in note for note in notes), notes


def test_parts_of_the_time_to_the_first_token_add_up_to_it(tmp_path: Any) -> None:
    timeline = run(make_workload(tmp_path, 2), link_gbps=0.0005).timeline
    columns = timeline.handoff
    assert columns is not None
    parts = columns.ttft_parts_ns(timeline.arrival_ns, timeline.first_token_ns)
    assert list(parts) == ["decode queue", "prefill queue", "prefill", "transfer", "polls"]
    assert all((part >= 0).all() for part in parts.values())
    rows = columns.remote
    ttft = (timeline.first_token_ns - timeline.arrival_ns)[rows]
    assert np.array_equal(np.sum(list(parts.values()), axis=0), ttft)


def test_pieces_of_a_prompt_move_while_the_next_is_computed(tmp_path: Any) -> None:
    """Two chunks of 64 and 32 tokens: with overlap the first moves when the second is computed."""
    columns = run(read_line(tmp_path, SIX_PAGES), NORMAL, link_gbps=1.0).timeline.handoff
    assert columns is not None
    assert columns.bytes.tolist() == [6 * 16 * BYTES]
    assert columns.posted_ns[0] < columns.prefill_done_ns[0]
    # The rest, two pages, takes its bytes over the link.
    assert columns.landed_ns[0] - columns.prefill_done_ns[0] == 2 * 16 * BYTES


def test_a_slow_link_moves_the_pieces_of_a_prompt_one_after_another(tmp_path: Any) -> None:
    columns = run(
        read_line(tmp_path, SIX_PAGES), NORMAL, link_gbps=0.001, link_latency_ms=2.0
    ).timeline.handoff
    assert columns is not None
    assert columns.landed_ns[0] - columns.posted_ns[0] == 2 * 2 * MS + 6 * 16 * BYTES * 1000


def test_hand_offs_at_one_time_share_the_way_out(tmp_path: Any) -> None:
    other = SIX_PAGES.replace("[1, 2, 3, 4, 5, 6]", "[11, 12, 13, 14, 15, 16]")
    workload = read_line(tmp_path, SIX_PAGES, other)
    engine = replace_engine(NORMAL, chunked_prefill_size=512)
    shared = run(workload, engine, prefill_workers=1, link_gbps=0.0001).timeline.handoff
    alone = run(workload, engine, prefill_workers=2, link_gbps=0.0001).timeline.handoff
    assert shared is not None
    assert alone is not None
    took = (shared.landed_ns - shared.posted_ns).max() / (alone.landed_ns - alone.posted_ns).max()
    assert took == pytest.approx(2.0)


def replace_engine(engine: SglangConfig, **how: Any) -> SglangConfig:
    return SglangConfig.from_dict(
        {name: getattr(engine, name) for name in engine.__struct_fields__ if name not in ("mocker", "tiers")}
        | how
    )


def test_a_radix_cache_on_the_decode_side_transfers_less(tmp_path: Any) -> None:
    again = SIX_PAGES.replace('"timestamp": 0', '"timestamp": 900')
    workload = read_line(tmp_path, SIX_PAGES, again)
    engine = replace_engine(NORMAL, disaggregation_decode_enable_radix_cache=True)
    with_cache = run(workload, engine, prefill_workers=1, decode_workers=1).timeline.handoff
    without = run(workload, NORMAL, prefill_workers=1, decode_workers=1).timeline.handoff
    assert with_cache is not None
    assert without is not None
    assert without.bytes.tolist() == [6 * 16 * BYTES] * 2
    assert with_cache.bytes.tolist() == [6 * 16 * BYTES, 0]


def test_a_request_waits_for_memory_at_the_decode_worker_before_it_is_computed(tmp_path: Any) -> None:
    lines = [
        SIX_PAGES.replace('"output_length": 4', '"output_length": 40').replace("[1,", f"[{at},")
        for at in (50, 60)
    ]
    engine = replace_engine(NORMAL, num_gpu_blocks=12)
    timeline = run(read_line(tmp_path, *lines), engine, prefill_workers=1, decode_workers=1).timeline
    columns = timeline.handoff
    assert columns is not None
    assert timeline.completed.all()
    assert columns.offered_ns[1] >= timeline.finish_ns[0]
    assert columns.prefill_admit_ns[1] > columns.offered_ns[1]


def test_a_request_that_never_fits_stops_the_decode_side_with_a_remedy(tmp_path: Any) -> None:
    engine = replace_engine(NORMAL, num_gpu_blocks=12, num_reserved_decode_tokens=128)
    with pytest.raises(WrongState, match="lower num_reserved_decode_tokens, or raise max_total_tokens"):
        run(read_line(tmp_path, SIX_PAGES), engine)


def test_failed_transfers_end_their_requests_and_free_all_pages(tmp_path: Any) -> None:
    found = run(make_workload(tmp_path, 4), transfer_failure_rate=0.4, check=True, seed=3)
    timeline, columns = found.timeline, found.timeline.handoff
    assert columns is not None
    failed = timeline.status == Status.FAILED
    assert failed.any()
    assert timeline.completed.any()
    assert ((columns.way == Way.FAILED) == failed).all()
    last = {int(worker): at for at, worker in enumerate(timeline.sample_worker)}
    assert timeline.sample_used_blocks[[last[worker] for worker in (2, 3)]].tolist() == [0, 0]


def test_links_deliver_what_they_were_given(tmp_path: Any) -> None:
    found = run(make_workload(tmp_path, 8, gap_ms=5.0), link_gbps=0.001, backend_gbps=0.0015)
    columns = found.timeline.handoff
    assert columns is not None
    for links in (columns.links_out, columns.links_in):
        assert sum(link.bytes_finished for link in links) == columns.bytes.sum()
        assert all(link.transfers_started == link.transfers_finished for link in links)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_the_backend_is_busy_while_pieces_move_and_not_between_them(tmp_path: Any, rate: float) -> None:
    limits = {"backend_gbps": 0.01, "link_latency_ms": 0.5, "transfer_failure_rate": rate}
    workload = make_workload(tmp_path, 6, gap_ms=40.0)
    found = run(workload, NORMAL, prefill_workers=1, decode_workers=1, **limits)
    columns = found.timeline.handoff
    assert columns is not None
    (out,) = columns.links_out
    assert columns.pushed_busy_ns == pytest.approx(out.busy_ns, abs=100)
    waited_ns = (columns.landed_ns - columns.posted_ns)[columns.landed_ns >= 0].sum()
    assert rate or 0 < columns.pushed_busy_ns < waited_ns
    handoff = Report.build(found.timeline, found.facts).handoff
    assert handoff is not None
    (backend,) = [link for link in handoff.links if link.name == "backend"]
    assert backend.busy_s == pytest.approx(out.busy_ns / 1e9)


def test_the_report_shows_bytes_parts_and_pools(tmp_path: Any) -> None:
    found = run(make_workload(tmp_path, 9, gap_ms=3.0), link_gbps=0.0002)
    report = Report.build(found.timeline, found.facts)
    handoff = report.handoff
    assert handoff is not None
    assert handoff.remote == len(found.timeline)
    assert math.isclose(sum(handoff.ttft_parts_ms.values()), handoff.ttft_ms)
    assert [pool.role for pool in handoff.pools] == ["prefill", "decode"]
    assert handoff.pools[0].held_max > 0
    verdicts = [verdict for verdict in report.verdicts if verdict.rule.startswith("handoff")]
    assert verdicts
    assert "uncached" not in " ".join(verdict.remedy for verdict in verdicts)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rule": "uncached:64"}, "rule: SGLang's decode servers compute no prompts"),
        ({"hop_ms": 1.0}, "hop_ms: SGLang's router sends a request to both workers at once"),
        ({"lease_s": 5}, "lease_s: SGLang's prefill servers have no leases"),
        ({"kv_load_failure_policy": "recompute"}, "kv_load_failure_policy: SGLang's decode servers"),
    ],
)
def test_settings_of_vllm_are_refused_by_name(tmp_path: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(make_workload(tmp_path, 1, requests=2), **settings)


def test_pools_that_cannot_hand_over_are_refused_by_name(tmp_path: Any) -> None:
    workload = make_workload(tmp_path, 1, requests=3)
    prefill = WorkerPool(name="p", role="prefill", engine=ENGINE)
    host = TiersConfig.from_dict({"kv_bytes_per_token": 100, "tiers": [{"tier": "g2", "blocks": 50}]})
    windows = replace_engine(ENGINE, swa_window=64)
    cases = [
        (
            WorkerPool(name="d", role="decode", engine=VllmConfig(block_size=16)),
            "one kind of engine and one page size",
        ),
        (
            WorkerPool(name="d", role="decode", engine=ENGINE, tiers=host),
            "tiers: HiCache with prefill and decode",
        ),
        (WorkerPool(name="d", role="decode", engine=windows), "swa_window: windows or states"),
    ]
    for decode, words in cases:
        with pytest.raises(ConfigError, match=words):
            run_offline(RunPlan(workload, pools=[prefill, decode], disaggregation=Disaggregation()))
