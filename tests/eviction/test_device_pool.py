"""Every eviction policy, built in or in Python, orders the blocks of a simulated device."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import understudy
from engines.building import MS
from engines.test_fast_forward import assert_fast_forward_changes_nothing
from engines.test_scripted_clock import content
from model.replay_gen import random_case
from model.vllm_config import PROFILES, RECORDED
from replay.building import single_turns
from understudy import _core
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, PolicyError
from understudy.kv import BUILT_IN_POLICIES, EvictionPolicy
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers import TiersConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

EXAMPLE = Path(__file__).parents[2] / "examples" / "python_policy.py"
PythonLru: Callable[[], EvictionPolicy] = runpy.run_path(str(EXAMPLE))["ProtectedLru"]
"""Empty blocks first, then the least recently released: what the built-in lru does."""

MANAGERS = ("native", "kvbm")
TIERS = {
    "kv_bytes_per_token": 1 << 14,
    "tiers": [{"tier": "g2", "blocks": 30, "link": {"down_gbps": 0.3, "up_gbps": 0.3}}],
}


def digest(seed: int, tiers: dict[str, Any] | None = None, **changes: Any) -> str | None:
    """Of the run of that seed; None where its requests block each other for good."""
    case = random_case(seed, async_scheduling=False, watermark=0.0, enable_prefix_caching=True, **changes)
    below: dict[str, Any] = {} if tiers is None else {"tiers": TiersConfig.from_dict(tiers)}
    try:
        run = run_offline(RunPlan(case.workload, case.config, **case.how, **below))
    except understudy.errors.WrongState:
        return None
    return str(run.facts.digest)


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("name", BUILT_IN_POLICIES)
def test_an_engine_fast_forwards_as_it_steps_under_each(name: str, manager: str) -> None:
    for seed in range(12):
        profile = PROFILES[seed % len(PROFILES)] if manager == "native" else RECORDED
        assert_fast_forward_changes_nothing(seed, profile, kv_manager=manager, eviction_policy=name)


@pytest.mark.parametrize("manager", MANAGERS)
def test_the_order_decides_who_stays(manager: str) -> None:
    # Two prompts take turns on a device that holds one and a half of them.
    workload = single_turns(
        [64, 64, 64, 64], 1, [0, 100, 200, 300], [range(4), range(4, 8), range(4), range(4, 8)]
    )
    found = {
        name: run_offline(
            RunPlan(
                workload,
                VllmConfig(block_size=16, num_gpu_blocks=7, kv_manager=manager, eviction_policy=name),  # type: ignore[arg-type]
            )
        ).timeline.cached_tokens_first.tolist()
        for name in ("lru", Newest)
    }
    assert found["lru"] != found[Newest]


class Newest(EvictionPolicy):
    """Hands out what was released last."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def on_freed(self, blocks: npt.NDArray[np.int32], lineage_hashes: list[int | None]) -> None:  # noqa: ARG002
        self.order += blocks.tolist()

    def on_taken(self, blocks: npt.NDArray[np.int32]) -> None:
        taken = set(blocks.tolist())
        self.order = [block for block in self.order if block not in taken]

    def select(self, count: int) -> Sequence[int]:
        return self.order[-count:][::-1]


@pytest.mark.parametrize("tiers", [None, "evict", "write_through"])
@pytest.mark.parametrize("manager", MANAGERS)
def test_a_policy_in_python_gives_what_the_same_one_gives_natively(manager: str, tiers: str | None) -> None:
    below = None if tiers is None else {**TIERS, "offload": {"mode": tiers}}
    digests = [
        (digest(seed, below, kv_manager=manager, eviction_policy=policy))
        for seed in range(15)
        for policy in ("lru", PythonLru)
    ]
    assert any(digests)
    assert digests[::2] == digests[1::2]


class Moody(Newest):
    """Fails when it is asked for the `fails_at`-th time."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self.asked = 0
        self.fails_at = fails_at

    def select(self, count: int) -> Sequence[int]:
        self.asked += 1
        if self.asked == self.fails_at:
            raise RuntimeError("not now")
        return super().select(count)


def lives(fails_at: int, manager: str) -> tuple[list[Any], int]:
    """What becomes of three requests, and how often the policy failed."""
    policy = Moody(fails_at)
    config = _core.VllmEngineConfig(
        block_size=4, num_gpu_blocks=13, kv_manager=manager, eviction_policy=lambda: policy, events=True
    )
    engine = _core.VllmEngine(config, _core.constant_timing(1.0, 1.0))
    for number in range(3):
        engine.submit(f"{number}", 8 + number, 14, content(1 + 100 * number, 22 + number))
    ended: list[Any] = []
    failures = 0
    while not engine.idle:
        try:
            effects = engine.advance(500 * MS)
        except RuntimeError:
            failures += 1
            engine.check()
            continue
        ended += [(r.id, r.first_token_ns, r.finish_ns, r.output_tokens) for r in effects.finished]
    engine.check()
    truth = _core.EventTruth()
    truth.apply(engine.take_all_events())
    truth.require_equal(engine)
    return ended, failures


@pytest.mark.parametrize("manager", MANAGERS)
def test_an_engine_goes_on_wherever_its_policy_failed(manager: str) -> None:
    whole, failures = lives(-1, manager)
    assert (len(whole), failures) == (3, 0)
    for fails_at in range(1, 8):
        again, failures = lives(fails_at, manager)
        assert failures == 1
        assert len(again) == 3
        assert sorted(row[3] for row in again) == sorted(row[3] for row in whole)


def test_a_policy_that_breaks_its_contract_is_named() -> None:
    class Liar(Newest):
        def select(self, count: int) -> Sequence[int]:
            return [0] * count

    with pytest.raises(PolicyError):
        run_offline(
            RunPlan(single_turns([64]), VllmConfig(block_size=16, num_gpu_blocks=8, eviction_policy=Liar))
        )


@pytest.mark.parametrize("policy", ["magic", 3, Newest()])
def test_what_is_no_policy_is_refused_by_name(policy: object) -> None:
    with pytest.raises(ConfigError, match="eviction_policy"):
        VllmConfig(eviction_policy=policy)


@pytest.mark.parametrize(
    ("settings", "exact"),
    [
        ({}, True),
        ({"eviction_policy": "vllm"}, True),
        ({"eviction_policy": "lru"}, False),
        ({"eviction_policy": Newest}, False),
        ({"kv_manager": "kvbm", "eviction_policy": "multi_lru"}, True),
        ({"kv_manager": "kvbm", "eviction_policy": "vllm"}, False),
    ],
)
def test_the_report_says_when_steps_are_no_longer_those_of_the_engine(
    settings: dict[str, Any], exact: bool
) -> None:
    report = understudy.replay(
        single_turns([64, 32]), VllmConfig(block_size=16, num_gpu_blocks=8, **settings)
    )
    notes = " ".join(report.run.notes)
    assert ("not step-exact" in notes) is not exact
