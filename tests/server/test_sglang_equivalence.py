"""A live SGLang run equals the offline run of its timestamps: schedule, cache, host tier and events."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from server.test_equivalence import Diary, live_request, play_live, play_offline, script
from server.test_online_tiers import HOST, crowd, play_on, tiers
from understudy import _core
from understudy.engines.sglang_config import SglangConfig
from understudy.engines.timing import Constant
from understudy.errors import ConfigError
from understudy.online import replay_online
from understudy.online.columns import LiveColumns
from understudy.run.digest import digests
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.server.engines import SimulatedCore
from understudy.server.server import Server
from understudy.server.settings import ServerSettings
from understudy.tiers.native import to_core
from understudy.tiers.plan import TierPlan

if TYPE_CHECKING:
    from understudy.run.timeline import Timeline
    from understudy.server.core import EngineCore
    from understudy.server.live_request import StepEffects
    from understudy.tiers.settings import TiersConfig
    from understudy.workload import Workload

ENGINE = SglangConfig(
    block_size=16,
    num_gpu_blocks=40,
    max_num_seqs=12,
    chunked_prefill_size=128,
    max_model_len=512,
    timing=Constant(prefill_ms=2.0, decode_ms=3.0),
)
HICACHE = tiers(HOST)


class SglangDiary(Diary):
    """Records what is visible of an SGLang engine."""

    def on_step(self, core: EngineCore, effects: StepEffects, now_ns: int) -> None:
        self.lines.append((now_ns, effects.batch_tokens, self._pools(core), self._events(core)))

    def on_landed(self, core: EngineCore) -> None:
        rows = self._events(core)
        if rows[0]:
            self.lines.append(("landed", self._pools(core), rows))

    def _pools(self, core: EngineCore) -> tuple[int, ...]:
        assert isinstance(core.engine, _core.SglangEngine)
        tokens = core.engine.tokens
        return tokens.available, tokens.evictable, tokens.host_used, tokens.backed_up, tokens.loaded_back


def make_core(
    engine: SglangConfig, below: TiersConfig | None, *, most: int = 1 << 12, index: int = 0
) -> EngineCore:
    plan = None if below is None else TierPlan.of(below, engine.block_size)
    config = None if plan is None else to_core(plan, most)
    return SimulatedCore(engine, tiers=config, name=f"worker {index}", events=True, check=True)


@pytest.mark.parametrize("normal", [False, True])
@pytest.mark.parametrize("policy", [None, "write_through", "write_back"])
def test_live_and_offline_do_the_same_to_the_page(
    normal: bool, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.test_equivalence.Diary", SglangDiary)
    engine = msgspec.structs.replace(
        ENGINE, disable_overlap_schedule=normal, hicache_write_policy=policy or "write_through"
    )
    below = None if policy is None else HICACHE
    parts = script(seed=5)
    core = make_core(engine, below)
    live, driver = asyncio.run(play_live(parts, core, clock_speed=4))
    assert driver.inputs
    offline = play_offline(parts, make_core(engine, below), driver.inputs)
    assert live.lines == offline.lines
    assert live.digest == offline.digest
    ends = [
        line[1] for line in live.lines if isinstance(line, tuple) and line[1] in ("finished", "cancelled")
    ]
    assert len(ends) == len(parts)
    assert {"finished", "cancelled"} <= set(ends)
    assert core.is_empty
    assert isinstance(core.engine, _core.SglangEngine)
    assert (core.engine.tokens.backed_up > 0) == (policy is not None)


def play(workload: Workload, engine: SglangConfig, below: TiersConfig | None, workers: int) -> Timeline:
    pages = (
        -(-(workload.prompt_tokens.astype(np.int64) + workload.output_tokens) // engine.block_size)
    ).sum()
    cores = [make_core(engine, below, most=int(pages), index=index) for index in range(workers)]
    columns = LiveColumns(workload, cores)
    for row, request in enumerate(play_on(cores, workload)):
        columns.on_end(row, row % workers, request)
    return columns.gathered()[0]


@pytest.mark.parametrize("normal", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("policy", [None, "write_through", "write_through_selective", "write_back"])
def test_columns_of_live_engines_are_those_of_the_replay(policy: Any, workers: int, normal: bool) -> None:
    below = None if policy is None else HICACHE
    engine = msgspec.structs.replace(
        ENGINE, disable_overlap_schedule=normal, hicache_write_policy=policy or "write_through"
    )
    workload = crowd(seed=7)
    live = play(workload, engine, below, workers)
    offline = run_offline(RunPlan(workload, engine, workers=workers, tiers=below)).timeline
    assert digests(live) == digests(offline)
    if policy is not None:
        assert live.tiers is not None
        assert live.tiers.totals.onboarded_blocks > 0 or policy == "write_through_selective"


@pytest.mark.parametrize("below", [None, HICACHE])
def test_over_http_the_columns_are_those_of_the_replay_at_the_same_timestamps(
    below: TiersConfig | None,
) -> None:
    workload = crowd(seed=3, count=30)
    online = replay_online(workload, "crowd", ENGINE, workers=2, tiers=below, clock_speed=2).columns
    stamped = replace(workload, arrival_ns=online.arrival_ns)
    offline = run_offline(RunPlan(stamped, ENGINE, workers=2, tiers=below)).timeline
    first_ns = online.arrival_ns.min()  # an offline run starts with its first request
    assert (online.first_token_ns - first_ns).tolist() == offline.first_token_ns.tolist()
    assert (online.finish_ns - first_ns).tolist() == offline.finish_ns.tolist()
    assert online.cached_tokens_first.tolist() == offline.cached_tokens_first.tolist()
    if below is not None:
        assert online.tiers is not None
        assert offline.tiers is not None
        assert online.tiers.totals.onboarded_blocks == offline.tiers.totals.onboarded_blocks > 0


@pytest.mark.parametrize(
    ("below", "problem"),
    [
        (tiers(HOST, {"tier": "g3", "blocks": 96}), "g3: SGLang's HiCache"),
        (tiers(HOST, mode="evict"), "offload: HiCache has its own rules"),
    ],
)
def test_tiers_that_hicache_lacks_are_refused_by_name(below: TiersConfig, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Server(ServerSettings(engine=ENGINE, tiers=below, max_model_len=512, port=0))


def test_a_request_is_the_same_offline_and_live() -> None:
    """The helper that makes requests names pages, not blocks of another size."""
    request = live_request(script(seed=1)[0], SglangDiary())
    assert request.identities is not None
    assert len(request.identities) == (request.prompt_tokens + request.max_tokens) // ENGINE.block_size
