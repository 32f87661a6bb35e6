"""A worker: its engines (one a rank), their metrics, and the models that they serve."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from understudy._core import Tier, TokenBlocks
from understudy.engines.offload import build_live_offload
from understudy.errors import ConfigError
from understudy.server.core import EngineCore, LiveRequest, StepEffects
from understudy.server.knobs import Latency
from understudy.server.kv_events import KvEventsConfig, KvEventSender
from understudy.server.metrics import Registry
from understudy.server.metrics.cache_info import add_cache_info
from understudy.server.metrics.errors import add_errors
from understudy.server.metrics.features import SleepMetrics
from understudy.server.metrics.late import add_lateness
from understudy.server.metrics.others import SglangMetrics, add_old_names
from understudy.server.metrics.process import HttpMetrics, add_process
from understudy.server.metrics.vllm import VllmMetrics
from understudy.server.pauses import Pauses

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from understudy._core import EventBatch, Identities, TierConfig, TierRun
    from understudy.server.api.texts import TokenTexts
    from understudy.server.driver import Driver
    from understudy.server.engines import GivenEngine
    from understudy.server.lateness import Lateness
    from understudy.server.outputs import Outputs
    from understudy.server.settings import ServerSettings


class Worker:
    """What answers requests behind one port. Its parts may be shared by the workers of a fleet."""

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
    ) -> None:
        self.settings = settings
        self.given = given
        """A real engine in place of the simulated ones."""
        self.driver = driver
        self.texts = texts
        self.tokenizer = texts.tokenizer
        self.outputs = outputs
        self.index = index
        self.created = int(time.time())
        self.loras = {module.name: module for module in settings.lora_modules}
        self._adapter_numbers: dict[str, int] = {}
        self.worst_s = 0.0
        """How late a token of its was delivered at most, since somebody looked and set it to 0."""
        capacity = settings.engine.num_gpu_blocks * settings.engine.block_size
        if settings.max_model_len > capacity:
            raise ConfigError(
                f"max_model_len={settings.max_model_len} does not fit in {capacity} tokens of KV cache "
                f"({settings.engine.num_gpu_blocks} blocks of {settings.engine.block_size}); give more "
                "--num-gpu-blocks-override, a smaller --max-model-len, or --max-model-len auto"
            )
        self.latency = None
        if settings.latency_ms is not None:
            self.latency = Latency(*settings.latency_ms, settings.latency_std_dev_ms, settings.seed + index)
        self.cores = (
            [given.core(f"worker {index}", events=events)]
            if given is not None
            else [
                EngineCore(
                    settings.engine,
                    timing=self.latency,
                    tiers=tiers,
                    offload=build_live_offload(settings.tiers, settings.engine, settings.most_blocks),
                    run=run,
                    name=f"worker {index}"
                    if settings.data_parallel_size == 1
                    else f"worker {index} rank {rank}",
                    events=events,
                    stay_sample=settings.kv_cache_metrics_sample if settings.kv_cache_metrics else 0.0,
                )
                for rank in range(settings.data_parallel_size)
            ]
        )
        self.registry = Registry()
        add_process(self.registry)
        name = settings.names[0]
        kind = SglangMetrics if settings.metrics == "sglang" else VllmMetrics
        self.metrics: list[VllmMetrics] = [
            kind(self.registry, core, name, rank, settings.max_model_len)
            for rank, core in enumerate(self.cores)
        ]
        if settings.old_metric_names:
            add_old_names(self.registry, self.metrics[0], name)
        self.admission_rejections = {
            reason: self.registry.counter(
                "vllm:admission_rejections", "Requests turned away, by why.", model_name=name, reason=reason
            )
            for reason in ("max_num_queued_reqs", "max_num_queued_tokens")
        }
        add_cache_info(self.registry, settings, len(self.cores))
        self.http = HttpMetrics(self.registry)
        self.pauses = Pauses(self, SleepMetrics(self.registry))
        self.on_events: Callable[[int, int, EventBatch], None] | None = None
        """Told of every step's events: (worker, rank, batch)."""
        self.on_restart: Callable[[int], None] | None = None
        """Told when the worker has lost its cache."""
        self.on_end: Callable[[int, LiveRequest], None] | None = None
        """Told when a request has ended: (worker, request)."""
        self.senders: list[KvEventSender] = []
        config = KvEventsConfig.read(settings.kv_events_config)
        config = config.at(settings.host, settings.port, settings.names[0])
        if config.publishes:
            # A copy that is still on its way down may be told of after its block has gone above.
            keep = 512 + (4 * settings.engine.num_gpu_blocks if settings.tiers.tiers else 0)
            self.senders = [
                KvEventSender(config, settings.engine.block_size, rank, keep_blocks=keep)
                for rank in range(len(self.cores))
            ]
        if given is not None and self.senders:
            given.tell(self.senders[0])
        add_lateness(self.registry, driver.step_lateness, token_lateness)
        add_errors(self.registry, self.cores)
        self._rank_of = {id(core): rank for rank, core in enumerate(self.cores)}
        for core in self.cores:
            driver.observe(core, self)

    # ── Requests ──

    def pick_rank(self, wanted: int | None) -> int:
        """The rank that was asked for, or the one with the shortest queue."""
        if wanted is not None and 0 <= wanted < len(self.cores):
            return wanted
        loads = [4 * core.num_waiting + core.num_running for core in self.cores]
        return loads.index(min(loads))

    def adapter_number(self, name: str) -> int:
        """What the engine calls an adapter; 0 for the model itself."""
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
        """Names of the blocks that prompt and output fill, on their way to a rank."""
        if not self.settings.engine.enable_prefix_caching:
            return None
        blocks = TokenBlocks(prompt, self.settings.engine.block_size, salt=salt, lora=lora)
        blocks.extend(output)
        named = blocks.identities
        if self.senders:
            self.senders[rank].remember(named, blocks.tokens, salt=salt, lora=lora, session=session)
        return named

    def hold(self, request: LiveRequest, rank: int) -> None:
        """It is about to be submitted there: what its blocks are is remembered as long as it lives."""
        if self.senders and request.identities is not None:
            self.senders[rank].hold(request)

    def submit(self, request: LiveRequest, rank: int) -> None:
        """Hand it to the engine of a rank."""
        self.driver.submit(self.cores[rank], request)

    def metrics_of(self, request: LiveRequest) -> VllmMetrics:
        """Where its rank counts."""
        assert request.rank is not None
        return self.metrics[self._rank_of[id(request.rank)]]

    def on_step(self, core: EngineCore, effects: StepEffects, now_ns: int) -> None:  # noqa: ARG002
        """A step has ended."""
        rank = self._rank_of[id(core)]
        self.metrics[rank].on_step(effects)
        self._tell_events(core, rank)

    def on_rest(self, core: EngineCore) -> None:
        """It begins no step now."""
        if self.senders and core.step_end_ns < 0:
            self.senders[self._rank_of[id(core)]].forget_some()
        self.pauses.look()

    def on_landed(self, core: EngineCore) -> None:
        """Transfers have landed in an idle engine: what they changed is told now, since no step will."""
        self._tell_events(core, self._rank_of[id(core)])

    def _tell_events(self, core: EngineCore, rank: int) -> None:
        if not core.has_events:
            return
        batch, _ = core.take_events()
        if self.senders:
            self.senders[rank].on_step(batch)
        if self.on_events is not None and len(batch):
            self.on_events(self.index, rank, batch)

    def live(self) -> list[LiveRequest]:
        """Requests on their way."""
        return [request for core in self.cores for request in core.live.values()]

    # ── Life ──

    @property
    def failed(self) -> bool:
        """One of its engines computes nothing any more."""
        return any(core.failure is not None for core in self.cores)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block, unless requests hold some."""
        if any(core.holds_blocks for core in self.cores):
            return False
        for core in self.cores:
            self.forget(core)
        return True

    def forget(self, core: EngineCore) -> None:
        """Its cache is empty from now on, but for what requests hold."""

        def go(now_ns: int) -> None:
            if not core.forget_cache(now_ns):
                return  # its events say what has gone
            if self.senders:
                self.senders[self._rank_of[id(core)]].forget_all()
            if self.on_restart is not None:
                self.on_restart(self.index)

        self.driver.do(core, go)

    def abort(self, requests: list[LiveRequest]) -> None:
        """End them now; their clients get what there was."""
        for request in requests:
            request.aborted = True
            self.driver.cancel(request)

    def kill(self) -> int:
        """The engines die and start again with nothing cached; requests in them are lost. Returns how many."""
        lost = 0
        for core in self.cores:

            def die(now_ns: int, core: EngineCore = core) -> None:
                for request in core.restart():
                    request.finish_ns = now_ns
                    request.tell_end(now_ns)
                if self.senders:
                    self.senders[self._rank_of[id(core)]].restart()
                if self.on_restart is not None:
                    self.on_restart(self.index)

            lost += len(core.live)
            self.driver.do(core, die)
        return lost

    def slow_links(self, tier: str, factor: float) -> None:
        """The links to and from a tier are so many times as slow from now on. A shared tier's are everybody's."""
        wanted, share = Tier[tier.upper()], 1 / factor
        for core in self.cores:

            def slow(now_ns: int, core: EngineCore = core) -> None:
                core.engine.set_link_share(now_ns, wanted, share)

            self.driver.do(core, slow)
        self.driver.nudge()

    def close(self) -> None:
        """Let go of what others could want, such as addresses."""
        for sender in self.senders:
            sender.close()
