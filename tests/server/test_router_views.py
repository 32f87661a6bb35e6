"""The standalone router's view of each engine's cache: whole, or said to be partial."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from server.router_scene import EVENTS, C, Scene, play
from understudy.proxy.service import RouterService, RouterSettings
from understudy.router import KvRouting, Router

if TYPE_CHECKING:
    from pathlib import Path

    from understudy._core import FleetView, RouteRequest


def test_a_lost_message_is_asked_for_again_and_the_view_is_whole() -> None:
    async def test(told: Scene) -> None:
        sender = told.servers[0].worker.senders[0]
        blocks = await told.joined()

        async def whole() -> bool:
            return len(await told.held(0)) == blocks

        await told.until(whole)
        before = (await told.dump())["workers"][0]["view"]
        sender.batches_to_drop = 1
        await told.client.post(C, {"prompt": list(range(160)), "max_tokens": 1})
        await told.client.post(C, {"prompt": list(range(200, 360)), "max_tokens": 1})
        blocks += 20
        await told.until(whole)
        view = (await told.dump())["workers"][0]["view"]
        assert (view["state"], view["gaps"]) == ("live", before["gaps"] + 1)
        assert view["replayed_messages"] > before["replayed_messages"]

    play(test, 1)


def test_without_a_replay_socket_a_gap_leaves_a_view_that_is_said_to_be_partial() -> None:
    async def test(told: Scene) -> None:
        sender = told.servers[0].worker.senders[0]
        await told.joined()
        sender.batches_to_drop = 1
        lost = {"prompt": list(range(160)), "max_tokens": 1}
        await told.client.post(C, lost)
        await told.client.post(C, {"prompt": list(range(200, 360)), "max_tokens": 1})

        async def partial() -> bool:
            return await told.states() == ["partial"]

        await told.until(partial)
        row = (await told.dump())["workers"][0]
        assert "cannot be replayed" in row["view"]["meaning"]
        assert "count as cached" in row["view"]["meanwhile"]
        # What is sent there from now on counts, though the events may not tell all.
        await told.client.post(C, lost)
        again = await told.client.post(C, lost)
        assert again.headers["x-understudy-overlap-blocks"] == "10"

    play(test, 1, events={**EVENTS, "replay_endpoint": None})


class Unobserving(Router):
    """Chooses the first worker and has no `observe`."""

    def choose(self, request: RouteRequest, view: FleetView) -> int:  # noqa: ARG002
        return int(view.ready[0])


@pytest.mark.parametrize("routing", ["round_robin", Unobserving(), KvRouting(use_events=False)])
def test_a_routing_that_reads_no_events_has_no_degraded_views(routing: Any) -> None:
    async def test(told: Scene) -> None:
        await told.client.post(C, {"prompt": list(range(160)), "max_tokens": 1})
        told.service.workers.look()
        dump = await told.dump()
        assert dump["degraded"] == []
        wanted = {"state": "not_followed", "meaning": "this routing reads no events"}
        assert [row["view"] for row in dump["workers"]] == [wanted] * 2

    play(test, 2, routing)


def test_an_engine_that_falls_silent_is_found_out_and_believed_again_when_it_speaks() -> None:
    async def test(told: Scene) -> None:
        sender = told.servers[0].worker.senders[0]

        async def state(wanted: str) -> bool:
            return await told.states() == [wanted]

        # Its events come while it answers, and not behind that: nothing is missing.
        await told.client.post(C, {"prompt": list(range(160)), "max_tokens": 100})
        await told.until(lambda: state("live"))
        await asyncio.sleep(0.5)
        assert await state("live")
        sender.stopped = True
        await told.client.post(C, {"prompt": list(range(1000, 1160)), "max_tokens": 1})
        await told.until(lambda: state("silent"))
        sender.stopped = False
        await told.client.post(C, {"prompt": list(range(2000, 2160)), "max_tokens": 1})
        await told.until(lambda: state("live"))

    play(test, 1, silence_s=0.2)


def test_a_restarted_engine_leaves_no_ghosts(tmp_path: Path) -> None:
    async def test(told: Scene) -> None:
        prompt = list(range(320))
        await told.client.post(C, {"prompt": prompt, "max_tokens": 1})

        async def count(blocks: int) -> bool:
            return len(await told.held(0)) == blocks

        await told.until(lambda: count(20))
        told.servers[0].worker.kill()
        await asyncio.sleep(0.05)
        await told.client.post(C, {"prompt": list(range(5000, 5080)), "max_tokens": 1})
        await told.until(lambda: count(5))
        assert (await told.dump())["workers"][0]["view"]["state"] == "live"

    # The publisher comes back at the same addresses.
    there = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    play(test, 1, events={**EVENTS, **there})


def test_a_router_that_comes_late_learns_what_is_there() -> None:
    async def test(told: Scene) -> None:
        await told.client.post(C, {"prompt": list(range(320)), "max_tokens": 1})
        late = RouterService(RouterSettings(workers=told.service.settings.workers, port=0, look_every_s=0.05))
        await late.start()
        try:
            other = Scene(late, told.servers)

            async def whole() -> bool:
                return sum([len(await other.held(worker)) for worker in range(2)]) == 20

            await other.until(whole)  # though no engine has said anything since
            assert await other.states() == ["live", "live"]
        finally:
            await late.stop()

    play(test, 2)
