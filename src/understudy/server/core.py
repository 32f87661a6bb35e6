"""One live engine of any kind, with its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from understudy._core import Engine as SimulatedEngine
from understudy._core import Phase, RequestSpec, VllmEngine
from understudy.engines.block_counts import BlockCounts
from understudy.engines.interface import HasLinks
from understudy.errors import WrongState
from understudy.server.live_request import StepEffects

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from understudy._core import Effects, EventBatch, LiveNet, Tier, VllmOffload
    from understudy.engines.interface import Engine
    from understudy.server.live_request import LiveRequest


class StepRecorder(Protocol):
    """Receives the requests and steps of an engine while a profile runs."""

    def on_submit(self, request: LiveRequest, now_ns: int) -> None:
        """Note a submitted request."""

    def on_step(self, engine: Engine, now_ns: int, *, ended: bool) -> None:
        """Record a step that has begun or ended."""

    def on_restart(self, core: EngineCore) -> None:
        """Note that the engine was replaced."""

    def on_end(self, requests: list[LiveRequest], now_ns: int) -> None:
        """Note requests that have ended."""


_NEVER = (1 << 63) - 1
_ENDS = {"cancelled": "cancelled", "failed": "lost"}
"""How requests end, by the reason of the engine's record; others are finished."""


class EngineCore:
    """The engine behind a rank and its live requests. A driver passes the time; the engine reads no clock."""

    failure: Exception | None = None
    """The exception that stopped the engine; None while it computes."""
    recorder: StepRecorder | None = None
    """Set while a profile runs."""
    errors = 0
    """Logged failures that did not stop the engine: `understudy:errors` on `/metrics`."""

    has_tiers = False
    net: LiveNet | None = None
    """Carries hand-offs of KV blocks to and from the engine; None: it takes no part in any."""
    on_handed: Callable[[LiveRequest], None] | None = None
    """Called when a prompt has ended whose blocks are kept for another engine."""
    on_failed: Callable[[LiveRequest], None] | None = None
    """Called when a request has failed whose KV moves between servers of SGLang."""
    failed_stages: dict[str, int] | None = None
    """Such requests by the stage in which they failed."""
    offload: VllmOffload | None = None
    stay_sample = 0.0
    draft_tokens = 0
    hashed_ahead = 0
    """Tokens behind a block that are part of its identity."""
    write_policy = ""
    """When a tier of SGLang copies to the host; empty: another kind of engine."""

    def __init__(
        self, make: Callable[[], Engine], *, name: str, block_size: int, num_blocks: int, events: bool = False
    ) -> None:
        """Make the engine; `make` is called again for one with an empty cache."""
        self._make = make
        self.name = name
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.has_events = events
        self.engine = make()
        self.live: dict[int, LiveRequest] = {}
        self.step_end_ns = -1
        """When the open step ends, perhaps `Effects.UNKNOWN`; −1: none is open."""
        self.computing = False
        """True while a thread runs the engine's `end_step`."""
        self.wake_ns = -1
        self.steps = 0
        self.preemptions = 0
        self.paused = False
        self.admission_paused = False
        self._slowdown = 1.0
        self._link_shares: dict[Tier, float] = {}
        self._load_failures: dict[Tier, float] = {}
        self._phase = Phase.IDLE
        self._next_id = 0
        self._batch_tokens = 0
        self._begin_ns = 0

    @property
    def waits_for_transfers(self) -> bool:
        """True when a transfer may let the engine go on."""
        return self.has_tiers or self.net is not None

    @property
    def vllm(self) -> VllmEngine:
        """Return the engine, for features that only vLLM's has. WrongState for another kind."""
        if not isinstance(self.engine, VllmEngine):
            raise WrongState(f"{self.name}: this needs a vLLM engine, not {type(self.engine).__name__}")
        return self.engine

    @property
    def simulated(self) -> SimulatedEngine:
        """Return the engine, for features of simulated ones. WrongState for one that computes."""
        if not isinstance(self.engine, SimulatedEngine):
            raise WrongState(f"{self.name}: this needs a simulated engine, not {type(self.engine).__name__}")
        return self.engine

    def find_refusal(self, request: LiveRequest) -> str | None:
        """Return why the engine can never run a request; None if it can."""
        return self.engine.never_fits(request.prompt_tokens, request.max_tokens)

    def make_spec(self, request: LiveRequest) -> object:
        """Convert a request to the engine's own form. InvalidArgument for a wrong value."""
        return RequestSpec(
            request.engine_id,
            request.name,
            request.prompt_tokens,
            request.max_tokens,
            request.identities,
            priority=request.priority,
            arrival_time=float(request.arrival_ns),
            eos_at=request.eos_at,
            adapter=request.adapter,
            leg=request.leg,
            peer=request.peer,
            peer_request=request.peer_request,
            tokens=request.tokens,
            salt=request.salt,
        )

    def submit(self, request: LiveRequest, now_ns: int) -> StepEffects:
        """Queue a request. InvalidArgument when the engine could never run it; nothing has changed then."""
        request.engine_id = self._next_id
        effects = self.engine.submit(self.make_spec(request), now_ns)
        self._next_id += 1
        request.identities = request.tokens = None  # the engine has its own copy
        request.rank = self
        self.live[request.engine_id] = request
        if self.recorder is not None:
            self.recorder.on_submit(request, now_ns)
        applied = self.apply(effects, now_ns)
        for ended in applied.finished:
            ended.refused = ended.ended == "cancelled"
        return applied

    def compute_cached_share(self, request: LiveRequest) -> float:
        """Return the cached share of a prompt, on the device and in tiers; before submission only."""
        if request.identities is None or request.prompt_tokens == 0:
            return 0.0
        found = self.engine.cached_prefix(request.identities[: request.prompt_tokens // self.block_size])
        return found * self.block_size / request.prompt_tokens

    def cancel(self, request: LiveRequest, now_ns: int) -> StepEffects:
        """Drop a request and free its blocks. No effect when it has ended, or was not submitted here."""
        if self.live.get(request.engine_id) is not request:
            return StepEffects([], [], 0)
        aborted = request.aborted
        effects = self.apply(self.engine.cancel(request.engine_id, now_ns), now_ns)
        request.aborted = aborted  # by this call, not by the engine
        return effects

    def mark_lost(self, request: LiveRequest, now_ns: int) -> None:
        """Mark a request as lost without calling the engine, which has failed."""
        self.live.pop(request.engine_id, None)
        request.ended, request.finish_ns = "lost", now_ns

    def pause_admission(self, on: bool) -> None:
        """Stop or restart admission: while paused, requests with blocks run to their end and no other starts."""
        self.engine.set_admitting(not on)
        self.admission_paused = on
        self._phase = self.engine.snapshot().phase

    @property
    def is_idle(self) -> bool:
        """True when no step is in progress and none would begin."""
        if self.computing:
            return False
        if self.failure is not None:
            return True
        if self.step_end_ns >= 0:
            return False
        idle = self.paused or self._phase in (Phase.IDLE, Phase.STALLED)
        return idle or (self.admission_paused and self.engine.drained)

    @property
    def is_empty(self) -> bool:
        """True when the engine has no request and no step, so that its cache can be replaced."""
        return not self.live and self.step_end_ns < 0 and not self.computing and self._phase == Phase.IDLE

    @property
    def holds_blocks(self) -> bool:
        """True when requests hold blocks, or some are kept for another engine."""
        kept = self.net is not None and isinstance(self.engine, VllmEngine) and bool(self.engine.held)
        return kept or (bool(self.live) and not self.engine.drained)

    def begin(self, now_ns: int) -> bool:
        """Begin a step if there is work and no step is open; True if so, with its end in `step_end_ns`."""
        if self.step_end_ns >= 0 or self.computing or self.is_idle:
            return False
        if now_ns < self._begin_ns:  # an idle loop that sleeps between two polls
            return False
        effects = self.engine.begin_step(now_ns)
        self.apply(effects, now_ns).notify_listeners(now_ns)
        if effects.phase not in (Phase.IN_STEP, Phase.STALLED) or effects.wake_ns is None:
            return False
        self.step_end_ns = effects.wake_ns
        self._batch_tokens = effects.batch_tokens
        if self.recorder is not None:
            self.recorder.on_step(self.engine, now_ns, ended=False)
        return True

    def end(self, effects: Effects, now_ns: int) -> StepEffects:
        """Apply the effects of the engine's `end_step`."""
        self.step_end_ns = -1
        self.steps += 1
        if self.recorder is not None:
            self.recorder.on_step(self.engine, now_ns, ended=True)
        return self.apply(effects, now_ns, effects.batch_tokens or self._batch_tokens)

    def land(self, now_ns: int) -> None:
        """Finish the transfers that end by then."""
        self.apply(self.engine.land(now_ns), now_ns).notify_listeners(now_ns)

    def apply(self, effects: Effects, now_ns: int, batch_tokens: int = 0) -> StepEffects:
        """Update the live requests by the effects of a call; the caller notifies their listeners."""
        # A computing engine may have received requests after these effects.
        self._phase = self.engine.snapshot().phase if self.computing else effects.phase
        if self.net is not None:
            waits = effects.phase in (Phase.READY, Phase.ASLEEP)
            self._begin_ns = (effects.wake_ns or _NEVER) if waits else 0
        live = self.live
        for admitted in effects.admitted:
            request = live.get(admitted.request)
            if request is not None and request.admitted_ns < 0:
                request.cached_tokens, request.below_tokens = admitted.cached_tokens, admitted.below_tokens
                request.pulled_tokens = admitted.pulled_tokens
                request.notify_admitted(now_ns)
        for engine_id in effects.preempted:
            if engine_id in live:
                live[engine_id].preemptions += 1
                self.preemptions += 1
        tokens: list[tuple[LiveRequest, int, int]] = []
        for engine_id, count in effects.tokens:
            request = live.get(engine_id)
            if request is None:
                continue
            if request.admitted_ns < 0:  # the engine does not report admissions
                request.notify_admitted(now_ns)
            tokens.append((request, request.emitted, count))
            request.emitted += count
            if request.first_token_ns < 0:
                request.first_token_ns = now_ns
        finished: list[LiveRequest] = []
        for record in effects.finished:
            request = live.pop(record.id, None)
            if request is None:
                continue
            request.record = record
            request.finish_ns = record.finish_ns
            request.ended = _ENDS.get(record.reason, "finished")
            request.aborted = request.aborted or request.ended == "cancelled"
            if request.leg == "prefill" and request.ended == "finished" and self.on_handed is not None:
                self.on_handed(request)
            if request.ended == "lost" and self.on_failed is not None:
                request.ended = "failed"
                self.on_failed(request)
            elif request.leg == "decode" and request.ended == "lost":
                request.ended = "failed"
            finished.append(request)
        if self.recorder is not None and finished:
            self.recorder.on_end(finished, now_ns)
        return StepEffects(tokens, finished, batch_tokens)

    def take_all(self, now_ns: int) -> list[LiveRequest]:
        """Drop all requests and free their blocks; they are lost. The cache and an open step stay."""
        taken = list(self.live.values())
        for request in taken:
            self.apply(self.engine.cancel(request.engine_id, now_ns), now_ns)
            request.ended, request.aborted = "lost", False
        return taken

    def fail(self, failure: Exception) -> list[LiveRequest]:
        """Stop the engine, also within a step. Returns the requests that are lost."""
        self.failure = failure
        self.step_end_ns = -1
        return self._mark_all_lost()

    def restart(self, now_ns: int = 0) -> list[LiveRequest]:
        """Replace the engine by a new one with an empty cache. Returns the requests that are lost."""
        lost = self._mark_all_lost()
        self._replace_engine(now_ns)
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
        if self.is_empty:
            self._replace_engine(now_ns)
            return True
        some_stay = self.holds_blocks or self.has_tiers
        self.engine.forget_cache(now_ns)
        self._phase = self.engine.snapshot().phase
        if self.has_events and not some_stay:
            self.engine.take_events()
        return not some_stay

    def _replace_engine(self, now_ns: int) -> None:
        self.engine = self._make()
        self._begin_ns = 0
        if self._slowdown != 1.0:
            self.set_slowdown(self._slowdown)
        for tier, share in self._link_shares.items():
            self.set_link_share(now_ns, tier, share)
        for tier, rate in self._load_failures.items():
            self.set_load_failures(tier, rate)
        if self.recorder is not None:
            self.recorder.on_restart(self)
        if self.admission_paused:
            self.engine.set_admitting(False)
        self._phase = self.engine.snapshot().phase

    def take_events(self) -> tuple[EventBatch, npt.NDArray[np.int64]]:
        """Return the events of the steps that ended since the last call."""
        return self.engine.take_events()

    @property
    def num_running(self) -> int:
        """Number of requests that the scheduler runs."""
        return self.engine.snapshot().running

    @property
    def num_waiting(self) -> int:
        """Number of queued requests, with those whose blocks are being loaded."""
        now = self.engine.snapshot()
        return now.waiting + now.parked

    @property
    def active_blocks(self) -> int:
        """Number of device blocks that requests hold."""
        return self.engine.snapshot().active_blocks

    @property
    def usage(self) -> float:
        """Share of blocks that requests hold, 0 … 1."""
        return self.active_blocks / self.num_blocks

    @property
    def host_usage(self) -> float:
        """Share of the host tier's blocks that are in use, 0 … 1; 0 without a host tier."""
        if not self.has_tiers:
            return 0.0
        return self.count_blocks(("g2",))["g2"].usage

    def count_blocks(self, tiers: Sequence[str]) -> dict[str, BlockCounts]:  # noqa: ARG002
        """Count the blocks of the device and of these tiers below it, by the tier's name."""
        active = self.active_blocks
        return {"device": BlockCounts(self.num_blocks - active, active, 0)}

    def set_link_share(self, now_ns: int, tier: Tier, share: float) -> None:
        """Leave a share of the bandwidth of a tier's links. WrongState for an engine that has none."""
        if not isinstance(self.engine, HasLinks):
            raise WrongState(
                f"{self.name}: this needs an engine with tiers, not {type(self.engine).__name__}"
            )
        self.engine.set_link_share(now_ns, tier, share)
        self._link_shares[tier] = share

    def set_slowdown(self, factor: float) -> None:
        """Make steps that begin from now on `factor` times as long. WrongState for an engine that cannot."""
        self.simulated.set_slowdown(factor)
        self._slowdown = factor

    def set_load_failures(self, tier: Tier, rate: float) -> None:
        """Let a share of the loads from a tier fail. WrongState for an engine without tiers."""
        self.simulated.set_load_failures(tier, rate)
        self._load_failures[tier] = rate
