"""Engines of a server: simulated ones, built from settings, and the interface to a real one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from understudy._core import VllmTransfer, with_transfer
from understudy.server.core import EngineCore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy._core import TierConfig, TierRun, VllmOffload
    from understudy.engines.block_counts import BlockCounts
    from understudy.engines.engine_config import EngineConfig
    from understudy.engines.timing import TimingModel
    from understudy.server.api.growing import GrowingPlan
    from understudy.server.api.sampling import Sampling
    from understudy.server.api.texts import TokenTexts
    from understudy.server.handoff.network import HandOffMember
    from understudy.server.kv_events import KvEventSender
    from understudy.server.live_request import LiveRequest, StepEffects
    from understudy.server.push.network import PushNetwork
    from understudy.server.settings import ServerSettings


class SimulatedCore(EngineCore):
    """A simulated engine, of the kind that its settings name."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        timing: TimingModel | None = None,
        tiers: TierConfig | None = None,
        offload: VllmOffload | None = None,
        run: TierRun | None = None,
        name: str = "worker",
        number: int = 0,
        events: bool = False,
        stay_sample: float = 0.0,
        check: bool = False,
        handoff: HandOffMember | None = None,
        push: PushNetwork | None = None,
    ) -> None:
        """Make the engine of a rank. Random streams differ by `number`, as by worker in an offline run."""
        self._config = config
        self.offload = offload
        self.stay_sample = stay_sample
        self.has_tiers = tiers is not None
        self.draft_tokens = config.draft_tokens
        self.write_policy = config.host_write_policy
        native = config.live_config(
            events=events, check=check, stay_sample=stay_sample, tiers=tiers, offload=offload
        )
        self.hashed_ahead = native.hashed_ahead
        if handoff is not None:
            self.net = handoff.network.net
            native = with_transfer(native, handoff.settings.transfer())  # type: ignore[arg-type]
        self.push = push
        if push is not None:
            self.net = push.net
            native = config.core_side(native, push.settings.role, VllmTransfer())
        steps = config.native_timing(timing)
        member = handoff or push
        worker = number if member is None else member.number
        super().__init__(
            lambda: native.make_engine(steps, tiers=tiers, run=run, name=name, net=self.net, worker=worker),
            name=name,
            block_size=native.block_size,
            num_blocks=native.num_gpu_blocks,
            events=events,
        )
        if handoff is not None:
            handoff.join(self)
        if push is not None:
            push.join(self)

    def submit(self, request: LiveRequest, now_ns: int) -> StepEffects:
        """Queue a request, and open its transfer first on one side of a disaggregated server."""
        if self.push is None:
            return super().submit(request, now_ns)
        engine_id = self._next_id
        self.push.open(request, engine_id, now_ns)
        try:
            return super().submit(request, now_ns)
        except Exception:
            self.push.give_up(engine_id, now_ns)
            raise

    def count_blocks(self, tiers: Sequence[str]) -> dict[str, BlockCounts]:
        """Count the blocks of the device and of these tiers below it, by the tier's name."""
        return self._config.count_blocks(self.engine, tiers)


def make_cores(
    settings: ServerSettings,
    index: int,
    *,
    timing: TimingModel | None,
    tiers: TierConfig | None,
    run: TierRun | None,
    events: bool,
    handoff: HandOffMember | None,
    push: PushNetwork | None,
) -> list[EngineCore]:
    """Make the engines of a worker, one per rank; `index` is the worker's number in its fleet."""
    ranks = settings.data_parallel_size
    return [
        SimulatedCore(
            settings.engine,
            timing=timing,
            tiers=tiers,
            offload=settings.engine.build_live_offload(settings.tiers, settings.most_blocks),
            run=run,
            name=f"worker {index}" if ranks == 1 else f"worker {index} rank {rank}",
            number=index * ranks + rank,
            events=events,
            stay_sample=settings.kv_cache_metrics_sample if settings.kv_cache_metrics else 0.0,
            handoff=handoff,
            push=push,
        )
        for rank in range(ranks)
    ]


class GivenEngine(Protocol):
    """A real engine in place of the simulated ones. It serves one worker."""

    def core(self, name: str, *, events: bool) -> EngineCore:
        """Return the engine behind the worker's only rank."""

    def plan(self, sampling: Sampling, texts: TokenTexts, limit: int) -> GrowingPlan:
        """Plan an answer. ApiError for options that the engine does not support."""

    def connect_events(self, sender: KvEventSender) -> None:
        """Send the tokens of published blocks to `sender`."""
