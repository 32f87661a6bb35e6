"""Seeded fault injection: by `/admin/fault`, by request header, or from the start."""

from __future__ import annotations

import asyncio
import math
import random
import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from understudy._core import Tier
from understudy.checks import read_as
from understudy.errors import ConfigError
from understudy.server.api.errors import ApiError, error_body
from understudy.server.api.fields import whole_number
from understudy.tiers.plan import TierPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from understudy.http import Connection, Request
    from understudy.server.settings import ServerSettings
    from understudy.server.worker import Worker

FAILURES: dict[str, tuple[int, str, str | None, str]] = {
    "rate_limit": (429, "rate_limit_exceeded", None, "Rate limit reached for requests"),
    "invalid_api_key": (401, "authentication_error", None, "Incorrect API key provided"),
    "context_length": (
        400,
        "invalid_request_error",
        "messages",
        "This model's maximum context length is {length} tokens. However, your messages resulted in more tokens",
    ),
    "server_error": (503, "server_error", None, "The server is overloaded"),
    "invalid_request": (400, "invalid_request_error", None, "Invalid request"),
    "model_not_found": (404, "invalid_request_error", "model", "The model `{model}` does not exist"),
}
"""llm-d-inference-sim's failure types: status, type, param, and the phrase that clients match."""


MAX_FACTOR = 1000
MAX_COUNT = 1_000_000


class FaultOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One fault order. Its JSON has only the fields that were given, so that another process reads it equally.

    `reject`: answer `status` instead; `delay`: answer `delay_ms` later; `drop`: cut the connection `after_ms`; `slow`:
    all that is sent to the client arrives `delay_ms` later, as over a slow line; `slow_link`: the links to and from a
    `tier` (g2, g3, g4) are `factor` times as slow, for what is under way too; `kill`: the engine dies and restarts with
    nothing cached, at once or after `duration_s`; `fail_reads`: the next `count` reads of a prefill worker's blocks
    fail, on decode workers; `stop_events`, `resume_events`, `lose_events` (`count` batches);
    `none`: end all faults, or those of the kind `only`. `rate` is the share of requests that it happens to, by `seed`.
    A fault ends `duration_s` (seconds of real time) after it began; without, when another order ends it.
    """

    kind: Literal[
        "reject",
        "delay",
        "drop",
        "slow",
        "slow_link",
        "kill",
        "fail_reads",
        "stop_events",
        "resume_events",
        "lose_events",
        "none",
    ]
    workers: list[int] | None = None
    rate: float = 1.0
    status: int = 503
    delay_ms: float = 1000.0
    after_ms: float = 50.0
    count: int = 1
    tier: Literal["g2", "g3", "g4"] = "g2"
    factor: float = 10.0
    seed: int = 0
    duration_s: float | None = None
    only: str | None = None

    @classmethod
    def read(cls, value: Any) -> FaultOrder:
        """Read an order. ApiError names a field that is unknown, invalid, or unused by this kind."""
        try:
            order = read_as(cls, value)
        except ConfigError as error:
            raise ApiError(str(error), kind="Bad Request") from None
        taken = ("kind", "workers", *_FIELDS[order.kind])
        for name in value:
            if name not in taken:
                raise _invalid(name, f"is not a field of {order.kind}, which takes {', '.join(taken[1:])}")
        if not 0 <= order.rate <= 1:
            raise _invalid("rate", f"must be a share from 0 to 1, got {order.rate:g}")
        if not 200 <= order.status <= 599:
            raise _invalid("status", f"must be from 200 to 599, got {order.status}")
        for name, time_ms in (("delay_ms", order.delay_ms), ("after_ms", order.after_ms)):
            if not (math.isfinite(time_ms) and time_ms >= 0):
                raise _invalid(name, f"must be a finite number from 0, got {time_ms:g}")
        if order.duration_s is not None and not (math.isfinite(order.duration_s) and order.duration_s > 0):
            raise _invalid("duration_s", f"must be a finite number above 0, got {order.duration_s:g}")
        if order.count < 1:
            raise _invalid("count", f"must be at least 1, got {order.count}")
        if order.count > MAX_COUNT:
            raise _invalid("count", f"must be at most {MAX_COUNT:,}, got {order.count}")
        if not 1 <= order.factor <= MAX_FACTOR:
            raise _invalid("factor", f"must be from 1 to {MAX_FACTOR}, got {order.factor:g}")
        if order.only is not None and order.only not in _LASTING:
            raise _invalid("only", f"must be one of {', '.join(_LASTING)}, got {order.only!r}")
        if order.kind == "kill" and order.workers is None:
            raise _invalid("workers", "must name the workers to kill, as [0]")
        if order.workers is not None and not order.workers:
            raise _invalid("workers", "is empty; leave it out for all workers")
        if len(order.workers or ()) != len(set(order.workers or ())):
            raise _invalid("workers", f"lists a worker twice: {order.workers}")
        return order


_OF_REQUESTS = ("rate", "seed", "duration_s")
_FIELDS: dict[str, tuple[str, ...]] = {
    "reject": ("status", *_OF_REQUESTS),
    "delay": ("delay_ms", *_OF_REQUESTS),
    "drop": ("after_ms", *_OF_REQUESTS),
    "slow": ("delay_ms", *_OF_REQUESTS),
    "slow_link": ("tier", "factor", "duration_s"),
    "kill": ("duration_s",),
    "fail_reads": ("count",),
    "stop_events": ("duration_s",),
    "resume_events": (),
    "lose_events": ("count",),
    "none": ("only",),
}
"""Fields of an order by kind, in addition to `kind` and `workers`."""
_LASTING = tuple(kind for kind in _FIELDS if kind not in ("resume_events", "none"))
"""Faults that `none` can end."""


def _invalid(name: str, why: str) -> ApiError:
    return ApiError(f"{name} {why}", param=name)


class ActiveFault(NamedTuple):
    """A fault that lasts until it is ended."""

    order: FaultOrder
    timer: asyncio.TimerHandle | None


class Faults:
    """The faults of one worker. `before` is called before every generation request."""

    def __init__(
        self,
        worker: Worker,
        generators: Container[str],
        *,
        mark_dead: Callable[[bool], None],
        handle: Callable[[Request, Connection], None],
    ) -> None:
        """`generators`: paths of generation requests; `mark_dead`: says whether the engine is dead; `handle`: answers a
        request that was delayed.
        """
        self._worker = worker
        self._generators = generators
        self._mark_dead = mark_dead
        self._handle = handle
        self._active: dict[str, ActiveFault] = {}
        """Active faults by target: requests, events, the engine, or one link."""
        self.planned: dict[int, dict[str, Any]] = {}
        """Active faults of a fleet's plan, by number: kind, fields, and the Unix time `until` which each lasts."""
        self._draw = random.Random(0)
        self.failure_rate = 0.0
        self.failure_types: tuple[str, ...] = tuple(FAILURES)

    def apply(self, order: FaultOrder) -> int:
        """Begin or end a fault; return the number of lost requests."""
        worker, lost = self._worker, 0
        if order.kind == "kill":
            self._end("engine")
            lost = worker.kill()
            if order.duration_s is not None:
                self._begin("engine", order)
        elif order.kind == "lose_events":
            for sender in worker.senders:
                sender.batches_to_drop += order.count
        elif order.kind == "fail_reads":
            if worker.handoff is not None:
                worker.handoff.fail_reads(order.count)
        elif order.kind == "resume_events":
            self._end("events")
        elif order.kind == "stop_events":
            self._begin("events", order)
        elif order.kind == "slow_link":
            self._begin(f"link {order.tier}", order)
        elif order.kind == "none":
            for what, fault in tuple(self._active.items()):
                if order.only in (None, fault.order.kind):
                    self._end(what)
            if worker.handoff is not None and order.only in (None, "fail_reads"):
                worker.handoff.fail_reads(0)
            for sender in worker.senders if order.only in (None, "lose_events") else ():
                sender.batches_to_drop = 0
        else:
            self._begin("requests", order)
        return lost

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the faults that have not ended."""
        kinds = tuple(fault.order.kind for fault in self._active.values()) if self._active else ()
        if self.planned:
            kinds = (*kinds, *(row["kind"] for row in self.planned.values()))
        for sender in self._worker.senders:
            if sender.batches_to_drop:
                return (*kinds, "lose_events")
        return kinds

    def active(self) -> list[dict[str, Any]]:
        """Describe the faults that have not ended, with the seconds that are left of each (None: no end)."""
        now_s = asyncio.get_running_loop().time()
        rows: list[dict[str, Any]] = []
        for order, timer in self._active.values():
            fields = {name: getattr(order, name) for name in _FIELDS[order.kind]}
            left_s = None if timer is None else round(max(timer.when() - now_s, 0.0), 3)
            rows.append({"kind": order.kind, **fields, "left_s": left_s})
        for planned in self.planned.values():
            until = planned["until"]
            left_s = None if until is None else round(max(until - time.time(), 0.0), 3)
            rows.append({**{name: planned[name] for name in planned if name != "until"}, "left_s": left_s})
        if lose := max((sender.batches_to_drop for sender in self._worker.senders), default=0):
            rows.append({"kind": "lose_events", "count": lose, "left_s": None})
        return rows

    def _begin(self, what: str, order: FaultOrder) -> None:
        self._end(what)
        timer = None
        if order.duration_s is not None:
            timer = asyncio.get_running_loop().call_later(order.duration_s, self._end, what)
        self._active[what] = ActiveFault(order, timer)
        if what == "requests":
            self._draw = random.Random(order.seed + self._worker.index)
        else:
            self._apply(what, order, on=True)

    def _end(self, what: str) -> None:
        order, timer = self._active.pop(what, (None, None))
        if timer is not None:
            timer.cancel()
        if order is not None and what != "requests":
            self._apply(what, order, on=False)

    def _apply(self, what: str, order: FaultOrder, *, on: bool) -> None:
        if what == "engine":
            self._mark_dead(on or self._worker.is_down)
        elif what == "events":
            for sender in self._worker.senders:
                sender.stopped = on
        else:
            self._worker.slow_links(order.tier, order.factor if on else 1.0)

    @property
    def is_dead(self) -> bool:
        """Whether an order keeps the engine dead."""
        return "engine" in self._active

    def before(self, request: Request, connection: Connection) -> bool:
        """Apply faults to a request. True when a fault answers it, now or later."""
        if request.path not in self._generators:
            return False
        asked = whole_number(request.headers.get("x-return-error", ""))
        if asked is not None and 400 <= asked <= 599:
            self._refuse(connection, asked)
            return True
        if self.failure_rate and self._draw.random() < self.failure_rate:
            kind = self._draw.choice(self.failure_types)
            status, name, param, phrase = FAILURES[kind]
            settings = self._worker.settings
            phrase = phrase.format(length=settings.max_model_len, model=settings.names[0])
            connection.respond(
                status, error_body(status, f"{phrase} (a failure on purpose: {kind})", name, param)
            )
            return True
        fault = self._active.get("requests")
        if fault is None or self._draw.random() >= fault.order.rate:
            return False
        order = fault.order
        loop = asyncio.get_running_loop()
        if order.kind == "reject":
            self._refuse(connection, order.status)
            return True
        if order.kind == "delay":
            loop.call_later(order.delay_ms / 1e3, self._handle, request, connection)
            return True
        if order.kind == "slow":
            connection.slow_s = order.delay_ms / 1e3
        if order.kind == "drop":
            loop.call_later(order.after_ms / 1e3, connection.drop)
        return False

    def _refuse(self, connection: Connection, status: int) -> None:
        connection.respond(status, error_body(status, "a fault on purpose", "InjectedFault"))


def chosen_workers(order: FaultOrder, workers: Sequence[ServerSettings]) -> list[int]:
    """List the workers of an order. ApiError names one that does not exist or lacks the link."""
    chosen = list(range(len(workers))) if order.workers is None else order.workers
    for index in chosen:
        if not 0 <= index < len(workers):
            raise ApiError(f"there is no worker {index}; there are 0 … {len(workers) - 1}")
        if order.kind == "slow_link" and not has_limited_link(workers[index], order.tier):
            raise ApiError(f"worker {index} has no {order.tier} tier behind a link with a limit")
        handoff = workers[index].handoff
        if order.kind == "fail_reads" and (handoff is None or not handoff.consumes):
            raise ApiError(f"worker {index} reads no blocks of others; it is not a decode worker")
    return chosen


def has_limited_link(settings: ServerSettings, tier: str) -> bool:
    """Return whether a worker with these settings has a tier behind a link of limited bandwidth."""
    plan = TierPlan.of(settings.tiers, settings.engine.block_size)
    return plan is not None and any(
        math.isfinite(link.bandwidth_gbps) or link.duplex_gbps is not None
        for one in plan.tiers
        for link in (*one.down, *one.up)
        if one.tier == Tier[tier.upper()]
    )


class Target(Protocol):
    """A server that an order is applied to."""

    faults: Faults

    @property
    def settings(self) -> ServerSettings:
        """Settings of the server."""


def apply_order(order: FaultOrder, apps: Sequence[Target]) -> dict[str, Any]:
    """Apply an order to its workers, or to all. ApiError when it is invalid; nothing has changed then."""
    chosen = chosen_workers(order, [app.settings for app in apps])
    lost = sum(apps[index].faults.apply(order) for index in chosen)
    return {"fault": order.kind, "workers": chosen, "lost_requests": lost}


def active_faults(apps: Sequence[Target]) -> dict[str, Any]:
    """List the faults that have not ended, worker by worker."""
    return {
        "faults": [{"worker": index, **row} for index, app in enumerate(apps) for row in app.faults.active()]
    }
