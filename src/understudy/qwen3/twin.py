"""The engine's twin: the same scheduler with an executor that only knows how long a step takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from understudy.kv import KvCacheManager
from understudy.qwen3.engine import Engine
from understudy.qwen3.executor import Computed, Step
from understudy.qwen3.host import HostTier
from understudy.qwen3.load import load_of_step
from understudy.qwen3.pages import RecordedPages, SimulatedPages
from understudy.qwen3.play import RecordedClock, VirtualClock
from understudy.qwen3.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from understudy.kv import KvLayout
    from understudy.qwen3.limits import SchedulerConfig
    from understudy.qwen3.play import Played
    from understudy.timing.recorded.load import LinkTimes, StepLoad


class StepTime(Protocol):
    """How long a step takes, in milliseconds: every timing model of a simulated engine is one.

    One that has `launch_ms` too says how much of it passes before the host tells what the step before computed.
    """

    def step_ms(self, step: StepLoad, /) -> float:
        """Never negative."""


class SimulatedExecutor:
    """Takes its time from a model, on a virtual clock. Its tokens are filler."""

    def __init__(self, time: StepTime, clock: VirtualClock) -> None:
        self.time = time
        self.clock = clock
        self._launch_ms: Callable[[StepLoad], float] = getattr(time, "launch_ms", lambda _: 0.0)
        self._step: Step | None = None
        self._until_ms = 0.0

    def prepare(self, step: Step) -> None:
        """See `Executor`."""

    def begin(self, step: Step) -> None:
        """See `Executor`."""
        load = load_of_step(step)
        self._step = step
        self._until_ms = self.clock.now_ms + self.time.step_ms(load)
        self.clock.now_ms += self._launch_ms(load)

    def finish(self) -> Computed:
        """See `Executor`."""
        step, self._step = self._step, None
        assert step is not None, "no step was begun"
        self.clock.wait_until(self._until_ms)
        return Computed([0] * len(step), [None] * len(step))

    def close(self) -> None:
        """See `Executor`."""
        self._step = None


class RecordedExecutor(SimulatedExecutor):
    """What was measured happens again, to the moment."""

    def __init__(self, steps: Sequence[dict[str, Any]], clock: VirtualClock) -> None:
        self.clock = clock
        self._step = None
        self._steps = list(reversed(steps))

    def begin(self, step: Step) -> None:
        """See `Executor`."""
        self._step = step
        self._row = self._steps.pop()
        self.clock.now_ms += self._row["launch_ms"]

    def finish(self) -> Computed:
        """See `Executor`."""
        step, self._step = self._step, None
        assert step is not None, "no step was begun"
        self.clock.now_ms = self._row["until_ms"]
        return Computed([0] * len(step), [None] * len(step))


def twin_of(
    config: SchedulerConfig,
    num_blocks: int,
    layout: KvLayout,
    time: StepTime,
    clock: VirtualClock,
    *,
    prefix_caching: bool = True,
    events: bool = False,
    host: tuple[int, LinkTimes] | None = None,
) -> Engine:
    """An engine that counts. `host`: pages of host memory, and how fast they come and go."""
    manager = KvCacheManager(num_blocks, layout, prefix_caching=prefix_caching, events=events)
    below = None if host is None else HostTier(manager, SimulatedPages(*host, clock))
    return Engine(Scheduler(manager, config, host=below), SimulatedExecutor(time, clock))


def again(played: Played, of: Engine) -> tuple[Engine, RecordedClock]:
    """A twin of an engine to which the same things happen at the same moments: it must decide as the engine did."""
    scheduler = of.scheduler
    clock = RecordedClock(played.polls)
    manager = KvCacheManager(
        scheduler.manager.total_blocks,
        scheduler.manager.layout,
        prefix_caching=scheduler.manager.prefix_caching,
    )
    below = None
    if scheduler.restores is not None:
        below = HostTier(
            manager, RecordedPages(scheduler.restores.host.carrier.num_blocks, played.copies, clock)
        )
    executor = RecordedExecutor(played.steps, clock)
    return Engine(Scheduler(manager, scheduler.config, host=below), executor), clock
