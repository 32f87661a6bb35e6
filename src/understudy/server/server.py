"""A running server: a worker, its app and its port."""

from __future__ import annotations

import asyncio
import signal
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from understudy.clock import WallClock
from understudy.errors import ConfigError
from understudy.http import Outbox, address_of, listen
from understudy.lateness import Lateness
from understudy.server.api.errors import SHUTTING_DOWN
from understudy.server.api.texts import TokenTexts
from understudy.server.app import App
from understudy.server.driver import Driver
from understudy.server.handoff.network import HandOffNetwork
from understudy.server.kv_events import KvEventsConfig
from understudy.server.loop import heap_frozen
from understudy.server.outputs import Outputs
from understudy.server.push.network import PushNetwork
from understudy.server.sessions import LiveSessions
from understudy.server.tokenizer import open_tokenizer
from understudy.server.worker import Worker
from understudy.tiers.native import to_core
from understudy.tiers.plan import TierPlan

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from understudy._core import TierConfig, TierRun
    from understudy.server.engines import GivenEngine
    from understudy.server.settings import ServerSettings
    from understudy.server.tokenizer import Tokenizer


class Runtime:
    """Parts that the workers of one process share: clock, driver, outbox, tokenizer."""

    def __init__(
        self, *, clock_speed: float = 1.0, tokenizer: Tokenizer, given: GivenEngine | None = None
    ) -> None:
        self.clock = WallClock(clock_speed)
        self.given = given
        self.driver = Driver(self.clock)
        self.token_lateness = Lateness()
        self.outbox = Outbox(self.clock, self.token_lateness)
        self.driver.after_pump = self.outbox.flush
        self.texts = TokenTexts(tokenizer)
        self._outputs: dict[tuple[str, str | None, int], Outputs] = {}
        self.network: HandOffNetwork | None = None
        """Carries hand-offs between the workers; None: no worker takes part in any."""
        self.sessions: LiveSessions | None = None
        """Keeps the KV of sessions between their requests; None: no policy."""

    def worker(
        self, settings: ServerSettings, index: int = 0, *, run: TierRun | None = None, events: bool = False
    ) -> Worker:
        """Make a worker. ConfigError names an invalid setting.

        Workers with tiers share `run`; with `events`, the worker calls its `on_events`.
        """
        key = (settings.response_mode, settings.response_file, settings.seed)
        if key not in self._outputs:
            self._outputs[key] = Outputs(
                self.texts.tokenizer,
                settings.response_mode,
                recorded=None if settings.response_file is None else Path(settings.response_file),
                seed=settings.seed,
            )
        if settings.handoff is not None and self.network is None:
            self.network = HandOffNetwork(self.driver, settings.handoff, settings.engine.block_size)
        push = None
        if settings.push is not None:
            if self.driver.network is not None:
                raise ConfigError(
                    "--disaggregation-mode: a process has one side; start each server with `understudy serve`"
                )
            push = PushNetwork(self.driver, settings.push, settings.engine.block_size)
        if settings.session_kv is not None and self.sessions is None:
            self.sessions = LiveSessions(settings.session_kv, self.driver)
        return Worker(
            settings,
            self.driver,
            self.texts,
            self._outputs[key],
            tiers=build_tiers(settings),
            run=run,
            index=index,
            token_lateness=self.token_lateness,
            events=events or KvEventsConfig.read(settings.kv_events_config).publishes,
            given=self.given,
            network=self.network,
            push=push,
            sessions=self.sessions,
        )


def build_tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """Return the TLS context, None for plain HTTP. ConfigError names an unusable file."""
    if settings.ssl_certfile is None:
        if settings.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
        if settings.ssl_ca_certs is not None:
            context.load_verify_locations(settings.ssl_ca_certs)
        context.verify_mode = ssl.VerifyMode(settings.ssl_cert_reqs)
    except (OSError, ValueError) as error:  # an ssl.SSLError is an OSError
        raise ConfigError(
            f"--ssl-certfile {settings.ssl_certfile} or its key or CA file cannot be used: {error}"
        ) from None
    return context


def build_tiers(settings: ServerSettings) -> TierConfig | None:
    """Convert the tier settings to the core's form; None without tiers."""
    plan = TierPlan.of(settings.tiers, settings.engine.block_size)
    if plan is not None:
        settings.engine.check_tiers(plan)
    return None if plan is None else to_core(plan, settings.most_blocks, seed=settings.seed)


def make_runtime(settings: ServerSettings) -> Runtime:
    """Make the shared parts for servers of these settings."""
    return Runtime(clock_speed=settings.clock_speed, tokenizer=open_tokenizer(settings.tokenizer))


class Server:
    """One worker behind one port."""

    def __init__(
        self,
        settings: ServerSettings,
        runtime: Runtime | None = None,
        index: int = 0,
        *,
        run: TierRun | None = None,
        events: bool = False,
    ) -> None:
        self.settings = settings
        self.tls = build_tls_context(settings)
        self.runtime = runtime or make_runtime(settings)
        self.worker = self.runtime.worker(settings, index, run=run, events=events)
        self.app = App(self.worker)
        self._listening: asyncio.Server | None = None
        self.port = settings.port

    async def start(self) -> None:
        """Start to listen. OSError when the port is taken, ConfigError when the side channel's is."""
        self.runtime.driver.start()
        if self.worker.handoff is not None:
            await self.worker.handoff.start()
        self._listening = await listen(
            self.app,
            self.runtime.outbox,
            self.settings.host,
            self.settings.port,
            self.tls,
            uds=self.settings.uds,
        )
        if self.settings.uds is None:
            self.port = self._listening.sockets[0].getsockname()[1]
        self.app.set_port(self.port)
        if self.worker.push is not None:
            await self.worker.push.start(self.settings.host, self.port, self.runtime.outbox)

    async def stop(self, drain_s: float | None = None) -> None:
        """Stop listening; drain answers for `drain_s` (default: `shutdown_timeout_s`), then abort the rest."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
            if self.settings.uds is not None:
                Path(self.settings.uds).unlink(missing_ok=True)
        self.app.draining = True
        left_s = self.settings.shutdown_timeout_s if drain_s is None else drain_s
        try:
            while left_s > 0 and (self.app.endpoints.in_flight or self.runtime.outbox.sending):
                await asyncio.sleep(0.02)
                left_s -= 0.02
        finally:  # also when a second signal ends the wait
            for generation in list(self.app.endpoints.in_flight):
                generation.shut_down()
            for connection in tuple(self.app.answering):
                connection.end_early(503, SHUTTING_DOWN)
        await self.runtime.outbox.wait_until_sent()
        self.worker.close()
        if self.runtime.network is not None:
            await self.runtime.network.close()
        if self.worker.push is not None:
            await self.worker.push.close()

    @property
    def address(self) -> str:
        """URL of the server, or the path of its Unix socket."""
        if self.settings.uds is not None:
            return f"unix:{self.settings.uds}"
        return f"{self.settings.scheme}://{address_of(self.settings.host, self.port)}"


async def run_until_stopped(
    start: Callable[[], Awaitable[None]], stop: Callable[[], Awaitable[None]], address: str
) -> None:
    """Start, wait for SIGINT or SIGTERM, stop; a second signal exits at once. ConfigError when it cannot listen."""
    stopping, at_once = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (at_once if stopping.is_set() else stopping).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        await start()
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error}") from None
    with heap_frozen():
        await stopping.wait()
        tasks = [asyncio.ensure_future(stop()), asyncio.ensure_future(at_once.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not tasks[0].cancelled():
            tasks[0].result()
