"""Workers in one process, each with its own port, and one routed front end."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from understudy._core import TierRun
from understudy.checks import port_number
from understudy.errors import ConfigError
from understudy.fleets.decision_log import DecisionLog
from understudy.fleets.front import FleetFront
from understudy.fleets.routing import FleetRouting
from understudy.http import address_of, listen
from understudy.memory import LIVE_BYTES, require_memory
from understudy.router.dispatch import name_policy
from understudy.server.access import Access
from understudy.server.api.errors import SHUTTING_DOWN
from understudy.server.server import Runtime, Server, build_tiers, make_runtime

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.report.verdict import Verdict
    from understudy.router.kv import KvRouting
    from understudy.router.router import Router
    from understudy.run.autoscale import Autoscale
    from understudy.run.disaggregation import Disaggregation
    from understudy.run.faults import FaultPlan
    from understudy.server.settings import ServerSettings


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a fleet: pools of equal workers, and a front end."""

    pools: tuple[tuple[int, ServerSettings], ...]
    """Pools as (number of workers, settings)."""
    base_port: int = 9000
    host: str = "127.0.0.1"
    port: int = 8000
    """Port of the front end."""
    front_host: str | None = None
    """Address of the front end; None: `host`, that of the workers."""
    admin_hosts: tuple[str, ...] = ()
    """Addresses and networks whose clients may call the front end's control routes; without a key only."""
    routing: str | KvRouting | Router = "round_robin"
    seed: int = 0
    disaggregation: Disaggregation | None = None
    """Rule and routing of prefill and decode workers (`handoff` in a pool's settings); None: none has a role."""
    autoscale: Autoscale | None = None
    """A scaler, which may order as many workers as its `max_workers` says; the pools are those at the start."""
    faults: FaultPlan | None = None
    """Faults in time of the fleet's clock, and what becomes of requests that lose their worker."""
    decisions: Path | None = None
    """File that gets a JSON line per routing decision while the fleet runs."""

    def most_workers(self) -> tuple[tuple[int, ServerSettings], ...]:
        """Return the pools with the most workers that they may have. New workers join a role's first pool."""
        if self.autoscale is None:
            return self.pools
        grown = []
        seen: set[str] = set()
        for count, pool in self.pools:
            role = _role_of(pool)
            standing = sum(n for n, one in self.pools if _role_of(one) == role)
            most = self.autoscale.most_workers(standing)
            grown.append((count + max(most - standing, 0) if role not in seen else count, pool))
            seen.add(role)
        return tuple(grown)

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Keys for the front end's control routes: those of all pools."""
        return tuple(dict.fromkeys(key for _, pool in self.pools for key in pool.api_keys))

    def access(self) -> Access:
        """Build the access checks of the front end."""
        origins = self.pools[0][1].allowed_origins
        return Access(keys=self.api_keys, admin_hosts=self.admin_hosts, origins=origins, host=self.host)


class Fleet:
    """The workers of one process, with a shared clock and driver."""

    def __init__(self, settings: FleetSettings) -> None:
        self.settings = settings
        first = settings.pools[0][1]
        for _, pool in settings.pools:
            if pool.clock_speed != first.clock_speed or pool.tokenizer != first.tokenizer:
                raise ConfigError("pools: tokenizer or clock-speed differs; give all pools the same")
            if pool.session_kv != first.session_kv:
                raise ConfigError("pools: session-kv differs; give all pools the same")
        pools = settings.most_workers()
        workers = sum(count for count, _ in pools)
        engines = sum(count * pool.data_parallel_size for count, pool in pools)
        require_memory(f"{workers:,} live workers", engines * LIVE_BYTES, "fewer workers need less")
        for _, pool in settings.pools:
            if pool.handoff is not None:
                port_number("--kv-side-channel-port", pool.handoff.port, workers)
        self.runtime: Runtime = make_runtime(first)
        sizes = {pool.engine.block_size for _, pool in settings.pools}
        self.servers: list[Server] = []
        self.routing = FleetRouting(self.servers, settings.routing, settings.seed)
        if self.routing.dispatcher.wants_blocks and len(sizes) > 1:
            raise ConfigError(
                f"pools: blocks of {' and '.join(map(str, sorted(sizes)))} tokens; routing by blocks needs one "
                "size, so give all pools the same block-size or page-size"
            )
        self.decode_routing: FleetRouting | None = None
        """Routing of decode workers; `routing` is then of prefill workers."""
        if settings.disaggregation is not None:
            policy = settings.disaggregation.decode_routing
            self.decode_routing = FleetRouting(self.servers, policy, settings.seed)
        self.shared_runs: list[TierRun] = []
        """Tiers that the workers of a pool share (G3, G4), for pools that have them."""
        for number, (count, pool) in enumerate(pools):
            run = self._shared_run(pool)
            if run is not None:
                self.shared_runs.append(run)
            for _ in range(count):
                server = self._server(pool, len(self.servers), run)
                self.servers.append(server)
                self._routing_of(pool).add(server, len(self.servers) - 1, number)
        self.front = FleetFront(
            self.servers,
            self.routing,
            pools,
            name_policy(settings.routing),
            settings.access(),
            starts=[count for count, _ in settings.pools],
            autoscale=settings.autoscale,
            faults=settings.faults,
        )
        if settings.disaggregation is not None and self.decode_routing is not None:
            self.front.divide(settings.disaggregation, self.decode_routing)
        if settings.decisions is not None:
            self.front.monitor.log = DecisionLog(settings.decisions)
        self._listening: asyncio.Server | None = None
        self.port = settings.port

    def _routing_of(self, pool: ServerSettings) -> FleetRouting:
        """Return the routing that a pool's workers belong to."""
        decodes = pool.handoff is not None and pool.handoff.role == "kv_consumer"
        return self.decode_routing if decodes and self.decode_routing is not None else self.routing

    def _shared_run(self, pool: ServerSettings) -> TierRun | None:
        """Make the shared tiers of a pool: disks and object stores; host memory belongs to each worker."""
        tiers = build_tiers(pool)
        if tiers is None or not any(tier.tier in ("g3", "g4") for tier in pool.tiers.tiers):
            return None
        return TierRun(tiers, pool.engine.block_size)

    def _server(self, pool: ServerSettings, index: int, run: TierRun | None) -> Server:
        port = self.settings.base_port + index if self.settings.base_port else 0
        own: dict[str, Any] = {"port": port, "host": self.settings.host}
        events = pool.kv_events_config
        if events.get("enable_kv_cache_events"):
            own["kv_events_config"] = {**events, **shifted(events, index * pool.data_parallel_size)}
        if pool.handoff is not None and pool.handoff.port:
            own["handoff"] = msgspec.structs.replace(pool.handoff, port=pool.handoff.port + index)
        events_kept = self._routing_of(pool).dispatcher.wants_events
        return Server(msgspec.structs.replace(pool, **own), self.runtime, index, run=run, events=events_kept)

    @property
    def ports(self) -> list[int]:
        """Ports of the workers."""
        return [server.port for server in self.servers]

    async def start(self) -> None:
        """Listen on all ports. OSError when a port is taken; then none is open."""
        port = 0
        try:
            for server in self.servers:
                port = server.settings.port
                await server.start()
            port = self.settings.port
            self._listening = await listen(
                self.front,
                self.runtime.outbox,
                self.settings.front_host or self.settings.host,
                self.settings.port,
                self.servers[0].tls,
            )
        except OSError as error:
            await self.stop()
            where = address_of(self.settings.host, port)
            raise OSError(error.errno, f"{error.strerror or error} ({where})") from None
        self.port = self._listening.sockets[0].getsockname()[1]
        self.front.start()
        self.front.elastic.start()

    async def stop(self) -> None:
        """Stop listening; requests end or are aborted as the workers' settings say."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        self.front.close()
        try:
            await asyncio.gather(*(server.stop() for server in self.servers))
        finally:  # requests that wait for a worker
            self.runtime.outbox.end_all(503, SHUTTING_DOWN)
        await self.runtime.outbox.wait_until_sent()

    def judge_lateness(self) -> Verdict | None:
        """Return the verdict that this machine was late, as of an online replay; None if not, or without a token."""
        from understudy.report.late_machine import judge_machine  # slow to import, and needed at the end only

        shown = self.front.first_tokens()
        count = sum(one.count for one in shown)
        if not count:
            return None
        tokens, steps = self.runtime.token_lateness, self.runtime.driver.step_lateness
        real_ms = 1e3 * max(tokens.quantile(0.99), steps.quantile(0.99))
        mean_ms = 1e3 * sum(one.sum for one in shown) / count
        return judge_machine(real_ms, self.runtime.clock.speed, mean_ms, "use replay, which is never late")


def print_lateness(fleet: Fleet, about: str = "") -> None:
    """Print the verdict on the machine on standard error, if it was late; `about`: which workers it is of."""
    verdict = fleet.judge_lateness()
    if verdict is not None:
        print(f"▲ {about}{verdict}", file=sys.stderr, flush=True)


def _role_of(pool: ServerSettings) -> str:
    return "both" if pool.handoff is None else pool.handoff.stage


def shifted(events: dict[str, Any], by: int) -> dict[str, Any]:
    """Return event endpoints with their ports moved by `by`, so that workers do not share one."""
    shifted = {}
    for name in ("endpoint", "replay_endpoint"):
        endpoint = events.get(name, "tcp://*:5557" if name == "endpoint" else None)
        if endpoint is None:
            continue
        head, colon, port = endpoint.rpartition(":")
        if colon and port.isdigit() and port != "0":
            shifted[name] = f"{head}:{int(port) + by}"
    return shifted
