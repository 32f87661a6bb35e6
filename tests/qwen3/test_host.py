"""Host memory below the device: what left comes back as it was, and nothing is lost on the way."""

from __future__ import annotations

import numpy as np
import pytest

from qwen3.building import OPEN, TINY, alone, ends, executor_of, generate, manager_of, prompt_of, whole
from understudy.errors import ConfigError, PolicyError
from understudy.qwen3.engine import Engine
from understudy.qwen3.host import HostTier
from understudy.qwen3.limits import SchedulerConfig
from understudy.qwen3.link import measure_link
from understudy.qwen3.pages import PinnedPages, merge_runs
from understudy.qwen3.request import Request
from understudy.qwen3.scheduler import Scheduler
from understudy.tiers.settings import TiersConfig


class Slow(HostTier):
    """Copies that end when they are told to, as those of a device do."""

    stalled = False

    def begin_copies(self) -> None:
        asked = list(self._pending)
        super().begin_copies()
        for copy in asked:
            copy.done = lambda: not self.stalled


def engine_with(blocks: int = 24, host: int = 64, seqs: int = 8) -> tuple[Engine, Slow]:
    manager = manager_of(TINY, blocks)
    executor = executor_of(TINY, manager)
    tier = Slow(manager, PinnedPages(host, executor.buffer))
    engine = Engine(Scheduler(manager, SchedulerConfig(64, seqs, 512), host=tier), executor)
    OPEN.append(engine)
    return engine, tier


def everything_is_back(engine: Engine, tier: Slow) -> None:
    tier.stalled = False
    tier.collect_ended()
    whole(engine)
    assert tier.blocks.available == tier.blocks.num_blocks


PROMPTS = [prompt_of(seed, 40) for seed in range(5)]


def test_what_the_device_has_evicted_comes_back_from_the_host() -> None:
    engine, tier = engine_with()
    for prompt in PROMPTS:
        generate(engine, prompt)
    assert tier.offloaded_blocks == 5 * 11  # 47 of 48 tokens are computed: eleven whole pages each
    for number, prompt in enumerate(PROMPTS):
        engine.submit(Request("r", prompt, 8))
        outputs = engine.run()
        assert [output.token for output in outputs] == alone(prompt)
        assert outputs[0].cached_tokens == 36
        assert tier.onboarded_blocks == 9 * (number + 1)
    everything_is_back(engine, tier)


def test_a_page_that_came_back_is_the_one_that_left_to_the_bit() -> None:
    engine, tier = engine_with()
    names = {}
    for prompt in PROMPTS[:2]:
        request = Request("r", prompt, 8)
        engine.submit(request)
        engine.run()
        assert request.chain is not None
        names[tuple(prompt)] = request.chain.identities[:9]
    buffer = engine.executor.buffer.pages  # type: ignore[attr-defined]
    first = names[tuple(PROMPTS[0])]
    with engine.scheduler.manager.blocks.match_prefix(first) as before:
        left = buffer[before.ids.tolist()].clone()
    engine.scheduler.manager.blocks.clear_inactive()
    buffer.fill_(float("nan"))
    copy = tier.onboard(first)
    assert copy is not None
    tier.begin_copies()
    with tier.commit(copy) as back:
        assert buffer[back.ids.tolist()].equal(left)


def test_copies_are_set_off_while_the_device_computes_unless_it_has_nothing_to_do() -> None:
    engine, tier = engine_with(blocks=40)
    seen: list[tuple[bool, bool]] = []
    tier.on_copy = lambda copy: seen.append((copy.down, engine.running))
    generate(engine, PROMPTS[0], max_tokens=21)  # the last step fills a page
    assert seen
    assert all(running for _, running in seen[:-1]), "what is sealed while others run waits for the next step"
    assert seen[-1] == (True, False), "behind the last step there is none"
    seen.clear()
    tier.collect_ended()
    engine.scheduler.manager.blocks.clear_inactive()
    engine.submit(Request("long", PROMPTS[1], 30))
    for _ in range(3):
        engine.step()
    engine.submit(Request("again", PROMPTS[0], 2))
    engine.run()
    assert (False, True) in seen, "a load is set off beside the step of another request"
    everything_is_back(engine, tier)


def test_a_copy_that_was_asked_for_and_not_set_off_has_not_come() -> None:
    engine, tier = engine_with()
    generate(engine, PROMPTS[0], max_tokens=1)
    request = Request("r", PROMPTS[0], 1)
    tier.collect_ended()
    engine.scheduler.manager.blocks.clear_inactive()
    assert engine.scheduler.add(request) is None
    assert engine.scheduler.schedule() is None, "it waits for its pages"
    assert request.load is not None
    assert not request.load.done()
    assert engine.scheduler.cancel("r")
    assert tier.blocks.available < tier.blocks.num_blocks, (
        "its pages are held until the copy has been and gone"
    )
    tier.begin_copies()
    everything_is_back(engine, tier)


def test_what_a_last_step_seals_goes_down_too() -> None:
    engine, tier = engine_with()
    generate(engine, PROMPTS[0], max_tokens=1)
    tier.collect_ended()
    assert tier.offloaded_blocks == 10
    everything_is_back(engine, tier)


def test_while_one_waits_for_its_pages_others_are_served() -> None:
    engine, tier = engine_with(blocks=40)
    for prompt in PROMPTS:
        generate(engine, prompt)
    tier.stalled = True
    engine.submit(Request("warm", PROMPTS[0], 4))
    engine.submit(Request("cold", prompt_of(77, 9), 4))
    outputs = []
    for _ in range(8):
        outputs += engine.step()
    assert ends(outputs) == {"cold": "length"}
    tier.stalled = False
    assert ends(engine.run()) == {"warm": "length"}
    everything_is_back(engine, tier)


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_who_leaves_during_a_copy_leaves_no_block_behind(how: str) -> None:
    engine, tier = engine_with()
    for prompt in PROMPTS:
        generate(engine, prompt)
    tier.stalled = True
    engine.submit(Request("warm", PROMPTS[0], 4))
    engine.step()
    assert engine.scheduler.restores is not None
    assert engine.scheduler.restores.loading
    if how == "cancel":
        engine.cancel("warm")
        assert (
            engine.scheduler.manager.available_blocks < engine.scheduler.manager.total_blocks - 1
        )  # still written
        everything_is_back(engine, tier)
    else:
        tier.stalled = False
        engine.close()
        assert engine.scheduler.manager.available_blocks == engine.scheduler.manager.total_blocks


def test_a_block_that_is_being_copied_down_is_not_given_away() -> None:
    engine, tier = engine_with(blocks=13)
    tier.stalled = True
    generate(engine, PROMPTS[0])
    manager = engine.scheduler.manager
    assert manager.available_blocks == manager.total_blocks - 1 - 11
    everything_is_back(engine, tier)


def test_a_full_host_refuses_and_counts() -> None:
    engine, tier = engine_with(host=4)
    assert generate(engine, PROMPTS[0]) == [alone(PROMPTS[0])]
    assert tier.refused_blocks > 0
    everything_is_back(engine, tier)


def test_requests_that_hold_restored_pages_cannot_lock_each_other_out() -> None:
    engine, tier = engine_with(blocks=24)
    for prompt in PROMPTS:
        generate(engine, prompt)
    tier.stalled = True
    for number, prompt in enumerate(PROMPTS):
        engine.submit(Request(f"{number}", prompt, 8))
    for _ in range(3):
        engine.step()
    tier.stalled = False
    assert ends(engine.run()) == {f"{number}": "length" for number in range(5)}
    everything_is_back(engine, tier)


@pytest.mark.parametrize(
    ("tiers", "word"),
    [
        (
            [{"tier": "g2", "blocks": 4}, {"tier": "g3", "blocks": 4}],
            "g3: the real engine has only host memory",
        ),
        ([{"tier": "g2", "blocks": "unlimited"}], "unlimited"),
        ([{"tier": "g2", "bytes": 10}], "is less than a page"),
    ],
)
def test_what_a_real_host_cannot_be_is_refused(tiers: list[dict[str, object]], word: str) -> None:
    settings = TiersConfig.from_dict(
        {"tiers": tiers, "offload": {"mode": "write_through"}, "kv_bytes_per_token": 1}
    )
    manager = manager_of(TINY, 8)
    with pytest.raises(ConfigError, match=word):
        HostTier.from_config(settings, manager, executor_of(TINY, manager).buffer)


def test_the_simulators_settings_make_a_real_host() -> None:
    settings = TiersConfig.from_dict(
        {
            "tiers": [{"tier": "g2", "blocks": 5}],
            "offload": {"mode": "write_through"},
            "kv_bytes_per_token": 1,
        }
    )
    manager = manager_of(TINY, 8)
    tier = HostTier.from_config(settings, manager, executor_of(TINY, manager).buffer)
    assert tier is not None
    assert tier.blocks.num_blocks == 5
    assert HostTier.from_config(TiersConfig(), manager, executor_of(TINY, manager).buffer) is None


@pytest.mark.parametrize(
    ("offload", "tier", "word"),
    [
        ({"mode": "evict"}, {}, "offload: mode: .* choose write_through"),
        ({"min_reuse": 2}, {}, "offload: min_reuse: .* give a filter"),
        ({"demand_first": True}, {}, "offload: demand_first"),
        ({"onboard_failure_rate": 0.1}, {}, "offload: onboard_failure_rate"),
        ({}, {"latency_ms": 1.0}, "g2: latency_ms"),
        ({}, {"link": {"down_gbps": 5}}, "g2: link: the real link"),
    ],
)
def test_no_setting_of_the_simulator_is_ignored(
    offload: dict[str, object], tier: dict[str, object], word: str
) -> None:
    settings = TiersConfig.from_dict({"tiers": [{"tier": "g2", "blocks": 4, **tier}], "offload": offload})
    manager = manager_of(TINY, 8)
    with pytest.raises(ConfigError, match=word):
        HostTier.from_config(settings, manager, executor_of(TINY, manager).buffer)


class EverySecond:
    """An offload policy: the first of two blocks is worth a copy."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def select(self, lineages: list[int], reuse: object) -> list[bool]:
        self.asked.append(len(lineages))
        assert np.asarray(reuse).tolist() == [0] * len(lineages)
        return [place % 2 == 0 for place in range(len(lineages))]


class Terse(EverySecond):
    def select(self, lineages: list[int], reuse: object) -> list[bool]:
        return super().select(lineages, reuse)[1:]


def host_of(offload: dict[str, object]) -> tuple[Engine, HostTier]:
    settings = TiersConfig.from_dict({"tiers": [{"tier": "g2", "blocks": 64}], "offload": offload})
    manager = manager_of(TINY, 40)
    executor = executor_of(TINY, manager)
    tier = HostTier.from_config(settings, manager, executor.buffer)
    assert tier is not None
    engine = Engine(Scheduler(manager, SchedulerConfig(64, 8, 512), host=tier), executor)
    OPEN.append(engine)
    return engine, tier


def test_a_policy_of_the_simulator_says_what_goes_down() -> None:
    engine, tier = host_of({"filter": EverySecond})
    generate(engine, PROMPTS[0], max_tokens=1)
    tier.collect_ended()
    assert isinstance(tier.filter, EverySecond)
    assert tier.filter.asked == [10]
    assert tier.offloaded_blocks == 5
    whole(engine)


def test_a_policy_that_does_not_answer_for_each_is_told_so() -> None:
    engine, _ = host_of({"filter": Terse})
    engine.submit(Request("r", PROMPTS[0], 1))
    with pytest.raises(PolicyError, match="9 times for 10 blocks"):
        engine.run()


def test_a_copy_down_has_no_more_pages_than_it_may() -> None:
    engine, tier = host_of({"offload_batch_size": 4})
    sizes: list[int] = []
    tier.on_copy = lambda copy: sizes.append(len(copy.identities))
    generate(engine, PROMPTS[0], max_tokens=1)
    assert sizes == [4, 4, 2]
    tier.collect_ended()
    assert tier.offloaded_blocks == 10


def test_pages_that_lie_end_to_end_on_both_sides_are_one_transfer() -> None:
    assert merge_runs([3, 4, 5, 9, 1, 2], [7, 8, 9, 10, 0, 5]) == [
        (3, 7, 3),
        (9, 10, 1),
        (1, 0, 1),
        (2, 5, 1),
    ]
    assert merge_runs([], []) == []


def test_the_link_is_measured_and_nothing_stays_behind() -> None:
    engine, tier = engine_with(blocks=64, host=64)
    times = measure_link(tier, rounds=2)
    assert min(times) >= 0
    assert times.down_ms > 0
    assert times.up_ms > 0
    assert tier.blocks.available == 64
    everything_is_back(engine, tier)
    assert generate(engine, PROMPTS[0]) == [alone(PROMPTS[0])]
