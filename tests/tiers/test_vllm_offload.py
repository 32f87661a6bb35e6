"""vLLM's native host offload on the clock: the same decisions, however a run is played; and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from replay.building import conversations, crowd, single_turns
from tiers.building import INF
from understudy._core import LinkPairConfig, TierConfig, TokenBlocks, VllmEngine, VllmOffload, constant_timing
from understudy.cli import build_parser
from understudy.cli.tier_flags import tier_settings
from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.offload import build_vllm_offload
from understudy.engines.offload_profiles import RECORDED, V0_32, OffloadProfile
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.report.tier_table import list_tier_facts
from understudy.report.tiers import TiersReport
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers.plan import TierPlan
from understudy.tiers.settings import TiersConfig
from understudy.tiers.vllm_flags import offload_settings

STEP_NS = 1_000_000
BLOCK = 4


def offloading(blocks: int = 240, eviction: str = "lru", **offload: Any) -> TiersConfig:
    return TiersConfig.from_dict(
        {
            "kv_bytes_per_token": 1 << 14,
            "tiers": [
                {"tier": "g2", "blocks": blocks, "eviction": eviction, "link": {"down_gbps": 3, "up_gbps": 5}}
            ],
            "offload": {"mode": "vllm", **offload},
        }
    )


# --- on the clock -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.32", "recorded"])
def test_who_was_loaded_whole_and_has_one_token_keeps_its_block_until_it_is_admitted(version: str) -> None:
    # Its only token is computed again, so nothing counts as computed: it was looked up again, and its block was lost.
    one = [[0], [1, 2, 3, 4]] * 6
    workload = single_turns(
        [len(ids) for ids in one], 1, [100 * i for i in range(len(one))], one, trace_block_size=1
    )
    engine = VllmConfig(block_size=1, num_gpu_blocks=5, vllm_version=version, async_scheduling=False)
    run = run_offline(RunPlan(workload, engine, tiers=offloading(blocks=20), check=True))
    assert run.timeline.tiers is not None
    assert run.timeline.tiers.totals.onboards > 0
    assert (run.timeline.output_tokens == 1).all()


@pytest.mark.parametrize("version", ["0.32", "recorded"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "tiers",
    [
        offloading(),
        offloading(eviction="arc"),
        offloading(blocks_per_chunk=2, offload_prompt_only=False),
        offloading(blocks=24),
    ],
    ids=["lru", "arc", "chunks", "small"],
)
def test_runs_that_are_played_otherwise_have_the_same_digests(
    version: str, asynchronous: bool, tiers: TiersConfig
) -> None:
    engine = VllmConfig(
        block_size=16,
        num_gpu_blocks=100,
        vllm_version=version,
        async_scheduling=asynchronous,
        max_num_seqs=12,
    )
    load = conversations(30)
    ways: tuple[dict[str, Any], ...] = ({}, {"fast_forward": False}, {"check": True})
    runs = [
        run_offline(RunPlan(load, engine, workers=2, tiers=tiers, events=True, **how)).facts.digests
        for how in ways
    ]
    assert runs[0] == runs[1] == runs[2]


def test_the_report_tells_hits_from_the_host_and_what_was_put_off_refused_and_flushed() -> None:
    engine = VllmConfig(block_size=16, num_gpu_blocks=60, async_scheduling=False)
    roomy = run_offline(RunPlan(conversations(60), engine, tiers=offloading(blocks=1000))).timeline.tiers
    assert roomy is not None
    assert roomy.below_tokens_first[0].sum() > 0
    assert len(roomy.onboard_ns) == roomy.totals.onboards > 0
    assert roomy.totals.deferred_lookups > 0
    assert roomy.totals.refused_stores == 0
    small = run_offline(RunPlan(conversations(60), engine, tiers=offloading(blocks=16))).timeline.tiers
    assert small is not None
    assert small.totals.refused_stores > 0
    assert small.totals.flushed_copies > 0


def test_the_table_names_them_with_their_numbers() -> None:
    engine = VllmConfig(block_size=16, num_gpu_blocks=60, async_scheduling=False)
    facts = []
    for blocks in (1000, 16):
        run = run_offline(RunPlan(conversations(60), engine, tiers=offloading(blocks=blocks)))
        tiers = TiersReport.of(run.timeline, run.facts)
        assert tiers is not None
        facts.append(dict(list_tier_facts(tiers)))
        counts = tiers.counts
        for label, count in (
            ("Deferred lookups", counts.deferred_lookups),
            ("Refused stores", counts.refused_stores),
            ("Flushed copies", counts.flushed_copies),
        ):
            assert facts[-1].get(label) == (f"{count:,}" if count else None)
    assert "Deferred lookups" in facts[0]
    assert "Refused stores" not in facts[0]
    assert "Refused stores" in facts[1]


def test_nothing_is_lost_when_the_host_holds_everything() -> None:
    """What a prompt finds on the device, or below, is what an unlimited cache would find: outputs are not stored."""
    engine = VllmConfig(block_size=16, num_gpu_blocks=4000, async_scheduling=False)
    small = VllmConfig(block_size=16, num_gpu_blocks=90, async_scheduling=False, max_num_seqs=4)
    load = crowd(40)
    roomy = run_offline(RunPlan(load, engine)).timeline
    tight = run_offline(RunPlan(load, small, tiers=offloading(blocks=8000))).timeline
    assert roomy.cached_tokens_first.sum() > 0
    assert tight.tiers is not None
    assert tight.tiers.below_tokens_first[0].sum() > 0
    without = run_offline(RunPlan(load, small)).timeline
    assert tight.cached_tokens_first.sum() > without.cached_tokens_first.sum()


def rules_of(rules: OffloadProfile, **settings: Any) -> VllmOffload:
    return rules.native(log=True, **settings)


def told(line: dict[str, Any]) -> dict[str, Any]:
    jobs = [
        [(job["request"], job["chunks"], job["device"], job["host"]) for job in line[kind]]
        for kind in ("loads", "stores")
    ]
    return {"jobs": jobs, "evicted": line["evicted"], "flush": len(line["flush"])}


def decisions(engine: VllmEngine, prompts: list[np.ndarray[Any, Any]]) -> list[Any]:
    """Everything that a crowd which is there from the start makes the engine decide, empty steps left out."""
    for index, prompt in enumerate(prompts):
        outputs = np.arange(1_000_000 + 100 * index, 1_000_008 + 100 * index, dtype=np.uint32)
        identities = TokenBlocks(np.concatenate([prompt, outputs]), BLOCK).identities
        engine.submit(f"r{index}", len(prompt), 8, identities, arrival_time=index)
    out: list[Any] = []
    now = 0
    for _ in range(2000):
        if engine.idle:
            break
        engine.begin_step(now)
        scheduled = engine.scheduled
        if engine.in_step:
            engine.end_step(now + STEP_NS)
        now += STEP_NS
        line = told(engine.take_offload_line())
        if scheduled or line["jobs"] != [[], []]:
            out.append((scheduled, engine.admitted, engine.preempted, line))
    assert engine.idle
    return out


@pytest.mark.parametrize("rules", [RECORDED, V0_32], ids=["recorded", "v0.32"])
@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("chunk", [1, 2])
def test_links_without_limits_decide_as_a_worker_that_needs_no_steps(
    rules: OffloadProfile, policy: str, chunk: int
) -> None:
    """The completions are those of lockstep with no steps: so is every decision."""
    rng = np.random.default_rng(7)
    prefixes = [np.arange(start, start + 40, dtype=np.uint32) for start in (10_000, 20_000, 30_000)]
    lengths = rng.integers(1, 30, size=40).tolist()
    prompts = [
        np.concatenate([prefixes[index % 3], np.arange(index * 100, index * 100 + length, dtype=np.uint32)])
        for index, length in enumerate(lengths)
    ]
    settings: dict[str, Any] = {"host_chunks": 24, "blocks_per_chunk": chunk, "eviction_policy": policy}
    runs = []
    for links in (False, True):
        config = VllmConfig(
            block_size=BLOCK,
            num_gpu_blocks=40,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            async_scheduling=False,
            vllm_version="recorded" if rules is RECORDED else "0.32",
        ).native(events=True, check=True, offload=rules_of(rules, **settings))
        way = LinkPairConfig(down_gbps=INF, up_gbps=INF)
        below = TierConfig(bytes_per_block=1 << 16, g2_blocks=24 * chunk, host=way, write_through=True)
        engine = VllmEngine(config, constant_timing(1.0, 1.0), tiers=below if links else None)
        runs.append(decisions(engine, prompts))
    assert runs[0] == runs[1]
    assert any(line["jobs"][0] for *_, line in runs[0])


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tiers": [{"tier": "g2", "blocks": 3}], "offload": {"blocks_per_chunk": 4}},
            "than a chunk",
        ),
        (
            {"tiers": [{"tier": "g2", "bytes": "1MiB"}], "offload": {"blocks_per_chunk": 8}},
            "than a chunk",
        ),
        (
            {"tiers": [{"tier": "g2", "blocks": 10}], "offload": {"blocks_per_chunk": 4}},
            "do not divide 10 blocks",
        ),
        (
            {"tiers": [{"tier": "g2", "blocks": 9, "eviction": "fifo"}]},
            "lru or arc in offload mode vllm, got 'fifo'",
        ),
        ({"tiers": [{"tier": "g2", "blocks": 9}, {"tier": "g3", "blocks": 9}]}, "g3 contradicts"),
        (
            {"tiers": [{"tier": "g2", "blocks": 9}], "offload": {"min_reuse": 2}},
            "min_reuse contradicts mode=vllm",
        ),
        ({"tiers": [{"tier": "g2", "blocks": 9}], "offload": {"blocks_per_chunk": 0}}, "at least 1"),
        ({"tiers": [{"tier": "g2", "bytes": "64GiB"}], "kv_bytes_per_token": None}, "KV bytes per token"),
    ],
)
def test_what_cannot_work_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    offload = {"mode": "vllm", **settings.pop("offload", {})}
    with pytest.raises(ConfigError, match=message):
        TierPlan.of(
            TiersConfig.from_dict({"kv_bytes_per_token": 1 << 14, **settings, "offload": offload}), 16
        )


def test_what_only_vllm_has_needs_its_mode() -> None:
    for offload in ({"blocks_per_chunk": 2}, {"offload_prompt_only": False}):
        with pytest.raises(ConfigError, match="needs mode=vllm"):
            TiersConfig.from_dict({"tiers": [{"tier": "g2", "blocks": 9}], "offload": offload})
    with pytest.raises(ConfigError, match="arc needs offload mode vllm"):
        TiersConfig.from_dict({"tiers": [{"tier": "g2", "blocks": 9, "eviction": "arc"}]})


def test_the_host_counts_chunks_that_begin_on_pages() -> None:
    tiers = TiersConfig.from_dict(
        {
            "kv_bytes_per_token": 100,
            "tiers": [{"tier": "g2", "bytes": 10 * 8192 + 8191}],
            "offload": {"mode": "vllm", "blocks_per_chunk": 3},
        }
    )
    plan = TierPlan.of(tiers, 16)  # a chunk of 4,800 bytes takes two pages
    assert plan is not None
    assert plan.tiers[0].blocks == 30


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"vllm_version": "0.27.1"}, "native offload of vllm_version '0.27.1' is not simulated"),
        ({"kv_manager": "kvbm"}, "needs kv_manager=native"),
        ({"mocker": MockerSettings(aic_nextn=2), "async_scheduling": False}, "contradicts aic_nextn"),
        ({"enable_prefix_caching": False}, "needs enable_prefix_caching"),
        ({"enable_lora": True, "max_loras": 2}, "contradicts enable_lora"),
    ],
)
def test_an_engine_that_has_no_such_offload_is_refused(engine: dict[str, Any], message: str) -> None:
    plan = TierPlan.of(offloading(), 16)
    with pytest.raises(ConfigError, match=message):
        build_vllm_offload(plan, VllmConfig(block_size=16, **engine), 100)


def flags(*arguments: str) -> dict[str, Any]:
    return tier_settings(build_parser().parse_args(["replay", "trace.jsonl", *arguments]))


def test_the_flags_of_vllm_switch_it_on() -> None:
    assert flags("--kv-offloading-size", "2") == {
        "tiers": {"g2": {"bytes": 2 << 30}},
        "offload": {"mode": "vllm", "blocks_per_chunk": 1},
    }
    config = (
        '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": '
        '{"cpu_bytes_to_use": 1e9, "block_size": 256, "eviction_policy": "arc", "offload_prompt_only": false}}'
    )
    assert flags("--kv-transfer-config", config, "--block-size", "64") == {
        "tiers": {"g2": {"bytes": 1_000_000_000, "eviction": "arc"}},
        "offload": {"mode": "vllm", "chunk_tokens": 256, "offload_prompt_only": False},
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, None, {"kv_connector": "LMCacheConnectorV1"}), "'LMCacheConnectorV1' is not supported"),
        ((None, None, {"kv_connector": "NixlConnector"}), "--prefill-workers"),
        ((None, None, {"kv_connector": "OffloadingConnector"}), "needs cpu_bytes_to_use"),
        ((4, "lmcache", None), "--kv-offloading-backend lmcache is not supported"),
        ((0, None, None), "must be above 0"),
        (("much", None, None), "must be a number of GiB"),
        ((None, None, "{"), "is not JSON"),
        (
            (1, None, {"kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec"}}),
            "spec_name must be",
        ),
        (
            (1, None, {"kv_connector_extra_config": {"store_threshold": 2}}),
            "store_threshold is not supported",
        ),
        ((1, None, {"kv_connector_extra_config": {"disk": 2}}), "disk is not a supported setting"),
        ((1, None, {"kv_role": "kv_producer"}), "kv_role must be kv_both"),
    ],
)
def test_what_those_flags_ask_for_and_is_not_known_is_refused_by_name(
    arguments: tuple[Any, Any, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        offload_settings(*arguments)


def test_two_flags_that_say_how_large_the_host_is_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="both set the host capacity"):
        flags("--kv-offloading-size", "2", "--g2", "9")
    with pytest.raises(ConfigError, match="both set the offload rules"):
        flags("--kv-offloading-size", "2", "--offload-mode", "vllm")
