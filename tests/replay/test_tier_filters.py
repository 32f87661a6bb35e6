"""Offload filters, eviction policies of tiers and loads that fail, in a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from replay.building import crowd
from replay.tier_scene import ENGINE, config, played
from understudy.errors import ConfigError, PolicyError
from understudy.kv import EvictionPolicy
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan

if TYPE_CHECKING:
    from collections.abc import Sequence


class Nothing:
    """Copies no block."""

    def select(self, lineages: list[int], reuse: Any) -> Sequence[bool]:  # noqa: ARG002
        return [False] * len(lineages)


def test_a_filter_that_wants_nothing_leaves_the_host_empty() -> None:
    timeline = played(crowd(), config(offload={"filter": Nothing}))
    assert timeline.tiers is not None
    assert timeline.tiers.totals.offloaded_blocks == 0
    assert timeline.tiers.tiers[1].stored_blocks == 0
    bare = played(crowd())
    assert timeline.finish_ns.tolist() == bare.finish_ns.tolist()


def test_a_filter_is_made_once_a_run_and_sees_hashes_and_reuse() -> None:
    made = []

    class Watching:
        def __init__(self) -> None:
            made.append(self)
            self.asked: list[tuple[int, Any]] = []

        def select(self, lineages: list[int], reuse: Any) -> Sequence[bool]:
            assert len(lineages) == len(reuse)
            assert all(isinstance(lineage, int) for lineage in lineages)
            self.asked.append((len(lineages), reuse.tolist()))
            return [True] * len(lineages)

    tiers = config(offload={"filter": Watching})
    first = run_offline(RunPlan(crowd(), ENGINE, workers=2, tiers=tiers))
    second = run_offline(RunPlan(crowd(), ENGINE, workers=2, tiers=tiers))
    assert len(made) == 2
    assert made[0].asked == made[1].asked != []
    assert first.facts.digest == second.facts.digest
    assert first.facts.tiers["offload"]["filter"].endswith("Watching")
    plain = run_offline(RunPlan(crowd(), ENGINE, workers=2, tiers=config()))
    assert plain.facts.digest == first.facts.digest


def test_a_filter_that_answers_for_others_is_an_error() -> None:
    class Short(Nothing):
        def select(self, lineages: list[int], reuse: Any) -> Sequence[bool]:  # noqa: ARG002
            return [True] * (len(lineages) + 1)

    with pytest.raises(PolicyError, match="asked about"):
        played(crowd(), config(offload={"filter": Short}))


def test_what_a_filter_raises_ends_the_run() -> None:
    class Raising(Nothing):
        def select(self, lineages: list[int], reuse: Any) -> Sequence[bool]:  # noqa: ARG002
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        played(crowd(), config(offload={"filter": Raising}))


def test_an_object_that_is_no_filter_is_refused() -> None:
    with pytest.raises(ConfigError, match="filter must be a class that implements OffloadPolicy"):
        config(offload={"filter": Nothing()})
    with pytest.raises(ConfigError, match=r"offload.filter returned .*no select"):
        played(crowd(), config(offload={"filter": dict}))


def test_loads_fail_at_the_rate_that_is_set_and_the_prompts_are_computed() -> None:
    slow_compute = {"recompute_fallback": False}
    broken = played(crowd(), config(offload={"onboard_failure_rate": 1.0, **slow_compute}))
    sound = played(crowd(), config(offload=slow_compute))
    assert broken.tiers is not None
    assert sound.tiers is not None
    assert broken.tiers.totals.failed_loads == broken.tiers.totals.onboards > 0
    assert sound.tiers.totals.failed_loads == 0
    assert np.any(sound.tiers.below_tokens_total)
    assert broken.completed.all()
    with pytest.raises(ConfigError, match="onboard_failure_rate must be a share from 0 and at most 1"):
        config(offload={"onboard_failure_rate": 1.5})


def test_a_block_whose_load_failed_did_not_come_from_below() -> None:
    # Somebody else may have computed it meanwhile: then it is a hit on the device.
    timeline = played(crowd(), config(offload={"onboard_failure_rate": 1.0, "recompute_fallback": False}))
    assert timeline.tiers is not None
    assert not np.any(timeline.tiers.below_tokens_total)


def test_a_tier_may_evict_by_a_class_of_ones_own_on_every_worker() -> None:
    made = []

    class Oldest(EvictionPolicy):
        """First freed, first evicted."""

        def __init__(self) -> None:
            made.append(self)
            self._order: dict[int, None] = {}

        def on_freed(self, blocks: Any, lineage_hashes: Any) -> None:  # noqa: ARG002
            self._order.update(dict.fromkeys(blocks.tolist()))

        def on_taken(self, blocks: Any) -> None:
            for block in blocks.tolist():
                self._order.pop(block, None)

        def select(self, count: int) -> Sequence[int]:
            return list(self._order)[:count]

    host = {"tier": "g2", "blocks": 30}
    run = run_offline(RunPlan(crowd(), ENGINE, workers=3, tiers=config({**host, "eviction": Oldest})))
    assert len(made) == 3
    fifo = run_offline(RunPlan(crowd(), ENGINE, workers=3, tiers=config({**host, "eviction": "fifo"})))
    assert run.timeline.completed.all()
    assert run.timeline.tiers is not None
    assert fifo.timeline.tiers is not None
    assert run.timeline.tiers.tiers[1].evicted_blocks > 0
    shared = config(host, {"tier": "g3", "blocks": 50, "eviction": Oldest})
    for _ in range(2):  # a plan serves many runs
        assert run_offline(RunPlan(crowd(), ENGINE, workers=2, tiers=shared)).timeline.completed.all()
