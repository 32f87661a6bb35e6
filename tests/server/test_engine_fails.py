"""An engine that fails under a server: those who leave it are told all the same."""

from __future__ import annotations

import pytest

from tiers.building import INF, MS, chain, tiers, way
from understudy.engines.config import VllmConfig
from understudy.engines.timing import Constant
from understudy.errors import CapacityExhausted
from understudy.server.clock import ScriptedClock
from understudy.server.core import EngineCore, LiveRequest, StepEffects
from understudy.server.driver import Driver


class Ends:
    """Who has ended, how and when."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str | None, int]] = []

    def on_admitted(self, request: LiveRequest, now_ns: int) -> None: ...

    def on_tokens(self, request: LiveRequest, first: int, count: int, now_ns: int) -> None: ...

    def on_end(self, request: LiveRequest, now_ns: int) -> None:
        self.told.append((request.name, request.ended, now_ns))

    def on_step(self, core: EngineCore, effects: StepEffects, now_ns: int) -> None: ...

    def on_landed(self, core: EngineCore) -> None: ...

    def on_rest(self, core: EngineCore) -> None: ...


def test_who_is_cancelled_hears_of_its_end_also_where_the_links_have_refused_a_transfer() -> None:
    config = VllmConfig(
        block_size=4,
        num_gpu_blocks=500,
        max_num_batched_tokens=400,
        async_scheduling=False,
        timing=Constant(0.0, 1.0),
    )
    core = EngineCore(config, tiers=tiers(1000, host=way(1e-9, INF), write_through=True))
    clock = ScriptedClock()
    driver = Driver(clock)
    ends = Ends()
    driver.observe(core, ends)
    requests = [LiveRequest(f"{i}", 400, 5, chain(i, 350), ends) for i in range(1, 7)]
    for request in requests:
        driver.submit(core, request)
    with pytest.raises(CapacityExhausted, match="years"):
        driver.run_to(clock)  # copies of a byte a second, one behind the other
    clock.time_ns += 10 * MS
    for request in requests:
        driver.cancel(request)
    driver.run_to(clock)
    assert ends.told == [(request.name, "lost", clock.time_ns) for request in requests]
    assert not core.live
