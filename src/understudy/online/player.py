"""Sends the requests of a workload when they are due, and reads their streams."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from understudy.engines.engine_config import describe_scheduling
from understudy.errors import WrongState
from understudy.fleets.fleet import Fleet, FleetSettings
from understudy.lateness import Lateness
from understudy.online.columns import LiveColumns
from understudy.online.content import TrueOutputs, limit_of, prompt_of
from understudy.online.hints import SessionTeller
from understudy.online.plays import play_graph
from understudy.router.dispatch import name_policy
from understudy.run.facts import RunFacts, TimeFacts
from understudy.run.session_kv import describe_totals
from understudy.run.times import compute_outside_share

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.engines.engine_config import EngineConfig
    from understudy.run.timeline import Timeline
    from understudy.server.live_request import LiveRequest
    from understudy.workload import Workload

_HEAD_START_NS = 20_000_000
"""Real time between the start of all clients and time 0 of the workload."""


class Player:
    """One run: a fleet, and the clients of its front end."""

    def __init__(
        self,
        workload: Workload,
        settings: FleetSettings,
        engine: EngineConfig,
        progress: Callable[[int], None] | None,
        lanes: int = 0,
    ) -> None:
        self._workload = workload
        self._lanes = lanes
        self._settings = settings
        self._engine = engine
        self._progress = progress
        self._fleet = Fleet(settings)
        self._columns = LiveColumns(
            workload,
            [core for server in self._fleet.servers for core in server.worker.cores],
            self._fleet.shared_runs,
        )
        self._teller = SessionTeller(workload)
        self._first_byte = Lateness()
        self._ended = 0

    async def play(self) -> tuple[Timeline, RunFacts]:
        """Run the workload to its end. Times are the workload's: its first request is due at 0."""
        fleet = self._fleet
        for server in fleet.servers:
            server.worker.on_end = self._on_end
            server.worker.outputs = TrueOutputs(server.worker.outputs, self._workload)
        await fleet.start()
        fleet.runtime.clock.start_in(_HEAD_START_NS)
        began_s = time.perf_counter()
        try:
            await self._send_all()
        finally:
            await fleet.stop()
            fleet.runtime.driver.stop()
        played_s = round(time.perf_counter() - began_s, 3)
        timeline, result = self._columns.gathered()
        facts = RunFacts(
            online=True,
            workers=len(fleet.servers),
            routing=name_policy(self._settings.routing),
            seed=self._settings.seed,
            speedup=fleet.runtime.clock.speed,
            scheduling=describe_scheduling([self._engine]),
            engine=self._engine.describe(),
            times=TimeFacts(self._engine.timing.describe_origin(), compute_outside_share([result])),
            lateness_ms=self._lateness_ms(),
            played_s=played_s,
            session_kv=self._describe_session_kv(),
        )
        return timeline, facts

    def _describe_session_kv(self) -> dict[str, Any]:
        settings = self._fleet.servers[0].settings.session_kv
        if settings is None:
            return {}
        now_ns = self._fleet.runtime.clock.now_ns()
        done: Counter[str] = Counter()
        for server in self._fleet.servers:
            done.update(describe_totals(server.worker.cores[0].vllm.prefix_totals(now_ns)))
        return {**settings.describe(), "done": dict(done)}

    def _on_end(self, worker: int, request: LiveRequest) -> None:
        self._columns.on_end(int(request.name.rpartition("-")[2]), worker, request)

    async def _send_all(self) -> None:
        """Send every request when it is due, and wait for all answers."""
        if self._workload.graph is not None:
            await play_graph(
                self._workload,
                self._workload.graph,
                self._lanes,
                self._fleet.runtime.clock.now_ns,
                self._send,
            )
            return
        heads = np.flatnonzero(self._workload.turn == 0)
        await asyncio.gather(*(self._session(int(row)) for row in heads))

    async def _send(self, row: int, due_ns: int, on_dispatch: Callable[[], None]) -> None:
        await self._until(due_ns)
        on_dispatch()
        await self._request(row)
        self._report_end()

    def _report_end(self) -> None:
        self._ended += 1
        if self._progress is not None:
            self._progress(self._ended)

    async def _session(self, row: int) -> None:
        due_ns = int(self._workload.arrival_ns[row])
        while row >= 0:
            await self._until(due_ns)
            await self._request(row)
            self._report_end()
            row = int(self._workload.next_turn[row])
            if row >= 0:
                due_ns = self._fleet.runtime.clock.now_ns() + int(self._workload.delay_ns[row])

    async def _until(self, due_ns: int) -> None:
        clock = self._fleet.runtime.clock
        while (wait_ns := due_ns - clock.now_ns()) > 0:
            await asyncio.sleep(wait_ns / clock.speed / 1e9)

    async def _request(self, row: int) -> None:
        workload, clock = self._workload, self._fleet.runtime.clock
        limit = limit_of(workload, row)
        most = self._settings.pools[0][1].max_model_len - int(workload.prompt_tokens[row])
        length = int(workload.cut_output_tokens[row]) if limit is None else min(limit, max(most, 1))
        body = msgspec.json.encode(
            {
                "model": self._settings.pools[0][1].names[0],
                "prompt": prompt_of(workload, row).tolist(),
                "max_tokens": max(length, 1),
                "ignore_eos": limit is None,
                "seed": row,
                "stream": True,
                "priority": int(workload.priority[row]) if workload.priority is not None else 0,
            }
        )
        told = "".join(f"{name}: {value}\r\n" for name, value in self._teller.send(row).items())
        reader, writer = await asyncio.open_connection("127.0.0.1", self._fleet.port)
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: online\r\nconnection: close\r\nx-request-id: row-%d\r\n"
                b"content-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b"
                % (row, told.encode(), len(body), body)
            )
            data = await reader.read(1 << 16)
            seen_ns = clock.now_ns()
            answer = data
            while data:
                data = await reader.read(1 << 16)
                answer += data
        finally:
            writer.close()
        self._teller.on_answer(row)
        if (failure := self._fleet.routing.dispatcher.failure) is not None:
            raise failure
        if not answer.startswith(b"HTTP/1.1 200"):
            if self._columns.has_ended(row):  # the engine ended it: a full queue, or a failed read
                return
            why = answer.partition(b"\r\n\r\n")[2].decode("utf-8", "replace")[:300]
            self._columns.on_refused(row, clock.now_ns(), why)
            return
        if b"[DONE]" not in answer:
            raise WrongState(f"row {row}: the stream ended before its answer did")
        first_ns = self._columns.request(row).first_token_ns
        self._first_byte.record((seen_ns - first_ns) / clock.speed / 1e9)

    def _lateness_ms(self) -> dict[str, float]:
        """Return quantiles of the lateness of tokens and ends of steps, and of first tokens at clients."""
        runtime = self._fleet.runtime
        late_s = {
            "token_p50": runtime.token_lateness.quantile(0.5),
            "token_p99": runtime.token_lateness.quantile(0.99),
            "step_end_p99": runtime.driver.step_lateness.quantile(0.99),
            "client_first_token_p50": self._first_byte.quantile(0.5),
            "client_first_token_p99": self._first_byte.quantile(0.99),
        }
        return {name: round(1e3 * value, 3) for name, value in late_s.items()}
