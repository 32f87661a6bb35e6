"""An engine that holds its queue: who is in progress ends, nobody begins, and afterwards all goes on."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from server.test_equivalence import Diary, Part, live_request
from understudy.clock import ScriptedClock
from understudy.engines.offload import UNLIMITED_BLOCKS
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import WrongState
from understudy.server.driver import Driver
from understudy.server.engines import SimulatedCore
from understudy.tiers.native import to_core
from understudy.tiers.plan import TierPlan
from understudy.tiers.settings import TiersConfig

if TYPE_CHECKING:
    from understudy.server.core import EngineCore
    from understudy.server.live_request import LiveRequest

MS = 1_000_000


def core_of(below: str, asynchronous: bool) -> EngineCore:
    config = VllmConfig(
        block_size=16,
        num_gpu_blocks=40,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        max_model_len=256,
        async_scheduling=asynchronous,
        timing=Constant(prefill_ms=20.0, decode_ms=3.0),
    )
    if not below:
        return SimulatedCore(config, events=True, check=True)
    settings = {
        "tiers": [{"tier": "g2", "blocks": 64, "link": {"down_gbps": 0.2, "up_gbps": 0.02}}],
        "kv_bytes_per_token": 1024,
        **({"offload": {"mode": "vllm"}} if below == "offload" else {}),
    }
    tiers = TiersConfig.from_dict(settings)
    plan = TierPlan.of(tiers, 16)
    assert plan is not None
    return SimulatedCore(
        config,
        tiers=to_core(plan, 1 << 12),
        offload=config.build_live_offload(tiers, UNLIMITED_BLOCKS),
        events=True,
        check=True,
    )


def play(seed: int, below: str, asynchronous: bool) -> tuple[int, int]:
    """Requests at random, and pauses; returns who was loading when one began, and who was queued when it was over."""
    draw = random.Random(seed)
    core, diary, clock = core_of(below, asynchronous), Diary(), ScriptedClock()
    driver = Driver(clock)
    driver.observe(core, diary)
    requests: list[LiveRequest] = []
    loading = queued = 0

    def send(count: int) -> None:
        for _ in range(count):
            shared = 10_000 * draw.randrange(12)
            prompt = [*range(shared, shared + 64), *draw.choices(range(100_000), k=draw.randrange(1, 40))]
            part = Part(f"r{len(requests)}", 0.0, prompt, draw.randrange(1, 30))
            requests.append(live_request(part, diary))
            driver.submit(core, requests[-1])

    for _ in range(6):
        send(draw.randrange(1, 12))
        until_ns = clock.time_ns + draw.randrange(1, 400) * MS
        driver.run_until(until_ns)
        clock.time_ns = until_ns
        begun = {one.name for one in core.live.values() if one.admitted_ns >= 0 and one.preemptions == 0}
        loading += len(core.vllm.loading) if below == "offload" else core.vllm.parked
        loads = {one.name for one in core.live.values() if one.engine_id in core.vllm.loading}
        core.pause_admission(True)
        driver.enqueue(core, lambda _: None)
        send(draw.randrange(4))
        if draw.random() < 0.3 and core.live:
            driver.cancel(draw.choice(list(core.live.values())))
        driver.run_until()
        # Nothing moves any more: who was in progress has ended, or gave way to others and is queued again.
        assert core.is_idle
        assert core.engine.drained
        left = core.live.values()
        assert not (begun | loads) & {one.name for one in left if one.preemptions == 0}
        assert all(one.admitted_ns < 0 or one.preemptions for one in left)
        assert core.vllm.pool[1] == 0
        assert core.num_waiting == len(core.live)
        queued += len(left)
        core.vllm.check()
        if draw.random() < 0.5:
            assert not core.holds_blocks
            driver.enqueue(core, core.forget_cache)
            driver.run_until()
            assert core.vllm.resident_hashes() == []
            assert len(core.live) == len(left)
        core.pause_admission(False)
        driver.enqueue(core, lambda _: None)
    driver.run_until()
    assert not core.live
    assert {one.ended for one in requests} <= {"finished", "cancelled"}
    assert all(one.emitted == one.max_tokens for one in requests if one.ended == "finished")
    assert core.vllm.pool[1] == 0
    core.vllm.check()
    return loading, queued


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("below", ["", "tiers", "offload"])
def test_who_is_in_progress_ends_and_the_queue_waits(below: str, asynchronous: bool) -> None:
    met = [play(seed, below, asynchronous) for seed in range(12)]
    assert sum(queued for _, queued in met) > 20
    if below == "offload":
        assert sum(loading for loading, _ in met) > 0


def test_nobody_fast_forwards_over_a_queue_that_is_held() -> None:
    core = core_of("", False)
    core.pause_admission(True)
    core.submit(live_request(Part("x", 0.0, [1, 2, 3], 2), Diary()), 0)
    with pytest.raises(WrongState, match="admission is off"):
        core.vllm.advance(10**9)
    core.pause_admission(False)
    core.vllm.advance(10**9)
    assert core.vllm.idle


def test_in_a_step_that_all_have_left_the_driver_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lands meanwhile does so then: looked for every nanosecond, it kept a server busy for minutes."""
    core, diary, clock = core_of("tiers", asynchronous=False), Diary(), ScriptedClock()
    driver = Driver(clock)
    times: list[int] = []
    play_at = driver._process

    def played(now_ns: int) -> None:
        times.append(now_ns)
        assert len(times) < 100
        play_at(now_ns)

    monkeypatch.setattr(driver, "_process", played)
    first = live_request(Part("first", 0.0, list(range(160)), 1), diary)
    driver.submit(core, first)
    while not first.ended:  # its blocks go down from now on, 16 KiB each at 0.2 GB/s
        driver.run_until(driver._queue[0][0] + 1)
    second = live_request(Part("second", 0.0, list(range(500, 600)), 5), diary)
    driver.submit(core, second)
    driver.run_until(clock.time_ns + 1)
    assert core.vllm.in_step
    driver.cancel(second)
    driver.run_until(clock.time_ns + 1)
    assert core.vllm.in_step
    assert core.vllm.wake_ns is not None
    assert core.vllm.wake_ns < core.step_end_ns
    driver.run_until()
    assert core.vllm.idle
    assert core.engine.next_landing_ns() is None
