"""A routing policy on the wall clock: asked about every request, told what becomes of it.

The policies are those of a replay, the same objects: native ones by name, `KvRouting`, or a `Router` of yours.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from understudy._core import NativeRouter, native_router
from understudy.errors import ConfigError, PolicyError, WrongState
from understudy.router.kv import KvRouting
from understudy.router.load import failure_of_yours, in_a_line

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from understudy._core import EventBatch, Identities
    from understudy.events.columns import EventColumns
    from understudy.router.router import Router

log = logging.getLogger("understudy.router")

POLICIES = ("round_robin", "random", "least_loaded", "power_of_two", "session_affinity", "kv")
BATCH_TOKENS = 8192
_NEVER = 1 << 62  # outstanding tokens of who must not be chosen


class Asked(NamedTuple):
    """What a router may know of a request, as in a replay (`RouteRequest`)."""

    row: int
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    priority: int
    block_size: int
    prompt_blocks: Identities
    session: int | None = None
    """The same number for requests that belong together."""


class Decision(NamedTuple):
    """Where a request goes, and why."""

    row: int
    worker: int
    overlap_blocks: int = 0
    """Of its prompt, that the worker is believed to hold on the device, and on slower tiers."""
    lower_overlap_blocks: int = 0
    best_overlap_blocks: int = 0
    """The most that any worker is believed to hold on the device."""
    cost: float = 0.0
    ties: int = 1
    waited_ms: float = 0.0


class EventRows(NamedTuple):
    """Events of a stream in the rows of a store's batch, as far as a router reads them: a row a block."""

    kinds: npt.NDArray[np.uint8]
    tiers: npt.NDArray[np.uint8]
    sequence_hashes: npt.NDArray[np.uint64]
    sole: npt.NDArray[np.bool_]


class Told(NamedTuple):
    """What a router is told of a worker's blocks, as in a replay (`KvEventBatch`)."""

    worker: int
    time_ns: int
    events: Any


class View(Protocol):
    """What a Python router sees of the workers (`FleetView`)."""

    def __len__(self) -> int: ...


class Counted:
    """Workers as a router counts them by itself: what it sent to each, and has not ended."""

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.tokens: list[int] = []

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def now_ns(self) -> int:
        """A clock that only goes forward."""
        return time.monotonic_ns()

    @property
    def outstanding_requests(self) -> npt.NDArray[np.int64]:
        """Requests that were sent to each worker and have not ended."""
        return np.array(self.requests, dtype=np.int64)

    @property
    def outstanding_tokens(self) -> npt.NDArray[np.int64]:
        """Their tokens, prompt and requested output."""
        return np.array(self.tokens, dtype=np.int64)


class Dispatcher:
    """Sends requests of a live fleet to workers by one policy. For one thread."""

    def __init__(self, policy: str | KvRouting | Router, *, seed: int = 0, view: View | None = None) -> None:
        """`view` is what a Python router gets to see; unless given, what is counted here."""
        if policy == "kv":
            policy = KvRouting()
        if isinstance(policy, KvRouting):
            for name in ("event_delay_ms", "event_period_ms", "event_loss"):
                if getattr(policy, name):
                    raise ConfigError(
                        f"{name} is for offline runs: on the wall clock events come as they come"
                    )
        self._uses_events = not isinstance(policy, KvRouting) or policy.use_events
        self.kv = policy.build(seed, keep_decisions=False) if isinstance(policy, KvRouting) else None
        self._native: NativeRouter | None = None
        self._newcomers: NativeRouter | None = None
        self._python: Any = None
        if isinstance(policy, str):
            self._native = native_router(policy, seed)
            if self._native is None:
                known = ", ".join(POLICIES)
                raise ConfigError(
                    f"--routing {policy!r} is not known; choose one of {known} or FILE.py:CLASS"
                )
            if policy == "session_affinity":  # who belongs to nobody goes to the least loaded
                self._newcomers = native_router("least_loaded", seed)
        elif self.kv is None:
            self._python = policy
        if self.kv is not None:
            self.kv.begin(0)
        self.counted = Counted()
        self._view = self.counted if view is None else view
        self._available: list[bool] = []
        self._sent: dict[int, tuple[int, int]] = {}  # row: its worker and tokens
        self._waiting: dict[int, tuple[Asked, Callable[[Decision], None]]] = {}
        self._rows = 0
        self._began_s = time.monotonic()
        self._failing: set[str] = set()
        self.failure: PolicyError | None = None
        """The first of a router of yours: an exception out of it, or a choice that is no worker."""

    # ── The fleet ──

    @property
    def wants_blocks(self) -> bool:
        """Whether it looks at the blocks of a prompt."""
        return self._native is None

    @property
    def wants_events(self) -> bool:
        """Whether it listens to what workers say of their blocks."""
        return self._uses_events if self.kv is not None else self._hears("observe")

    @property
    def num_waiting(self) -> int:
        """Requests that wait here."""
        return len(self._waiting)

    def add_worker(self, batch_tokens: int = BATCH_TOKENS) -> int:
        """One more; returns its number. `batch_tokens` of prompts fit into one of its steps."""
        if self.kv is not None:
            self.kv.add_worker(batch_tokens)
        self._available.append(True)
        self.counted.requests.append(0)
        self.counted.tokens.append(0)
        return len(self._available) - 1

    def set_available(self, worker: int, available: bool) -> None:
        """Whether it may be chosen."""
        if self._available[worker] == available:
            return
        self._available[worker] = available
        if self.kv is not None:
            self.kv.set_available(worker, available)
        self._release()

    def set_degraded(self, worker: int, degraded: bool) -> None:
        """While events do not tell the whole truth of a worker, what is sent there counts as cached."""
        if self.kv is not None:
            self.kv.set_degraded(worker, degraded)

    def forget(self, worker: int) -> None:
        """A worker holds nothing any more, or nobody knows what."""
        if self.kv is not None:
            self.kv.forget(worker)

    def observe(self, worker: int, batch: EventBatch) -> None:
        """A step of a worker stored or removed blocks."""
        if self.kv is not None:
            self.kv.index.apply_batch(worker, batch)
        elif self._hears("observe"):
            self._tell("observe", Told(worker, time.monotonic_ns(), batch))

    def observe_columns(self, worker: int, columns: EventColumns) -> None:
        """The same of a consolidated stream, whose blocks bear the names that prompts' blocks have."""
        if self.kv is not None:
            self.kv.index.apply_columns(
                worker, columns.kinds, columns.tiers, columns.offsets, columns.sequence_hashes
            )
        elif self._hears("observe"):
            counts = np.diff(columns.offsets)
            rows = EventRows(
                np.repeat(columns.kinds, counts),
                np.repeat(columns.tiers, counts),
                columns.sequence_hashes,
                np.ones(len(columns.sequence_hashes), dtype=np.bool_),
            )
            self._tell("observe", Told(worker, time.monotonic_ns(), rows))

    # ── Requests ──

    def next_row(self) -> int:
        """A number for the next request."""
        self._rows += 1
        return self._rows

    def ask(self, asked: Asked, go: Callable[[Decision], None]) -> None:
        """Calls `go` with the decision: now, or when the request need not wait any longer.

        WrongState when no worker is available; PolicyError when a router of yours fails.
        """
        if not any(self._available):
            raise WrongState("no worker is available")
        if self.kv is None:
            self._go(asked, go, Decision(asked.row, self._pick(asked)))
            return
        worker = self.kv.decide(
            asked.row,
            asked.prompt_blocks.sequence_hashes,
            asked.prompt_tokens,
            asked.block_size,
            self._now_ms(),
            priority=asked.priority,
        )
        if worker is None:
            self._waiting[asked.row] = (asked, go)
        else:
            self._go(asked, go, self._decided())

    def first_token(self, row: int) -> None:
        """Its answer has begun."""
        if self.kv is not None:
            self.kv.first_token(row)
            self._release()
        elif self._hears("first_token"):
            self._tell("first_token", row)

    def ended(self, row: int) -> None:
        """It is gone: answered, failed, or nobody waits for it. Once is enough, twice does no harm."""
        known = self._waiting.pop(row, None) is not None
        worker, tokens = self._sent.pop(row, (-1, 0))
        if worker >= 0:
            known = True
            self.counted.requests[worker] -= 1
            self.counted.tokens[worker] -= tokens
        if not known:
            return
        if self.kv is not None:
            self.kv.ended(row)
            self._release()
        elif self._hears("ended"):
            self._tell("ended", row)

    # ── Parts ──

    def _pick(self, asked: Asked) -> int:
        if self._python is not None:
            try:
                worker = self._python.choose(asked, self._view)
            except Exception as error:
                raise self._failed("choose", error) from error
            if not isinstance(worker, int | np.integer) or not 0 <= worker < len(self._available):
                raise self._noted(
                    "choose", f"the router chose worker {worker!r}; there are {len(self._available)}"
                )
            return int(worker) if self._available[int(worker)] else self._available.index(True)
        policy, session = self._native, asked.session
        if session is None:
            policy, session = self._newcomers or policy, asked.row
        assert policy is not None
        tokens = [
            tokens if up else _NEVER for tokens, up in zip(self.counted.tokens, self._available, strict=True)
        ]
        for _ in tokens:  # some go by turns or by chance, and meet who is away
            worker = policy.pick(asked.row, session, self.counted.requests, tokens)
            if self._available[worker]:
                return worker
        return self._available.index(True)

    def _go(self, asked: Asked, go: Callable[[Decision], None], decision: Decision) -> None:
        tokens = asked.prompt_tokens + asked.output_tokens
        self._sent[asked.row] = (decision.worker, tokens)
        self.counted.requests[decision.worker] += 1
        self.counted.tokens[decision.worker] += tokens
        go(decision)

    def _decided(self) -> Decision:
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
            asked, go = self._waiting.pop(released[0])
            self._go(asked, go, self._decided())

    def _now_ms(self) -> float:
        return (time.monotonic() - self._began_s) * 1e3

    def _tell(self, method: str, what: object) -> None:
        """A router that does not take it harms neither the worker that told it nor the request."""
        try:
            getattr(self._python, method)(what)
        except Exception as error:
            self._failed(method, error)

    def _failed(self, method: str, error: Exception) -> PolicyError:
        what = failure_of_yours(error) or f"the router's {method}() raised {in_a_line(error)}"
        return self._noted(method, what)

    def _noted(self, method: str, what: str) -> PolicyError:
        failure = PolicyError(what)
        self.failure = self.failure or failure
        if method not in self._failing:
            self._failing.add(method)
            log.error("%s (told once)", what)
        return failure

    def _hears(self, method: str) -> bool:
        own = getattr(self._python, method, None)
        return own is not None and not hasattr(own, "does_nothing")
