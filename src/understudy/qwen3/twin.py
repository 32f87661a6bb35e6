"""The engine's twin: the same scheduler with an executor that only simulates step times."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Protocol

from understudy.clock import ScriptedClock
from understudy.errors import WrongState
from understudy.kv import KvCacheManager
from understudy.qwen3.engine import Engine
from understudy.qwen3.executor import Computed, Step
from understudy.qwen3.host import HostTier
from understudy.qwen3.load import compute_step_load
from understudy.qwen3.pages import RecordedPages, SimulatedPages
from understudy.qwen3.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from understudy.kv import KvLayout
    from understudy.qwen3.limits import SchedulerConfig
    from understudy.qwen3.runner import RunRecord
    from understudy.timing.recorded.load import LinkTimes, StepLoad


class RecordedClock(ScriptedClock):
    """Clock that waits only for the times at which the recorded engine polled."""

    def __init__(self, polls_ms: Sequence[float]) -> None:
        super().__init__()
        self.time_ns = -1  # before the first poll
        self._polls_ns = [round(ms * 1e6) for ms in polls_ms]

    def wait_until(self, time_ns: int) -> None:
        """Advance to the first recorded poll from that time on. WrongState when there is none."""
        if time_ns <= self.time_ns:
            return
        at = bisect_left(self._polls_ns, time_ns)
        if at == len(self._polls_ns):
            raise WrongState(f"the recording has nothing after {self.time_ns / 1e6:.3f} ms")
        self.time_ns = self._polls_ns[at]


class StepTime(Protocol):
    """Model of step times in ms; every timing model of a simulated engine is one.

    With `launch_ms`, it also gives the part of a step before the host reports the previous step's results.
    """

    def step_ms(self, step: StepLoad, /) -> float:
        """Return the duration of a step in ms, not negative."""


class SimulatedExecutor:
    """Executor with step times of a model on a virtual clock. Its tokens are all 0."""

    def __init__(self, time: StepTime, clock: ScriptedClock) -> None:
        self.time = time
        self.clock = clock
        self._launch_ms: Callable[[StepLoad], float] = getattr(time, "launch_ms", lambda _: 0.0)
        self._step: Step | None = None
        self._until_ns = 0

    def prepare(self, step: Step) -> None:
        """Implement `Executor`."""

    def begin(self, step: Step) -> None:
        """Implement `Executor`."""
        load = compute_step_load(step)
        self._step = step
        self._until_ns = self.clock.time_ns + round(self.time.step_ms(load) * 1e6)
        self.clock.time_ns += round(self._launch_ms(load) * 1e6)

    def finish(self) -> Computed:
        """Implement `Executor`."""
        step, self._step = self._step, None
        assert step is not None, "no step was begun"
        self.clock.time_ns = max(self.clock.time_ns, self._until_ns)
        return Computed([0] * len(step), [None] * len(step))

    def close(self) -> None:
        """Implement `Executor`."""
        self._step = None


class RecordedExecutor(SimulatedExecutor):
    """Executor with the recorded times of each step."""

    def __init__(self, steps: Sequence[dict[str, Any]], clock: ScriptedClock) -> None:
        self.clock = clock
        self._step = None
        self._steps = list(reversed(steps))

    def begin(self, step: Step) -> None:
        """Implement `Executor`."""
        self._step = step
        self._row = self._steps.pop()
        self.clock.time_ns += round(self._row["launch_ms"] * 1e6)

    def finish(self) -> Computed:
        """Implement `Executor`."""
        step, self._step = self._step, None
        assert step is not None, "no step was begun"
        self.clock.time_ns = round(self._row["until_ms"] * 1e6)
        return Computed([0] * len(step), [None] * len(step))


def build_twin(
    config: SchedulerConfig,
    num_blocks: int,
    layout: KvLayout,
    time: StepTime,
    clock: ScriptedClock,
    *,
    prefix_caching: bool = True,
    events: bool = False,
    host: tuple[int, LinkTimes] | None = None,
) -> Engine:
    """Build a simulated twin. `host`: pages of host memory, and their copy times."""
    manager = KvCacheManager(num_blocks, layout, prefix_caching=prefix_caching, events=events)
    below = None if host is None else HostTier(manager, SimulatedPages(*host, clock))
    return Engine(Scheduler(manager, config, host=below), SimulatedExecutor(time, clock))


def build_recorded_twin(record: RunRecord, of: Engine) -> tuple[Engine, RecordedClock]:
    """Build a twin with the recorded times of a run; its decisions must equal those of the engine."""
    scheduler = of.scheduler
    clock = RecordedClock(record.polls)
    manager = KvCacheManager(
        scheduler.manager.total_blocks,
        scheduler.manager.layout,
        prefix_caching=scheduler.manager.prefix_caching,
    )
    below = None
    if scheduler.restores is not None:
        below = HostTier(
            manager, RecordedPages(scheduler.restores.host.copier.num_blocks, record.copies, clock)
        )
    executor = RecordedExecutor(record.steps, clock)
    return Engine(Scheduler(manager, scheduler.config, host=below), executor), clock
