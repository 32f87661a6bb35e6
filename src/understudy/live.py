"""Live servers and fleets inside a script or a notebook: `understudy.serve` and `understudy.fleet`."""

from __future__ import annotations

import asyncio
import atexit
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

import msgspec

from understudy.errors import ConfigError
from understudy.http import address_of
from understudy.server.loop import allow_many_files, new_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from understudy.router.kv import KvRouting
    from understudy.router.router import Router


class _Running(Protocol):
    """A server or fleet between its start and its stop."""

    async def start(self) -> str:
        """Start to listen; return the URL."""
        ...

    async def stop(self) -> None:
        """Stop listening and end all requests."""
        ...


class LiveHandle:
    """A live server or fleet in a thread of this process; a context manager that stops it at the end.

    A handle that is not stopped ends with the process.
    """

    url: str
    """URL of the server, or of the fleet's front end, such as http://127.0.0.1:41234."""

    def __init__(self, build: Callable[[], _Running]) -> None:
        started: Future[str] = Future()
        self._loop = new_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run, args=(build, started), name="understudy-live", daemon=True
        )
        allow_many_files()
        self._thread.start()
        try:
            self.url = started.result()
        except OSError as error:
            raise ConfigError(f"port: cannot listen: {error}; choose another port, or 0 for any") from None
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop listening, end all requests and wait for both; a stopped handle stays as it is."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
        atexit.unregister(self.stop)

    def __enter__(self) -> LiveHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<LiveHandle {self.url}{'' if self._thread.is_alive() else ', stopped'}>"

    def _run(self, build: Callable[[], _Running], started: Future[str]) -> None:
        async def main() -> None:
            try:
                running = build()
                url = await running.start()
            except BaseException as error:
                started.set_exception(error)
                return
            started.set_result(url)
            await self._stopping.wait()
            await running.stop()

        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(main())


def serve(
    model: str = "understudy/tok",
    *,
    gpu: str | None = None,
    port: int = 0,
    clock_speed: float = 1.0,
    flags: Sequence[str] = (),
) -> LiveHandle:
    """Start a live server with vLLM's HTTP API in this process; return its handle, which has the URL.

    Parameters:
        model: name that clients use; with `gpu` the name of a known model.
        gpu: name of a GPU, such as H100; gives step times and KV blocks.
        port: TCP port on 127.0.0.1; 0 is any free port.
        clock_speed: speed of the simulated clock relative to real time.
        flags: flags of `understudy serve`, such as ["--max-num-seqs", "64"].

    Errors: ConfigError names an invalid flag or a port that is taken.

    Example:
        with us.serve("Llama-3.1-8B", gpu="H100", clock_speed=10) as server:
            print(server.url)
    """
    from understudy.cli.serve import print_unused_flags
    from understudy.server.flags.serving import read_serve
    from understudy.server.server import Server

    plan = read_serve(_list_arguments(model, gpu, port, clock_speed, flags))
    if plan.line.values.get("engine") == "qwen3":
        raise ConfigError("flags: --engine qwen3 is for the command line; use `understudy serve`")
    print_unused_flags(plan.idle)

    class RunningServer:
        def __init__(self) -> None:
            self._server = Server(plan.settings)

        async def start(self) -> str:
            await self._server.start()
            return self._server.address

        async def stop(self) -> None:
            await self._server.stop()
            self._server.runtime.driver.stop()

    return LiveHandle(RunningServer)


def fleet(
    model: str = "understudy/tok",
    *,
    workers: int = 4,
    routing: str | KvRouting | Router = "round_robin",
    gpu: str | None = None,
    port: int = 0,
    base_port: int = 0,
    clock_speed: float = 1.0,
    flags: Sequence[str] = (),
) -> LiveHandle:
    """Start live workers behind a routing front end in this process; return the handle of the front end.

    Parameters:
        model: name that clients use; with `gpu` the name of a known model.
        workers: number of workers.
        routing: name of a policy, KvRouting, or a user-defined Router.
        gpu: name of a GPU, such as H100; gives step times and KV blocks.
        port: TCP port of the front end on 127.0.0.1; 0 is any free port.
        base_port: port of the first worker; 0 is any free ports.
        clock_speed: speed of the simulated clock relative to real time.
        flags: flags of `understudy fleet`, such as ["--max-num-seqs", "64"].

    Errors: ConfigError names an invalid flag or a port that is taken.

    Example:
        with us.fleet("Llama-3.1-8B", gpu="H100", workers=2, routing=us.KvRouting()) as fleet:
            print(fleet.url)
    """
    from understudy.cli.fleet import read_fleet
    from understudy.fleets.fleet import Fleet

    own = ["--workers", str(workers), "--base-port", str(base_port)]
    if isinstance(routing, str):
        own += ["--routing", routing]
    settings, processes = read_fleet([*_list_arguments(model, gpu, port, clock_speed, flags), *own])
    if processes != 1:
        raise ConfigError("flags: --processes is for the command line; use `understudy fleet`")
    if not isinstance(routing, str):
        settings = msgspec.structs.replace(settings, routing=routing)

    class RunningFleet:
        def __init__(self) -> None:
            self._fleet = Fleet(settings)

        async def start(self) -> str:
            await self._fleet.start()
            return f"{settings.pools[0][1].scheme}://{address_of(settings.host, self._fleet.port)}"

        async def stop(self) -> None:
            await self._fleet.stop()
            self._fleet.runtime.driver.stop()

    return LiveHandle(RunningFleet)


def _list_arguments(
    model: str, gpu: str | None, port: int, clock_speed: float, flags: Sequence[str]
) -> list[str]:
    if isinstance(flags, str):
        raise ConfigError(f"flags must be a list of words, got {flags!r}; write {flags.split()}")
    own = ["--port", str(port), "--clock-speed", str(clock_speed), *(() if gpu is None else ("--gpu", gpu))]
    return [model, *own, *flags]
