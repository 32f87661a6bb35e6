"""Faults during a replay: crashes, slow workers and links, and what becomes of requests that lose their worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from elastic.burst import workload_of
from elastic.steps import Steps
from understudy import VllmConfig
from understudy.engines.sglang_config import SglangConfig
from understudy.errors import ConfigError
from understudy.run.autoscale import Autoscale
from understudy.run.disaggregation import Disaggregation
from understudy.run.faults import FaultPlan, parse_fault, read_fault_file
from understudy.run.losses import DRAINED, Outcome
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.run_plan import RunPlan
from understudy.run.timeline import Status
from understudy.run.worker_lives import Life
from understudy.tiers.settings import TiersConfig

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.run.losses import RequestLosses
    from understudy.workload import Workload

SMALL = VllmConfig(block_size=16, num_gpu_blocks=200, max_num_seqs=8, max_num_batched_tokens=256)
SGLANG = SglangConfig(block_size=16, num_gpu_blocks=200, max_num_seqs=8)
G2: list[dict[str, Any]] = [{"tier": "g2", "blocks": 512}]


def tiers_of(*tiers: dict[str, Any]) -> TiersConfig:
    return TiersConfig.from_dict({"tiers": list(tiers), "kv_bytes_per_token": 1000})


SPLIT = Disaggregation(prefill_workers=1, decode_workers=1, kv_bytes_per_token=1000)
G3 = tiers_of(*G2, {"tier": "g3", "blocks": 4096})


def steady(requests: int = 60, *, every_s: float = 0.1, prompt: int = 100, answer: int = 40) -> Workload:
    """Return requests at a steady rate."""
    return workload_of([i * every_s for i in range(requests)], prompt=prompt, answer=answer, block=16)


def play(*faults: str, engine: Any = SMALL, workload: Workload | None = None, **how: Any) -> OfflineRun:
    """Play requests with these faults; every run is also checked step by step."""
    policy = {name: how.pop(name) for name in tuple(how) if name in FaultPlan.__struct_fields__}
    plan = FaultPlan(faults=tuple(parse_fault(one) for one in faults), **policy)
    how = {"workers": 2, "check": "deep", **how}
    return run_offline(RunPlan(steady() if workload is None else workload, engine, faults=plan, **how))


def losses_of(made: OfflineRun) -> RequestLosses:
    losses = made.timeline.losses
    assert losses is not None
    return losses


def lives_of(made: OfflineRun, worker: int) -> list[tuple[float, str]]:
    lives = made.timeline.lives
    assert lives is not None
    mine = lives.life_worker == worker
    return [
        (at / 1e9, Life(int(state)).name.lower())
        for at, state in zip(lives.life_ns[mine], lives.life_state[mine], strict=True)
    ]


# ── Crashes ──


def test_a_crashed_worker_restarts_and_its_requests_start_anew_elsewhere() -> None:
    made = play("kill:1@2s+1s")
    assert lives_of(made, 1) == [(0.0, "ready"), (2.0, "crashed"), (2.0, "restarting"), (3.0, "ready")]
    losses = losses_of(made)
    assert len(losses.loss_request)
    assert (losses.loss_outcome == Outcome.RETRIED).all()
    assert (losses.loss_worker == 1).all()
    assert losses.fault_began_ns.tolist() == [2 * 10**9]
    assert losses.fault_ended_ns.tolist() == [3 * 10**9]
    line = made.timeline
    assert line.completed.all()
    assert (line.worker[losses.loss_request] == 0).all()
    assert (line.first_token_ns[losses.loss_request] > 2 * 10**9).all()
    served = line.worker == 1
    away = (line.arrival_ns >= 2 * 10**9) & (line.arrival_ns < 3 * 10**9)
    assert not (served & away).any()
    assert (served & (line.arrival_ns > 3 * 10**9)).any()


def test_a_crash_loses_the_cache_of_its_device() -> None:
    same = workload_of([i / 10 for i in range(40)], prompt=100, answer=8, block=16)
    alike = type(same)(
        arrival_ns=same.arrival_ns,
        prompt_tokens=same.prompt_tokens,
        output_tokens=same.output_tokens,
        hash_ids=np.tile(np.arange(7, dtype=np.uint32), 40),
        hash_offsets=same.hash_offsets,
        trace_block_size=16,
    )
    made = play("kill:0@2.05s+0.1s", workload=alike, workers=1)
    cached = made.timeline.cached_tokens_first
    first = int(np.flatnonzero(made.timeline.arrival_ns >= 2.05e9)[0])
    assert cached[0] == 0
    assert (cached[1 : first - 1] > 0).all()
    assert losses_of(made).loss_request.tolist() == [first - 1]
    assert cached[first - 1] == 0
    assert (cached[first + 2 :] > 0).all()


def test_a_crash_keeps_blocks_of_shared_tiers() -> None:
    arrivals = [0.0, 4.0]
    twice = workload_of(arrivals, prompt=160, answer=4, block=16)
    twice = type(twice)(
        arrival_ns=twice.arrival_ns,
        prompt_tokens=twice.prompt_tokens,
        output_tokens=twice.output_tokens,
        hash_ids=np.tile(np.arange(10, dtype=np.uint32), 2),
        hash_offsets=twice.hash_offsets,
        trace_block_size=16,
    )
    for tiers, kept in ((tiers_of(*G2), False), (G3, True)):
        made = play("kill:0@2s+1s", workload=twice, workers=1, tiers=tiers, check=True)
        assert (made.timeline.cached_tokens_first[1] > 0) == kept


def test_a_worker_without_a_restart_stays_away() -> None:
    made = play("kill:1@2s")
    assert lives_of(made, 1) == [(0.0, "ready"), (2.0, "crashed")]
    assert made.timeline.completed.all()
    assert (made.timeline.worker[made.timeline.arrival_ns >= 2 * 10**9] == 0).all()


def test_requests_fail_where_no_worker_is_left() -> None:
    made = play("kill:0@2s", workers=1)
    late = made.timeline.arrival_ns >= 2 * 10**9
    assert (made.timeline.status[late] == Status.FAILED).all()
    losses = losses_of(made)
    assert set(np.flatnonzero(late).tolist()) <= set(losses.loss_request.tolist())
    ended = losses.loss_request[losses.loss_outcome == Outcome.FAILED]
    assert sorted(ended.tolist()) == np.flatnonzero(made.timeline.status == Status.FAILED).tolist()


def test_requests_wait_for_the_restart_of_the_only_worker() -> None:
    made = play("kill:0@2s+2s", workers=1)
    assert made.timeline.completed.all()
    away = (made.timeline.arrival_ns >= 2 * 10**9) & (made.timeline.arrival_ns < 4 * 10**9)
    assert (made.timeline.first_admit_ns[away] >= 4 * 10**9).all()


# ── What becomes of requests ──


def test_lost_requests_fail_with_the_tokens_so_far() -> None:
    made = play("kill:1@2s+1s", on_loss="fail")
    losses = losses_of(made)
    failed = np.flatnonzero(made.timeline.status == Status.FAILED)
    assert failed.tolist() == sorted(losses.loss_request.tolist())
    assert len(failed)
    assert (made.timeline.finish_ns[failed] == 2 * 10**9).all()
    tokens = dict(zip(losses.loss_request.tolist(), losses.loss_tokens.tolist(), strict=True))
    assert made.timeline.output_tokens[failed].tolist() == [tokens[row] for row in failed.tolist()]


@pytest.mark.parametrize("engine", [SMALL, SGLANG], ids=["vllm", "sglang"])
def test_migrated_requests_keep_their_tokens(engine: Any) -> None:
    made = play("kill:1@2s+1s", on_loss="migrate", engine=engine, workload=steady(60, answer=200))
    losses = losses_of(made)
    moved = losses.loss_outcome == Outcome.MIGRATED
    assert moved.any()
    line = made.timeline
    assert line.completed.all()
    assert (line.output_tokens == 200).all()
    rows = losses.loss_request[moved]
    assert (line.first_token_ns[rows] <= 2 * 10**9).all()
    assert (line.last_token_ns[rows] > 2 * 10**9).all()
    anew = play("kill:1@2s+1s", engine=engine, workload=steady(60, answer=200))
    assert line.finish_ns[rows].sum() < anew.timeline.finish_ns[rows].sum()


def test_a_request_fails_after_as_many_losses_as_attempts() -> None:
    kills = [f"kill@{at}s+0.2s" for at in (1.0, 1.5, 2.0)]
    made = play(*kills, max_attempts=2, workload=steady(20, answer=400))
    times = np.bincount(losses_of(made).loss_request)
    assert times.max() == 2
    assert set(np.flatnonzero(made.timeline.status == Status.FAILED)) == set(np.flatnonzero(times == 2))


def test_a_lost_request_waits_for_the_delay_before_it_is_routed() -> None:
    made = play("kill:1@2s", retry_delay_ms=700)
    rows = losses_of(made).loss_request
    assert (made.timeline.queued_ns[rows] >= 2_700_000_000).all()


def test_a_worker_that_drains_too_long_hands_back_its_requests() -> None:
    def drained(**policy: Any) -> OfflineRun:
        return play(
            workload=steady(20, answer=600),
            autoscale=Autoscale(scaler=Steps([(1000, None, 1)])),
            **policy,
        )

    whole = drained()
    assert whole.timeline.losses is None
    made = drained(drain_limit_s=0.5, on_loss="migrate")
    losses = losses_of(made)
    assert (losses.loss_fault == DRAINED).all()
    assert (losses.loss_ns == 1_500_000_000).all()
    assert made.timeline.completed.all()
    assert lives_of(made, 1)[-1][1] == "stopped"
    assert lives_of(made, 1)[-1][0] < lives_of(whole, 1)[-1][0]


def test_a_worker_with_a_batch_behind_its_last_request_stops_at_the_end_of_that() -> None:
    for fast_forward in (True, False):
        made = play(
            engine=SGLANG,
            workload=steady(8, answer=30),
            autoscale=Autoscale(scaler=Steps([(300, None, 1), (5000, None, 1)])),
            fast_forward=fast_forward,
            check=True,
        )
        last_ns = made.timeline.finish_ns[made.timeline.worker == 1].max()
        end_s, state = lives_of(made, 1)[-1]
        assert end_s == pytest.approx(last_ns / 1e9, abs=0.05)
        assert state == "stopped"


# ── Slow workers and links ──


def test_a_slow_worker_takes_longer_steps_for_the_time_of_the_fault() -> None:
    plain, slow = play(workers=1), play("slow:0@2s+1s,factor=4", workers=1)
    line = slow.timeline
    before = plain.timeline.finish_ns < 2 * 10**9
    assert (line.finish_ns[before] == plain.timeline.finish_ns[before]).all()
    hurt = (line.arrival_ns >= 2.1e9) & (line.arrival_ns < 2.7e9)
    assert (line.finish_ns[hurt] > plain.timeline.finish_ns[hurt]).all()
    assert line.end_ns < play("slow:0@2s,factor=4", workers=1).timeline.end_ns


def test_a_slow_link_delays_loads_from_the_host() -> None:
    tiers = tiers_of({"tier": "g2", "blocks": 512, "link": {"down_gbps": 1.0, "up_gbps": 1.0}})
    rows = 24
    turns = workload_of([i * 0.4 for i in range(rows)], prompt=1600, answer=4, block=16)
    again = type(turns)(
        arrival_ns=turns.arrival_ns,
        prompt_tokens=turns.prompt_tokens,
        output_tokens=turns.output_tokens,
        hash_ids=np.concatenate([np.arange(100, dtype=np.uint32) + 100 * (row % 3) for row in range(rows)]),
        hash_offsets=turns.hash_offsets,
        trace_block_size=16,
    )
    plain = play(workload=again, workers=1, tiers=tiers)
    slow = play("slow_link@3s+4s,factor=100", workload=again, workers=1, tiers=tiers)
    assert plain.timeline.tiers is not None
    assert slow.timeline.tiers is not None
    assert plain.timeline.tiers.onboard_ns.max() < slow.timeline.tiers.onboard_ns.max()
    failing = play("fail_loads@0s,rate=1", workload=again, workers=1, tiers=tiers)
    assert failing.timeline.tiers is not None
    assert failing.timeline.tiers.totals.failed_loads > 0
    assert failing.timeline.completed.all()


# ── The router and its events ──


@pytest.mark.parametrize(
    "fault",
    [
        "lose_events@1s+2s,rate=0.5",
        "late_events@1s+2s,delay_ms=800",
        "double_events@1s+2s",
        "stop_events:0@1s+2s",
        "restart_router@2s+0.5s",
    ],
)
def test_the_index_is_equal_to_the_engines_once_events_have_caught_up(fault: str) -> None:
    again = _shared_prefixes()
    made = play(fault, workload=again, routing="kv", workers=3)
    assert made.timeline.completed.all()
    assert losses_of(made).fault_ended_ns[0] > 0


def test_a_router_that_has_forgotten_its_index_hits_less() -> None:
    again = _shared_prefixes()
    plain = play(workload=again, routing="kv", workers=3)
    forgets = play("stop_events@0s", workload=again, routing="kv", workers=3)
    assert forgets.timeline.cached_tokens_first.sum() < plain.timeline.cached_tokens_first.sum()


def _shared_prefixes() -> Workload:
    rows = 60
    same = workload_of([i / 20 for i in range(rows)], prompt=160, answer=8, block=16)
    return type(same)(
        arrival_ns=same.arrival_ns,
        prompt_tokens=same.prompt_tokens,
        output_tokens=same.output_tokens,
        hash_ids=np.concatenate(
            [np.arange(10, dtype=np.uint32) + 10 * (row * 7 % 11) for row in range(rows)]
        ),
        hash_offsets=same.hash_offsets,
        trace_block_size=16,
    )


# ── Refusals ──


@pytest.mark.parametrize(
    ("faults", "how", "why"),
    [
        (["kill:7@1s"], {}, "there is no worker 7; there are 2"),
        (["stop_events@1s"], {}, "the router receives no events"),
        (["slow_link:0@1s,tier=g3"], {"tiers": G3}, "workers share this tier"),
        (
            ["kill:0@1s"],
            {"disaggregation": SPLIT, "workers": 1},
            "do not work with prefill and decode workers yet",
        ),
        (["kill:0@1s"], {"ranks": True}, "do not work with ranks"),
        ([], {"drain_limit_s": 1.0}, "workers of this run do not drain"),
    ],
)
def test_faults_that_a_run_cannot_have_are_refused(faults: list[str], how: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        play(*faults, check=True, **how)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("kill", "is not KIND"),
        ("burn:1@3s", "burn is not a fault"),
        ("kill:1@3y", "'3y' is not a time"),
        ("kill:1@3s,factor=2", "factor: is not a field of kill"),
        ("slow:1@3s,factor=0.5", "factor: 0.5 must be from 1 to 1000"),
        ("kill:1@-3s", "at_s: -3.0 is not a time"),
    ],
)
def test_a_fault_that_cannot_be_read_is_refused_by_name(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_fault(text)


def test_a_file_has_faults_in_both_forms(tmp_path: Path) -> None:
    path = tmp_path / "faults.txt"
    path.write_text(
        '# two faults\n\nkill:2@10min+30s\n{"kind": "slow", "at_s": 5, "worker": 1, "factor": 3}\n',
        encoding="utf-8",
    )
    faults = read_fault_file(path)
    assert [one.describe() for one in faults] == ["kill:2@600s+30s", "slow:1@5s,factor=3"]
    path.write_text('{"kind": "slow"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="line 1"):
        read_fault_file(path)
