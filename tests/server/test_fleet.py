"""A live fleet: ports, routing, the page, settings, and the command line."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from server.client import QUICK, Client
from server.fleet_scene import C, run, served, vanish
from understudy.cli.fleet import read_fleet
from understudy.errors import ConfigError
from understudy.fleets.fleet import Fleet, FleetSettings
from understudy.fleets.routing import LiveFleetView
from understudy.fleets.spread import SpreadFleet
from understudy.router import FleetView, KvRouting, Router
from understudy.router.outstanding import OutstandingWork
from understudy.server.settings import ServerSettings

if TYPE_CHECKING:
    from pathlib import Path


def test_every_worker_has_its_port_and_the_door_routes_to_all() -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        for server in fleet.servers:
            assert (await Client(server.port).get("/health")).status == 200
        replies = [await client.post(C, {"prompt": "x", "max_tokens": 2}) for _ in range(6)]
        assert [reply.status for reply in replies] == [200] * 6
        assert served(fleet) == [4, 4, 4]
        assert (await client.get("/v1/models")).json["data"][0]["id"] == "stub"
        assert (await client.get("/health")).status == 200

    run(test, 3)


def test_kv_routing_sends_prompts_to_where_their_blocks_are() -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        prompts = [[seed * 1000 + place for place in range(320)] for seed in range(4)]
        for prompt in prompts:
            await client.post(C, {"prompt": prompt, "max_tokens": 1})
        homes = [row["worker"] for row in (await client.get("/fleet/state")).json["decisions"]]
        assert len(set(homes)) > 1  # nobody had anything: ties are drawn
        for prompt, home in zip(prompts, homes, strict=True):
            await client.post(C, {"prompt": [*prompt, 5, 6], "max_tokens": 1})
            last = (await client.get("/fleet/state")).json["decisions"][-1]
            assert last["worker"] == home
            assert (last["overlap"], last["blocks"]) == (20, 20)
        fleet.servers[homes[0]].worker.kill()
        await asyncio.sleep(0.05)
        await client.post(C, {"prompt": prompts[0], "max_tokens": 1})
        assert (await client.get("/fleet/state")).json["decisions"][-1]["overlap"] == 0

    run(test, 4, "kv")


def test_requests_wait_at_the_door_while_every_worker_is_busy() -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        front, kv = fleet.routing.dispatcher, fleet.routing.dispatcher.kv
        assert kv is not None
        bodies = [{"prompt": [n] * 200, "max_tokens": 2, "stream": n % 2 == 0} for n in range(12)]
        tasks = [asyncio.create_task(client.post(C, body)) for body in bodies]
        most = 0
        while not all(task.done() for task in tasks):
            most = max(most, front.num_waiting)
            assert (kv.prefill_tokens <= 200).all()  # one prompt at a time on each
            await asyncio.sleep(0.002)
        assert most > 0
        assert [task.result().status for task in tasks] == [200] * 12
        decisions = (await client.get("/fleet/state")).json["decisions"]
        assert sum(row["waited_ms"] > 0 for row in decisions) >= most
        assert not kv.prefill_tokens.any()
        assert not kv.active_blocks.any()
        assert front.outstanding.requests == [0, 0]
        # Clients that go away, some of them while they wait.
        await asyncio.gather(*(vanish(client, {"prompt": [n] * 900}, 0.003) for n in range(6)))
        await asyncio.sleep(0.1)
        assert (front.num_waiting, front.outstanding.requests) == (0, [0, 0])

    run(test, 2, KvRouting(queue_threshold=0.0))


class _Listener(Router):
    """Takes turns, and writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []
        self.stored: dict[int, int] = {}

    def choose(self, request: Any, view: Any) -> int:
        assert len(view.outstanding_tokens) == len(view.running) == len(view) == 2
        assert len(request.prompt_blocks) == request.prompt_tokens // request.block_size
        self.heard.append(("asked", request.row))
        return int(request.row % 2)

    def observe(self, batch: Any) -> None:
        self.stored[batch.worker] = self.stored.get(batch.worker, 0) + int((batch.events.kinds == 0).sum())

    def first_token(self, row: int) -> None:
        self.heard.append(("first", row))

    def ended(self, row: int) -> None:
        self.heard.append(("ended", row))


def test_a_router_in_python_hears_live_what_it_hears_in_a_replay() -> None:
    router = _Listener()

    async def test(client: Client, fleet: Fleet) -> None:
        for n in range(2):
            await client.post(C, {"prompt": [n] * 64, "max_tokens": 3, "stream": n == 0})
        await client.post(C, {"prompt": 7})  # refused by its worker
        told = [("asked", 1), ("first", 1), ("ended", 1), ("asked", 2), ("first", 2), ("ended", 2)]
        assert router.heard == [*told, ("asked", 3), ("ended", 3)]
        assert router.stored == {0: 4, 1: 4}

    run(test, 2, router)


def test_the_page_and_its_stream_show_the_fleet() -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        page = await client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert b"http" not in page.body  # works offline
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(b"GET /fleet/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await reader.readuntil(b"data: ")
        state = msgspec.json.decode((await reader.readuntil(b"\n")).strip())
        assert len(state["workers"]["running"]) == 2
        await client.post("/admin/fault", {"kind": "kill", "workers": [1], "duration_s": 60})
        await reader.readuntil(b"data: ")
        changes = msgspec.json.decode((await reader.readuntil(b"\n")).strip())
        assert "workers" not in changes  # only what has changed
        assert changes["changed"]["state"] == [[1], ["dead"]]
        assert [(mark["kind"], mark["workers"], mark["ended"]) for mark in changes["marks"]] == [
            ("kill", [1], False)
        ]
        assert [(row["kind"], row["workers"]) for row in changes["faults"]] == [("kill", [1])]
        await client.post("/admin/fault", {"kind": "none"})
        writer.close()
        slow = asyncio.create_task(client.post(C, {"prompt": "x", "max_tokens": 300}))
        await asyncio.sleep(0.1)
        requests = [(await client.get(f"/fleet/workers/{n}")).json["requests"] for n in range(2)]
        assert sum(map(len, requests)) == 1
        assert (await slow).status == 200
        assert (await client.get("/fleet/workers/7")).status == 404
        assert not fleet.front.monitor.is_watched  # nothing is sent

    run(test, 2)


def test_the_command_line_of_a_fleet() -> None:
    line = ["m", "--workers", "3", "--routing", "kv", "--max-num-seqs", "9", "--port", "1"]
    queue = ["--router.queue_threshold", "2", "--router.queue_policy", "wspt"]
    settings, processes = read_fleet([*line, *queue])
    assert processes == 1
    ((count, pool),) = settings.pools
    assert (count, settings.port, pool.engine.max_num_seqs) == (3, 1, 9)
    assert settings.routing == KvRouting(queue_threshold=2, queue_policy="wspt")
    with pytest.raises(ConfigError, match="for --routing kv"):
        read_fleet(["--router.temperature", "1"])
    with pytest.raises(ConfigError, match="offline"):
        Fleet(read_fleet([*line, "--router.event_loss", "0.5"])[0])
    with pytest.raises(ConfigError, match="choose one of"):
        Fleet(read_fleet(["--routing", "best"])[0])
    with pytest.raises(ConfigError, match=r"FILE\.py:CLASS"):
        Fleet(read_fleet(["--routing", "router.py"])[0])
    with pytest.raises(ConfigError, match="did you mean --workers"):
        read_fleet(["--worker", "3"])


def test_how_many_workers_is_never_guessed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="workers must be at least 1, got 0"):
        read_fleet(["--workers", "0"])
    pools = tmp_path / "fleet.yaml"
    pools.write_text("pools: [{workers: 2}]")
    assert [count for count, _ in read_fleet(["--fleet-config", str(pools)])[0].pools] == [2]
    with pytest.raises(ConfigError, match="both set the number"):
        read_fleet(["--fleet-config", str(pools), "--workers", "7"])


def test_a_fleet_spreads_over_processes() -> None:
    settings, processes = read_fleet(
        ["stub", "--workers", "4", "--processes", "2", "--routing", "kv", "--base-port", "0", "--port", "0"]
    )

    async def main() -> None:
        fleet = SpreadFleet(settings, processes)
        await fleet.start()
        try:
            assert len(set(fleet.ports)) == 4
            client = Client(fleet.port)
            body = {"prompt": list(range(320)), "max_tokens": 2}
            home = (await client.post(C, body)).headers["x-understudy-worker"]
            for _ in range(200):
                rows = (await client.post("/query", {"token_ids": body["prompt"]})).json["workers"]
                if rows[int(home)]["held"]["device"]:
                    break
                await asyncio.sleep(0.02)
            assert (await client.post(C, body)).headers["x-understudy-worker"] == home
            assert len((await client.get("/dump")).json["workers"]) == 4
        finally:
            await fleet.stop()

    asyncio.run(main())
    with pytest.raises(ConfigError, match="from 2 to"):
        SpreadFleet(settings, 5)


class _ReadsPools(Router):
    """Chooses the worker of the last pool, and keeps what it has read."""

    def __init__(self) -> None:
        self.pools: list[int] = []

    def choose(self, request: Any, view: Any) -> int:  # noqa: ARG002
        self.pools = view.pools.tolist()
        return self.pools.index(max(self.pools))


def test_a_live_router_reads_the_pools_of_the_workers() -> None:
    router = _ReadsPools()
    pool = ServerSettings(model="stub", engine=QUICK, max_model_len=4096)
    pools = ((2, pool), (1, msgspec.structs.replace(pool, data_parallel_size=2)))

    async def main() -> None:
        fleet = Fleet(FleetSettings(pools=pools, base_port=0, port=0, routing=router))
        await fleet.start()
        try:
            assert (await Client(fleet.port).post(C, {"prompt": "x", "max_tokens": 2})).status == 200
        finally:
            await fleet.stop()
            fleet.runtime.driver.stop()

    asyncio.run(main())
    assert router.pools == [0, 0, 1, 1]


class _First(Router):
    """Chooses the first worker, without reading caches."""

    def choose(self, request: Any, view: Any) -> int:  # noqa: ARG002
        return int(view.ready[0])


def test_the_page_shows_what_the_worker_of_a_user_defined_router_has_cached() -> None:
    async def test(client: Client, _: Fleet) -> None:
        for _number in range(2):
            await client.post(C, {"prompt": list(range(320)), "max_tokens": 1})
        first, second = (await client.get("/fleet/state")).json["decisions"]
        assert (first["overlap"], second["overlap"], second["blocks"]) == (0, 20, 20)
        assert {second[name] for name in ("lower", "best", "cost")} == {None}
        assert second["why"] == "_First"

    run(test, 2, _First())


def test_a_native_router_without_an_index_reports_no_overlap() -> None:
    async def test(client: Client, _: Fleet) -> None:
        await client.post(C, {"prompt": list(range(320)), "max_tokens": 1})
        last = (await client.get("/fleet/state")).json["decisions"][-1]
        assert (last["overlap"], last["blocks"]) == (None, 0)

    run(test, 1)


def test_a_live_view_has_every_attribute_of_a_replays() -> None:
    def names(view: type) -> set[str]:
        return {name for name in dir(view) if not name.startswith("_")}

    assert names(LiveFleetView) >= names(FleetView)
    engines = {"running", "waiting", "used_blocks", "total_blocks"}  # a standalone router does not know them
    assert names(OutstandingWork) >= names(FleetView) - engines


def test_the_workers_of_a_standalone_router_are_one_pool() -> None:
    view = OutstandingWork()
    for _ in range(3):
        view.add_worker()
    assert view.pools.tolist() == [0, 0, 0]
