"""SGLang engines in a run: recorded times of tokens, and every way to drive a fleet."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from replay.building import ONE_MS, conversations, crowd
from understudy.engines.kinds.registry import read_engine
from understudy.engines.sglang_config import SglangConfig
from understudy.errors import ConfigError
from understudy.router import KvRouting
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers import TiersConfig
from understudy.workload import ClosedLoop, Workload

if TYPE_CHECKING:
    from understudy._core import StepLoad

GOLDEN = Path(__file__).parents[1] / "golden" / "sglang-clock"


class RecordedClock:
    """Step times of the recordings."""

    def __init__(self, clock: dict[str, int]) -> None:
        self._clock = clock

    def step_ms(self, step: StepLoad, /) -> float:
        prefill = sum(tokens for tokens, _ in step.chunks)
        clock = self._clock
        ns = clock["base_ns"] + clock["prefill_token_ns"] * prefill + clock["decode_row_ns"] * step.decodes
        return ns / 1e6


def read(path: Path) -> dict[str, Any]:
    with gzip.open(path) as file:
        pair: dict[str, Any] = json.load(file)
    return pair


def is_plain(path: Path) -> bool:
    """Without aborts, and without time that the host takes."""
    scenario = read(path)["scenario"]
    return not scenario.get("aborts") and not (
        scenario["clock"]["launch_ns"] + scenario["clock"]["result_ns"]
    )


PLAIN = [path for path in sorted(GOLDEN.glob("*.json.gz")) if is_plain(path)]
KEPT = {
    "max_prefill_tokens",
    "chunked_prefill_size",
    "prefill_max_requests",
    "schedule_policy",
    "schedule_conservativeness",
    "enable_mixed_chunk",
    "disable_radix_cache",
    "radix_eviction_policy",
}


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_a_run_has_the_recorded_times(path: Path) -> None:
    pair = read(path)
    scenario, config = pair["scenario"], pair["recorded"]["config"]
    engine = SglangConfig(
        block_size=config["page_size"],
        num_gpu_blocks=config["max_total_num_tokens"] // config["page_size"],
        max_num_seqs=config["max_running_requests"],
        max_model_len=config["context_len"],
        disable_overlap_schedule=not config["overlap"],
        **{name: config[name] for name in KEPT},
    )
    prompts = [
        [
            token
            for item in one["prompt"]
            for token in (range(item[0], item[0] + item[1]) if isinstance(item, list) else [item])
        ]
        for one in scenario["requests"]
    ]
    order = sorted(range(len(prompts)), key=lambda i: scenario["requests"][i]["t"])
    requests = [scenario["requests"][i] for i in order]
    limits = [one["max_tokens"] for one in requests]
    begin = requests[0]["t"]  # a workload begins with its first arrival
    columns: dict[str, Any] = {
        "arrival_ns": [one["t"] - begin for one in requests],
        "prompt_tokens": [len(prompts[i]) for i in order],
        "output_tokens": [one.get("eos_at") or one["max_tokens"] for one in requests],
        "max_tokens": limits,
        "hash_offsets": np.cumsum([0, *(len(prompts[i]) for i in order)]),
        "hash_ids": [token for i in order for token in prompts[i]],
        "trace_block_size": 1,
    }
    timeline = run_offline(
        RunPlan(Workload(**columns), engine, timing=RecordedClock(scenario["clock"]), check=True)
    ).timeline
    for row, one in enumerate(requests):
        recorded = pair["recorded"]["requests"][one["id"]]
        assert timeline.first_token_ns[row] + begin == recorded["tokens"][0], one["id"]
        assert timeline.finish_ns[row] + begin == recorded["end"][0], one["id"]
        assert timeline.output_tokens[row] == len(recorded["tokens"])


def test_most_recordings_on_a_clock_are_plain() -> None:
    assert len(PLAIN) >= 16


ENGINES = [
    SglangConfig(block_size=16, num_gpu_blocks=200, timing=ONE_MS),
    SglangConfig(
        block_size=16, num_gpu_blocks=200, timing=ONE_MS, disable_overlap_schedule=True, schedule_policy="lpm"
    ),
    SglangConfig(
        block_size=1, num_gpu_blocks=2000, timing=ONE_MS, enable_mixed_chunk=True, chunked_prefill_size=64
    ),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"threads": 2},
        {"routing": "least_loaded"},
        {"routing": KvRouting()},
        {"routing": KvRouting(event_delay_ms=2.0)},
        {"load": ClosedLoop(5)},
        {"events": True},
    ],
    ids=str,
)
def test_every_driver_runs_it_alike_with_checks_and_without(
    engine: SglangConfig, how: dict[str, Any]
) -> None:
    workload = crowd(60) if "threads" in how else conversations(20)
    plain = run_offline(RunPlan(workload, engine, workers=3, **how))
    checked = run_offline(RunPlan(workload, engine, workers=3, check=True, **how))
    stepped = run_offline(RunPlan(workload, engine, workers=3, **{**how, "threads": 1}, fast_forward=False))
    assert plain.facts.digest == checked.facts.digest == stepped.facts.digest
    assert (plain.timeline.output_tokens == workload.output_tokens).all()
    assert plain.timeline.cached_tokens_first.sum() > 0


def test_pools_hold_both_kinds_of_engines() -> None:
    from understudy.engines.vllm_config import VllmConfig
    from understudy.run.pools import WorkerPool

    pools = [
        WorkerPool(engine=SglangConfig(block_size=16, num_gpu_blocks=300, timing=ONE_MS), name="sglang"),
        WorkerPool(engine=VllmConfig(block_size=16, num_gpu_blocks=300, timing=ONE_MS), name="vllm"),
    ]
    timeline = run_offline(RunPlan(crowd(40), pools=pools, routing="least_loaded")).timeline
    assert set(timeline.worker.tolist()) == {0, 1}


def test_settings_by_name_choose_the_kind() -> None:
    engine = read_engine({"engine_type": "sglang", "block_size": 16, "schedule_policy": "lpm"})
    assert isinstance(engine, SglangConfig)
    assert engine.schedule_policy == "lpm"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule_policy": "random"}, "schedule_policy"),
        (
            {"page_size": 64, "chunked_prefill_size": 100},
            "chunked_prefill_size must be -1 or a multiple of block_size=64",
        ),
        ({"enable_priority_scheduling": True, "schedule_policy": "lpm"}, "choose fcfs or lof"),
        ({"enable_prefix_caching": False}, "give disable_radix_cache"),
        ({"hicache_ratio": 2}, "hicache_ratio"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_engine({"engine_type": "sglang", **settings})


def tiers_of(*tiers: str, **more: object) -> TiersConfig:
    return TiersConfig.from_dict(
        {"kv_bytes_per_token": 1024, "tiers": [{"tier": tier, "blocks": 100} for tier in tiers], **more}
    )


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_host_tier_is_hicache(policy: Any, overlap: bool) -> None:
    engine = SglangConfig(
        block_size=16,
        num_gpu_blocks=60,
        timing=ONE_MS,
        hicache_write_policy=policy,
        disable_overlap_schedule=not overlap,
    )
    run = run_offline(RunPlan(conversations(20), engine, tiers=tiers_of("g2"), check=True, events=True))
    again = run_offline(RunPlan(conversations(20), engine, tiers=tiers_of("g2")))
    assert run.facts.digest == again.facts.digest
    without = run_offline(RunPlan(conversations(20), engine))
    assert run.timeline.cached_tokens_first.sum() > without.timeline.cached_tokens_first.sum()
    tiers = run.timeline.tiers
    assert tiers is not None
    down, up = tiers.links
    assert (down.name, up.name) == ("worker 0 g1_to_g2", "worker 0 g2_to_g1")
    assert down.bytes_finished > 0
    assert up.bytes_finished == 1024 * tiers.below_tokens_total[0].sum() > 0


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        (tiers_of("g2", "g3"), "g3: SGLang's HiCache has no tier below the host"),
        (tiers_of("g2", "g3", "g4"), "g3: SGLang's HiCache"),
        (tiers_of("g2", offload={"mode": "evict"}), "offload: HiCache has its own rules"),
    ],
)
def test_tiers_that_hicache_lacks_are_refused_by_name(tiers: TiersConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_offline(RunPlan(crowd(5), SglangConfig(timing=ONE_MS), tiers=tiers))
