"""Workers that meet leap as they step: steps of no time, cheap prompts, events of hosts, a budget that is used up."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from model.replay_gen import Case, random_case
from replay.building import single_turns
from tiers.building import tiers, way
from tiers.fleets import crowd_of, digest, play
from understudy.engines.config import VllmConfig
from understudy.engines.timing import Constant, Polynomial
from understudy.errors import WrongState
from understudy.router.kv import KvRouting
from understudy.run.offline import run_offline
from understudy.run.schema import columns_of
from understudy.run.timeline import Timeline
from understudy.tiers.settings import TiersConfig
from understudy.timing.coefficients import StepCoefficients
from understudy.timing.physical import Physical
from understudy.workload import ClosedLoop

CHEAP_PROMPTS = StepCoefficients(
    weights_ms=0.5, token_ms=0.01, context_ms=0.01, attention_ms=1e-5, step_ms=0.3
)
"""A prompt's last token costs less than a decode that reads the prompt."""


def digests(case: Case, **how: Any) -> list[Any]:
    """Of both ways, or the halt that they come to."""
    found: list[Any] = []
    for leaping in (True, False):
        try:
            run = run_offline(case.workload, case.config, leaping=leaping, **{**case.how, **how})
        except WrongState as halt:
            found.append(str(halt))
        else:
            found.append([run.facts["digest"], run.timeline.queued_ns.tolist()])
    return found


@pytest.mark.parametrize("part", range(4))
def test_steps_of_no_time_are_begun_as_often_as_others_begin_theirs(part: int) -> None:
    for seed in range(100 * part, 100 * part + 100):
        rng = Random(f"at once {seed}")
        case = random_case(seed, timing=Constant(0.0, rng.choice([1.0, 3.0])))
        load = ClosedLoop(rng.choice([2, 5, 20]), rng.choice([0.0, 3.0]))
        leapt, stepped = digests(case, workers=rng.choice([2, 3]), load=load)
        assert leapt == stepped, seed


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
        leapt, stepped = digests(Case(workload, config, {"workers": 2, "load": ClosedLoop(3)}))
        assert leapt == stepped, seed


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
                workload,
                config,
                workers=2,
                routing=KvRouting(event_loss=0.4),
                tiers=below,
                seed=seed,
                leaping=leaping,
            )
            for leaping in (True, False)
        ]
        believed = [run.decisions.lower_overlap_blocks.tolist() for run in runs if run.decisions is not None]
        assert believed[0] == believed[1], seed
        assert runs[0].facts["digest"] == runs[1].facts["digest"], seed
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
        leapt, stepped = (
            play(crowd, tiers(**below), **fleet, timing=timing, check=False, leaping=leaping)
            for leaping in (True, False)
        )
        assert digest(leapt) == digest(stepped), seed
        waits += int(leapt.room_wait_ns.sum() > 0)
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
        leapt, stepped = (
            run_offline(workload, config, leaping=leaping, **how).timeline for leaping in (True, False)
        )
        for declared in columns_of(Timeline):
            for one, other in zip(declared.arrays(leapt), declared.arrays(stepped), strict=True):
                assert one.tolist() == other.tolist(), (seed, declared.name)
