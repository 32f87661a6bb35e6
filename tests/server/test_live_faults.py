"""Planned faults in a live fleet, and requests that lose their worker."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from server.client import QUICK, Client
from server.fleet_scene import C, fleet_of
from understudy.errors import ConfigError
from understudy.fleets.fleet import Fleet, FleetSettings
from understudy.run.faults import FaultPlan, parse_fault
from understudy.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from server.client import Reply

LONG = {"prompt": "a b c d e f g h", "max_tokens": 120, "ignore_eos": True, "seed": 1}


def plan_of(*faults: str, **policy: Any) -> FaultPlan:
    return FaultPlan(faults=tuple(parse_fault(text) for text in faults), **policy)


def run(
    test: Callable[[Client, Fleet], Awaitable[None]],
    plan: FaultPlan,
    *,
    workers: int = 2,
    routing: str = "round_robin",
    **settings: Any,
) -> None:
    async def main() -> None:
        async with fleet_of(workers, routing, faults=plan, **settings) as (client, fleet):
            await test(client, fleet)
            await asyncio.sleep(0.3)  # checks run behind the last fault
            assert fleet.front.elastic.checks.mistakes == []
            ledger = fleet.front.elastic.ledger
            assert (ledger.open, ledger.arrived) == (0, sum(ledger.ended.values()))

    asyncio.run(main())


async def ask_all(client: Client, count: int, body: dict[str, Any]) -> list[Reply]:
    return await asyncio.gather(*(client.post(C, {**body, "prompt": f"{n} a b c"}) for n in range(count)))


def ended(fleet: Fleet) -> dict[str, int]:
    return {name: count for name, count in fleet.front.elastic.ledger.ended.items() if count}


async def wait_for(what: Callable[[], bool]) -> None:
    for _ in range(300):
        if what():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it has not happened within 3 s")


def test_a_request_whose_worker_crashes_fails_once_under_fail() -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        answers = await ask_all(client, 4, LONG)
        assert sorted(answer.status for answer in answers) == [200, 200, 500, 500]
        assert ended(fleet) == {"completed": 2, "failed": 2}
        assert fleet.front.elastic.lost is not None
        assert fleet.front.elastic.lost.outcomes == {"failed": 2}

    run(test, plan_of("kill:0@0.05s+0.2s", on_loss="fail"))


@pytest.mark.parametrize("policy", ["retry", "migrate"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_worker_crashes_completes_with_the_same_answer(policy: Any, stream: bool) -> None:
    body = {**LONG, "stream": stream}

    async def ask(faults: FaultPlan | None) -> list[Reply]:
        async with fleet_of(2, faults=faults) as (client, fleet):
            answers = await ask_all(client, 6, body)
            if faults is not None:
                assert fleet.front.elastic.lost is not None
                outcome = "retried" if policy == "retry" else "migrated"
                assert fleet.front.elastic.lost.outcomes == {outcome: 3}
                assert ended(fleet) == {"completed": 6}
            return answers

    def texts(answers: list[Reply]) -> list[str]:
        if not stream:
            assert all(answer.json["usage"]["completion_tokens"] == 120 for answer in answers)
            return [answer.json["choices"][0]["text"] for answer in answers]
        return [
            "".join(event["choices"][0]["text"] for event in answer.events if event != "[DONE]")
            for answer in answers
        ]

    plain = texts(asyncio.run(ask(None)))
    assert texts(asyncio.run(ask(plan_of("kill:0@0.06s+0.1s", on_loss=policy)))) == plain


def test_a_request_that_migrates_computes_its_tokens_once() -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        await ask_all(client, 2, LONG)
        made = sum(server.worker.metrics[0].generation_tokens.value for server in fleet.servers)
        assert made == 240

    run(test, plan_of("kill:0@0.06s", on_loss="migrate"))


def test_requests_wait_for_a_worker_that_will_be_back_and_fail_where_none_will() -> None:
    async def back(client: Client, fleet: Fleet) -> None:
        first = asyncio.create_task(client.post(C, LONG))
        await asyncio.sleep(0.1)
        assert (await client.get("/fleet/state")).json["workers"]["state"] == ["dead"]
        second = await client.post(C, LONG)
        assert ((await first).status, second.status) == (200, 200)

    async def gone(client: Client, fleet: Fleet) -> None:
        first = await client.post(C, LONG)
        assert (first.status, "has died" in first.json["error"]["message"]) == (500, True)
        assert (await client.post(C, LONG)).status == 500

    run(back, plan_of("kill:0@0.05s+0.4s"), workers=1)
    run(gone, plan_of("kill:0@0.05s"), workers=1)


def test_a_request_fails_after_as_many_losses_as_it_may_have() -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        answer = await client.post(C, {**LONG, "max_tokens": 400})
        assert answer.status == 500
        assert fleet.front.elastic.lost is not None
        assert fleet.front.elastic.lost.outcomes == {"retried": 1, "failed": 1}

    run(test, plan_of("kill:0@0.05s+0.05s", "kill:0@0.25s+0.05s", max_attempts=2), workers=1)


def test_a_client_that_leaves_a_lost_request_ends_it() -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        asked = asyncio.create_task(client.post(C, LONG))
        lost = fleet.front.elastic.lost
        assert lost is not None
        await wait_for(lambda: lost.num_pending == 1)
        asked.cancel()
        await wait_for(lambda: ended(fleet) == {"disconnected": 1})
        assert lost.num_pending == 0
        assert not fleet.servers[0].app.endpoints.in_flight

    run(test, plan_of("kill:0@0.05s+60s"), workers=1)


def test_the_state_lists_planned_faults_and_when_they_end() -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        await wait_for(lambda: bool(fleet.servers[1].app.faults.kinds))
        state = (await client.get("/fleet/state")).json
        assert state["workers"]["state"] == ["ready", "slow"]
        fault = state["faults"][0]
        assert (fault["kind"], fault["factor"], fault["workers"], fault["planned"]) == (
            "slow",
            4.0,
            [1],
            True,
        )
        assert fault["until"] > state["time"]
        await wait_for(lambda: not fleet.servers[1].app.faults.kinds)

    run(test, plan_of("slow:1@0.02s+1s,factor=4"))


def test_steps_of_a_slow_worker_take_longer() -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        await asyncio.sleep(0.05)
        await client.post(C, {**LONG, "max_tokens": 30})
        engine = fleet.servers[0].worker.metrics[0]
        assert engine.gap.sum / engine.gap.count == pytest.approx(8e-3, rel=0.01)

    run(test, plan_of("slow:0@0s,factor=8"), workers=1)


@pytest.mark.parametrize(
    "fault",
    [
        "restart_router@0.05s+0.2s",
        "lose_events@0.02s+0.2s,rate=0.5",
        "late_events@0.02s+0.2s,delay_ms=60",
        "double_events@0.02s+0.2s",
        "stop_events:1@0.02s+0.2s",
        "kill:1@0.05s+0.1s",
    ],
)
def test_the_routers_index_equals_the_engines_again_after_a_fault_of_events(fault: str) -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        for _ in range(4):
            await ask_all(client, 6, {**LONG, "prompt": "x", "max_tokens": 40})
        await asyncio.sleep(0.2)
        index = fleet.routing.dispatcher.index
        assert index is not None
        assert len(index) > 0
        fleet.front.elastic.checks.check([0, 1])
        before = fleet.front.elastic.checks.checked
        await asyncio.sleep(0.05)
        assert fleet.front.elastic.checks.checked >= before + 4

    run(test, plan_of(fault), routing="kv")


def test_a_worker_that_drains_for_too_long_hands_back_its_requests() -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        asked = [asyncio.create_task(client.post(C, {**LONG, "max_tokens": 1500})) for _ in range(2)]
        await wait_for(lambda: all(server.worker.live() for server in fleet.servers))
        assert (await client.post("/admin/scale", {"workers": 1})).status == 200
        await wait_for(lambda: fleet.servers[1].app.stopped)
        assert len(fleet.servers[0].worker.live()) == 2
        assert [(await one).status for one in asked] == [200, 200]
        assert fleet.front.elastic.lost is not None
        assert fleet.front.elastic.lost.outcomes == {"migrated": 1}

    run(test, plan_of(drain_limit_s=0.1, on_loss="migrate"))


def test_hand_made_kills_follow_the_policy_too() -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        asked = asyncio.create_task(client.post(C, LONG))
        await wait_for(lambda: bool(fleet.servers[0].worker.live()))
        await client.post("/admin/fault", {"kind": "kill", "workers": [0], "duration_s": 0.2})
        assert (await asked).status == 200

    run(test, plan_of(on_loss="retry"), workers=1)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("kill:2@1s", "there is no worker 2"),
        ("lose_events@1s", "the router receives no events"),
        ("slow_link@1s", "no g2 tier behind a link with a limit"),
        ("fail_loads@1s", "fail_loads|tier"),
    ],
)
def test_a_fault_that_the_fleet_cannot_have_is_refused_before_it_begins(fault: str, why: str) -> None:
    pool = ServerSettings(model="stub", engine=QUICK, max_model_len=4096)
    with pytest.raises(ConfigError, match=why):
        Fleet(FleetSettings(pools=((2, pool),), base_port=0, port=0, faults=plan_of(fault)))
