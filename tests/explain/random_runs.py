"""Random small runs with every step recorded: engines, tiers, routers, ranks and workloads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replay.building import conversations, crowd
from understudy.engines.sglang_config import SglangConfig
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.explain import SavedRun
from understudy.router.kv import KvRouting
from understudy.run.disaggregation import Disaggregation
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers import TiersConfig
from understudy.workload import ClosedLoop, Normal, OpenLoop, Poisson

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Choose = Callable[[Sequence[Any]], Any]


def choose_arguments(choose: Choose) -> tuple[Any, dict[str, Any]]:
    """Choose a workload and the other fields of a `RunPlan`."""
    timing = choose([None, Constant(prefill_ms=3.0, decode_ms=1.7), Constant(prefill_ms=0.0, decode_ms=1.0)])
    is_vllm = choose([True, True, False])
    block_size = choose([8, 16, 64])
    common: dict[str, Any] = {
        "block_size": block_size,
        "num_gpu_blocks": choose([800, 1500, 6000]) // block_size,
    }
    if timing is not None:
        common["timing"] = timing
    if is_vllm:
        engine: Any = VllmConfig(
            **common,
            max_num_seqs=choose([2, 8, 64]),
            max_num_batched_tokens=choose([64, 256, 2048]),
            async_scheduling=choose([True, False]),
            enable_prefix_caching=choose([True, True, False]),
            scheduling_policy=choose(["fcfs", "priority"]),
        )
    else:
        engine = SglangConfig(
            **common,
            max_num_seqs=choose([8, 64]),
            chunked_prefill_size=choose([128, 2048]),
            enable_mixed_chunk=choose([True, False]),
            disable_overlap_schedule=choose([True, False]),
        )
    how: dict[str, Any] = {
        "workers": choose([1, 2, 3]),
        "seed": choose(range(100)),
        "load": choose([OpenLoop(), OpenLoop(arrival_rate_scale=5), ClosedLoop(concurrency=6)]),
        "routing": choose(
            ["round_robin", "least_loaded", KvRouting(), KvRouting(queue_threshold=choose([0.1, 1.0]))]
        ),
    }
    if is_vllm and choose([True, False, False, False]):
        how["disaggregation"] = Disaggregation(
            prefill_workers=choose([1, 2]),
            decode_workers=choose([1, 2]),
            kv_bytes_per_token=1000,
            link_gbps=choose([0.01, 1.0]),
        )
        how["workers"] = 1
        how["routing"] = "round_robin"
    elif choose([True, False, False]):
        tier = {"tier": "g2", "blocks": 300, "link": {"down_gbps": 0.1, "up_gbps": 0.1}}
        how["tiers"] = TiersConfig.from_dict({"tiers": [tier], "kv_bytes_per_token": choose([1024, 65536])})
    made = choose([crowd, conversations])
    mean = choose(range(50, 500, 7))
    outputs = choose([(20, 8), (60, 30), (2, 1)])
    workload = made(
        choose(range(3, 25)),
        arrivals=Poisson(qps=choose([10, 40, 200])),
        prompt_tokens=Normal(mean=mean, std=mean / 3),
        output_tokens=Normal(mean=outputs[0], std=outputs[1]),
    )
    return workload, {"engine": engine, **how}


def record(workload: Any, **how: Any) -> SavedRun:
    """Replay with every step recorded."""
    run = run_offline(RunPlan(workload, keep_steps=True, **how))
    assert run.steps is not None
    return SavedRun.of(run.timeline, run.steps, run.facts, run.decisions)
