"""A worker: its engines (one per rank), their metrics, and the models that they serve."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from understudy._core import Tier, TokenBlocks
from understudy.engines.group_layouts import require_room
from understudy.server.engines import make_cores
from understudy.server.event_senders import make_senders
from understudy.server.handoff.network import HandOffMember
from understudy.server.latency import Latency
from understudy.server.metrics.errors import add_errors
from understudy.server.metrics.handoff import add_handoff
from understudy.server.metrics.late import add_lateness
from understudy.server.metrics.page import MetricsPage
from understudy.server.pauses import Pauses

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from understudy._core import EventBatch, Identities, TierConfig, TierRun
    from understudy.lateness import Lateness
    from understudy.server.api.texts import TokenTexts
    from understudy.server.core import EngineCore
    from understudy.server.driver import Driver
    from understudy.server.engines import GivenEngine
    from understudy.server.handoff.network import HandOffNetwork
    from understudy.server.live_request import LiveRequest, StepEffects
    from understudy.server.metrics.vllm import VllmMetrics
    from understudy.server.outputs import Outputs
    from understudy.server.push.network import PushNetwork
    from understudy.server.sessions import LiveSessions
    from understudy.server.settings import ServerSettings


class Worker:
    """Serves the requests of one port. Workers of a fleet may share its parts."""

    def __init__(
        self,
        settings: ServerSettings,
        driver: Driver,
        texts: TokenTexts,
        outputs: Outputs,
        *,
        tiers: TierConfig | None = None,
        run: TierRun | None = None,
        index: int = 0,
        token_lateness: Lateness | None = None,
        events: bool = False,
        given: GivenEngine | None = None,
        network: HandOffNetwork | None = None,
        push: PushNetwork | None = None,
        sessions: LiveSessions | None = None,
    ) -> None:
        self.settings = settings
        self.release = settings.release
        """The vLLM release that the server answers as."""
        self.weight_version = "default"
        """Label of the weights; `/update_weight_version` changes it."""
        self.given = given
        """A real engine in place of the simulated ones."""
        self.driver = driver
        self.texts = texts
        self.tokenizer = texts.tokenizer
        self.outputs = outputs
        self.index = index
        self.restarts = 0
        """Times that the worker was killed."""
        self.created = int(time.time())
        self.loras = {module.name: module for module in settings.lora_modules}
        self._adapter_numbers = {name: number for number, name in enumerate(self.loras, 1)}
        self.max_lateness_s = 0.0
        """Greatest lateness of a delivered token, seconds, since the reader set it to 0."""
        if not settings.kind.shortens_requests:
            require_room(settings.engine, settings.max_model_len)
        self.latency = None
        if settings.latency_ms is not None:
            self.latency = Latency(*settings.latency_ms, settings.latency_std_dev_ms, settings.seed + index)
        self.handoff: HandOffMember | None = None
        """The worker's part in hand-offs of KV blocks."""
        if network is not None and settings.handoff is not None:
            self.handoff = HandOffMember(network, settings.handoff, settings.engine.block_size)
        self.push = push
        """The worker's transfers as one side of a disaggregated SGLang server; None: it is none."""
        self.cores: list[EngineCore] = (
            [given.core(f"worker {index}", events=events)]
            if given is not None
            else make_cores(
                settings,
                index,
                timing=self.latency,
                tiers=tiers,
                run=run,
                events=events,
                handoff=self.handoff,
                push=push,
            )
        )
        self.sessions = sessions
        """Keeps the KV of sessions between their requests; None: no policy."""
        self._rank_of = {id(core): rank for rank, core in enumerate(self.cores)}
        self._hashed_ahead = self.cores[0].hashed_ahead
        page = MetricsPage.of(settings, self.cores)
        self.registry = page.registry
        self.metrics = page.ranks
        self.admission_rejections = page.admission_rejections
        self.http = page.http
        self.pauses = Pauses(self, page.sleep)
        self._held: list[tuple[LiveRequest, int]] | None = None
        """Requests that arrived while SGLang's generation was paused; None while it is not."""
        self.on_events: Callable[[int, int, EventBatch], None] | None = None
        """Called with every step's events: (worker, rank, batch)."""
        self.on_restart: Callable[[int], None] | None = None
        """Called when the worker has lost its cache."""
        self.on_lost: Callable[[int, list[LiveRequest], int], list[LiveRequest]] | None = None
        """Called when requests have lost the worker: (worker, requests, now). It returns those that end here."""
        self.is_down = False
        """True while the worker is away after a crash: requests that still reach it are lost."""
        self.on_end: Callable[[int, LiveRequest], None] | None = None
        """Called when a request has ended: (worker, request)."""
        self._between_steps: dict[int, list[Callable[[], None]]] = {}
        self.senders = make_senders(settings, self.cores)
        if given is not None and self.senders:
            given.connect_events(self.senders[0])
        if self.handoff is not None:
            add_handoff(self.registry, self.handoff, model_name=settings.names[0], engine="0")
        add_lateness(self.registry, driver.step_lateness, token_lateness)
        add_errors(self.registry, self.cores)
        if sessions is not None:
            sessions.join(self.cores, self.registry)
        for core in self.cores:
            driver.observe(core, self)

    # ── Requests ──

    def pick_rank(self, wanted: int | None) -> int:
        """Return the wanted rank, or the one with the shortest queue."""
        if wanted is not None and 0 <= wanted < len(self.cores):
            return wanted
        loads = [4 * core.num_waiting + core.num_running for core in self.cores]
        return loads.index(min(loads))

    def adapter_number(self, name: str) -> int:
        """Return the engine's number for an adapter; 0 for the base model."""
        return self._adapter_numbers.setdefault(name, len(self._adapter_numbers) + 1) if name else 0

    def identities(
        self,
        prompt: npt.NDArray[np.uint32],
        output: npt.NDArray[np.uint32],
        rank: int,
        *,
        salt: str,
        lora: str,
        session: str = "",
    ) -> Identities | None:
        """Compute the identities of the blocks that prompt and output fill; None without prefix caching."""
        if not self.settings.engine.caches_prefixes:
            return None
        blocks = TokenBlocks(prompt, self.settings.engine.block_size, salt=salt, lora=lora)
        blocks.extend(output)
        named = blocks.identities
        if self._hashed_ahead:
            named = named.hash_ahead(blocks.tokens, self._hashed_ahead)
        if self.senders:
            self.senders[rank].remember(
                named,
                blocks.tokens,
                salt=salt,
                lora=lora,
                lora_id=self.adapter_number(lora),
                session=session,
                hashed_ahead=self._hashed_ahead,
            )
        return named

    def retain_tokens(self, request: LiveRequest, rank: int) -> None:
        """Keep the tokens of a request's blocks while it is alive; before it is submitted."""
        if self.senders and request.identities is not None:
            self.senders[rank].retain(request)

    def report_hits(self, request: LiveRequest, named: Identities) -> None:
        """Publish the cached blocks of an admitted request too."""
        assert request.rank is not None
        if self.senders:
            self.senders[self._rank_of[id(request.rank)]].report_hits(request, named)

    def submit(self, request: LiveRequest, rank: int) -> None:
        """Submit a request to the engine of a rank; while generation is paused, keep it."""
        if self.is_down:
            self._lose_later(self.cores[rank], request)
        elif self._held is None:
            self.driver.submit(self.cores[rank], request)
        else:
            self._held.append((request, rank))

    def hold_requests(self) -> None:
        """Keep new requests until `release_requests`."""
        self._held = [] if self._held is None else self._held

    def release_requests(self) -> None:
        """Submit the requests that were kept, and new ones again."""
        held, self._held = self._held or [], None
        for request, rank in held:
            if not request.ended:
                self.driver.submit(self.cores[rank], request)

    def find_metrics(self, request: LiveRequest) -> VllmMetrics:
        """Return the metrics of a request's rank."""
        assert request.rank is not None
        return self.metrics[self._rank_of[id(request.rank)]]

    def on_step(self, core: EngineCore, effects: StepEffects, now_ns: int) -> None:  # noqa: ARG002
        """Count a step and publish its events."""
        rank = self._rank_of[id(core)]
        self.metrics[rank].on_step(effects)
        self._count_handoffs()
        self._publish_events(core, rank)
        if self._between_steps:
            self._run_between_steps(core)

    def call_between_steps(self, core: EngineCore, act: Callable[[], None]) -> None:
        """Call `act` once when the engine is between two steps and its events have been published."""

        def call_or_wait(_: int) -> None:
            self._between_steps.setdefault(id(core), []).append(act)
            if core.step_end_ns < 0 and not core.computing:
                self._publish_events(core, self._rank_of[id(core)])
                self._run_between_steps(core)

        self.driver.enqueue(core, call_or_wait)

    def _run_between_steps(self, core: EngineCore) -> None:
        for act in self._between_steps.pop(id(core), ()):
            act()

    def on_idle(self, core: EngineCore) -> None:
        """Trim the event sender's tokens and complete pending pauses."""
        if self.senders and core.step_end_ns < 0:
            self.senders[self._rank_of[id(core)]].trim()
        self.pauses.complete_pending()
        self._count_handoffs()

    def _count_handoffs(self) -> None:
        if self.handoff is not None and self.handoff.on_polled is not None:
            self.handoff.on_polled()

    def on_landed(self, core: EngineCore) -> None:
        """Publish the events of transfers that landed in an idle engine."""
        self._publish_events(core, self._rank_of[id(core)])

    def _publish_events(self, core: EngineCore, rank: int) -> None:
        if not core.has_events:
            return
        batch, _ = core.take_events()
        if self.senders:
            self.senders[rank].on_step(batch)
        if self.on_events is not None and len(batch):
            self.on_events(self.index, rank, batch)

    def live(self) -> list[LiveRequest]:
        """List the requests in flight."""
        return [request for core in self.cores for request in core.live.values()]

    # ── Lifecycle ──

    @property
    def failed(self) -> bool:
        """True when one of the engines has failed."""
        return any(core.failure is not None for core in self.cores)

    def reset_prefix_cache(self) -> bool:
        """Clear every cached block. False, and no effect, when requests hold some."""
        if any(core.holds_blocks for core in self.cores):
            return False
        for core in self.cores:
            self.clear_cache(core)
        return True

    def flush(self, then: Callable[[bool], None]) -> None:
        """Clear the caches, tiers included, if every engine is idle, and call `then` with True; else with False."""
        left = len(self.cores)
        idle = True

        def clear(now_ns: int, core: EngineCore) -> None:
            nonlocal left, idle
            idle = idle and core.is_empty
            left -= 1
            if not left and idle:
                for one in self.cores:
                    self._forget(one, now_ns)
            if not left:
                then(idle)

        for core in self.cores:
            self.driver.enqueue(core, partial(clear, core=core))

    def _forget(self, core: EngineCore, now_ns: int) -> None:
        """Clear the cache of an idle engine and publish that at once."""
        core.forget_cache(now_ns)
        rank = self._rank_of[id(core)]
        if self.senders:
            self.senders[rank].mark_cleared()
        if self.on_restart is not None:
            self.on_restart(self.index)
        self._publish_events(core, rank)

    def clear_cache(self, core: EngineCore) -> None:
        """Clear an engine's cache, except the blocks that requests hold."""

        def clear(now_ns: int) -> None:
            if not core.forget_cache(now_ns):
                return  # events list the cleared blocks
            if self.senders:
                self.senders[self._rank_of[id(core)]].mark_cleared()
            if self.on_restart is not None:
                self.on_restart(self.index)

        self.driver.enqueue(core, clear)

    def abort(self, requests: list[LiveRequest]) -> None:
        """End requests now; their clients get the outputs so far."""
        for request in requests:
            request.aborted = True
            self.driver.cancel(request)

    def kill(self) -> int:
        """Replace the engines by new ones with empty caches. Returns the number of lost requests."""
        lost = 0
        self.restarts += 1
        for core in self.cores:

            def restart(now_ns: int, core: EngineCore = core) -> None:
                if self.handoff is not None:
                    self.handoff.restart(now_ns)
                if self.push is not None:
                    self.push.restart(now_ns)
                lost = core.restart(now_ns)
                if self.senders:
                    self.senders[self._rank_of[id(core)]].restart()
                if self.on_restart is not None:
                    self.on_restart(self.index)
                self._end_lost(lost, now_ns)

            lost += len(core.live)
            self.driver.enqueue(core, restart)
        return lost

    def hand_back(self) -> None:
        """Take the requests that are in flight away from the engines: they have lost this worker, which goes on."""
        for core in self.cores:

            def take(now_ns: int, core: EngineCore = core) -> None:
                self._end_lost(core.take_all(now_ns), now_ns)

            self.driver.enqueue(core, take)

    def _lose_later(self, core: EngineCore, request: LiveRequest) -> None:
        request.arrival_ns = self.driver.clock.now_ns()
        request.rank = core

        def lose(now_ns: int) -> None:
            if not request.ended:
                core.mark_lost(request, now_ns)
                self._end_lost([request], now_ns)

        self.driver.enqueue(core, lose)

    def _end_lost(self, lost: list[LiveRequest], now_ns: int) -> None:
        ended = lost if self.on_lost is None or not lost else self.on_lost(self.index, lost, now_ns)
        for request in ended:
            request.finish_ns = now_ns
            request.notify_end(now_ns)

    def slow_links(self, tier: str, factor: float) -> None:
        """Divide the bandwidth of a tier's links by `factor`. Links of a shared tier slow down for all workers."""
        wanted, share = Tier[tier.upper()], 1 / factor
        for core in self.cores:

            def slow(now_ns: int, core: EngineCore = core) -> None:
                core.set_link_share(now_ns, wanted, share)

            self.driver.enqueue(core, slow)
        self.driver.poll_all()

    def close(self) -> None:
        """Release sockets."""
        if self.handoff is not None:
            self.handoff.close()
        for sender in self.senders:
            sender.close()
