"""One live engine: the simulated engine, the requests in it, and what a step of it did."""

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
    """Who waits for the tokens of a request. Called between steps, never in the middle of one."""

    def on_admitted(self, request: LiveRequest, now_ns: int) -> None:
        """It was scheduled for the first time; `request.cached_tokens` is known."""

    def on_tokens(self, request: LiveRequest, first: int, count: int, now_ns: int) -> None:
        """Outputs `first` … `first + count − 1` became visible."""

    def on_end(self, request: LiveRequest, now_ns: int) -> None:
        """It has ended: `request.ended` says how. Nothing follows."""

    def on_broken(self, request: LiveRequest) -> None:
        """It raised, and whoever waits for it must not wait for ever."""


class LiveRequest:
    """A request on its way through one engine, with the times at which things happened to it (ns, −1: not yet)."""

    __slots__ = (
        "__weakref__",
        "aborted",
        "adapter",
        "admitted_ns",
        "arrival_ns",
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
        "turned_away",
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
        """The share of its prompt that must be cached when it comes; with less it is not computed here."""
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.identities = identities
        self.listener = listener
        self.priority = priority
        self.rank: EngineCore | None = None
        self.record: RequestRecord | None = None
        """What the engine wrote of it, once it has ended there."""
        self.engine_id = -1
        self.emitted = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self.arrival_ns = self.admitted_ns = self.first_token_ns = self.last_token_ns = self.finish_ns = -1
        self.aborted = False
        """It was ended from inside, and its client is to be told what there was of it."""
        self.turned_away = False
        """Too little of it was cached; the engine has not seen it."""
        self.ended = ""
        """"finished", "cancelled", "lost" (its engine was killed, or has failed), or "" while it is on its way."""

    def tell_end(self, now_ns: int) -> None:
        """Who waits for it hears that it has ended; nobody else hears of it if that fails."""
        try:
            self.listener.on_end(self, now_ns)
        except Exception:
            self.broke()

    def broke(self) -> None:
        """What was raised just now is its own affair: it goes to the log, and all others go on."""
        log.exception("the answer to request %s failed", ascii(self.name))
        if self.rank is not None:
            self.rank.errors += 1
        try:
            self.listener.on_broken(self)
        except Exception:
            log.exception("nor could its client be told")


class StepEffects(NamedTuple):
    """What became visible at the end of a step."""

    tokens: list[tuple[LiveRequest, int, int]]
    """(request, first output, count), in the order of the batch."""

    finished: list[LiveRequest]
    batch_tokens: int
    """Tokens that the step computed."""

    def tell(self, now_ns: int) -> None:
        """Who waits for these requests hears of it."""
        for request, first, count in self.tokens:
            try:
                request.listener.on_tokens(request, first, count, now_ns)
            except Exception:
                request.broke()
            request.last_token_ns = now_ns
        for request in self.finished:
            request.tell_end(now_ns)


class EngineCore:
    """The engine behind a rank. Told the time by a driver; reads no clock."""

    failure: Exception | None = None
    """Why it computes nothing any more; None while it does."""
    errors = 0
    """What failed around it, was told to the log, and stopped nobody: `understudy:errors` on `/metrics`."""

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
        self.holding = False
        self._batch_tokens = 0

    def submit(self, request: LiveRequest) -> None:
        """Queue it. InvalidArgument when the engine could never run it; nothing has changed then."""
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
        request.identities = None  # the engine has its own
        request.rank = self
        self.live[request.engine_id] = request

    def cached_share(self, request: LiveRequest) -> float:
        """What it would find of its prompt, on the device and below, if it began now; before it is submitted."""
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
        """Drop it and free its blocks. False when it has already ended."""
        if request.rank is not self or request.engine_id not in self.live:
            return False
        request.record = self.engine.cancel(request.engine_id, now_ns)
        del self.live[request.engine_id]
        request.finish_ns = now_ns
        request.ended = "cancelled"
        return True

    def lose(self, request: LiveRequest, now_ns: int) -> None:
        """It has ended, whatever its engine, which can no longer be told, makes of it."""
        self.live.pop(request.engine_id, None)
        request.ended, request.finish_ns = "lost", now_ns

    def hold(self, on: bool) -> None:
        """While on, the queue waits: who holds blocks goes on to its end, and nobody else begins."""
        self.holding = on
        self.engine.set_admitting(not on)

    @property
    def quiet(self) -> bool:
        """No step is in progress, and none would begin."""
        engine = self.engine
        if self.failure is not None:
            return True
        if engine.in_step:
            return False
        return self.paused or engine.idle or engine.stuck or (self.holding and engine.drained)

    @property
    def holds_blocks(self) -> bool:
        """Requests hold some of its blocks."""
        return bool(self.live) and not self.engine.drained

    def begin(self, now_ns: int) -> bool:
        """Begin a step if there is something to do and none is open; True if so, and `step_end_ns` is its end."""
        engine = self.engine
        if self.quiet or engine.in_step:
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
                    request.broke()
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
        """End the open step. What it did is visible in the result, and nowhere before."""
        told = self.engine.end_step(now_ns)
        self.step_end_ns = -1
        self.steps += 1
        live = self.live
        tokens: list[tuple[LiveRequest, int, int]] = []
        for engine_id, count in told.tokens:
            if engine_id not in live:
                continue
            request = live[engine_id]
            tokens.append((request, request.emitted, count))
            request.emitted += count
            if request.first_token_ns < 0:
                request.first_token_ns = now_ns
        finished: list[LiveRequest] = []
        for record in told.finished:
            if record.id in live:
                request = live.pop(record.id)
                request.record = record
                request.finish_ns = record.finish_ns
                request.ended = "finished"
                finished.append(request)
        return StepEffects(tokens, finished, self._batch_tokens)

    def fail(self, failure: Exception) -> list[LiveRequest]:
        """It computes nothing any more, in the middle of a step or not. Returns the requests that are lost with it."""
        self.failure = failure
        self.step_end_ns = -1
        return self._lose_all()

    def restart(self) -> list[LiveRequest]:
        """The engine dies and another takes its place, with nothing cached. Returns the requests that died with it."""
        lost = self._lose_all()
        self._renew()
        self.step_end_ns = -1
        self.failure = None
        return lost

    def _lose_all(self) -> list[LiveRequest]:
        lost = list(self.live.values())
        self.live.clear()
        for request in lost:
            request.ended = "lost"
        return lost

    def forget_cache(self, now_ns: int) -> bool:
        """Forget every block that nobody holds; below the device too where nobody is here.

        Whether that was all of them: then no events tell of it. Else the next step's tell which: what lies below stays.
        """
        if self.failure is not None:
            return False
        if not self.live and not self.engine.in_step and self.engine.idle:
            self._renew()
            return True
        some_stay = self.holds_blocks or self.has_tiers
        self.engine.forget_cache(now_ns)
        if self.has_events and not some_stay:
            self.engine.take_events()
        return not some_stay

    def _renew(self) -> None:
        self.engine = self._make()
        self.engine.set_admitting(not self.holding)

    def take_events(self) -> tuple[EventBatch, npt.NDArray[np.int64]]:
        """The events of ended steps since the last call."""
        return self.engine.take_events()

    @property
    def num_running(self) -> int:
        """Requests that the scheduler runs."""
        return len(self.engine.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, those whose blocks are being loaded among them."""
        return self.engine.num_waiting + (self.engine.parked if self.has_tiers else 0)

    @property
    def still_lands(self) -> bool:
        """Nobody is here, or nobody who may go on, and what those who were left is on its way to or between tiers."""
        if not (self.engine.idle or (self.holding and self.engine.drained)):
            return False
        return self.engine.offload_pending if self.offload is not None else not self.engine.tiers_idle

    @property
    def host_usage(self) -> float:
        """The share of the host's blocks that hold something, 0 … 1; 0 without a host tier."""
        if not self.has_tiers:
            return 0.0
        free, active, inactive, _ = self.engine.tier_blocks(Tier.G2)
        total = free + active + inactive
        return (active + inactive) / total if total else 0.0

    @property
    def usage(self) -> float:
        """The share of blocks that requests hold, 0 … 1."""
        return self.engine.pool[1] / self.config.num_gpu_blocks
