"""The tiers of a live run are told as those of a replay: same columns, same report."""

from __future__ import annotations

import random
from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from replay.building import single_turns
from understudy import _core
from understudy.clock import ScriptedClock
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import InvalidArgument, WrongState
from understudy.online import prompt_of, replay_online
from understudy.online.columns import LiveColumns
from understudy.report import Report
from understudy.run.digest import digests
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.server.driver import Driver
from understudy.server.engines import SimulatedCore
from understudy.server.live_request import LiveRequest
from understudy.tiers.native import to_core
from understudy.tiers.plan import TierPlan
from understudy.tiers.settings import TiersConfig

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.run.timeline import Timeline
    from understudy.server.core import EngineCore
    from understudy.workload import Workload

ENGINE = VllmConfig(
    block_size=16,
    num_gpu_blocks=40,
    max_num_seqs=12,
    max_num_batched_tokens=128,
    max_model_len=512,
    timing=Constant(prefill_ms=2.0, decode_ms=3.0),
)
LINK = {"down_gbps": 0.02, "up_gbps": 0.02}
HOST = {"tier": "g2", "blocks": 64, "link": LINK}
DISK = {"tier": "g3", "blocks": 96, "link": {"down_gbps": 0.01, "up_gbps": 0.01}}


def tiers(*below: dict[str, Any], **offload: Any) -> TiersConfig:
    return TiersConfig.from_dict({"kv_bytes_per_token": 1024, "tiers": list(below), "offload": offload})


KINDS = {
    "write-through": tiers(HOST, mode="write_through", recompute_fallback=False),
    "on eviction": tiers(HOST, mode="evict", recompute_fallback=False),
    "with a disk that workers share": tiers(HOST, DISK, mode="write_through", recompute_fallback=False),
    "a host without a limit": tiers(
        {"tier": "g2", "blocks": "unlimited", "link": LINK}, mode="evict", recompute_fallback=False
    ),
    "vLLM's offload": tiers(HOST, mode="vllm"),
}


def crowd(seed: int, count: int = 60) -> Workload:
    """A few beginnings that come again and again, more than the device holds."""
    draw = random.Random(seed)
    content = []
    for _ in range(count):
        beginning = draw.randrange(6)
        own = [draw.randrange(1 << 30) for _ in range(draw.randrange(3))]
        content.append([1000 * beginning + place for place in range(9)] + own)
    return single_turns(
        [16 * len(ids) for ids in content],
        [draw.randrange(1, 24) for _ in range(count)],
        np.cumsum([0.0] + [draw.expovariate(1 / 9) for _ in range(count - 1)]).tolist(),
        content,
    )


class Silent:
    """Nobody listens."""

    def on_admitted(self, request: LiveRequest, now_ns: int) -> None: ...

    def on_tokens(self, request: LiveRequest, first: int, count: int, now_ns: int) -> None: ...

    def on_end(self, request: LiveRequest, now_ns: int) -> None: ...
    def on_error(self, request: LiveRequest) -> None: ...


def cores_of(
    engine: VllmConfig, below: TiersConfig, workers: int, most: int
) -> tuple[list[EngineCore], list[_core.TierRun]]:
    plan = TierPlan.of(below, engine.block_size)
    assert plan is not None
    config = to_core(plan, most)
    shared = [_core.TierRun(config, engine.block_size)] if len(below.tiers) > 1 else []
    offload = engine.build_live_offload(below, most)
    return [
        SimulatedCore(
            engine,
            tiers=config,
            offload=offload,
            run=shared[0] if shared else None,
            name=f"worker {index}",
            check=True,
        )
        for index in range(workers)
    ], shared


def play_on(cores: list[EngineCore], workload: Workload) -> list[LiveRequest]:
    """Through the live driver, each request at its time and to the next worker."""
    clock = ScriptedClock()
    driver = Driver(clock)
    requests = []
    for row in range(len(workload)):
        prompt, output = int(workload.prompt_tokens[row]), int(workload.output_tokens[row])
        outputs = 300_000 + 1000 * row + np.arange(output)
        named = np.concatenate([prompt_of(workload, row), outputs]).astype(np.uint32)
        identities = _core.TokenBlocks(named, ENGINE.block_size).identities
        requests.append(LiveRequest(f"row-{row}", prompt, output, identities, Silent()))
        driver.run_until(int(workload.arrival_ns[row]))
        clock.time_ns = int(workload.arrival_ns[row])
        driver.submit(cores[row % len(cores)], requests[-1])
    driver.run_until()
    return requests


def play(workload: Workload, engine: VllmConfig, below: TiersConfig, workers: int) -> Timeline:
    tokens = workload.prompt_tokens.astype(np.int64) + workload.output_tokens
    cores, shared = cores_of(engine, below, workers, int((-(-tokens // engine.block_size)).sum()))
    columns = LiveColumns(workload, cores, shared)
    for row, request in enumerate(play_on(cores, workload)):
        columns.on_end(row, row % workers, request)
    return columns.gathered()[0]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_live_engines_are_those_of_the_replay(kind: str, workers: int, asynchronous: bool) -> None:
    below = KINDS[kind]
    engine = msgspec.structs.replace(ENGINE, async_scheduling=asynchronous)
    workload = crowd(seed=7)
    live = play(workload, engine, below, workers)
    offline = run_offline(RunPlan(workload, engine, workers=workers, tiers=below)).timeline
    assert live.tiers is not None
    assert offline.tiers is not None
    assert live.tiers.totals.onboarded_blocks > 0
    assert len(live.tiers.onboard_ns) > 0
    assert live.tiers.sample_host_blocks.max() > 0
    assert digests(live) == digests(offline)


@pytest.mark.parametrize("seed", [31, 61])
def test_what_lands_after_the_last_step_is_there_in_the_end(seed: int) -> None:
    """Under vLLM's offload, which hears of its stores between steps."""
    below = KINDS["vLLM's offload"]
    engine = msgspec.structs.replace(ENGINE, async_scheduling=False, num_gpu_blocks=30 + seed % 40)
    workload = crowd(seed)
    live = play(workload, engine, below, 3)
    offline = run_offline(RunPlan(workload, engine, workers=3, tiers=below)).timeline
    assert digests(live) == digests(offline)


@pytest.mark.parametrize(("kind", "workers"), [("on eviction", 1), ("with a disk that workers share", 2)])
def test_over_http_the_report_has_the_tiers_of_the_replay_at_the_same_stamps(
    kind: str, workers: int, tmp_path: Path
) -> None:
    workload, below = crowd(seed=3, count=40), KINDS[kind]
    online = replay_online(workload, "crowd", ENGINE, workers=workers, tiers=below, clock_speed=2)
    stamped = replace(workload, arrival_ns=online.columns.arrival_ns)
    run = run_offline(RunPlan(stamped, ENGINE, workers=workers, tiers=below))
    offline = Report.build(run.timeline, run.facts)
    live, replayed = online.to_dict()["tiers"], offline.to_dict()["tiers"]
    assert live.keys() == replayed.keys()
    assert live["counts"] == replayed["counts"]
    assert live["counts"]["onboarded_blocks"] > 0
    assert live["onboard_ms"] == replayed["onboard_ms"]
    assert live["parked_ms"] == replayed["parked_ms"]
    for ours, theirs in zip(live["tiers"], replayed["tiers"], strict=True):
        assert ours.pop("tier") == theirs.pop("tier")
        assert ours == pytest.approx(theirs, rel=1e-6)  # means of the same steps, which began a bit later
    for ours, theirs in zip(live["links"], replayed["links"], strict=True):
        for name in ("name", "links", "bandwidth_gbps", "transfers", "bytes", "busy_s"):
            assert ours[name] == theirs[name]
    assert online.run.tiers == run.facts.tiers
    table = StringIO()
    online.print(Console(file=table, width=100))
    assert "Machine late" in table.getvalue()
    online.to_html(tmp_path / "online.html")
    page = (tmp_path / "online.html").read_text()
    for words in ("Hits by tier", "Residency", "Onboard latency", "G2 → G1", "lateness of the machine"):
        assert words in page


def test_an_engine_keeps_no_times_unless_somebody_will_take_them() -> None:
    """No two gaps are equal: a server would grow with every step."""
    workload, below = crowd(seed=7), KINDS["on eviction"]
    (core,), _ = cores_of(ENGINE, below, 1, 1 << 12)
    play_on([core], workload)
    columns = _core.RunColumns(len(workload), tiers=True)
    columns.add_engine(0, core.vllm)
    result = columns.take()
    assert result.tier_totals.onboards > 0
    assert len(result.onboard_ns) == len(result.itl_ns) == 0
    assert len(result.sample_time_ns) > 0  # of which there are so many and no more


def test_a_row_is_told_of_once() -> None:
    columns = _core.RunColumns(2)
    columns.reject(1, 5, "too long")
    with pytest.raises(WrongState, match="row 1 is known already"):
        columns.reject(1, 6, "too long")
    with pytest.raises(InvalidArgument, match="row 2 of 2"):
        columns.reject(2, 6, "too long")
    assert columns.take().rejections == [(1, "too long")]
    with pytest.raises(InvalidArgument, match="row 0 of 0"):
        columns.reject(0, 6, "too long")
