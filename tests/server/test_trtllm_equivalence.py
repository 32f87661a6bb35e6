"""A live TensorRT-LLM run equals the offline run of its timestamps: schedule, caches and events."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from server.test_equivalence import Diary, play_live, play_offline, script
from server.test_online_tiers import crowd
from understudy import _core
from understudy.engines.timing import Constant
from understudy.engines.trtllm_config import TrtllmConfig
from understudy.online import replay_online
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.server.engines import SimulatedCore
from understudy.server.live_request import StepEffects  # noqa: TC001  (annotations of a method)

if TYPE_CHECKING:
    from understudy.server.core import EngineCore

ENGINE = TrtllmConfig(
    block_size=16,
    num_gpu_blocks=64,
    layer_kv_bytes=131072,
    max_num_seqs=12,
    max_num_batched_tokens=256,
    enable_chunked_prefill=True,
    max_model_len=512,
    timing=Constant(prefill_ms=2.0, decode_ms=3.0),
)


class TrtDiary(Diary):
    """Records what is visible of a TensorRT-LLM engine."""

    def on_step(self, core: EngineCore, effects: StepEffects, now_ns: int) -> None:
        assert isinstance(core.engine, _core.TrtEngine)
        batch = core.engine.iteration
        shown = (batch.contexts, batch.context_tokens, batch.generation, batch.paused)
        self.lines.append((now_ns, effects.batch_tokens, shown, self._events(core)))


def make_core(engine: TrtllmConfig) -> EngineCore:
    return SimulatedCore(engine, events=True, check=True)


@pytest.mark.parametrize("without_overlap", [False, True])
@pytest.mark.parametrize("windows", [(), (64, 512)])
def test_live_and_offline_do_the_same(
    without_overlap: bool, windows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.test_equivalence.Diary", TrtDiary)
    engine = msgspec.structs.replace(
        ENGINE, disable_overlap_scheduler=without_overlap, num_layers=2, max_attention_window=windows
    )
    parts = script(seed=5)
    live, driver = asyncio.run(play_live(parts, make_core(engine), clock_speed=4))
    assert driver.inputs
    offline = play_offline(parts, make_core(engine), driver.inputs)
    assert live.lines == offline.lines
    assert live.digest == offline.digest
    lines: list[Any] = live.lines
    assert len([line for line in lines if line[1] in ("finished", "cancelled")]) == len(parts)


def test_over_http_the_columns_are_those_of_the_replay_at_the_same_timestamps() -> None:
    workload = crowd(seed=3, count=30)
    online = replay_online(workload, "crowd", ENGINE, workers=2, clock_speed=2).columns
    stamped = replace(workload, arrival_ns=online.arrival_ns)
    offline = run_offline(RunPlan(stamped, ENGINE, workers=2)).timeline
    first_ns = online.arrival_ns.min()  # an offline run starts with its first request
    assert (online.first_token_ns - first_ns).tolist() == offline.first_token_ns.tolist()
    assert (online.finish_ns - first_ns).tolist() == offline.finish_ns.tolist()
    assert online.cached_tokens_first.tolist() == offline.cached_tokens_first.tolist()
