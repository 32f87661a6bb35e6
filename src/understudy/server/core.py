"""One live engine: the simulated engine, its requests, and the effects of a step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple, Protocol

from understudy._core import Tier, VllmEngine

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from understudy._core import EventBatch, Identities, RequestRecord, TierConfig, TierRun, VllmOffload
    from understudy.engines.config import VllmConfig
    from understudy.engines.timing import TimingModel

log = logging.getLogger("understudy.server")


class Listener(Protocol):
    """Receives the progress of a request. Called between steps only."""

    def on_admitted(self, request: LiveRequest, now_ns: int) -> None:
        """Handle the first scheduling of a request; `request.cached_tokens` is known."""

    def on_tokens(self, request: LiveRequest, first: int, count: int, now_ns: int) -> None:
        """Handle outputs `first` … `first + count − 1`, which became visible."""

    def on_end(self, request: LiveRequest, now_ns: int) -> None:
        """Handle the end of a request, the last call; `request.ended` says how it ended."""

    def on_error(self, request: LiveRequest) -> None:
        """Handle an exception of this listener: fail the answer, so that its client does not wait."""


class LiveRequest:
    """A request in one engine, with the times of its transitions (ns, −1: not yet)."""

    __slots__ = (
        "__weakref__",
        "aborted",
        "adapter",
        "admitted_ns",
        "arrival_ns",
        "below_cache_threshold",
        "cache_hit_threshold",
        "cached_tokens",
        "emitted",
        "ended",
        "engine_id",
        "eos_at",
        "finish_ns",
        "first_token_ns",
        "identities",
        "last_token_ns",
        "listener",
        "max_tokens",
        "name",
        "preemptions",
        "priority",
        "prompt_tokens",
        "rank",
        "record",
    )

    def __init__(
        self,
        name: str,
        prompt_tokens: int,
        max_tokens: int,
        identities: Identities | None,
        listener: Listener,
        *,
        priority: int = 0,
        eos_at: int | None = None,
        adapter: int = 0,
        cache_hit_threshold: float = 0.0,
    ) -> None:
        self.name = name
        self.eos_at = eos_at
        self.adapter = adapter
        self.cache_hit_threshold = cache_hit_threshold
        """Least share of the prompt that must be cached on arrival; with less the request is not computed here."""
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.identities = identities
        self.listener = listener
        self.priority = priority
        self.rank: EngineCore | None = None
        self.record: RequestRecord | None = None
        """The engine's record of the request, once it has ended there."""
        self.engine_id = -1
        self.emitted = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self.arrival_ns = self.admitted_ns = self.first_token_ns = self.last_token_ns = self.finish_ns = -1
        self.aborted = False
        """True when the server ended the request; its client gets the outputs so far."""
        self.below_cache_threshold = False
        """True when too little of the prompt was cached; the request was not submitted to the engine."""
        self.ended = ""
        """"finished", "cancelled", "lost" (its engine was killed, or has failed), or "" while in flight."""

    def notify_end(self, now_ns: int) -> None:
        """Notify the listener that the request has ended; log its errors."""
        try:
            self.listener.on_end(self, now_ns)
        except Exception:
            self.report_failure()

    def report_failure(self) -> None:
        """Log and count the exception being handled, and notify the listener."""
        log.exception("the answer to request %s failed", ascii(self.name))
        if self.rank is not None:
            self.rank.errors += 1
        try:
            self.listener.on_error(self)
        except Exception:
            log.exception("the failure of request %s could not be sent to its client", ascii(self.name))


class StepEffects(NamedTuple):
    """Effects that become visible at the end of a step."""

    tokens: list[tuple[LiveRequest, int, int]]
    """(request, first output, count), in the order of the batch."""

    finished: list[LiveRequest]
    batch_tokens: int
    """Tokens that the step computed."""

    def notify_listeners(self, now_ns: int) -> None:
        """Notify the listeners of these requests."""
        for request, first, count in self.tokens:
            try:
                request.listener.on_tokens(request, first, count, now_ns)
            except Exception:
                request.report_failure()
            request.last_token_ns = now_ns
        for request in self.finished:
            request.notify_end(now_ns)


class EngineCore:
    """The engine behind a rank. A driver passes the time; the engine reads no clock."""

    failure: Exception | None = None
    """The exception that stopped the engine; None while it computes."""
    errors = 0
    """Logged failures that did not stop the engine: `understudy:errors` on `/metrics`."""

    def __init__(
        self,
        config: VllmConfig,
        *,
        timing: TimingModel | None = None,
        tiers: TierConfig | None = None,
        offload: VllmOffload | None = None,
        run: TierRun | None = None,
        name: str = "worker",
        events: bool = False,
        stay_sample: float = 0.0,
        check: bool = False,
    ) -> None:
        self.config = config
        self.stay_sample = stay_sample
        drafts = config.speculative_config
        self.draft_tokens = 0 if drafts is None else drafts.num_speculative_tokens
        self.name = name
        self.offload = offload
        native = config.native(events=events, check=check, offload=offload, stay_sample=stay_sample)
        steps = config.native_timing(timing)

        def make() -> VllmEngine:
            return VllmEngine(native, steps, tiers=tiers, run=run, name=name)

        self._make = make
        self.has_tiers = tiers is not None
        self.has_events = events
        self.engine = self._make()
        self.live: dict[int, LiveRequest] = {}
        self.step_end_ns = -1
        self.wake_ns = -1
        self.steps = 0
        self.preemptions = 0
        self.paused = False
        self.admission_paused = False
        self._batch_tokens = 0

    def submit(self, request: LiveRequest) -> None:
        """Queue a request. InvalidArgument when the engine could never run it; nothing has changed then."""
        request.engine_id = self.engine.submit(
            request.name,
            request.prompt_tokens,
            request.max_tokens,
            request.identities,
            priority=request.priority,
            arrival_time=float(request.arrival_ns),
            eos_at=request.eos_at,
            adapter=request.adapter,
        )
        request.identities = None  # the engine has its own copy
        request.rank = self
        self.live[request.engine_id] = request

    def compute_cached_share(self, request: LiveRequest) -> float:
        """Return the cached share of a prompt, on the device and in tiers; before submission only."""
        if request.identities is None or request.prompt_tokens == 0:
            return 0.0
        size = self.config.block_size
        prompt = request.identities[: request.prompt_tokens // size]
        if self.has_tiers:
            found = sum(kind != "miss" for kind, _, _ in self.engine.tier_lookup(prompt))
        else:
            found = self.engine.cached_blocks(prompt)
        return found * size / request.prompt_tokens

    def cancel(self, request: LiveRequest, now_ns: int) -> bool:
        """Drop a request and free its blocks. False when it has already ended."""
        if request.rank is not self or request.engine_id not in self.live:
            return False
        request.record = self.engine.cancel(request.engine_id, now_ns)
        del self.live[request.engine_id]
        request.finish_ns = now_ns
        request.ended = "cancelled"
        return True

    def mark_lost(self, request: LiveRequest, now_ns: int) -> None:
        """Mark a request as lost without calling the engine, which has failed."""
        self.live.pop(request.engine_id, None)
        request.ended, request.finish_ns = "lost", now_ns

    def pause_admission(self, on: bool) -> None:
        """Stop or restart admission: while paused, requests with blocks run to their end and no other starts."""
        self.admission_paused = on
        self.engine.set_admitting(not on)

    @property
    def is_idle(self) -> bool:
        """True when no step is in progress and none would begin."""
        engine = self.engine
        if self.failure is not None:
            return True
        if engine.in_step:
            return False
        return self.paused or engine.idle or engine.stuck or (self.admission_paused and engine.drained)

    @property
    def holds_blocks(self) -> bool:
        """True when requests hold blocks."""
        return bool(self.live) and not self.engine.drained

    def begin(self, now_ns: int) -> bool:
        """Begin a step if there is work and no step is open; True if so, with its end in `step_end_ns`."""
        engine = self.engine
        if self.is_idle or engine.in_step:
            return False
        duration_ns = engine.begin_step(now_ns)
        for engine_id, _, cached in engine.admitted:
            request = self.live[engine_id]
            if request.admitted_ns < 0:
                request.admitted_ns = now_ns
                request.cached_tokens = cached
                try:
                    request.listener.on_admitted(request, now_ns)
                except Exception:
                    request.report_failure()
        for engine_id in engine.preempted:
            if engine_id in self.live:
                self.live[engine_id].preemptions += 1
                self.preemptions += 1
        if engine.asleep:
            return False
        self.step_end_ns = now_ns + duration_ns
        self._batch_tokens = sum(tokens for _, tokens in engine.batch)
        return True

    def end(self, now_ns: int) -> StepEffects:
        """End the open step and return its effects."""
        ended = self.engine.end_step(now_ns)
        self.step_end_ns = -1
        self.steps += 1
        live = self.live
        tokens: list[tuple[LiveRequest, int, int]] = []
        for engine_id, count in ended.tokens:
            if engine_id not in live:
                continue
            request = live[engine_id]
            tokens.append((request, request.emitted, count))
            request.emitted += count
            if request.first_token_ns < 0:
                request.first_token_ns = now_ns
        finished: list[LiveRequest] = []
        for record in ended.finished:
            if record.id in live:
                request = live.pop(record.id)
                request.record = record
                request.finish_ns = record.finish_ns
                request.ended = "finished"
                finished.append(request)
        return StepEffects(tokens, finished, self._batch_tokens)

    def fail(self, failure: Exception) -> list[LiveRequest]:
        """Stop the engine, also within a step. Returns the requests that are lost."""
        self.failure = failure
        self.step_end_ns = -1
        return self._mark_all_lost()

    def restart(self) -> list[LiveRequest]:
        """Replace the engine by a new one with an empty cache. Returns the requests that are lost."""
        lost = self._mark_all_lost()
        self._replace_engine()
        self.step_end_ns = -1
        self.failure = None
        return lost

    def _mark_all_lost(self) -> list[LiveRequest]:
        lost = list(self.live.values())
        self.live.clear()
        for request in lost:
            request.ended = "lost"
        return lost

    def forget_cache(self, now_ns: int) -> bool:
        """Clear every block that no request holds; in tiers too when there is no request.

        True when all were cleared: no events are published then. Else the next step's events list the cleared ones,
        and tiers keep their blocks.
        """
        if self.failure is not None:
            return False
        if not self.live and not self.engine.in_step and self.engine.idle:
            self._replace_engine()
            return True
        some_stay = self.holds_blocks or self.has_tiers
        self.engine.forget_cache(now_ns)
        if self.has_events and not some_stay:
            self.engine.take_events()
        return not some_stay

    def _replace_engine(self) -> None:
        self.engine = self._make()
        self.engine.set_admitting(not self.admission_paused)

    def take_events(self) -> tuple[EventBatch, npt.NDArray[np.int64]]:
        """Return the events of the steps that ended since the last call."""
        return self.engine.take_events()

    @property
    def num_running(self) -> int:
        """Number of requests that the scheduler runs."""
        return len(self.engine.running)

    @property
    def num_waiting(self) -> int:
        """Number of queued requests, with those whose blocks are being loaded."""
        return self.engine.num_waiting + (self.engine.parked if self.has_tiers else 0)

    @property
    def waits_for_transfers(self) -> bool:
        """True when no request can run and transfers to or between tiers are still in flight."""
        if not (self.engine.idle or (self.admission_paused and self.engine.drained)):
            return False
        return self.engine.offload_pending if self.offload is not None else not self.engine.tiers_idle

    @property
    def host_usage(self) -> float:
        """Share of the host tier's blocks that are in use, 0 … 1; 0 without a host tier."""
        if not self.has_tiers:
            return 0.0
        free, active, inactive, _ = self.engine.tier_blocks(Tier.G2)
        total = free + active + inactive
        return (active + inactive) / total if total else 0.0

    @property
    def usage(self) -> float:
        """Share of blocks that requests hold, 0 … 1."""
        return self.engine.pool[1] / self.config.num_gpu_blocks
