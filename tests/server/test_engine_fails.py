"""An engine that fails under a server: it says so, and whoever has to do with it is told."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from server.client import serving
from tiers.building import INF, MS, chain, tiers, way
from understudy._core import Tier
from understudy.clock import ScriptedClock
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import CapacityExhausted, InvalidArgument
from understudy.server.driver import Driver
from understudy.server.engines import SimulatedCore
from understudy.server.live_request import LiveRequest, StepEffects
from understudy.tiers import TiersConfig

if TYPE_CHECKING:
    from understudy.server.core import EngineCore


class Ends:
    """Who has ended, how and when."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str | None, int]] = []

    def on_admitted(self, request: LiveRequest, now_ns: int) -> None: ...

    def on_tokens(self, request: LiveRequest, first: int, count: int, now_ns: int) -> None: ...

    def on_end(self, request: LiveRequest, now_ns: int) -> None:
        self.told.append((request.name, request.ended, now_ns))

    def on_error(self, request: LiveRequest) -> None: ...

    def on_step(self, core: EngineCore, effects: StepEffects, now_ns: int) -> None: ...

    def on_landed(self, core: EngineCore) -> None: ...

    def on_idle(self, core: EngineCore) -> None: ...


class Scene:
    """An engine whose copies to the host take years where many are under way, its driver, and six requests."""

    def __init__(self, **settings: Any) -> None:
        config = VllmConfig(
            block_size=4,
            num_gpu_blocks=500,
            max_num_batched_tokens=400,
            async_scheduling=False,
            timing=Constant(0.0, 1.0),
        )
        below = {"host": way(1e-9, INF), "write_through": True, **settings}
        self.core = SimulatedCore(config, tiers=tiers(1000, **below))
        self.clock = ScriptedClock()
        self.driver = Driver(self.clock)
        self.ends = Ends()
        self.driver.observe(self.core, self.ends)
        self.requests = [LiveRequest(f"{i}", 400, 5, chain(i, 350), self.ends) for i in range(1, 7)]

    def come(self) -> None:
        for request in self.requests:
            self.driver.submit(self.core, request)

    def fail(self) -> None:
        self.come()
        with pytest.raises(CapacityExhausted, match="years"):
            self.driver.run_until()  # copies of a byte a second, one behind the other


def test_an_engine_that_fails_says_why_and_who_was_in_it_is_told_at_once() -> None:
    scene = Scene()
    scene.fail()
    core = scene.core
    assert "years" in str(core.failure)
    assert (core.live, core.step_end_ns, core.is_idle) == ({}, -1, True)
    assert scene.ends.told == [(request.name, "lost", scene.clock.time_ns) for request in scene.requests]


def test_nothing_happens_in_it_any_more() -> None:
    scene = Scene()
    scene.fail()
    scene.ends.told.clear()
    steps = scene.core.steps
    scene.clock.time_ns += 10 * MS
    for request in scene.requests:
        scene.driver.cancel(request)  # they have ended
    late = LiveRequest("late", 40, 5, chain(9, 20), scene.ends, cache_hit_threshold=0.5)
    scene.driver.submit(scene.core, late)
    scene.driver.enqueue(scene.core, scene.core.forget_cache)
    scene.driver.run_until()
    assert scene.ends.told == [("late", "lost", scene.clock.time_ns)]
    assert (scene.core.steps, scene.driver.idle) == (steps, True)


def test_one_that_fails_does_not_stop_the_others() -> None:
    scene = Scene()
    others = Scene(host=way(INF))
    scene.driver.observe(others.core, others.ends)
    scene.come()
    for request in others.requests:
        scene.driver.submit(others.core, request)
    with pytest.raises(CapacityExhausted, match="years"):
        scene.driver.run_until()
    scene.driver.run_until()
    assert [how for _, how, _ in others.ends.told] == ["finished"] * 6


def test_a_new_engine_takes_its_place_when_it_is_killed() -> None:
    scene = Scene()
    scene.fail()
    scene.driver.enqueue(scene.core, lambda _: scene.core.restart())
    again = LiveRequest("again", 40, 5, chain(9, 20), scene.ends)
    scene.driver.submit(scene.core, again)
    scene.driver.run_until(scene.clock.time_ns + 100 * MS)
    assert (again.ended, scene.core.failure) == ("finished", None)


def test_a_server_whose_engine_has_failed_is_not_healthy_and_stops_at_once() -> None:
    below = TiersConfig.from_dict(
        {
            "tiers": [{"tier": "g2", "blocks": 1000, "link": {"down_gbps": 1e-9}}],
            "kv_bytes_per_token": 250_000,
            "offload": {"mode": "write_through"},
        }
    )
    engine = VllmConfig(
        block_size=4, num_gpu_blocks=500, max_num_batched_tokens=400, timing=Constant(0.0, 1.0)
    )

    async def main() -> None:
        async with serving(engine=engine, max_model_len=1000, tiers=below) as (client, server):
            assert (await client.get("/health")).status == 200
            asked = [
                client.post(
                    "/v1/completions", {"prompt": [1000 * i + n for n in range(400)], "max_tokens": 50}
                )
                for i in range(6)
            ]
            told = await asyncio.gather(*asked)
            assert {answer.status for answer in told} == {500}
            assert "the engine has died" in told[0].json["error"]["message"]
            assert (await client.get("/health")).status == 503
            late = await client.post("/v1/completions", {"prompt": [1], "max_tokens": 1})
            assert late.status == 500
            assert not server.app.endpoints.in_flight
            assert (await client.post("/admin/fault", {"kind": "kill", "workers": [0]})).status == 200
            assert (await client.get("/health")).status == 200

    asyncio.run(main())


def test_links_that_cannot_be_slowed_stay_as_they_are_and_everything_goes_on() -> None:
    scene = Scene(host=way(INF))
    scene.come()
    scene.driver.enqueue(scene.core, lambda now_ns: scene.core.vllm.set_link_share(now_ns, Tier.G2, 0.5))
    with pytest.raises(InvalidArgument, match="no limit to be lowered"):
        scene.driver.run_until()
    scene.driver.run_until()  # those who came at that very time have begun
    assert [how for _, how, _ in scene.ends.told] == ["finished"] * 6
    assert scene.core.failure is None
