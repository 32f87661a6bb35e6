"""Apply a routing policy to live requests on the wall clock.

Policies are the same objects as in a replay: native ones by name, `KvRouting`, or a user-defined `Router`.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from understudy._core import KvEventBatch, NativeRouter, native_router
from understudy.errors import ConfigError, PolicyError, WrongState
from understudy.events.columns import build_cleared
from understudy.router.delayed import DELIVERY_FIELDS, DelayedEvents
from understudy.router.kv import KvRouting
from understudy.router.outstanding import OutstandingWork
from understudy.router.prefix_index import PrefixIndex
from understudy.router.router import has_own
from understudy.user_code import format_in_one_line, locate_user_failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy import _core
    from understudy._core import EventBatch, GroupLayout, Identities
    from understudy.events.columns import EventColumns
    from understudy.router.router import Router

log = logging.getLogger("understudy.router")

POLICIES = ("round_robin", "random", "least_loaded", "power_of_two", "session_affinity", "session_tree", "kv")
BATCH_TOKENS = 8192


class LiveRouteRequest(NamedTuple):
    """Fields of a live request that a router may read; same names as `RouteRequest` of a replay."""

    row: int
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    priority: int
    block_size: int
    prompt_blocks: Identities
    session: int | None = None
    """Session id; requests of one session have the same number."""
    parent_session: int | None = None
    """Session that started this one."""
    stage: str = "whole"
    """Part of the request that needs a worker: whole, prefill or decode."""


class Decision(NamedTuple):
    """The chosen worker of a request, with the reasons."""

    row: int
    worker: int
    overlap_blocks: int | None = None
    """Leading prompt blocks that the router's index has for the worker on the device; None without an index."""
    lower_overlap_blocks: int | None = None
    """Following prompt blocks that it has on slower tiers."""
    best_overlap_blocks: int | None = None
    """Highest `overlap_blocks` of any worker."""
    cost: float | None = None
    ties: int = 1
    waited_ms: float = 0.0
    score: float | None = None
    """Score and reason of a user-defined router's `Choice`."""
    reason: str | None = None


def name_policy(policy: str | KvRouting | DelayedEvents | Router) -> str:
    """Return the name of a policy: the class of a user-defined router."""
    if isinstance(policy, DelayedEvents):
        policy = policy.router
    if isinstance(policy, str):
        return policy
    return "kv" if isinstance(policy, KvRouting) else type(policy).__name__


def reads_events(policy: str | KvRouting | DelayedEvents | Router) -> bool:
    """Return whether a live policy receives KV events."""
    if isinstance(policy, DelayedEvents):
        policy = policy.router
    if isinstance(policy, str):
        return policy == "kv"
    return policy.use_events if isinstance(policy, KvRouting) else has_own(policy, "observe")


class Dispatcher:
    """Dispatch requests of a live fleet to workers by one policy. For one thread."""

    def __init__(
        self,
        policy: str | KvRouting | DelayedEvents | Router,
        *,
        seed: int = 0,
        view: OutstandingWork | None = None,
    ) -> None:
        """Build the policy. `view` is passed to a Python router; it may know more of the workers."""
        self.policy = name_policy(policy)
        """Name of the policy; the class of a user-defined router."""
        if policy == "kv":
            policy = KvRouting()
        if isinstance(policy, KvRouting | DelayedEvents):
            for name in DELIVERY_FIELDS:
                if getattr(policy, name):
                    raise ConfigError(
                        f"{name} is for offline runs; leave it out, because live events have their real delays"
                    )
        if isinstance(policy, DelayedEvents):
            policy = policy.router
        self._uses_events = not isinstance(policy, KvRouting) or policy.use_events
        self.kv = policy.build(seed, keep_decisions=False) if isinstance(policy, KvRouting) else None
        self._native: NativeRouter | None = None
        self._no_session: NativeRouter | None = None
        self._python: Any = None
        if isinstance(policy, str):
            self._native = native_router(policy, seed)
            if self._native is None:
                known = ", ".join(POLICIES)
                raise ConfigError(
                    f"--routing {policy!r} is not known; choose one of {known} or FILE.py:CLASS"
                )
            if policy in (
                "session_affinity",
                "session_tree",
            ):  # requests without a session go to the least loaded worker
                self._no_session = native_router("least_loaded", seed)
        elif self.kv is None:
            self._python = policy
        if self.kv is not None:
            self.kv.begin(0)
        self._index = PrefixIndex() if self._overrides("observe") else None
        self.outstanding = OutstandingWork() if view is None else view
        self._available = self.outstanding.available
        self._sent: dict[int, tuple[int, int]] = {}  # worker and tokens by row
        self._waiting: dict[int, tuple[LiveRouteRequest, Callable[[Decision], None]]] = {}
        self._rows = 0
        self._began_s = time.monotonic()
        self._failing: set[str] = set()
        self.failure: PolicyError | None = None
        """First failure of a user-defined router: an exception, or a choice that is not a worker."""
        self.missed_batches: dict[int, int] = {}
        """By worker: batches of events at which a user-defined router's `observe` raised. Its view is incomplete."""

    # ── The fleet ──

    @property
    def wants_blocks(self) -> bool:
        """Whether the policy reads the blocks of a prompt."""
        return self._native is None

    @property
    def wants_events(self) -> bool:
        """Whether the policy receives KV events."""
        return self._uses_events if self.kv is not None else self._overrides("observe")

    @property
    def index(self) -> _core.PrefixIndex | None:
        """Blocks of the workers by the events received, whatever the policy makes of them; None without events."""
        if self.kv is not None:
            return self.kv.index
        return self._index

    def is_degraded(self, worker: int) -> bool:
        """Whether a user-defined router missed events of a worker, because its `observe` raised."""
        return worker in self.missed_batches

    @property
    def num_waiting(self) -> int:
        """Requests in the router's queue."""
        return len(self._waiting)

    def add_worker(self, batch_tokens: int = BATCH_TOKENS, groups: GroupLayout | None = None) -> int:
        """Add a worker and return its id. `batch_tokens` prompt tokens fit into one of its steps.

        `groups`: layout of its KV cache groups, if it has several.
        """
        if self.kv is not None:
            self.kv.add_worker(batch_tokens, groups)
        return self.outstanding.add_worker()

    def set_available(self, worker: int, available: bool) -> None:
        """Set whether the worker may be chosen; releases queued requests."""
        if self._available[worker] == available:
            return
        self._available[worker] = available
        if self.kv is not None:
            self.kv.set_available(worker, available)
        self._release()

    def set_degraded(self, worker: int, degraded: bool) -> None:
        """Set whether the worker's events are incomplete; then prompts sent there count as cached."""
        if self.kv is not None:
            self.kv.set_degraded(worker, degraded)

    def forget(self, worker: int) -> None:
        """Remove all blocks of a worker from the index: its cache was lost, or is unknown."""
        if self.kv is not None:
            self.kv.forget(worker)
        elif self._index is not None:
            self._observe(worker, build_cleared().to_batch())

    def observe(self, worker: int, batch: EventBatch) -> None:
        """Apply the blocks that a step of a worker stored or removed."""
        if self.kv is not None:
            self.kv.index.apply_batch(worker, batch)
        elif self._index is not None:
            self._observe(worker, batch)

    def observe_columns(self, worker: int, columns: EventColumns) -> None:
        """Apply events of a consolidated stream, whose blocks have the sequence hashes of prompt blocks."""
        if self.kv is not None:
            self.kv.index.apply_columns(
                worker, columns.kinds, columns.tiers, columns.offsets, columns.sequence_hashes
            )
        elif self._index is not None:
            self._observe(worker, columns.to_batch())

    # ── Requests ──

    def next_row(self) -> int:
        """Return the number of the next request."""
        self._rows += 1
        return self._rows

    def dispatch(self, request: LiveRouteRequest, send: Callable[[Decision], None]) -> None:
        """Call `send` with the decision: now, or when the router's queue releases the request.

        WrongState when no worker is available; PolicyError when a user-defined router fails.
        """
        if not any(self._available):
            raise WrongState("no worker is available")
        if self.kv is None:
            choice = self._pick(request)
            score, reason = getattr(choice, "score", None), getattr(choice, "reason", None)
            self._send(request, send, Decision(request.row, int(choice), score=score, reason=reason))
            return
        worker = self.kv.decide(
            request.row,
            request.prompt_blocks.sequence_hashes,
            request.prompt_tokens,
            request.block_size,
            self._now_ms(),
            priority=request.priority,
        )
        if worker is None:
            self._waiting[request.row] = (request, send)
        else:
            self._send(request, send, self._read_decision())

    def first_token(self, row: int) -> None:
        """Report that a request has its first token."""
        if self.kv is not None:
            self.kv.first_token(row)
            self._release()
        elif self._overrides("first_token"):
            self._notify("first_token", row)

    def ended(self, row: int) -> None:
        """Report that a request finished, failed or was cancelled. Repeated calls have no effect."""
        known = self._waiting.pop(row, None) is not None
        worker, tokens = self._sent.pop(row, (-1, 0))
        if worker >= 0:
            known = True
            self.outstanding.count(worker, -1, -tokens)
        if not known:
            return
        if self.kv is not None:
            self.kv.ended(row)
            self._release()
        elif self._overrides("ended"):
            self._notify("ended", row)

    # ── Parts ──

    def _observe(self, worker: int, batch: EventBatch) -> None:
        assert self._index is not None
        self._index.apply_batch(worker, batch)
        now_ns, pool = time.monotonic_ns(), int(self.outstanding.pools[worker])
        if self._notify("observe", KvEventBatch(worker, batch, pool=pool, time_ns=now_ns)):
            self.missed_batches[worker] = self.missed_batches.get(worker, 0) + 1

    def _pick(self, request: LiveRouteRequest) -> int:
        if self._python is not None:
            try:
                worker = self._python.choose(request, self.outstanding)
            except Exception as error:
                raise self._record_exception("choose", error) from error
            is_id = isinstance(worker, int | np.integer) and not isinstance(worker, bool)
            if not is_id or worker not in self.outstanding.ready:
                raise self._record_failure(
                    "choose",
                    f"the router chose worker {worker!r}, which is not ready; "
                    f"choose one of the {len(self.outstanding.ready)} ids in view.ready",
                )
            choice: int = worker
            return choice
        policy, session = self._native, request.session
        if session is None:
            policy, session = self._no_session or policy, request.row
        assert policy is not None
        work = self.outstanding
        return policy.pick(
            request.row, session, work.requests, work.tokens, work.ready, request.parent_session
        )

    def _send(self, request: LiveRouteRequest, send: Callable[[Decision], None], decision: Decision) -> None:
        tokens = request.prompt_tokens + request.output_tokens
        self._sent[request.row] = (decision.worker, tokens)
        self.outstanding.count(decision.worker, 1, tokens)
        send(decision)

    def _read_decision(self) -> Decision:
        assert self.kv is not None
        last = self.kv.last
        return Decision(
            last.row,
            last.worker,
            last.overlap_blocks,
            last.lower_overlap_blocks,
            last.best_overlap_blocks,
            last.cost,
            last.ties,
            last.waited_ms,
        )

    def _release(self) -> None:
        if self.kv is None or not self._waiting or not any(self._available):
            return
        while (released := self.kv.release(self._now_ms())) is not None:
            request, send = self._waiting.pop(released[0])
            self._send(request, send, self._read_decision())

    def _now_ms(self) -> float:
        return (time.monotonic() - self._began_s) * 1e3

    def _notify(self, method: str, argument: object) -> PolicyError | None:
        """Call a router's method; record an exception, so that it fails neither the worker nor the request."""
        try:
            getattr(self._python, method)(argument)
        except Exception as error:
            return self._record_exception(method, error)
        return None

    def _record_exception(self, method: str, error: Exception) -> PolicyError:
        message = locate_user_failure(error) or f"the router's {method}() raised {format_in_one_line(error)}"
        return self._record_failure(method, message)

    def _record_failure(self, method: str, message: str) -> PolicyError:
        failure = PolicyError(message)
        self.failure = self.failure or failure
        if method not in self._failing:
            self._failing.add(method)
            log.error("%s (logged once)", message)
        return failure

    def _overrides(self, method: str) -> bool:
        return has_own(self._python, method)
