"""Runs of requests that wait for others: arrivals by the rule, equal in every mode, and equal to Dynamo's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload import (
    ClosedLoop,
    Lockstep,
    OpenLoop,
    Plays,
    RequestGraph,
    Workload,
    read_trace,
    scale_users,
)

if TYPE_CHECKING:
    from understudy._core import StepLoad
    from understudy.run.timeline import Timeline

GOLDEN = Path(__file__).parents[1] / "golden" / "agents"
RUNS = json.loads((GOLDEN / "expected.json").read_text())["runs"]


class FixedPasses:
    """Passes that take a fixed time for prompts, and another one for decoding."""

    def __init__(self, prefill_ms: float, decode_ms: float) -> None:
        self._prefill_ms, self._decode_ms = prefill_ms, decode_ms

    def step_ms(self, step: StepLoad) -> float:
        """Return the time of a step."""
        return self._prefill_ms * bool(step.chunks) + self._decode_ms * bool(step.decodes)


def play(workload: Workload, load: Any = None, **more: Any) -> Timeline:
    engine = VllmConfig(num_gpu_blocks=4096, block_size=64, async_scheduling=False)
    return run_offline(RunPlan(workload, engine, load=load, **more)).timeline


def make(edges: list[tuple[int, int, int, int]], plays: list[int], **more: Any) -> Workload:
    """Return a workload of short requests with the dependencies (row, row waited for, trigger, delay in ms)."""
    rows = len(plays)
    edges = sorted(edges)
    counts = np.bincount([edge[0] for edge in edges], minlength=rows)
    graph = RequestGraph(
        play=np.array(plays, np.int32),
        not_before_ns=np.array(more.pop("not_before_ms", [0] * rows)) * 10**6,
        dependency_offsets=np.concatenate([[0], np.cumsum(counts)]),
        dependency_rows=np.array([edge[1] for edge in edges], np.int64),
        dependency_triggers=np.array([edge[2] for edge in edges], np.uint8),
        dependency_delay_ns=np.array([edge[3] for edge in edges], np.int64) * 10**6,
        dependency_relations=np.zeros(len(edges), np.uint8),
    )
    return Workload(
        arrival_ns=np.array(more.pop("start_ms", [0] * rows)) * 10**6,
        prompt_tokens=np.full(rows, 64, np.int32),
        output_tokens=np.arange(rows, dtype=np.int32) % 5 + 1,
        hash_offsets=np.arange(rows + 1),
        hash_ids=np.arange(rows, dtype=np.uint32),
        trace_block_size=64,
        graph=graph,
        **more,
    )


def check_arrivals(workload: Workload, timeline: Timeline, start_ns: dict[int, int] | None = None) -> None:
    """Compare every arrival with the rule: the latest of the earliest time and of the events waited for."""
    graph = workload.graph
    assert graph is not None
    events = timeline.arrival_ns, timeline.finish_ns
    for row in range(len(workload)):
        start = int(workload.arrival_ns[row]) if start_ns is None else start_ns[int(graph.play[row])]
        times = [start + int(graph.not_before_ns[row])]
        for at in range(graph.dependency_offsets[row], graph.dependency_offsets[row + 1]):
            event = events[graph.dependency_triggers[at]][graph.dependency_rows[at]]
            times.append(int(event + graph.dependency_delay_ns[at]))
        assert timeline.arrival_ns[row] == max(times), row


DIAMOND = [(1, 0, 0, 3), (2, 0, 1, 5), (3, 1, 1, 0), (3, 2, 1, 7)]


def test_a_request_arrives_when_the_last_of_those_it_waits_for_is_through() -> None:
    workload = make(DIAMOND, [0] * 4)
    check_arrivals(workload, play(workload, Plays(clock="recorded")))


@given(st.data())
def test_random_graphs_arrive_by_the_rule_and_equal_in_every_mode(data: st.DataObject) -> None:
    plays = sorted(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=12)))
    plays = [sorted(set(plays)).index(one) for one in plays]
    delays, edges = st.integers(0, 40), []
    for row, own in enumerate(plays):
        others = [other for other in range(row) if plays[other] == own]
        for other in data.draw(st.lists(st.sampled_from(others), max_size=3, unique=True)) if others else []:
            edge = (row, other, data.draw(st.integers(0, 1)), data.draw(delays))
            edges.append(edge)
    starts = data.draw(st.lists(delays, min_size=3, max_size=3))
    workload = make(
        edges,
        plays,
        not_before_ms=[data.draw(delays) for _ in plays],
        start_ms=[starts[own] for own in plays],
    ).sorted_by_arrival()
    workers = data.draw(st.integers(1, 3))
    routing = data.draw(st.sampled_from(["round_robin", "least_loaded", "kv"]))
    load = Plays(clock="recorded")
    fast = play(workload.normalised(), load, workers=workers, routing=routing, check=True)
    check_arrivals(workload.normalised(), fast)
    slow = play(workload.normalised(), load, workers=workers, routing=routing, fast_forward=False)
    assert np.array_equal(fast.arrival_ns, slow.arrival_ns)
    assert np.array_equal(fast.finish_ns, slow.finish_ns)


def test_lanes_start_the_next_play_when_one_has_ended() -> None:
    workload = make([(1, 0, 1, 50), (3, 2, 1, 0), (5, 4, 0, 9)], [0, 0, 1, 1, 2, 2])
    one = play(workload, Plays(lanes=1))
    finish = one.finish_ns.reshape(3, 2).max(axis=1)
    starts = {0: 0, 1: int(finish[0]), 2: int(finish[1])}
    check_arrivals(workload, one, starts)
    two = play(workload, ClosedLoop(2))  # sessions of a graph are plays
    assert two.arrival_ns[2] == 0
    assert two.arrival_ns[4] == two.finish_ns[2:4].max()


def test_the_clock_of_the_client_ignores_recorded_times_of_requests_that_wait() -> None:
    workload = make([(1, 0, 1, 2)], [0, 0, 1], not_before_ms=[0, 9000, 500])
    client, recorded = play(workload), play(workload, Plays(clock="recorded"))
    assert client.arrival_ns[1] == client.finish_ns[0] + 2_000_000
    assert recorded.arrival_ns[1] == 9_000_000_000
    assert client.arrival_ns[2] == recorded.arrival_ns[2] == 500_000_000


def test_the_arrival_rate_scale_divides_delays_and_recorded_times() -> None:
    workload = make([(1, 0, 1, 30)], [0, 0, 1], not_before_ms=[0, 0, 500])
    twice = play(workload, OpenLoop(arrival_rate_scale=2))
    assert twice.arrival_ns[1] == twice.finish_ns[0] + 15_000_000
    assert twice.arrival_ns[2] == 250_000_000


def test_a_rejected_request_does_not_stop_its_play() -> None:
    workload = make([(1, 0, 1, 4)], [0, 0])
    engine = VllmConfig(num_gpu_blocks=4, block_size=16)
    timeline = run_offline(RunPlan(workload, engine)).timeline  # row 1 needs a fifth block
    assert timeline.arrival_ns[1] == timeline.finish_ns[0] + 4_000_000
    assert 1 in timeline.reject_reasons


def test_more_users_are_more_plays_with_blocks_of_their_own() -> None:
    workload = make(DIAMOND, [0] * 4, request_ids=list("abcd"))
    assert workload.graph is not None
    doubled = scale_users(workload, 2)
    assert doubled.graph is not None
    assert doubled.graph.plays == 2
    assert len(set(doubled.hash_ids.tolist())) == 8
    check_arrivals(doubled, play(doubled, Plays(clock="recorded")))
    assert len(scale_users(workload, 1.0)) == 4


def test_loads_that_do_not_fit_the_workload_are_refused() -> None:
    graph, plain = make(DIAMOND, [0] * 4), make([], [0] * 4)
    plain = Workload(
        arrival_ns=plain.arrival_ns,
        prompt_tokens=plain.prompt_tokens,
        output_tokens=plain.output_tokens,
        hash_offsets=plain.hash_offsets,
        hash_ids=plain.hash_ids,
        trace_block_size=64,
    )
    with pytest.raises(ConfigError, match="must be Plays"):
        play(graph, Lockstep())
    with pytest.raises(ConfigError, match="needs requests that wait for one another"):
        play(plain, Plays())
    with pytest.raises(ConfigError, match="clock must be client or recorded"):
        Plays(clock="mine")  # type: ignore[arg-type]


AGENTS = [run for run in RUNS if run["format"] in ("weka", "agentic_mooncake", "dynamo")]


@pytest.mark.parametrize(
    "run", AGENTS, ids=[f"{one['file']}-{one['prefill_ms']}-{one['options']}" for one in AGENTS]
)
def test_arrivals_and_reuse_equal_dynamos(run: dict[str, Any]) -> None:
    workload = read_trace(GOLDEN / run["file"])
    options = run["options"]
    load: Plays | OpenLoop = OpenLoop()
    if workload.graph is not None:
        load = Plays(
            lanes=options.get("agentic_lanes", 0),
            clock="recorded",
            arrival_rate_scale=options.get("arrival_speedup_ratio", 1),
        )
    timing = FixedPasses(run["prefill_ms"], run["decode_ms"])
    timeline = play(workload, load, timing=timing)
    assert workload.request_ids is not None
    graph = workload.graph
    names: list[str | None] = [None] * len(workload)
    if graph is not None and graph.play_ids is not None:
        names = [graph.play_ids[one] for one in graph.play]
    rows = {
        (own, name.removeprefix(f"{own}:")): row
        for row, (own, name) in enumerate(zip(names, workload.request_ids, strict=True))
    }
    # Passes of the two engines begin at other times; over a play that adds up where they are long.
    pass_ms = (run["prefill_ms"] + run["decode_ms"]) * (1 if run["prefill_ms"] == 10 else 3)
    for place, (name, play_id, _, arrival_ms, _, finish_ms, *_, reused) in enumerate(run["requests"]):
        row = place if name is None else rows[play_id, name]
        assert timeline.arrival_ns[row] / 1e6 == pytest.approx(arrival_ms, abs=pass_ms), name
        assert timeline.finish_ns[row] / 1e6 == pytest.approx(finish_ms, abs=2 * pass_ms), name
        assert timeline.cached_tokens_first[row] == reused, name


CHAINS = [run for run in RUNS if run["format"] in ("mooncake-delta", "applied_compute_agentic")]


@pytest.mark.parametrize("run", CHAINS, ids=[f"{one['file']}-{one['prefill_ms']}" for one in CHAINS])
def test_chains_of_turns_equal_dynamos_in_arrivals_and_reuse(run: dict[str, Any]) -> None:
    if run["format"] == "mooncake-delta":
        workload = read_trace(GOLDEN / run["file"], format="mooncake-delta", trace_block_size=64)
        load: OpenLoop | ClosedLoop = OpenLoop()
    else:
        workload = read_trace(GOLDEN / run["file"], format="applied-compute")
        load = ClosedLoop(run["options"]["replay_concurrency"])
    timing = FixedPasses(run["prefill_ms"], run["decode_ms"])
    timeline = play(workload, load, timing=timing)
    ours = sorted(
        zip(
            timeline.prompt_tokens.tolist(),
            (timeline.arrival_ns / 1e6).tolist(),
            (timeline.finish_ns / 1e6).tolist(),
            timeline.cached_tokens_first.tolist(),
            strict=True,
        )
    )
    theirs = sorted((one[6], one[3], one[5], one[8]) for one in run["requests"])
    assert [row[:3] for row in ours] == [row[:3] for row in theirs]
    # An engine also caches the block in which a prompt ends and its answer begins; Dynamo's answers have no content.
    answered = 64 if run["format"] == "applied_compute_agentic" else 0
    assert [row[3] for row in ours] == [row[3] + (answered if row[3] else 0) for row in theirs]
