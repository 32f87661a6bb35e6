"""A live run is the offline run of the stamps it had: same schedule, same cache and tiers, same events."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest

from understudy import _core
from understudy.clock import ScriptedClock, WallClock
from understudy.engines.timing import Constant, Polynomial
from understudy.engines.vllm_config import VllmConfig
from understudy.server.driver import Driver
from understudy.server.engines import SimulatedCore
from understudy.server.live_request import LiveRequest, StepEffects
from understudy.tiers.native import to_core
from understudy.tiers.plan import TierPlan
from understudy.tiers.settings import TiersConfig

if TYPE_CHECKING:
    from understudy.server.core import EngineCore

MS = 1_000_000


@dataclass
class Diary:
    """Everything that can be seen of an engine from outside, with its times."""

    lines: list[object] = field(default_factory=list)

    def on_admitted(self, request: LiveRequest, now_ns: int) -> None:
        self.lines.append((now_ns, "admitted", request.name, request.cached_tokens))

    def on_tokens(self, request: LiveRequest, first: int, count: int, now_ns: int) -> None:
        self.lines.append((now_ns, "tokens", request.name, first, count))

    def on_end(self, request: LiveRequest, now_ns: int) -> None:
        self.lines.append((now_ns, request.ended, request.name, request.preemptions))

    def on_error(self, request: LiveRequest) -> None: ...

    def on_step(self, core: EngineCore, effects: StepEffects, now_ns: int) -> None:
        self.lines.append((now_ns, effects.batch_tokens, core.vllm.pool, self._events(core)))

    def on_landed(self, core: EngineCore) -> None:
        rows = self._events(core)
        if rows[0]:
            self.lines.append(("landed", core.vllm.pool, rows))

    def on_idle(self, core: EngineCore) -> None:
        """It says nothing: how often depends on when inputs came."""

    def _events(self, core: EngineCore) -> list[list[int]]:
        batch, times = core.take_events()
        return [
            times.tolist(),
            batch.kinds.tolist(),
            batch.tiers.tolist(),
            batch.sequence_hashes.tolist(),
            batch.parent_hashes.tolist(),
        ]

    @property
    def digest(self) -> int:
        return _core.xxh3_64(repr(self.lines).encode())


@dataclass
class Part:
    """A request of the script."""

    name: str
    at_ms: float
    prompt: list[int]
    outputs: int
    cancel_ms: float | None = None
    eos_at: int | None = None


def script(seed: int, count: int = 60) -> list[Part]:
    """Shared prefixes, a crowd that has to be preempted, and clients who go away."""
    draw = random.Random(seed)
    parts = []
    at_ms = 0.0
    for number in range(count):
        at_ms += draw.expovariate(1 / 6) if number >= 12 else 0.0
        shared = draw.choice([0, 1, 2])
        prompt = list(range(shared * 10_000, shared * 10_000 + 48)) + draw.choices(
            range(100_000), k=draw.randrange(1, 60)
        )
        cancel = at_ms + draw.uniform(0, 40) if draw.random() < 0.2 and number >= 12 else None
        if number % 15 == 14:
            cancel = at_ms  # gone at once, however late this machine is
        outputs = draw.randrange(1, 40) if cancel is None and number >= 12 else 40
        eos_at = draw.randrange(1, outputs + 1) if draw.random() < 0.2 and number >= 12 else None
        parts.append(Part(f"r{number}", at_ms, prompt, outputs, cancel, eos_at))
    return parts


def core_of(asynchronous: bool, tiers: bool) -> EngineCore:
    config = VllmConfig(
        block_size=16,
        num_gpu_blocks=40,
        max_num_seqs=12,
        max_num_batched_tokens=128,
        max_model_len=256,
        async_scheduling=asynchronous,
        timing=Constant(prefill_ms=2.0, decode_ms=3.0),
    )
    below = None
    if tiers:
        plan = TierPlan.of(
            TiersConfig.from_dict(
                {
                    "tiers": [{"tier": "g2", "blocks": 64, "link": {"down_gbps": 0.02, "up_gbps": 0.02}}],
                    "kv_bytes_per_token": 1024,
                }
            ),
            16,
        )
        assert plan is not None
        below = to_core(plan, 1 << 12)
    return SimulatedCore(config, tiers=below, events=True, check=True)


def live_request(part: Part, diary: Diary) -> LiveRequest:
    outputs = [7_000_000 + index for index in range(part.outputs)]
    blocks = _core.TokenBlocks(np.array(part.prompt + outputs, dtype=np.uint32), 16)
    return LiveRequest(
        part.name, len(part.prompt), part.outputs, blocks.identities, diary, eos_at=part.eos_at
    )


async def play_live(parts: list[Part], core: EngineCore, clock_speed: float) -> tuple[Diary, Driver]:
    """On the wall clock, with whatever jitter this machine has today."""
    diary = Diary()
    clock = WallClock(clock_speed)
    driver = Driver(clock)
    driver.inputs = []
    driver.observe(core, diary)
    driver.start()

    async def one(part: Part) -> None:
        await asyncio.sleep(part.at_ms / 1e3 / clock_speed)
        request = live_request(part, diary)
        driver.submit(core, request)
        if part.cancel_ms is not None:
            await asyncio.sleep((part.cancel_ms - part.at_ms) / 1e3 / clock_speed)
            driver.cancel(request)

    await asyncio.gather(*map(one, parts))
    while not driver.idle:
        await asyncio.sleep(0.005)
    driver.stop()
    return diary, driver


def play_offline(parts: list[Part], core: EngineCore, inputs: list[tuple[int, str, str]]) -> Diary:
    """The same inputs on a virtual clock."""
    diary = Diary()
    clock = ScriptedClock()
    driver = Driver(clock)
    driver.observe(core, diary)
    by_name = {part.name: part for part in parts}
    requests: dict[str, LiveRequest] = {}
    for time_ns, kind, name in inputs:
        driver.run_until(time_ns)
        clock.time_ns = time_ns
        if kind == "submit":
            requests[name] = live_request(by_name[name], diary)
            driver.submit(core, requests[name])
        else:
            driver.cancel(requests[name])
    driver.run_until()
    return diary


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("tiers", [False, True])
def test_live_and_offline_do_the_same_to_the_block(asynchronous: bool, tiers: bool) -> None:
    parts = script(seed=5)
    live, driver = asyncio.run(play_live(parts, core := core_of(asynchronous, tiers), clock_speed=4))
    assert driver.inputs
    offline = play_offline(parts, core_of(asynchronous, tiers), driver.inputs)
    assert live.lines == offline.lines
    assert live.digest == offline.digest
    ends = [
        line[1] for line in live.lines if isinstance(line, tuple) and line[1] in ("finished", "cancelled")
    ]
    assert len(ends) == len(parts)  # each once
    assert {"finished", "cancelled"} <= set(ends)
    assert core.preemptions > 0
    assert core.vllm.pool[1] == 0
    assert driver.step_lateness.count == core.steps


def test_a_live_run_is_the_replay_of_the_stamps_it_had() -> None:
    """Against the replay itself, which fast-forwards: every time that a request knows is the same."""
    from replay.building import single_turns
    from understudy.run.offline import run_offline
    from understudy.run.run_plan import RunPlan

    parts = [Part(f"r{n}", 3.7 * n, list(range(40 * n, 40 * n + 20 + n)), 6 + n % 5) for n in range(20)]
    config = VllmConfig(block_size=16, num_gpu_blocks=64, max_model_len=256, timing=Polynomial())

    async def live() -> list[LiveRequest]:
        core, clock, diary = SimulatedCore(config), WallClock(8), Diary()
        driver = Driver(clock)
        driver.start()
        requests = []
        for part in parts:
            await asyncio.sleep(3.7e-3 / 8)
            requests.append(live_request(part, diary))
            driver.submit(core, requests[-1])
        while not driver.idle:
            await asyncio.sleep(0.005)
        driver.stop()
        return requests

    requests = asyncio.run(live())
    first_ns = requests[0].arrival_ns
    workload = single_turns(
        [len(part.prompt) for part in parts],
        [part.outputs for part in parts],
        [request.arrival_ns / MS for request in requests],
    )
    timeline = run_offline(RunPlan(workload, config)).timeline
    assert [request.first_token_ns - first_ns for request in requests] == timeline.first_token_ns.tolist()
    assert [request.finish_ns - first_ns for request in requests] == timeline.finish_ns.tolist()
    assert [request.admitted_ns - first_ns for request in requests] == timeline.first_admit_ns.tolist()
