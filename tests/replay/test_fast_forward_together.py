"""Workers that meet fast-forward as they step: steps of no time, cheap prompts, events of hosts, a spent budget."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from model.replay_gen import Case, random_case
from replay.building import single_turns
from tiers.building import tiers, way
from tiers.fleets import crowd_of, digest, play
from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.timing import Constant, Interpolated, Polynomial
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import WrongState
from understudy.router.kv import KvRouting
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.run.schema import list_columns
from understudy.run.timeline import Timeline
from understudy.tiers.settings import TiersConfig
from understudy.timing.coefficients import StepCoefficients
from understudy.timing.physical import Physical
from understudy.workload import ClosedLoop, OpenLoop

if TYPE_CHECKING:
    from pathlib import Path

CHEAP_PROMPTS = StepCoefficients(
    weights_ms=0.5, token_ms=0.01, context_ms=0.01, attention_ms=1e-5, step_ms=0.3
)
"""A prompt's last token costs less than a decode that reads the prompt."""


def digests(case: Case, **how: Any) -> list[Any]:
    """Of both ways, or the halt that they come to."""
    found: list[Any] = []
    for fast_forward in (True, False):
        try:
            run = run_offline(
                RunPlan(case.workload, case.config, fast_forward=fast_forward, **{**case.how, **how})
            )
        except WrongState as halt:
            found.append(str(halt))
        else:
            found.append([run.facts.digest, run.timeline.queued_ns.tolist()])
    return found


@pytest.mark.parametrize("part", range(4))
def test_steps_of_no_time_are_begun_as_often_as_others_begin_theirs(part: int) -> None:
    for seed in range(100 * part, 100 * part + 100):
        rng = Random(f"at once {seed}")
        case = random_case(seed, timing=Constant(0.0, rng.choice([1.0, 3.0])))
        load = ClosedLoop(rng.choice([2, 5, 20]), rng.choice([0.0, 3.0]))
        forwarded, stepped = digests(case, workers=rng.choice([2, 3]), load=load)
        assert forwarded == stepped, seed


def test_an_end_is_not_heard_late_because_of_who_comes_back_behind_the_step_that_is_open(
    tmp_path: Path,
) -> None:
    # Row 9 was preempted at the end of a block, and finds all of it: it has a token of the batch behind the open one,
    # none of that.
    profile = tmp_path / "profile.npz"
    np.savez(
        profile,
        prefill_isl=[1.0, 1000.0],
        prefill_ttft_ms=[1.0, 3.0],
        decode_active_kv_tokens=[0.0, 50.0, 400.0],
        decode_context_length=[0.0, 20.0, 200.0],
        decode_itl=[[1.0, 20.0, 150.0], [2.0, 25.0, 170.0], [10.0, 60.0, 300.0]],
    )
    workload = single_turns(
        [1, 1, 1, 1, 17, 11, 13, 27, 6, 16, 1, 1],
        [7, 28, 1, 1, 7, 30, 1, 12, 32, 3, 1, 1],
        trace_block_size=4,
    )
    config = VllmConfig(
        block_size=16,
        num_gpu_blocks=7,
        max_num_batched_tokens=1000,
        max_num_seqs=8,
        watermark=0,
        async_scheduling=True,
        timing=Interpolated(str(profile)),
    )
    forwarded, stepped = (
        run_offline(
            RunPlan(
                workload,
                config,
                workers=2,
                load=ClosedLoop(4),
                routing="round_robin",
                fast_forward=fast_forward,
            )
        ).timeline
        for fast_forward in (True, False)
    )
    assert stepped.preemptions[9] == 1
    assert forwarded.arrival_ns.tolist() == stepped.arrival_ns.tolist()
    assert forwarded.arrival_ns[11] == forwarded.finish_ns[5]  # in whose place it comes


def test_an_end_is_not_heard_late_because_who_was_preempted_comes_back_by_a_cheaper_step() -> None:
    # The second of two prompts that begin alike computes block 2 first, so that the first has one of its own until it
    # gives way for a block; what it finds then is one block less to hold, and it is back a step later.
    workload = single_turns(
        [201, 217, 39],
        [48, 3, 150],
        content=[[1, 2, *range(1000, 1011)], [1, 2, *range(1000, 1012)], [1, 2, 2000]],
        session=[0, 0, 1],
        turn=[0, 1, 0],
        delay_ns=[0, 0, 0],
    )
    timing = StepCoefficients(weights_ms=0.5, token_ms=0.01, context_ms=0.05, attention_ms=1e-5, step_ms=0.3)
    config = VllmConfig(
        block_size=16,
        num_gpu_blocks=21,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        long_prefill_token_threshold=16,
        preemption_mode="fifo",
        watermark=0,
        timing=Physical(coefficients=timing),
    )
    forwarded, stepped = (
        run_offline(RunPlan(workload, config, fast_forward=fast_forward)).timeline
        for fast_forward in (True, False)
    )
    assert stepped.preemptions.tolist() == [1, 0, 0]
    assert forwarded.arrival_ns.tolist() == stepped.arrival_ns.tolist()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_end_is_not_heard_late_where_the_end_of_a_prompt_costs_less_than_a_decode(
    asynchronous: bool,
) -> None:
    for seed in range(60):
        rng = Random(f"cheap {seed}")
        requests = rng.randint(4, 8)
        workload = single_turns(
            [rng.choice([9, 10, 13]) for _ in range(requests)],
            [rng.choice([1, 1, 3]) for _ in range(requests)],
            trace_block_size=4,
        )
        config = VllmConfig(
            block_size=4,
            num_gpu_blocks=100,
            max_num_batched_tokens=8,
            max_num_seqs=4,
            async_scheduling=asynchronous,
            timing=Physical(coefficients=CHEAP_PROMPTS),
        )
        forwarded, stepped = digests(Case(workload, config, {"workers": 2, "load": ClosedLoop(3)}))
        assert forwarded == stepped, seed


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_end_is_not_heard_late_where_the_first_token_is_free_and_a_decode_costs_by_its_context(
    tmp_path: Path, asynchronous: bool
) -> None:
    profile = tmp_path / "profile.npz"
    for seed in range(60):
        rng = Random(f"free first tokens {seed}")
        by_context = np.cumsum([0.2, rng.choice([0.0, 5.0, 60.0]), rng.choice([0.1, 90.0, 400.0])])
        by_load = np.cumsum([0.0, rng.choice([0.0, 3.0, 40.0]), rng.choice([1.0, 200.0])])
        np.savez(
            profile,
            prefill_isl=[1.0, 300.0],
            prefill_ttft_ms=[rng.choice([0.0, 0.3]), rng.choice([0.5, 20.0])],
            decode_active_kv_tokens=[0.0, 60.0, 600.0],
            decode_context_length=[0.0, 30.0, 200.0],
            decode_itl=by_load[:, None] + by_context,
        )
        changes: dict[str, Any] = {"timing": Interpolated(str(profile)), "charge_first_token": False}
        if asynchronous:  # no drafts: they go with synchronous scheduling
            plain = MockerSettings()
            changes |= {"async_scheduling": True, "aic_mtp_seed": plain.aic_mtp_seed}
            changes |= {"aic_nextn": None, "aic_nextn_accept_rates": None}
        case = random_case(seed, **changes)
        load = ClosedLoop(rng.choice([2, 5, 20]), rng.choice([0.0, 3.0]))
        routing = rng.choice(["round_robin", "least_loaded"])
        forwarded, stepped = digests(case, workers=rng.choice([2, 3]), load=load, routing=routing)
        assert forwarded == stepped, seed


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("prefill_ms", [0.0, 0.01])
def test_an_end_is_not_heard_late_where_who_is_preempted_has_its_last_token_for_nothing(
    prefill_ms: float, asynchronous: bool
) -> None:
    # The third decodes while the others read their prompts, for next to nothing; they put it out, then one of them the
    # other, and it comes back and ends before a decode has passed.
    for blocks in range(149, 160):
        config = VllmConfig(
            block_size=1,
            num_gpu_blocks=blocks,
            max_num_batched_tokens=1000,
            long_prefill_token_threshold=10,
            scheduler_reserve_full_isl=False,
            enable_prefix_caching=False,
            async_scheduling=asynchronous,
            timing=Constant(prefill_ms, 1.0),
            mocker=MockerSettings(charge_first_token=False),
        )
        workload = single_turns([120, 120, 15, 20], [30, 30, 6, 3], trace_block_size=1)
        forwarded, stepped = digests(Case(workload, config, {}), load=ClosedLoop(3))
        assert forwarded == stepped, blocks


def test_free_prompts_of_any_length_turn_lookahead_off(tmp_path: Path) -> None:
    # A prompt of one token takes time, longer ones take none: a preempted request may return and end at once.
    profile = tmp_path / "profile.npz"
    preemptions = 0
    for seed in (*range(20), 944, 1117, 1623, 1693, 2236):
        rng = Random(f"decr {seed}")
        np.savez(
            profile,
            prefill_isl=[1.0, rng.choice([3.0, 5.0, 9.0])],
            prefill_ttft_ms=[rng.choice([0.3, 1.0]), 0.0],
            decode_active_kv_tokens=[0.0, 60.0, 600.0],
            decode_context_length=[0.0, 30.0, 200.0],
            decode_itl=[[1.0, 1.0, 1.0]] * 3,
        )
        requests = rng.randint(4, 14)
        workload = single_turns(
            [rng.choice([4, 9, 16, 20]) for _ in range(requests)],
            [rng.choice([1, 2, 3, 5, 12, 20]) for _ in range(requests)],
            trace_block_size=4,
        )
        block_size = rng.choice([1, 4])
        config = VllmConfig(
            block_size=block_size,
            max_num_batched_tokens=rng.choice([24, 64, 1000]),
            enable_prefix_caching=rng.random() < 0.3,
            async_scheduling=rng.random() < 0.3,
            num_gpu_blocks=rng.randint(42, 90) // block_size,
            max_num_seqs=8,
            watermark=0,
            scheduler_reserve_full_isl=False,
            timing=Interpolated(str(profile)),
            mocker=MockerSettings(charge_first_token=False),
        )
        how: dict[str, Any] = {"workers": rng.choice([1, 2, 3]), "load": ClosedLoop(rng.choice([2, 4, 6]))}
        how["routing"] = rng.choice(["round_robin", "least_loaded"])
        fast, stepped = (
            run_offline(RunPlan(workload, config, fast_forward=fast_forward, **how))
            for fast_forward in (True, False)
        )
        assert fast.facts.digest == stepped.facts.digest, seed
        preemptions += int(stepped.timeline.preemptions.sum())
    assert preemptions


def test_a_halt_names_who_was_stuck_first() -> None:
    # Without chunked prefill a preempted request returns whole, into a budget that is too small; then others come.
    halts = 0
    timings: list[Constant | Polynomial] = [Constant(0.0, 1.0), Constant(1.0, 0.7), Polynomial()]
    for seed in range(200):
        rng = Random(f"halts {seed}")
        requests = rng.randint(4, 14)
        workload = single_turns(
            [rng.choice([4, 8, 16, 16]) for _ in range(requests)],
            [rng.choice([1, 5, 12, 20, 30]) for _ in range(requests)],
            arrival_ms=sorted(rng.choice([0, 0, rng.randint(0, 40)]) for _ in range(requests)),
        )
        config = VllmConfig(
            block_size=4,
            num_gpu_blocks=rng.choice([12, 13, 14]),
            max_num_batched_tokens=rng.choice([20, 24]),
            max_num_seqs=8,
            enable_chunked_prefill=False,
            enable_prefix_caching=False,
            timing=rng.choice(timings),
        )
        case = Case(workload, config, {"workers": rng.choice([2, 3, 4]), "routing": "least_loaded"})
        forwarded, stepped = digests(case, load=rng.choice([OpenLoop(), ClosedLoop(6)]))
        assert forwarded == stepped, seed
        halts += isinstance(stepped, str)
    assert halts


def test_a_router_hears_of_what_has_landed_on_a_host_while_its_worker_did_nothing() -> None:
    # The events of the device may be lost; those of the host come later, when the worker is idle.
    workload = single_turns([640, 640], 4, [0, 900], [range(40), range(40)], 16)
    config = VllmConfig(block_size=16, num_gpu_blocks=50, timing=Constant(1.0, 1.0))
    link = {"down_gbps": 0.05, "up_gbps": "inf"}
    below = TiersConfig.from_dict(
        {"kv_bytes_per_token": 1 << 14, "tiers": [{"tier": "g2", "blocks": 400, "link": link}]}
    )
    heard = 0
    for seed in range(12):
        runs = [
            run_offline(
                RunPlan(
                    workload,
                    config,
                    workers=2,
                    routing=KvRouting(event_loss=0.4),
                    tiers=below,
                    seed=seed,
                    fast_forward=fast_forward,
                )
            )
            for fast_forward in (True, False)
        ]
        believed = [run.decisions.lower_overlap_blocks.tolist() for run in runs if run.decisions is not None]
        assert believed[0] == believed[1], seed
        assert runs[0].facts.digest == runs[1].facts.digest, seed
        heard += believed[0][1] > 0
    assert heard


def test_whoever_waits_for_room_leaves_a_budget_that_the_head_of_the_queue_may_use() -> None:
    timing = StepCoefficients(
        weights_ms=0.5, token_ms=0.01, context_ms=0.0013, attention_ms=1e-5, step_ms=0.3, sequence_ms=0.01
    ).build()
    waits = 0
    for seed in range(60):
        rng = Random(f"room {seed}")
        crowd = crowd_of(seed, requests=30, groups=2, most_outputs=200)
        below: dict[str, Any] = {
            "g2_blocks": 12,
            "host": way(rng.choice([0.1, 0.3, 1.0]), 1.0),
            "offload_concurrency": 1,
        }
        fleet = {"num_gpu_blocks": rng.choice([40, 80, 120]), "max_num_batched_tokens": rng.choice([4, 8])}
        forwarded, stepped = (
            play(crowd, tiers(**below), **fleet, timing=timing, check=False, fast_forward=fast_forward)
            for fast_forward in (True, False)
        )
        assert digest(forwarded) == digest(stepped), seed
        waits += int(forwarded.room_wait_ns.sum() > 0)
    assert waits


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("load", [None, ClosedLoop(12)])
def test_whoever_comes_while_a_step_runs_finds_the_worker_as_if_it_had_not_ended_yet(
    load: ClosedLoop | None, asynchronous: bool
) -> None:
    # Long prompts, so that others come while one is computed; room that runs out, or not.
    timings: list[Any] = [Polynomial(), Physical(coefficients=CHEAP_PROMPTS), Constant(1.0, 2.0)]
    for seed in range(25):
        rng = Random(f"in the middle {seed}")
        requests = rng.randint(10, 40)
        workload = single_turns(
            [rng.choice([5, 60, 300]) for _ in range(requests)],
            [rng.choice([1, 2, 30, 200]) for _ in range(requests)],
            arrival_ms=sorted(rng.uniform(0, 800) for _ in range(requests)),
            trace_block_size=4,
        )
        config = VllmConfig(
            block_size=rng.choice([4, 16]),
            num_gpu_blocks=rng.choice([140, 400, 4000]),
            max_num_batched_tokens=rng.choice([16, 64, 1000]),
            max_num_seqs=rng.choice([3, 16]),
            async_scheduling=asynchronous,
            timing=rng.choice(timings),
        )
        how: dict[str, Any] = {"workers": rng.choice([1, 2, 3]), "load": load}
        forwarded, stepped = (
            run_offline(RunPlan(workload, config, fast_forward=fast_forward, **how)).timeline
            for fast_forward in (True, False)
        )
        for declared in list_columns(Timeline):
            for one, other in zip(declared.arrays(forwarded), declared.arrays(stepped), strict=True):
                assert one.tolist() == other.tolist(), (seed, declared.name)
