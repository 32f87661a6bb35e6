"""A filter or a host policy that raises while blocks leave the device loses none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from eviction.strict import StrictLru
from tiers.building import BLOCK, Worker, chain, of_tier, tiers
from understudy.kv import BUILT_IN_POLICIES

if TYPE_CHECKING:
    from collections.abc import Callable


class Fragile:
    """An offload filter that takes every block, and raises at its first call."""

    def __init__(self) -> None:
        self.calls = 0

    def ask(self, _name: str = "") -> None:
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("not today")

    def select(self, lineages: list[int], reuse: Any) -> list[bool]:  # noqa: ARG002
        self.ask()
        return [True] * len(lineages)


def host_policy(fragile: Fragile) -> Callable[[], StrictLru]:
    """A host policy that raises when `fragile` does."""

    def make() -> StrictLru:
        policy = StrictLru()
        policy.hook = lambda name: fragile.ask() if name == "select" else None
        return policy

    return make


@pytest.mark.parametrize("device", [*BUILT_IN_POLICIES, "user-defined"])
@pytest.mark.parametrize("raising", ["filter", "host policy"])
@pytest.mark.parametrize("kv_manager", ["native", "kvbm"])
def test_blocks_that_were_evicted_when_it_raised_are_cached_again(
    raising: str, device: str, kv_manager: str
) -> None:
    fragile = Fragile()
    below: dict[str, Any] = (
        {"offload_filter": fragile} if raising == "filter" else {"g2_policy": host_policy(fragile)}
    )
    order: Any = StrictLru if device == "user-defined" else device
    worker = Worker(5, tiers(**below), step_ms=0.0, kv_manager=kv_manager, eviction_policy=order)
    worker.cache(1, 3)
    worker.cache(2, 1)
    cached = {f"{1000 * tag + i + 1}" for tag, blocks in ((1, 3), (2, 1)) for i in range(blocks)}
    index: set[str] = set()

    def listen() -> None:
        for kind, block in of_tier(worker.events(), 1):
            assert (f"{block}" in index) == (kind == "removed")
            index.symmetric_difference_update({f"{block}"})

    listen()
    assert index == cached
    request = worker.submit(3, 3 * BLOCK)
    with pytest.raises(RuntimeError, match="not today"):
        worker.begin()
    worker.check()
    listen()
    assert index == cached
    worker.play()
    assert worker.emitted(request) == 1
    assert fragile.calls > 1
    found = [worker.answers(tag, blocks) for tag, blocks in ((1, 3), (2, 1))]
    assert [kind for kinds in found for kind, _ in kinds] == ["hit"] * 4, found


def test_an_engine_that_is_asked_again_offloads_what_it_could_not_before() -> None:
    worker = Worker(2, tiers(offload_filter=Fragile()), step_ms=0.0)
    worker.cache(1, 2)
    worker.submit(2, 2 * BLOCK)
    with pytest.raises(RuntimeError, match="not today"):
        worker.begin()
    assert sorted(worker.engine.resident_hashes()) == sorted(block.sequence_hash for block in chain(1, 2))
    worker.play()
    assert [tier for _, tier in worker.answers(1, 2)] == [2, 2]
