"""The halt of vLLM releases up to 0.30 in a replay: an error that names the defect and the release, not a hang."""

from __future__ import annotations

import pytest

from replay.building import ONE_MS, conversations, single_turns
from understudy.engines.kv_groups import KvCacheGroup
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import WrongState
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers.settings import TiersConfig
from understudy.workload import Normal

A, B, C = ([start + place for place in range(10)] for start in (100, 200, 300))
ROWS = [  # arrival in ms, outputs, blocks of the prompt
    (5, 26, [*B[:9], 1050, 1051]),
    (20, 12, [*C, 1300, 1301, 1302, 1303]),
    (20, 2, [*B[:8], 1400, 1401, 1402, 1403, 1404]),
    (20, 7, [*A[:9], 1450, 1451]),
    (22, 30, [*C, 1500]),
    (23, 36, [*C[:9], 1550, 1551, 1552, 1553, 1554]),
    (35, 7, [*B[:9], 1600, 1601, 1602]),
]


def play(version: str, *, fast_forward: bool = True) -> OfflineRun:
    """Row 6 is loaded while row 5, which comes before it and does not fit beside what was loaded, waits."""
    load = single_turns(
        [16 * len(blocks) for _, _, blocks in ROWS],
        [outputs for _, outputs, _ in ROWS],
        [arrival for arrival, _, _ in ROWS],
        [blocks for _, _, blocks in ROWS],
        16,
    )
    engine = VllmConfig(
        block_size=16,
        num_gpu_blocks=22,
        max_num_seqs=8,
        async_scheduling=False,
        vllm_version=version,
        timing=Constant(prefill_ms=1.0, decode_ms=1.0),
    )
    link = {"down_gbps": 100, "up_gbps": 0.05}
    tiers = {"kv_bytes_per_token": 1 << 10, "tiers": [{"tier": "g2", "blocks": 400, "link": link}]}
    return run_offline(
        RunPlan(
            load,
            engine,
            tiers=TiersConfig.from_dict({**tiers, "offload": {"mode": "vllm"}}),
            fast_forward=fast_forward,
        )
    )


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize(
    ("version", "named"),
    [("recorded", r"revision a014e35f\w* \(recorded\)"), ("0.28.0", r"0\.28"), ("0.30.0", r"0\.30")],
)
def test_a_replay_that_halts_names_the_defect_and_the_release(
    version: str, named: str, fast_forward: bool
) -> None:
    with pytest.raises(WrongState, match="the run makes no progress: 2 requests wait") as halt:
        play(version, fast_forward=fast_forward)
    assert halt.match(r"row 5 \(224 tokens\), row 6 \(192 tokens\); 13 of 22 blocks are free")
    assert halt.match("stands before others that hold blocks which were loaded for them")
    assert halt.match(rf"a defect of the offload of vLLM {named}, not of the run; vLLM 0\.31 and later")


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0"])
def test_releases_that_serve_holders_first_do_not_halt(version: str) -> None:
    assert play(version).timeline.completed.all()


def play_groups(num_gpu_blocks: int, *, fast_forward: bool = True) -> OfflineRun:
    """Load prompts of 15 conversations whose windows need more blocks than vLLM reserves for them."""
    groups = (
        KvCacheGroup(kind="sliding_window", block_size=64, window=33),
        KvCacheGroup(kind="full", block_size=64),
    )
    engine = VllmConfig(
        kv_cache_groups=groups,
        num_gpu_blocks=num_gpu_blocks,
        max_num_batched_tokens=256,
        async_scheduling=False,
        prefix_cache_retention_interval=None,
        timing=ONE_MS,
    )
    tiers = {"kv_bytes_per_token": 1 << 16, "tiers": [{"tier": "g2", "blocks": 400}]}
    load = conversations(15, prompt_tokens=Normal(mean=900, std=100), output_tokens=Normal(mean=150, std=8))
    return run_offline(
        RunPlan(
            load,
            engine,
            tiers=TiersConfig.from_dict({**tiers, "offload": {"mode": "vllm"}}),
            fast_forward=fast_forward,
        )
    )


@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_halt_behind_loads_of_windows_names_the_rule_and_a_remedy(fast_forward: bool) -> None:
    with pytest.raises(WrongState, match="the run makes no progress: 11 requests wait") as halt:
        play_groups(37, fast_forward=fast_forward)
    assert halt.match("hold blocks which were loaded for them lack room for the rest of their prompts")
    assert halt.match(r"the offload of vLLM 0\.33 reserves too few blocks .* it halts too")
    assert halt.match(r"choose more blocks \(--num-gpu-blocks\)$")
    assert play_groups(50).timeline.completed.all()
