"""Control routes: which routes there are, and which clients each of them answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from server.client import QUICK, Client, serving
from server.router_scene import scene
from understudy.cli.fleet import read_fleet
from understudy.errors import ConfigError
from understudy.fleets.fleet import Fleet, FleetSettings
from understudy.fleets.spread import SpreadFleet
from understudy.http import Connection
from understudy.server.access import Access, RouteClass, is_own, route_class
from understudy.server.api.developer import Developer
from understudy.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from server.client import Reply

EVERYTHING: dict[str, Any] = {"dev_mode": True, "runtime_lora": True, "enable_scale_out": True}
KEY = {"authorization": "Bearer k"}
VLLM_PUBLIC = {
    *("/health", "/health/ready", "/ping", "/version", "/load", "/metrics", "/kv_event_sources"),
    *("/tokenize", "/detokenize", "/invocations", "/generative_scoring", "/adapters"),
    *("/scale_elastic_ep", "/is_scaling_elastic_ep"),
    *("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"),
}
"""vLLM's routes that need no key. A new route is not in here, and so has to be refused without one."""
REMOTE = "203.0.113.9"


def is_public(path: str) -> bool:
    return path in VLLM_PUBLIC or path in ("/", "/page/")  # the page has no data


Table = dict[str, set[str]]


def methods_of(*tables: dict[str, dict[str, Any]]) -> Table:
    found: Table = {}
    for table in tables:
        for path, methods in table.items():
            found.setdefault(path, set()).update(methods)
    return found


def table_of(app: Any) -> Table:
    """Every route of a server."""
    own = {path: {"GET": None, "POST": None} for path in app.own}
    generators = {path: {"POST": None} for path in app.routes.generators}
    return methods_of(own, generators, app.routes.plain)


async def check_table(client: Client, table: Table, *, has_key: bool, remote: bool) -> None:
    """Call every route without a key: all but the public ones must be refused."""
    assert table
    for path, methods in table.items():
        for method in methods:
            where = f"{path}7" if path.endswith("/") and path != "/" else path
            reply = await client.ask(method, where, {}, headers={"connection": "close"})
            refused = 401 if has_key else 403 if remote else None
            if is_public(path) or (not has_key and path.startswith(("/v1", "/inference"))):
                assert reply.status not in (401, 403) or b"enable-scale-out" in reply.body, (method, path)
            else:
                assert reply.status == refused, (method, path, reply.status)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients seem to be on another machine."""
    monkeypatch.setattr(Connection, "peer", REMOTE)


def test_each_route_of_a_server_has_one_class() -> None:
    async def main() -> None:
        async with serving(**EVERYTHING) as (_, server):
            table = table_of(server.app)
            developer = set(Developer(server.worker).plain)
            for path in table:
                kind = route_class(path)
                assert server.app.class_of(path) is kind
                assert (kind is RouteClass.PUBLIC) == is_public(path), path
                assert (kind is RouteClass.KEYED) == path.startswith(("/v1", "/inference")), path
                # Every control route is one of vLLM's development routes, or our own.
                assert (kind is RouteClass.CONTROL) == ((path in developer) != is_own(path)), path
            assert {"/admin/fault", "/admin/config", "/sleep"} <= set(table)

    asyncio.run(main())


@pytest.mark.parametrize("has_key", [True, False])
def test_no_route_of_a_server_is_open_by_accident(has_key: bool, elsewhere: None) -> None:
    async def main() -> None:
        async with serving(**EVERYTHING, api_keys=("k",) if has_key else ()) as (client, server):
            await check_table(client, table_of(server.app), has_key=has_key, remote=True)

    asyncio.run(main())


def fleet_of(**settings: Any) -> Fleet:
    pool = ServerSettings(model="stub", engine=QUICK, max_model_len=4096, **settings)
    return Fleet(FleetSettings(pools=((2, pool),), base_port=0, port=0))


def with_fleet(test: Callable[[Client, Fleet], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        fleet = fleet_of(**settings)
        await fleet.start()
        try:
            await test(Client(fleet.port), fleet)
        finally:
            await fleet.stop()
            fleet.runtime.driver.stop()

    asyncio.run(main())


@pytest.mark.parametrize("has_key", [True, False])
def test_no_route_of_a_fleets_door_is_open_by_accident(has_key: bool, elsewhere: None) -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        table = methods_of(fleet.front.own)
        for path in table:
            assert is_public(path) != is_own(path), path
        # Requests that the front forwards are checked by the worker.
        everything = methods_of(table_of(fleet.servers[0].app), fleet.front.own)  # type: ignore[arg-type]
        await check_table(client, everything, has_key=has_key, remote=True)

    with_fleet(test, **EVERYTHING, api_keys=("k",) if has_key else ())


@pytest.mark.parametrize("has_key", [True, False])
def test_no_route_of_a_router_is_open_by_accident(has_key: bool, elsewhere: None) -> None:
    async def main() -> None:
        keys = ("k",) if has_key else ()
        async with serving(**EVERYTHING) as (_, engine), scene(1, "kv", api_keys=keys) as told:
            proxy = told.service.proxy
            # Paths that the router passes on are checked at the router: engines see its address, not the client's.
            everything = methods_of(proxy.routes, table_of(engine.app), {"/future": {"GET": 1, "POST": 1}})  # type: ignore[arg-type]
            assert {"/query", "/register", "/unregister", "/dump", "/admin/fault", "/sleep"} <= set(
                everything
            )
            await check_table(told.client, everything, has_key=has_key, remote=True)
            assert (await told.client.get("//admin/fault")).status == (401 if has_key else 403)
            assert (await told.client.get("/%61dmin/fault")).status == (401 if has_key else 403)

    asyncio.run(main())


def test_a_key_opens_control_routes_from_anywhere(elsewhere: None) -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        for path in ("/fleet/state", "/fleet/workers/1", "/admin/fault", "/is_sleeping"):
            assert (await client.ask("GET", path)).status == 401
            assert (await client.ask("GET", path, headers={"authorization": "Bearer wrong"})).status == 401
            assert (await client.ask("GET", path, headers={"authorization": "Basic k"})).status == 401
            assert (await client.ask("GET", path, headers=KEY)).status == 200
            # A reverse proxy with a name of its own is fine: the key tells that the caller may.
            assert (await client.ask("GET", path, headers={**KEY, "host": "fleet.example"})).status == 200
        refused = await client.post("/admin/fault", {"kind": "kill", "workers": [0]})
        assert (refused.status, refused.body) == (401, b'{"error":"Unauthorized"}')
        assert (await client.post("/admin/fault", {"kind": "none"}, **KEY)).status == 200
        assert (await client.get("/")).status == 200
        assert (await client.get("/health")).status == 200

    with_fleet(test, api_keys=("k",), dev_mode=True)


def test_without_a_key_control_routes_answer_this_machine_and_admin_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with serving(dev_mode=True, admin_hosts=("10.1.0.0/16", "fd00::7")) as (client, _):
            allowed = ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "", "10.1.2.3", "fd00::7")
            for peer in (*allowed, "10.2.0.1", "fd00::8", REMOTE, "::ffff:203.0.113.9", None):
                monkeypatch.setattr(Connection, "peer", peer)
                for path in ("/admin/config", "/is_sleeping"):
                    reply = await client.get(path)
                    assert reply.status == (200 if peer in allowed else 403), (peer, path)
                assert (await client.get("/v1/models")).status == 200
            assert reply.status == 403
            monkeypatch.setattr(Connection, "peer", REMOTE)
            error = (await client.post("/admin/fault", {"kind": "none"})).json["error"]
            assert error["type"] == "PermissionDeniedError"
            assert "--api-key" in error["message"]
            assert f"--admin-host {REMOTE}" in error["message"]

    asyncio.run(main())


ORIGINS = [
    ("http://evil.example", "localhost:8000", 403),
    ("null", "localhost:8000", 403),
    ("http://[", "localhost:8000", 403),
    ("http://localhost:9999", "localhost:8000", 403),
    ("http://localhost:8000", "localhost:8000", 200),
    ("http://dash.example", "127.0.0.1:8000", 200),
    (None, "127.0.0.1:8000", 200),
    (None, "[::1]:8000", 200),
    (None, "LOCALHOST", 200),
    (None, "a.localhost", 200),
    (None, "evil.example:8000", 403),
    (None, "localhost.evil.example", 403),
    (None, "127.0.0.1.evil.example", 403),
    ("http://evil.example:8000", "evil.example:8000", 403),
]


@pytest.mark.parametrize("path", ["/admin/fault", "/resume", "/register"])
def test_foreign_origins_and_names_of_other_servers_are_refused(path: str) -> None:
    """A page in a browser on this machine, also one whose name was pointed at this machine (DNS rebinding)."""

    async def ask(client: Client, origin: str | None, host: str) -> Reply:
        headers = {"host": host, **({} if origin is None else {"origin": origin})}
        return await client.ask("POST", path, {"kind": "none"}, headers=headers)

    async def main() -> None:
        origins = ("*", "http://dash.example")
        given: dict[str, Any] = {"allowed_origins": origins}
        async with serving(dev_mode=True, **given) as (client, _), scene(1, "round_robin", **given) as told:
            asked = told.client if path == "/register" else client
            for origin, host, status in ORIGINS:
                reply = await ask(asked, origin, host)
                wanted = 400 if path == "/register" and status == 200 else status
                assert reply.status == wanted, (origin, host, reply.body)
                if status == 403:
                    assert reply.json["error"]["type"] == "PermissionDeniedError"

    asyncio.run(main())


def test_a_browser_on_an_admin_host_cannot_be_pointed_here_by_dns(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(admin_hosts=("10.0.0.0/8",)) as (client, _):
            monkeypatch.setattr(Connection, "peer", "10.0.0.7")
            name = {"host": "gpu1:8000"}
            order = {"kind": "none"}
            assert (await client.ask("POST", "/admin/fault", order, headers=name)).status == 200
            page = {**name, "origin": "http://gpu1:8000"}
            assert (await client.ask("POST", "/admin/fault", order, headers=page)).status == 403

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
def test_our_own_posts_need_json(kind: str) -> None:
    async def main() -> None:
        async with serving(dev_mode=True) as (client, _), scene(1, "kv") as told:
            for asked, path in (
                (client, "/admin/fault"),
                (client, "/admin/config"),
                (told.client, "/query"),
                (told.client, "/register"),
                (told.client, "/unregister"),
            ):
                reply = await asked.ask("POST", path, {"kind": "none"}, headers={"content-type": kind})
                assert reply.status == 415, path
                assert "application/json" in reply.json["error"]["message"]
            json = {"content-type": "Application/JSON; charset=utf-8"}
            assert (await client.ask("POST", "/admin/config", {}, headers=json)).status == 200
            # vLLM's own development routes take any type of content.
            assert (await client.ask("POST", "/resume", headers={"content-type": kind})).status == 200

    asyncio.run(main())


def test_a_fleet_over_processes_works_with_a_key() -> None:
    line = ["stub", "--workers", "3", "--processes", "2", "--base-port", "0", "--port", "0"]
    settings, processes = read_fleet(
        [*line, "--routing", "kv", "--lora-modules", "a=b", "--api-key", "k", "l"]
    )
    body = {"prompt": "x", "max_tokens": 2}
    second = {"authorization": "Bearer l"}

    async def main() -> None:
        fleet = SpreadFleet(settings, processes)
        await fleet.start()
        client = Client(fleet.port)
        try:
            assert (await client.get("/")).status == 200
            assert fleet.front is not None
            table = methods_of(fleet.front.proxy.routes, fleet._own.routes)  # type: ignore[union-attr]
            await check_table(client, table, has_key=True, remote=False)
            for headers in (KEY, second):
                assert (await client.ask("POST", "/v1/completions", body, headers=headers)).status == 200
                state = await client.ask("GET", "/fleet/state", headers=headers)
                assert len(state.json["ports"]) == 3
                assert (await client.ask("GET", "/fleet/workers/2", headers=headers)).json["worker"] == 2
            order = {"kind": "reject", "workers": [2], "duration_s": 60}
            assert (await client.ask("POST", "/admin/fault", order, headers=KEY)).status == 200
            (fault,) = (await client.ask("GET", "/admin/fault", headers=KEY)).json["faults"]
            assert (fault["worker"], fault["kind"]) == (2, "reject")
            assert 0 < fault["left_s"] <= 60
            # The router knows the adapters of its engines, which tell them with a key only.
            assert all(worker.adapters == {"a"} for worker in fleet.front.workers.all)
            for group, _ in fleet._own._groups:  # type: ignore[union-attr]
                assert (await Client(group.port).get("/fleet/state")).status == 401
        finally:
            await fleet.stop()

    asyncio.run(main())


def test_a_router_with_a_key_registers_engines_that_need_it() -> None:
    async def main() -> None:
        async with serving(api_keys=("k",)) as (_, engine), scene(0, "kv", api_keys=("k", "l")) as told:
            url = {"url": f"http://127.0.0.1:{engine.port}"}
            assert (await told.client.post("/register", url)).status == 401
            assert (await told.client.post("/register", url, **KEY)).status == 200
            body = {"prompt": "x", "max_tokens": 2}
            assert (await told.client.post("/v1/completions", body)).status == 401
            assert (await told.client.post("/v1/completions", body, **KEY)).status == 200
            rows = await told.client.ask("GET", "/dump", headers={"authorization": "Bearer l"})
            assert rows.json["workers"][0]["up"]
            assert (await told.client.get("/health")).status == 200
            assert (await told.client.get("/metrics")).status == 200

    asyncio.run(main())


def test_a_client_of_a_unix_socket_is_on_this_machine(tmp_path: Path) -> None:
    async def main() -> bytes:
        path = str(tmp_path / "socket")
        async with serving(uds=path):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(b"GET /admin/fault HTTP/1.1\r\nhost: any\r\nconnection: close\r\n\r\n")
            found = await reader.read()
            writer.close()
            return found

    assert asyncio.run(main()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("hosts", [("gpu1",), ("10.0.0.1/8",), ("10.0.0.0/33",), ("",)])
def test_an_admin_host_that_is_no_address_is_refused(hosts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--admin-host: "):
        Access(admin_hosts=hosts)
    with pytest.raises(ConfigError, match="--admin-host: "):
        read_fleet(["--admin-host", *hosts])


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="--api-key: is empty"):
        read_fleet(["--api-key", ""])


def test_an_admin_host_next_to_a_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="--admin-host: has no effect with --api-key"):
        read_fleet(["--admin-host", "10.0.0.0/8", "--api-key", "k"])
    assert read_fleet(["--admin-host", "10.0.0.0/8", "::1"])[0].admin_hosts == ("10.0.0.0/8", "::1")


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/admin/fault", "/nothing"])
def test_answers_name_their_server(path: str) -> None:
    async def main() -> None:
        async with serving() as (client, _), scene(1, "round_robin") as told:
            assert (await client.get(path)).headers["server"] == "understudy"
            assert (await told.client.get(path)).headers["server"] == "understudy"

    asyncio.run(main())
