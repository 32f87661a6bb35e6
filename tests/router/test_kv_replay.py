"""KV-aware routing in a replay: what a router sees, and what follows from seeing it late."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

from replay.building import conversations, single_turns
from understudy._core import Tier
from understudy.api import replay
from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, InvalidArgument
from understudy.report.html.page import page
from understudy.router import KvRouting
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.options import Outputs
from understudy.run.run_plan import RunPlan
from understudy.tiers.settings import TiersConfig
from understudy.workload import Constant, Fixed, SyntheticSpec, SystemPrompts, synthesise
from understudy.workload.families import FanOut, QuickTurns

if TYPE_CHECKING:
    from pathlib import Path

SIZES: dict[str, Any] = {"block_size": 64, "num_gpu_blocks": 2048, "max_num_batched_tokens": 8192}
ENGINE = VllmConfig(**SIZES, mocker=MockerSettings(charge_first_token=False))
FAN_OUT = FanOut(contexts=40, context_interval_ms=1200.0, seed=3).build()


def play(routing: Any = "kv", *, workers: int = 8, seed: int = 0, fast_forward: bool = True) -> OfflineRun:
    return run_offline(
        RunPlan(FAN_OUT, ENGINE, workers=workers, seed=seed, routing=routing, fast_forward=fast_forward)
    )


def ttft_ms(run: OfflineRun) -> float:
    return float((run.timeline.first_token_ns - run.timeline.arrival_ns).mean()) / 1e6


def test_a_stale_view_costs_what_prediction_wins_back() -> None:
    oracle, late = ttft_ms(play()), ttft_ms(play(KvRouting(event_delay_ms=500)))
    predicted = ttft_ms(play(KvRouting(event_delay_ms=500, predict_ttl_ms=5000)))
    blind = ttft_ms(play("round_robin"))
    assert oracle * 1.2 < late
    assert predicted < 1.1 * oracle
    assert late < blind * 1.1


@pytest.mark.parametrize("fast_forward", [True, False], ids=["fast_forward", "stepping"])
def test_what_lands_on_a_host_after_the_last_step_is_told_too(fast_forward: bool) -> None:
    slow = {"tier": "g2", "blocks": 8, "link": {"down_gbps": 0.001}}
    tiers = TiersConfig.from_dict({"tiers": [slow], "kv_bytes_per_token": 100})
    router = KvRouting().build(0)
    run_offline(
        RunPlan(
            single_turns([64]),
            VllmConfig(block_size=16, num_gpu_blocks=8),
            workers=2,
            tiers=tiers,
            routing=router,
            fast_forward=fast_forward,
        )
    )
    held = [[router.index.num_blocks(w, tier=tier) for tier in (Tier.G1, Tier.G2)] for w in range(2)]
    assert sorted(held) == [[0, 0], [4, 4]]


def test_bundles_are_as_late_as_their_period() -> None:
    assert ttft_ms(play(KvRouting(event_period_ms=2000))) > 1.15 * ttft_ms(play())


def test_an_oracle_regrets_nothing_and_a_late_view_does() -> None:
    exact, late = play().decisions, play(KvRouting(event_delay_ms=500)).decisions
    assert exact is not None
    assert late is not None
    assert not exact.cost_regret.any()
    assert (exact.overlap_blocks == exact.true_overlap_blocks).all()
    assert late.cost_regret.sum() > 0
    assert (late.overlap_blocks < late.best_true_overlap_blocks).any()
    assert (late.cost_regret >= 0).all()


def test_what_an_oracle_believes_is_what_the_engine_finds() -> None:
    # Every question comes when the one before it has ended: nothing changes between the choice and the admission.
    calm = FanOut(contexts=6, children=4, gap_ms=3000, context_interval_ms=60_000.0).build()
    run = run_offline(RunPlan(calm, ENGINE, workers=2, routing="kv"))
    assert run.decisions is not None
    found = run.timeline.cached_tokens_first[run.decisions.rows] // ENGINE.block_size
    assert (found == run.decisions.overlap_blocks).all()
    assert (found > 0).sum() == 18


def test_the_seed_decides_between_equals_and_nothing_else() -> None:
    one, again, other = play(seed=1), play(seed=1), play(seed=2)
    assert one.facts.digest == again.facts.digest
    assert one.facts.digest != other.facts.digest


@pytest.mark.parametrize(
    "routing", [KvRouting(), KvRouting(event_delay_ms=30, event_loss=0.2, predict_ttl_ms=50)]
)
def test_fast_forwards_change_nothing(routing: KvRouting) -> None:
    forwarded, stepped = play(routing), play(routing, fast_forward=False)
    assert (forwarded.timeline.worker == stepped.timeline.worker).all()
    assert (forwarded.timeline.finish_ns == stepped.timeline.finish_ns).all()


def test_which_events_are_lost_does_not_depend_on_leaps() -> None:
    """Below the device blocks come and go between steps: workers that fast-forward tell of them at other times."""
    tiers = TiersConfig.from_dict(
        {"kv_bytes_per_token": 1 << 14, "tiers": [{"tier": "g2", "blocks": 30, "link": {"down_gbps": 0.05}}]}
    )
    engine = VllmConfig(block_size=16, num_gpu_blocks=90, max_num_seqs=8)
    told = []
    for fast_forward in (True, False):
        router = KvRouting(event_delay_ms=5, event_loss=0.3).build()
        run = run_offline(
            RunPlan(
                conversations(40), engine, workers=3, routing=router, tiers=tiers, fast_forward=fast_forward
            )
        )
        told.append((run.facts.digest, router.lost_deliveries, router.decisions.overlap_blocks.tolist()))
    assert told[0] == told[1]


def test_lost_events_are_lost_and_counted() -> None:
    router = KvRouting(event_loss=0.5).build()
    play(router)
    assert router.lost_deliveries > 0
    assert router.decisions.cost_regret.sum() > 0
    untouched = KvRouting().build()
    play(untouched)
    assert (untouched.lost_deliveries, untouched.unknown_removals) == (0, 0)


def test_an_idle_fleet_is_known_to_be_idle() -> None:
    router = KvRouting().build()
    play(router)
    assert not router.prefill_tokens.any()
    assert not router.active_blocks.any()


@pytest.mark.parametrize("block_size", [16, 64])
def test_the_index_is_what_the_engines_hold_after_every_step(block_size: int) -> None:
    engine = VllmConfig(block_size=block_size, num_gpu_blocks=20_000 // block_size)
    workload = synthesise(
        SyntheticSpec(
            sessions=60,
            prompt_tokens=Fixed(700),
            output_tokens=Fixed(40),
            prefixes=SystemPrompts(groups=3, tokens=2048),
            arrivals=Constant(qps=40),
        )
    )
    run_offline(RunPlan(workload, engine, workers=3, routing="kv", check=True))


@pytest.mark.parametrize(
    "routing", [KvRouting(), KvRouting(queue_threshold=0.5), KvRouting(predict_ttl_ms=10)]
)
@pytest.mark.parametrize("manager", ["native", "kvbm"])
def test_without_prefix_caching_an_index_knows_nothing_and_is_right(
    manager: Literal["native", "kvbm"], routing: KvRouting
) -> None:
    """kvbm names blocks all the same; nobody is told of them."""
    engine = VllmConfig(block_size=16, num_gpu_blocks=60, kv_manager=manager, enable_prefix_caching=False)
    router = routing.build()
    run = run_offline(RunPlan(conversations(40), engine, workers=3, routing=router, check=True))
    assert (run.timeline.finish_ns > 0).all()
    assert len(router.index.dump_columns()[3]) == 0


def test_blocks_on_a_shared_tier_count_for_whoever_lacks_them() -> None:
    tiers = TiersConfig.from_dict(
        {"kv_bytes_per_token": 1000, "tiers": [{"tier": "g2", "blocks": 8}, {"tier": "g3", "blocks": 400}]}
    )
    workload = synthesise(
        SyntheticSpec(
            sessions=120,
            prompt_tokens=Fixed(64),
            output_tokens=Fixed(12),
            prefixes=SystemPrompts(groups=6, tokens=160),
            arrivals=Constant(qps=30),
            trace_block_size=16,
        )
    )
    small = VllmConfig(block_size=16, num_gpu_blocks=40)  # the device forgets what the disk keeps for all
    turns = np.arange(len(workload), dtype=np.int32) % 4
    costs = []
    for weight in (0.25, 0.0):
        router = KvRouting(disk_cache_hit_weight=weight, host_cache_hit_weight=0.0).build(imposed=turns)
        run_offline(RunPlan(workload, small, workers=4, tiers=tiers, check=True, routing=router))
        costs.append(router.decisions.cost)
    lower = router.decisions.lower_overlap_blocks
    assert (router.decisions.overlap_blocks + lower <= 224 // 16).all()
    assert (costs[0] < costs[1]).sum() > 10
    assert (costs[0] <= costs[1]).all()
    assert (lower[costs[0] < costs[1]] > 0).all()


def test_imposed_choices_are_taken() -> None:
    imposed = np.arange(len(FAN_OUT), dtype=np.int32) % 5
    router = KvRouting().build(imposed=imposed)
    assert (play(router).timeline.worker == imposed).all()
    with pytest.raises(InvalidArgument, match="imposed"):
        play(KvRouting().build(imposed=imposed), workers=2)


def test_who_can_never_fit_is_routed_too_if_asked_for() -> None:
    engines = [
        VllmConfig(
            num_gpu_blocks=136, mocker=MockerSettings(route_rejected=flag)
        )  # some questions are too long
        for flag in (False, True)
    ]
    runs = [run_offline(RunPlan(FAN_OUT, engine, workers=4)).timeline.worker for engine in engines]
    fits = runs[0] >= 0
    assert not fits.all()
    assert (runs[1][fits] == np.flatnonzero(fits) % 4).all()
    assert (runs[0][fits] == np.arange(fits.sum()) % 4).all()


def test_without_the_charge_a_first_token_comes_earlier() -> None:
    charged = VllmConfig(**SIZES)
    runs = [run_offline(RunPlan(FAN_OUT, engine, workers=8)) for engine in (ENGINE, charged)]
    assert ttft_ms(runs[0]) < ttft_ms(runs[1])
    lone = [
        run_offline(RunPlan(QuickTurns(sessions=1, turns=1).build(), e)).timeline for e in (ENGINE, charged)
    ]
    free, paid = (int(t.first_token_ns[0] - t.arrival_ns[0]) for t in lone)
    assert free == round((4.209989e-7 * 4096**2 + 1.518344e-2 * 4096 + 16.50142) * 1e6)
    u = 4096 / (2048 * 64)
    assert paid - free == pytest.approx((-25.74 * u * u + 54.01 * u + 5.74) * 1e6, abs=1)


def test_a_session_stays_where_it_began() -> None:
    workload = synthesise(
        SyntheticSpec(
            sessions=20,
            turns=Fixed(4),
            prompt_tokens=Fixed(300),
            followup_tokens=Fixed(50),
            output_tokens=Fixed(20),
            arrivals=Constant(qps=20),
        )
    )
    timeline = run_offline(RunPlan(workload, ENGINE, workers=4, routing="session_affinity")).timeline
    for session in range(20):
        assert len(set(timeline.worker[workload.session == session].tolist())) == 1
    assert len(set(timeline.worker.tolist())) == 4


def test_the_better_of_two_beats_chance() -> None:
    spread = {}
    for routing in ("random", "power_of_two"):
        workers = play(routing).timeline.worker
        spread[routing] = np.bincount(workers, minlength=8).std()
    assert spread["power_of_two"] < spread["random"]
    assert (play("power_of_two").timeline.worker == play("power_of_two").timeline.worker).all()


def test_names_that_are_not_known_are_refused() -> None:
    with pytest.raises(ConfigError, match="power_of_two"):
        play("best_effort")


def test_the_report_says_how_well_it_was_routed(tmp_path: Path) -> None:
    file = tmp_path / "why.jsonl"
    report = replay(
        FAN_OUT, ENGINE, workers=8, routing=KvRouting(event_delay_ms=500), outputs=Outputs(decisions=file)
    )
    told = report.run.router
    assert told["decisions"] == len(FAN_OUT)
    assert told["predicted_hit"] < told["best_hit"]
    assert told["regretted"] > 0
    assert told["imbalance"] >= 1
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["row"] for line in lines] == list(range(len(FAN_OUT)))
    assert sum(line["overlap_blocks"] for line in lines) * 64 == pytest.approx(
        told["predicted_hit"] * FAN_OUT.prompt_tokens.sum()
    )


def test_the_page_says_what_was_believed_and_found_and_why() -> None:
    late = page(replay(FAN_OUT, ENGINE, workers=8, routing=KvRouting(event_delay_ms=500)))
    assert "<h2>Routing</h2>" in late
    assert "Choices with the largest regret" in late
    exact = page(replay(FAN_OUT, ENGINE, workers=8, routing="kv"))
    assert "Choices with the largest cost" in exact
    assert "<h2>Routing</h2>" not in page(replay(FAN_OUT, ENGINE, workers=8))
