"""Live sessions: what clients tell in headers, what servers do with it, and that a replay does the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from replay.test_session_kv import CROWD, ENGINE, TIERS, make
from server.client import Client, Reply, serving
from understudy.cli.fleet import read_fleet
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.fleets.spread import SpreadFleet
from understudy.online.hints import SessionTeller
from understudy.online.replay import run_online
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.run.session_kv import Keep, SessionKv
from understudy.server import sessions as live_sessions
from understudy.server.api.errors import ApiError
from understudy.server.api.session_headers import read_hints
from understudy.server.flags.serving import read_serve
from understudy.server.server import Server
from understudy.server.settings import ServerSettings
from understudy.workload import Plays, read_trace
from understudy.workload.graph import TRIGGERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy._core import SessionSleep
    from understudy.workload import Workload

GOLDEN = Path(__file__).parents[1] / "golden" / "agents"
TIMING = Constant(prefill_ms=100.0, decode_ms=50.0)
NAMED = SessionKv(client_hold_s=60)


def both(
    workload: Workload, kv: SessionKv, engine: VllmConfig, speed: float = 4, **how: Any
) -> tuple[Any, Any]:
    """A run on live workers, and the replay."""
    engine = msgspec.structs.replace(engine, timing=TIMING)
    live = run_online(workload, engine, clock_speed=speed, session_kv=kv, **how)
    load = how.pop("plays", None)
    return live, run_offline(RunPlan(workload, engine, session_kv=kv, load=load, **how))


def counts(run: Any) -> dict[str, float]:
    """What was done, without what depends on how long holds of several sessions overlap."""
    overlaps = ("held_block_s", "held_blocks", "peak_held_blocks")
    return {name: value for name, value in run.facts.session_kv["done"].items() if name not in overlaps}


APART_NS = 5 * 10**9
"""Arrivals that lie further apart have the same order live; a busy machine may swap others."""
ROUNDING_NS = 20 * 10**6
"""A timer of the event loop may fire a millisecond early, which is this much at twenty times the speed."""


def require_same_order_and_counts(live: Any, offline: Any, *, workers: bool) -> None:
    names = ("cached_tokens_first", "prompt_tokens", "output_tokens", "status")
    for name in (*names, "worker") if workers else names:
        assert getattr(live.timeline, name).tolist() == getattr(offline.timeline, name).tolist(), name
    planned, seen = offline.timeline.arrival_ns, live.timeline.arrival_ns
    for row, time_ns in enumerate(planned):
        assert (seen[planned > time_ns + APART_NS] > seen[row]).all()
    assert counts(live) == counts(offline)


def require_arrivals_by_the_rule(workload: Workload, live: Any) -> None:
    graph, timeline = workload.graph, live.timeline
    assert graph is not None
    events = timeline.arrival_ns, timeline.finish_ns
    for row in range(len(workload)):
        for at in range(graph.dependency_offsets[row], graph.dependency_offsets[row + 1]):
            if TRIGGERS[graph.dependency_triggers[at]] != "completion":
                continue  # the client's dispatch is ahead of the arrival that the server notes
            event = events[graph.dependency_triggers[at]][graph.dependency_rows[at]]
            assert timeline.arrival_ns[row] >= event + graph.dependency_delay_ns[at] - ROUNDING_NS


@pytest.mark.parametrize(
    ("kv", "effect"),
    [
        (SessionKv(hold_s=10, release="end"), "holds"),
        (SessionKv(release="end"), "dropped_blocks"),
        (SessionKv(release_after_s=0.5), "drops"),
    ],
)
def test_live_sessions_are_kept_as_a_replay_keeps_them(kv: SessionKv, effect: str) -> None:
    live, offline = both(make([[(0, 2), (4000, 2)], *[[(800 * one, 2)] for one in range(1, 5)]]), kv, ENGINE)
    require_same_order_and_counts(live, offline, workers=True)
    assert counts(live)[effect] > 0


def test_a_client_that_tells_when_it_returns_finds_its_blocks_loaded() -> None:
    turns = [(0, 2), (6000, 2)]
    workload = make([turns, *[[(700 * one, 2)] for one in range(1, 8)]])
    kv = SessionKv(offload_after_s=0, prefetch="told", prefetch_lead_s=0.4)
    live, offline = both(workload, kv, ENGINE, tiers=TIERS)
    require_same_order_and_counts(live, offline, workers=True)
    assert counts(live)["prefetched_blocks"] == 10
    row = int(np.flatnonzero(workload.turn == 1)[0])
    assert live.timeline.tiers.below_tokens_first[0][row] == 0
    assert live.timeline.cached_tokens_first[row] == 160


@pytest.mark.parametrize(
    ("name", "lanes"),
    [
        ("weka.jsonl", 0),
        ("weka.jsonl", 1),
        ("weka-relative.json", 0),
        ("agentic_mooncake.jsonl", 0),
        ("dynamo_sessions.jsonl", 0),
    ],
)
def test_samples_live_have_the_order_and_counts_of_a_replay(name: str, lanes: int) -> None:
    workload = read_trace(GOLDEN / name)
    engine = VllmConfig(num_gpu_blocks=4096, block_size=64)
    kv = SessionKv(hold_s=2)
    live, offline = both(
        workload, kv, engine, 20, plays=Plays(lanes=lanes), workers=2, routing="session_tree"
    )
    # Plays that start together may reach a live router in any order.
    require_same_order_and_counts(live, offline, workers=lanes == 1)
    require_arrivals_by_the_rule(workload, live)
    assert counts(live)["holds"] > 0


def test_a_session_that_moves_is_held_where_it_is() -> None:
    workload = make([[(0, 2), (900, 2), (900, 2)], [(400, 2)]])
    live, offline = both(workload, SessionKv(hold_s=30), ENGINE, workers=2, routing="round_robin")
    require_same_order_and_counts(live, offline, workers=True)
    assert counts(live)["holds"] == 4


# ── Headers ──


@pytest.mark.parametrize(
    ("headers", "problem"),
    [
        ({"x-session-next-s": "soon"}, "x-session-next-s: must be seconds from 0 to 999999999"),
        ({"x-session-next-s": "-1"}, "must be seconds"),
        ({"x-session-next-s": "1e3"}, "must be seconds"),
        ({"x-session-next-s": "1, 2"}, "must be seconds"),
        ({"x-session-next-s": "9999999999"}, "must be seconds"),
        ({"x-session-hold-s": ""}, "must be seconds"),
        ({"x-session-hold-s": "٣"}, "must be seconds"),
        ({"x-session-hold-s": "61"}, "exceeds what this server allows .*; choose at most 60"),
        ({"x-session-hold-s": "9", "x-session-release-s": "3"}, "is below x-session-hold-s"),
        ({"x-session-end": "yes"}, "must be true or false"),
        ({"x-session-end": "true", "x-session-next-s": "3"}, "leave one of them out"),
        ({"x-parent-session-id": "p" * 257}, "has 257 characters; use at most 256"),
    ],
)
def test_wrong_headers_are_named(headers: dict[str, str], problem: str) -> None:
    with pytest.raises(ApiError, match=problem) as refused:
        read_hints(headers, "a", NAMED)
    assert refused.value.status == 400
    assert refused.value.param in headers


def test_headers_become_hints() -> None:
    headers = {"x-session-next-s": "2.5", "x-session-hold-s": "0.000000001", "x-parent-session-id": "root"}
    hints = read_hints(headers, "a", NAMED)
    assert hints == ("a", "root", 2_500_000_000, False, 1, None)
    assert read_hints({}, "", NAMED) is None
    with pytest.raises(ApiError, match="x-session-end: names no session; add x-session-id"):
        read_hints({"x-session-end": "true"}, "", NAMED)


def test_a_server_without_policies_reads_hints_and_refuses_holds() -> None:
    assert read_hints({"x-session-next-s": "2.5"}, "a", None) is None
    with pytest.raises(ApiError, match="must be seconds"):
        read_hints({"x-session-next-s": "later"}, "a", None)
    for name in ("x-session-hold-s", "x-session-release-s"):
        with pytest.raises(
            ApiError, match=f"{name}: this server keeps no KV of sessions; start it with --session-kv"
        ):
            read_hints({name: "3"}, "a", None)
    with pytest.raises(ApiError, match="leave it out"):
        read_hints({"x-session-hold-s": "3"}, "a", SessionKv(hold_s=5))


GIVEN: dict[str, Any] = {
    "model": "m",
    "max_model_len": 512,
    "engine": msgspec.structs.replace(ENGINE, timing=Constant(prefill_ms=1, decode_ms=1), max_model_len=512),
}
SETTINGS = ServerSettings(**GIVEN, session_kv=NAMED)


def on_server(kv: SessionKv, work: Callable[[Server, Client], Any]) -> Any:
    async def main() -> Any:
        async with serving(**{**GIVEN, "session_kv": kv}) as (client, server):
            return await work(server, client)

    return asyncio.run(main())


async def complete(client: Client, first: int, **headers: str) -> Reply:
    """Send a prompt of ten blocks."""
    body = {"model": "m", "prompt": list(range(first, first + 160)), "max_tokens": 2}
    named = {f"x-{name.replace('_', '-')}": value for name, value in headers.items()}
    return await client.ask("POST", "/v1/completions", body, headers=named)


def totals(server: Server) -> Any:
    now_ns = server.runtime.clock.now_ns()
    return server.worker.cores[0].vllm.prefix_totals(now_ns)


def test_a_client_holds_and_gives_up_the_blocks_of_its_session() -> None:
    async def work(server: Server, client: Client) -> None:
        answer = await complete(client, 1, session_id="a", session_hold_s="50")
        assert answer.status == 200
        assert (totals(server).holds, totals(server).peak_held_blocks) == (1, 10)
        for one in range(2, 8):
            await complete(client, 1000 * one)
        assert totals(server).yielded_holds == 0
        await complete(client, 1, session_id="a", session_release_s="0")
        assert (totals(server).drops, totals(server).dropped_blocks) == (1, 10)
        refused = await complete(client, 1, session_id="a", session_hold_s="70")
        assert refused.status == 400
        assert "choose at most 60" in refused.body.decode()
        page = await client.ask("GET", "/metrics")
        assert 'understudy:session_kv{what="holds"} 1' in page.body.decode()

    on_server(NAMED, work)


def test_sessions_are_forgotten_when_they_end_or_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_sessions, "MOST_SESSIONS", 3)

    async def work(server: Server, client: Client) -> None:
        sessions = server.worker.sessions
        assert sessions is not None
        for one in range(5):
            await complete(client, 1000 * one, session_id=f"s{one}", session_hold_s="50")
        assert sessions.forgotten == 2
        assert list(sessions._sessions) == ["s2", "s3", "s4"]
        assert totals(server).holds == 5
        await complete(client, 4000, session_id="s4", session_end="true")
        assert list(sessions._sessions) == ["s2", "s3"]
        too_long = {"model": "m", "prompt": [5] * 600}
        await client.ask("POST", "/v1/completions", too_long, headers={"x-session-id": "s2"})
        assert list(sessions._sessions) == ["s2", "s3"]  # refused: it has not woken

    on_server(NAMED, work)


class Broken:
    """A user-defined policy that fails."""

    def on_sleep(self, _sleep: SessionSleep) -> Keep:
        """Raise."""
        raise ValueError("no")


def test_a_policy_that_fails_is_counted_and_answers_go_on() -> None:
    async def work(server: Server, client: Client) -> None:
        assert (await complete(client, 1, session_id="a")).status == 200
        assert (await complete(client, 1, session_id="a")).status == 200
        assert server.worker.cores[0].errors == 2

    on_server(SessionKv(policy=Broken), work)


def test_servers_that_keep_nothing_for_sessions_are_refused() -> None:
    plan = read_serve(["--session-kv", "hold_s=60,client_hold_s=600"])
    assert plan.settings.session_kv == SessionKv(hold_s=60, client_hold_s=600)
    assert "session-kv" not in plan.idle
    with pytest.raises(
        ConfigError, match="--session-kv: works with vLLM's scheduler; leave it out with --engine sglang"
    ):
        read_serve(["--engine", "sglang", "--session-kv", "hold_s=60"])
    with pytest.raises(ConfigError, match="prefetch needs a tier below the GPU"):
        Server(msgspec.structs.replace(SETTINGS, session_kv=SessionKv(prefetch="told")))
    with pytest.raises(ConfigError, match="leave data_parallel_size at 1"):
        Server(msgspec.structs.replace(SETTINGS, data_parallel_size=2))
    engine = msgspec.structs.replace(SETTINGS.engine, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="without prefix caching"):
        Server(msgspec.structs.replace(SETTINGS, engine=engine))
    settings, _ = read_fleet(["--workers", "4", "--session-kv", "hold_s=60"])
    with pytest.raises(ConfigError, match="leave out --session-kv, or --processes"):
        SpreadFleet(settings, 2)
    with pytest.raises(ConfigError, match="client_hold_s is for clients of a live server"):
        RunPlan(make(CROWD), ENGINE, session_kv=NAMED)


def test_a_client_tells_the_gap_where_the_next_request_waits_for_this_answer_alone() -> None:
    from replay.test_plays import make as make_plays

    graph = make_plays([(1, 0, 1, 7), (2, 1, 1, 9), (2, 3, 1, 0)], [0, 0, 0, 0])
    workload = replace(graph, session=np.array([0, 0, 0, 1], np.int32), turn=np.array([0, 1, 2, 0], np.int32))
    teller = SessionTeller(workload)
    assert teller.send(0) == {"x-session-id": "0", "x-session-next-s": "0.007000000"}
    assert teller.send(3) == {"x-session-id": "1", "x-session-end": "true"}
    assert teller.send(1) == {"x-session-id": "0"}  # the other agent has not answered
    teller.on_answer(3)
    assert teller.send(1)["x-session-next-s"] == "0.009000000"
    assert "x-session-end" in teller.send(2)
