"""A scaler in the loop of a live fleet."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from server.fleet_scene import C, fleet_of
from understudy.cli.fleet import read_fleet
from understudy.errors import ConfigError
from understudy.run.autoscale import Autoscale

if TYPE_CHECKING:
    from understudy.scaling.metrics import Decision, TickMetrics

LONG = {"prompt": "a b c d e f g h", "max_tokens": 400, "ignore_eos": True}


class Steps:
    """Orders two workers at the first tick and one at the twentieth, and keeps what it saw."""

    seen: list[TickMetrics]

    def __init__(self) -> None:
        type(self).seen = []

    def initial_tick_ms(self) -> float:
        return 20.0

    def on_tick(self, metrics: TickMetrics) -> Decision:
        self.seen.append(metrics)
        wanted = {1: 2, 20: 1}.get(len(self.seen))
        return {"target_prefill": None, "target_decode": wanted, "next_tick_ms": metrics["now_ms"] + 50}


async def states(client: Any) -> list[str]:
    found: list[str] = (await client.get("/fleet/state")).json["workers"]["state"]
    return found


def test_a_scaler_of_the_users_starts_and_stops_live_workers() -> None:
    scale = Autoscale(scaler=Steps(), max_workers=3, startup_s=0.6)

    async def main() -> None:
        async with fleet_of(1, autoscale=scale) as (client, fleet):
            assert [server.app.stopped for server in fleet.servers] == [False, True, True]
            asked = asyncio.create_task(client.post(C, LONG))
            for _ in range(500):
                now = await states(client)
                if len(Steps.seen) > 20 and now == ["ready", "stopped", "stopped"]:
                    break
                await asyncio.sleep(0.02)
            assert now == ["ready", "stopped", "stopped"]
            assert (await asked).status == 200
            assert fleet.front.elastic.scaler is not None
            assert fleet.front.elastic.scaler.failure is None

    asyncio.run(main())
    seen = Steps.seen
    assert [one["tick_ordinal"] for one in seen[:3]] == [0, 1, 2]
    assert seen[1]["starting_decode_ids"] == [1]
    assert any(one["active_decode_count"] == 2 for one in seen)
    assert sum(one["traffic"]["num_req"] for one in seen if one["traffic"] is not None) == 1
    decoding = [one["decode_fpm_snapshots"][0] for one in seen if one["decode_fpm_snapshots"]]
    assert any(one["num_decode_requests"] == 1 and one["sum_decode_kv_tokens"] > 8 for one in decoding)


def test_a_backlog_makes_the_built_in_scaler_order_workers() -> None:
    scale = Autoscale(scaler="backlog", max_workers=4)

    async def main() -> None:
        async with fleet_of(1, autoscale=scale, clock_speed=10.0) as (client, fleet):
            body = {**LONG, "max_tokens": 300}
            answers = await asyncio.gather(
                *(client.post(C, {**body, "prompt": f"{n} " * 900}) for n in range(60))
            )
            assert {answer.status for answer in answers} == {200}
            assert fleet.front.elastic.scaler is not None
            assert fleet.front.elastic.scaler.ticks > 0
            assert fleet.front.elastic.scaler.failure is None

    asyncio.run(main())


def test_a_scaler_that_raises_is_called_no_more_and_the_fleet_goes_on() -> None:
    class Broken:
        def initial_tick_ms(self) -> float:
            return 0.0

        def on_tick(self, _: TickMetrics) -> Decision:
            raise ValueError("no idea")

    async def main() -> None:
        async with fleet_of(1, autoscale=Autoscale(scaler=Broken(), max_workers=2)) as (client, fleet):
            await asyncio.sleep(0.05)
            scaler = fleet.front.elastic.scaler
            assert scaler is not None
            assert scaler.failure is not None
            assert "no idea" in scaler.failure
            assert (await client.post(C, {**LONG, "max_tokens": 2})).status == 200

    asyncio.run(main())


def test_flags_of_the_fleet_give_faults_and_a_scaler() -> None:
    flags = (
        "m --workers 2 --routing kv --fault kill:1@5s+2s --fault=slow@1s,factor=3 --on-loss migrate "
        "--autoscale hpa,metric=kv_use,target=0.5 --max-workers 6 --startup-s 3"
    )
    settings, _ = read_fleet(flags.split())
    assert settings.faults is not None
    assert [one.describe() for one in settings.faults.faults] == ["kill:1@5s+2s", "slow@1s,factor=3"]
    assert settings.faults.on_loss == "migrate"
    assert settings.autoscale is not None
    assert (settings.autoscale.most_workers(2), settings.most_workers()[0][0]) == (6, 6)


def test_chaos_draws_the_same_faults_for_the_same_seed() -> None:
    flags = "--workers 3 --routing kv --chaos 7 --chaos-rate 120"
    plans = [read_fleet(["m", *flags.split()])[0].faults for _ in range(2)]
    assert plans[0] is not None
    assert plans[0] == plans[1]
    assert len(plans[0].faults) > 2000


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--max-workers 3", "--max-workers has no effect without --autoscale"),
        ("--chaos-rate 3", "--chaos-rate has no effect without --chaos"),
        ("--fault kill", "--fault"),
        ("--faults nowhere.txt", "--faults nowhere.txt"),
        ("--processes 2 --on-loss retry", "leave --processes out"),
        ("--autoscale nothing", "nothing"),
    ],
)
def test_flags_without_effect_are_refused(flags: str, why: str) -> None:
    from understudy.fleets.fleet import Fleet

    with pytest.raises(ConfigError, match=why):
        Fleet(read_fleet(["m", *flags.split()])[0])
