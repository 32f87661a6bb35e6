"""A fleet over several processes: groups of workers, one process each, behind a router.

The front end is the standalone router, which receives the workers' KV events as it would from real engines. Each group
has an internal front end, which reports on its workers and takes fault orders for them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.errors import ConfigError
from understudy.fleets.decision_log import DecisionLog
from understudy.fleets.fleet import Fleet, FleetSettings, print_lateness, shifted
from understudy.fleets.spread_front import SpreadFront
from understudy.proxy.address import WorkerAddress
from understudy.proxy.service import RouterService, RouterSettings
from understudy.proxy.upstream import Upstream
from understudy.router.dispatch import name_policy
from understudy.server.loop import heap_frozen, run

if TYPE_CHECKING:
    from multiprocessing.connection import Connection as Pipe
    from multiprocessing.process import BaseProcess

    from understudy.server.settings import ServerSettings

START_S = 120.0


class SpreadFleet:
    """The groups of workers and their front end."""

    def __init__(self, settings: FleetSettings, processes: int) -> None:
        total = sum(count for count, _ in settings.pools)
        if not 1 < processes <= total:
            raise ConfigError(
                f"--processes must be from 2 to the number of workers ({total}), got {processes}"
            )
        for _, pool in settings.pools:
            if pool.ssl_certfile is not None:
                raise ConfigError("a fleet in several processes is not encrypted: leave out --ssl-certfile")
            if any(tier.tier in ("g3", "g4") for tier in pool.tiers.tiers):
                raise ConfigError(
                    "workers in several processes share no tier: leave out g3 and g4, or --processes"
                )
            if pool.session_kv is not None:
                raise ConfigError(
                    "workers in several processes do not share sessions: leave out --session-kv, or --processes"
                )
        self.settings = settings
        self.port = settings.port
        self.ports: list[int] = []
        self._folder = tempfile.TemporaryDirectory(prefix="understudy-fleet-")
        self._groups = [
            msgspec.structs.replace(
                settings,
                pools=pools,
                base_port=base,
                port=0,
                decisions=None,  # those of the whole fleet are made in front of the groups
                front_host="127.0.0.1",
                admin_hosts=(),
                routing="round_robin",
            )
            for pools, base in _groups(settings, processes, Path(self._folder.name))
        ]
        self._children: list[tuple[BaseProcess, Pipe]] = []
        self.front: RouterService | None = None
        self._own: SpreadFront | None = None

    async def start(self) -> None:
        """Start the groups, then the front end. ConfigError when one of them fails."""
        context = multiprocessing.get_context("spawn")
        try:
            for group in self._groups:
                ours, theirs = context.Pipe()
                child = context.Process(target=_serve_group, args=(group, theirs), daemon=True)
                child.start()
                theirs.close()
                self._children.append((child, ours))
            loop = asyncio.get_running_loop()
            fronts = []
            for group, (_, pipe) in zip(self._groups, self._children, strict=True):
                started = await loop.run_in_executor(None, _wait, pipe)
                if isinstance(started, str):
                    raise ConfigError(started)
                front, ports = started
                key = next(iter(group.api_keys), None)
                fronts.append((Upstream(f"http://127.0.0.1:{front}", key=key), len(ports)))
                self.ports += ports
            urls = tuple(WorkerAddress(url=f"http://127.0.0.1:{port}") for port in self.ports)
            first = self.settings.pools[0][1]
            self.front = RouterService(
                RouterSettings(
                    workers=urls,
                    routing=self.settings.routing,
                    host=self.settings.host,
                    port=self.settings.port,
                    tokenizer=first.tokenizer or "builtin",
                    max_num_batched_tokens=first.engine.max_num_batched_tokens or 10_000_000,
                    seed=self.settings.seed,
                    kv_cache_groups=first.engine.group_layout,
                    first_byte_timeout_s=0.0,  # workers may be paused for as long as their user wants
                    stall_timeout_s=0.0,
                    max_body_bytes=first.max_body_bytes,
                    max_body_depth=first.max_body_depth,
                    api_keys=self.settings.api_keys,
                    admin_hosts=self.settings.admin_hosts,
                    allowed_origins=first.allowed_origins,
                )
            )
            name = name_policy(self.settings.routing)
            self._own = SpreadFront(fronts, self.settings.pools, name, self.front)
            if self.settings.decisions is not None:
                self._own.monitor.log = DecisionLog(self.settings.decisions)
            self.front.proxy.own = self._own
            await self.front.start()
            self._own.start()
        except BaseException:
            await self.stop()
            raise
        self.port = self.front.port

    async def stop(self) -> None:
        """Stop the front end, then the groups, as the workers' settings say."""
        if self._own is not None:
            self._own.close()
        drain_s = max(pool.shutdown_timeout_s for _, pool in self.settings.pools)
        if self.front is not None:
            await self.front.stop(drain_s)
        for _, pipe in self._children:
            pipe.close()  # the signal to stop
        for child, _ in self._children:
            await asyncio.get_running_loop().run_in_executor(None, child.join, 30 + drain_s)
            if child.is_alive():
                child.terminate()
        self._children = []
        self._folder.cleanup()


def _groups(settings: FleetSettings, processes: int, folder: Path) -> list[tuple[Any, int]]:
    """Split workers evenly, in order; workers without event settings publish on sockets in `folder`."""
    workers: list[ServerSettings] = [pool for count, pool in settings.pools for _ in range(count)]
    groups = []
    for group in range(processes):
        first, last = (len(workers) * edge // processes for edge in (group, group + 1))
        pools = []
        for index in range(first, last):
            pool = workers[index]
            given = pool.kv_events_config
            if given.get("enable_kv_cache_events"):  # a group counts its ports from its first worker on
                moved = shifted(given, first * pool.data_parallel_size)
                pool = msgspec.structs.replace(pool, kv_events_config={**given, **moved})
            else:
                events = {
                    "enable_kv_cache_events": True,
                    "endpoint": f"ipc://{folder}/events-{index}",
                    "replay_endpoint": f"ipc://{folder}/replay-{index}",
                }
                pool = msgspec.structs.replace(pool, kv_events_config=events)
            pools.append((1, pool))
        groups.append((tuple(pools), settings.base_port + first if settings.base_port else 0))
    return groups


def _wait(pipe: Pipe) -> Any:
    try:
        return pipe.recv() if pipe.poll(START_S) else "a group of workers did not start in time"
    except EOFError:
        return "a group of workers ended before it had started"


def _serve_group(settings: FleetSettings, pipe: Pipe) -> None:
    """Run a group's process: its workers listen until the pipe closes."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops it

    async def main() -> None:
        try:
            fleet = Fleet(settings)
            await fleet.start()
        except (ConfigError, OSError) as error:
            pipe.send(f"cannot start workers: {error}")
            return
        pipe.send((fleet.port, [server.port for server in fleet.servers]))
        gone = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(pipe.fileno(), gone.set)
        loop.add_signal_handler(signal.SIGTERM, gone.set)  # systemd signals every process of a unit
        with heap_frozen():
            await gone.wait()
        loop.remove_reader(pipe.fileno())
        await fleet.stop()
        print_lateness(fleet, f"workers on ports {fleet.ports[0]} … {fleet.ports[-1]}: ")
        fleet.runtime.driver.stop()

    run(main())
