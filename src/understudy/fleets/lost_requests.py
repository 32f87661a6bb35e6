"""Requests of a live fleet that lose their worker: they fail, start anew elsewhere, or go on with their tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from understudy.errors import PolicyError, WrongState
from understudy.server.api.choice import Choice, ContinuedChoice
from understudy.server.api.errors import ApiError
from understudy.server.api.generation import Generation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from understudy.fleets.routing import FleetRouting
    from understudy.http import Connection
    from understudy.router.dispatch import Decision, LiveRouteRequest
    from understudy.run.faults import FaultPlan
    from understudy.server.live_request import LiveRequest
    from understudy.server.server import Server

POLLED_EVERY_S = 0.02
"""Time between two looks for a worker that takes stranded requests."""


@dataclass(slots=True)
class SentRequest:
    """A client's request that a worker has."""

    asked: LiveRouteRequest
    path: str
    losses: int = 0


@dataclass(slots=True)
class LostAnswer:
    """An answer without a worker, and those of its choices that have not ended."""

    generation: Generation
    choices: list[Choice]
    sent: SentRequest
    migrates: bool
    timer: asyncio.TimerHandle | None = field(default=None)


class Stranded(NamedTuple):
    """A request that waits until any worker is ready."""

    connection: Connection
    route: Callable[[], None]
    fail: Callable[[], None]


class LostRequests:
    """Takes the requests of workers that crash, or drain for too long, and sends them again."""

    def __init__(
        self,
        servers: Sequence[Server],
        routing: FleetRouting,
        plan: FaultPlan,
        *,
        on_sent: Callable[[LiveRouteRequest, Decision, int, str], None],
        may_return: Callable[[], bool],
    ) -> None:
        """`on_sent`: notes a routed request; `may_return`: whether a worker will be ready that is not now."""
        self._servers = servers
        self._routing = routing
        self._plan = plan
        self._on_sent = on_sent
        self._may_return = may_return
        self._sent: dict[Connection, SentRequest] = {}
        self._pending: dict[Connection, LostAnswer] = {}
        self._stranded: list[Stranded] = []
        self._poll: asyncio.TimerHandle | None = None
        self.outcomes: Counter[str] = Counter()
        """Losses by what became of the request: failed, retried or migrated."""
        for server in servers:
            server.worker.on_lost = self.take

    # ── The front end's side ──

    def note_sent(self, connection: Connection, asked: LiveRouteRequest, path: str) -> None:
        """Note that a worker has a request, before it gets it."""
        self._sent[connection] = SentRequest(asked, path)

    def note_ended(self, connection: Connection) -> None:
        """Note that a request has been answered, or that its client has disconnected."""
        sent = self._sent.pop(connection, None)
        if sent is not None:
            self._routing.dispatcher.ended(sent.asked.row)
        lost = self._pending.pop(connection, None)
        if lost is not None and lost.timer is not None:
            lost.timer.cancel()

    def wait_for_worker(
        self, connection: Connection, route: Callable[[], None], fail: Callable[[], None]
    ) -> None:
        """Call `route` once a worker is ready, or `fail` once none will be; neither for a client that has gone."""
        self._stranded.append(Stranded(connection, route, fail))
        if self._poll is None:
            self._poll = asyncio.get_running_loop().call_later(POLLED_EVERY_S, self._poll_stranded)

    @property
    def num_pending(self) -> int:
        """Requests that have lost a worker and have no other yet."""
        return len(self._pending)

    # ── Losses ──

    def take(self, worker: int, requests: list[LiveRequest], now_ns: int) -> list[LiveRequest]:  # noqa: ARG002
        """Take requests that have lost a worker; return those that end here."""
        ended: list[LiveRequest] = []
        answers: dict[Connection, tuple[Generation, list[LiveRequest]]] = {}
        for request in requests:
            choice = _choice_of(request)
            generation = None if choice is None else choice.generation
            if (
                choice is None
                or not isinstance(generation, Generation)
                or generation.gone
                or _is_complete(choice)
            ):
                ended.append(request)
                continue
            answers.setdefault(generation.connection, (generation, []))[1].append(request)
        for connection, (generation, lost) in answers.items():
            sent = self._sent.get(connection)
            if sent is None:  # it came to the worker's own port
                ended += lost
                continue
            sent.losses += 1
            limit = self._plan.max_attempts
            if self._plan.on_loss == "fail" or (limit is not None and sent.losses >= limit):
                self.outcomes["failed"] += 1
                ended += lost
                continue
            choices = [choice for request in lost if (choice := _choice_of(request)) is not None]
            migrates = self._plan.on_loss == "migrate" and any(choice.emitted for choice in choices)
            self.outcomes["migrated" if migrates else "retried"] += 1
            self._suspend(worker, LostAnswer(generation, choices, sent, migrates))
        return ended

    def _suspend(self, worker: int, lost: LostAnswer) -> None:
        generation = lost.generation
        connection = generation.connection
        self._servers[worker].app.endpoints.release(generation)
        generation.on_done = None
        self._routing.dispatcher.ended(lost.sent.asked.row)
        self._pending[connection] = lost
        connection.on_close = generation.cancel_before_run
        delay_s = self._plan.retry_delay_ms / 1e3 / self._servers[0].runtime.clock.speed
        lost.timer = asyncio.get_running_loop().call_later(delay_s, self._route, lost)

    # ── Sending again ──

    def _route(self, lost: LostAnswer) -> None:
        lost.timer = None
        routing, sent = self._routing, lost.sent
        sent.asked = sent.asked._replace(
            row=routing.dispatcher.next_row(),
            prompt_tokens=sent.asked.prompt_tokens
            + sum(choice.emitted for choice in lost.choices) * lost.migrates,
        )
        routing.update_availability()
        try:
            routing.dispatcher.dispatch(sent.asked, partial(self._send, lost))
        except WrongState:
            connection = lost.generation.connection
            self.wait_for_worker(connection, partial(self._route, lost), partial(self._fail, lost))
        except PolicyError:
            self._fail(lost)

    def _send(self, lost: LostAnswer, decision: Decision) -> None:
        generation, sent = lost.generation, lost.sent
        connection = generation.connection
        if self._pending.get(connection) is not lost:
            self._routing.dispatcher.ended(sent.asked.row)
            return
        del self._pending[connection]
        chosen, rank = self._routing.targets[decision.worker]
        server = self._servers[chosen]
        before = generation.worker.index
        self._on_sent(sent.asked, decision, chosen, sent.path)
        row, dispatcher = sent.asked.row, self._routing.dispatcher
        connection.on_first_token = partial(dispatcher.first_token, row)
        connection.extra_headers = connection.extra_headers.replace(
            f"x-understudy-worker: {before}\r\n".encode(), f"x-understudy-worker: {chosen}\r\n".encode()
        )
        server.app.endpoints.adopt(generation)
        try:
            try:
                generation.resubmit(server.worker, lost.choices, rank, migrates=lost.migrates)
            except ApiError:
                if not lost.migrates:
                    raise
                # Prompt and answer so far do not fit as a prompt: it starts anew.
                generation.resubmit(server.worker, lost.choices, rank, migrates=False)
        except ApiError:
            generation.lose()

    # ── No worker ──

    def _poll_stranded(self) -> None:
        """Send stranded requests again if a worker is ready; end them if none will be."""
        self._poll = None
        stranded, self._stranded = [one for one in self._stranded if not one.connection.closed], []
        is_ready = any(server.app.takes_requests for server in self._servers)
        for one in stranded:
            if is_ready:
                one.route()
            elif self._may_return():
                self.wait_for_worker(*one)
            else:
                one.fail()

    def _is_pending(self, lost: LostAnswer) -> bool:
        return self._pending.get(lost.generation.connection) is lost

    def _fail(self, lost: LostAnswer) -> None:
        if self._is_pending(lost):
            self.outcomes["failed"] += 1
            del self._pending[lost.generation.connection]
            lost.generation.lose()

    def close(self) -> None:
        """End the requests that have no worker."""
        if self._poll is not None:
            self._poll.cancel()
            self._poll = None
        self._stranded.clear()
        for lost in tuple(self._pending.values()):
            lost.generation.shut_down()
        self._pending.clear()


def _is_complete(choice: Choice) -> bool:
    return choice.emitted >= choice.plan.total


def _choice_of(request: LiveRequest) -> Choice | None:
    """Return the choice of a client's answer that the request is of; None for another listener."""
    listener = request.listener
    if isinstance(listener, ContinuedChoice):
        return listener.choice
    return listener if isinstance(listener, Choice) else None
