"""Threads on one manager: nothing is lost and nothing hangs."""

from __future__ import annotations

import gc
import random
import threading
import time
import warnings
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import pytest

from eviction.strict import StrictLru
from threads import run_together
from understudy.errors import CapacityExhausted, PolicyError, WrongState
from understudy.kv import BlockManager, BlockStore, MutableBlocks, PoolConfig, RegisteredBlocks, Tier
from understudy.tokens import Identities

if TYPE_CHECKING:
    from understudy.core_types import DuplicatePolicyName, PolicyName

# 40 blocks a prompt: calls on either side of the size from which the core lets go of the GIL.
PROMPTS = [Identities.from_local_hashes(range(1000 * p + 1, 1000 * p + 41)) for p in range(6)]
NATIVE: list[PolicyName] = ["lineage", "lineage_fifo", "lru", "multi_lru", "fifo", "vllm", "vllm_append"]
DUPLICATES: list[DuplicatePolicyName] = ["allow", "reject", "keep"]


def hammer(manager: BlockManager, seed: int, rounds: int) -> None:
    """Random requests of the kinds an engine makes; keeps up to 4 of them, and ends with none."""
    rng = random.Random(seed)
    held: list[RegisteredBlocks | MutableBlocks] = []
    for _ in range(rounds):
        prompt = rng.choice(PROMPTS)[: rng.randint(1, 40)]
        hit = manager.match_prefix(prompt)
        held.append(hit)
        try:
            fresh = manager.allocate(len(prompt) - len(hit))
        except CapacityExhausted:
            pass
        else:
            action = rng.random()
            if action < 0.7:
                held.append(fresh.register(prompt[len(hit) :]))
            elif action < 0.8:
                fresh.stage(prompt[len(hit) :]).release()
            else:
                held.append(fresh)
        if rng.random() < 0.1:
            manager.touch(rng.choice(PROMPTS))
        if rng.random() < 0.05:
            manager.clear_inactive()
        if rng.random() < 0.2 and isinstance(held[0], RegisteredBlocks):
            weak = held[0].weak()
            again = weak.upgrade()
            assert again is not None, "a held block is gone"
            again.release()
        while len(held) > rng.randint(0, 4):
            held.pop(rng.randrange(len(held))).release()
    for guard in held:
        guard.release()


def assert_conserved(manager: BlockManager) -> None:
    metrics = manager.metrics()
    assert manager.available == manager.num_blocks
    assert metrics.reset_blocks + metrics.inactive_blocks == manager.num_blocks
    assert (metrics.mutable_blocks, metrics.staged_blocks, metrics.active_blocks) == (0, 0, 0)
    assert metrics.active_references == 0
    assert metrics.allocations == metrics.allocations_from_reset + metrics.evictions
    manager.store.check()
    with manager.allocate(manager.num_blocks) as everything:
        assert sorted(everything.ids.tolist()) == list(range(manager.num_blocks))


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("policy", NATIVE)
def test_threads_on_one_native_pool_lose_nothing(policy: PolicyName, threads: int) -> None:
    manager = BlockManager(100, policy=policy, duplicates=random.Random(threads).choice(DUPLICATES))
    run_together(*(partial(hammer, manager, seed, 1500) for seed in range(threads)))
    assert manager.metrics().evictions > 0
    assert_conserved(manager)


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("duplicates", DUPLICATES)
def test_threads_on_one_pool_with_a_python_policy_lose_nothing(
    duplicates: DuplicatePolicyName, threads: int
) -> None:
    policy = StrictLru()  # objects to any news that contradicts the old
    manager = BlockManager(100, policy=policy, duplicates=duplicates)
    run_together(*(partial(hammer, manager, seed, 400) for seed in range(threads)))
    assert manager.metrics().evictions > 0
    assert_conserved(manager)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_python_pool_and_a_native_pool_of_one_store_do_not_block_each_other(threads: int) -> None:
    store = BlockStore(
        [
            PoolConfig(100, tier=Tier.G1, policy=StrictLru(), duplicates="keep"),
            PoolConfig(100, tier=Tier.G2, policy="lineage"),
        ],
        events=True,
    )
    pools = [store.manager(Tier.G1), store.manager(Tier.G2)] * threads
    run_together(*(partial(hammer, manager, seed, 400) for seed, manager in enumerate(pools)))
    for manager in pools[:2]:
        assert_conserved(manager)
    ids = store.drain_events().ids
    assert np.array_equal(ids, np.arange(len(ids)))


@pytest.mark.parametrize("policy", ["lineage", "lru", "vllm", "python"])
def test_eight_threads_that_each_want_all_blocks_never_share_one(policy: str) -> None:
    manager = BlockManager(16, policy=StrictLru() if policy == "python" else policy)  # type: ignore[arg-type]
    grants: list[tuple[int, ...]] = []
    lock = threading.Lock()
    holders: list[int] = []

    def want_all() -> None:
        for _ in range(100):
            try:
                blocks = manager.allocate(16)
            except CapacityExhausted:
                continue
            with lock:
                holders.append(1)
                assert len(holders) == 1, "two threads hold the whole pool"
                grants.append(tuple(sorted(blocks.ids.tolist())))
                holders.pop()
            blocks.release()

    run_together(*[want_all] * 8)
    assert set(grants) == {tuple(range(16))}
    assert_conserved(manager)


@pytest.mark.parametrize("policy", ["lineage", "lru", "vllm", "python"])
def test_blocks_held_at_one_moment_are_held_once(policy: str) -> None:
    manager = BlockManager(64, policy=StrictLru() if policy == "python" else policy)  # type: ignore[arg-type]
    granted: list[MutableBlocks] = []

    def grab(seed: int) -> None:
        rng = random.Random(seed)
        while True:
            try:
                granted.append(manager.allocate(rng.randint(1, 6)))
            except CapacityExhausted:
                if manager.available < 1:
                    return

    run_together(*(partial(grab, seed) for seed in range(4)))
    held = [set(blocks.ids.tolist()) for blocks in granted]
    assert all(a.isdisjoint(b) for a, b in combinations(held, 2))
    assert set.union(*held) == set(range(64))
    for blocks in granted:
        blocks.release()
    assert_conserved(manager)


def test_one_guard_released_by_many_threads_is_released_once() -> None:
    manager = BlockManager(64, policy="lru")
    for _ in range(50):
        blocks = manager.allocate(64).register(Identities.from_local_hashes(range(1, 65)))
        extra = blocks.clone()
        run_together(*[blocks.release] * 4)
        assert manager.metrics().active_references == 64
        extra.release()
    assert_conserved(manager)


def test_a_guard_released_while_another_thread_clones_it_keeps_its_blocks_until_then() -> None:
    blocks = 200_000
    identities = Identities.from_local_hashes(range(1, blocks + 1))
    manager = BlockManager(blocks, policy="lru")
    for _ in range(12):
        guard = manager.allocate(blocks).register(identities)
        at_it: list[bool] = []

        def release(guard: RegisteredBlocks = guard, at_it: list[bool] = at_it) -> None:
            while not at_it:
                pass
            guard.release()
            guard.release()

        def clone(guard: RegisteredBlocks = guard, at_it: list[bool] = at_it) -> None:
            at_it.append(True)  # the other comes to it as soon as the call lets go of the GIL
            try:
                copy = guard.clone()
            except WrongState:
                return
            assert len(copy) == blocks
            assert manager.metrics().active_references >= blocks
            copy.release()

        run_together(clone, release)
        assert guard.released
        assert_conserved(manager)


# --- policies that do things while they are asked -------------------------------------------------


@pytest.mark.parametrize("method", ["on_freed", "on_taken", "select"])
def test_a_collection_inside_a_policy_that_drops_guards_does_not_deadlock(method: str) -> None:
    policy = StrictLru()
    manager = BlockManager(32, policy=policy)
    dropped: list[int] = []

    class Cycle:
        """Only the collector can drop it, and the guard with it."""

        def __init__(self, guard: object) -> None:
            self.me = self
            self.guard = guard

    def collect(name: str) -> None:
        if name == method:
            dropped.append(gc.collect(0))

    def churn(start: int) -> None:
        prompt = Identities.from_local_hashes(range(start, start + 4))
        for _ in range(20):
            try:
                Cycle(manager.allocate(4).register(prompt))
            except CapacityExhausted:
                gc.collect(0)
            manager.allocate(1).release()

    policy.hook = collect
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # the guards are dropped on purpose
            run_together(partial(churn, 100), partial(churn, 200))
            gc.collect()
    finally:
        gc.enable()
        policy.hook = lambda _name: None
    assert sum(dropped) > 0
    assert manager.metrics().leaked_guards > 0
    assert_conserved(manager)


def test_a_policy_that_waits_for_another_thread_does_not_stop_that_thread() -> None:
    policy = StrictLru()
    manager = BlockManager(64, policy=policy)
    held = manager.allocate(8).register(PROMPTS[0][:8])
    asked, done = threading.Event(), threading.Event()
    waited: list[bool] = []

    def wait_for_the_other(name: str) -> None:
        if name == "select" and not done.is_set():
            asked.set()
            waited.append(done.wait(60))

    def other() -> None:
        assert asked.wait(60)
        # Everything but an allocation goes on while the policy thinks.
        assert manager.available == 56
        manager.match_prefix(PROMPTS[0][:8]).release()
        manager.has_blocks(PROMPTS[1])
        manager.touch(PROMPTS[0])
        manager.store.drain_events()
        held.release()
        assert manager.clear_inactive() == 8
        done.set()

    policy.hook = wait_for_the_other
    run_together(lambda: manager.allocate(50).release(), other)
    policy.hook = lambda _name: None
    assert waited == [True]
    assert_conserved(manager)


def test_while_a_policy_thinks_other_allocations_wait_their_turn() -> None:
    policy = StrictLru()
    manager = BlockManager(64, policy=policy)
    inside: list[int] = []

    def alone(_name: str) -> None:
        inside.append(1)
        assert len(inside) == 1, "two calls of one policy overlap"
        time.sleep(0)
        inside.pop()

    def allocate() -> None:
        for _ in range(100):
            manager.allocate(8).release()

    policy.hook = alone
    run_together(*[allocate] * 4)
    policy.hook = lambda _name: None
    assert_conserved(manager)


def test_a_policy_that_fails_in_one_thread_leaves_the_others_alone() -> None:
    policy = StrictLru()
    manager = BlockManager(100, policy=policy)
    unlucky = threading.local()
    refusals: list[str] = []

    def fail(name: str) -> None:
        if name == "select" and getattr(unlucky, "yes", False):
            raise PolicyError("not for you")

    def refused() -> None:
        unlucky.yes = True
        while len(refusals) < 100:
            try:
                manager.allocate(1).release()
            except PolicyError as error:
                refusals.append(str(error))
            except CapacityExhausted:
                time.sleep(0)  # the others hold everything at the moment

    policy.hook = fail
    run_together(refused, partial(hammer, manager, 1, 100), partial(hammer, manager, 2, 100))
    policy.hook = lambda _name: None
    assert refusals == ["not for you"] * 100
    assert_conserved(manager)


def test_policies_that_allocate_from_each_others_pools_are_refused_instead_of_deadlocking() -> None:
    policies = {Tier.G1: StrictLru(), Tier.G2: StrictLru()}
    store = BlockStore([PoolConfig(8, tier=tier, policy=policy) for tier, policy in policies.items()])
    both_inside = threading.Barrier(2)
    refusals: list[str] = []

    def reach_over(other: Tier, name: str) -> None:
        if name != "select":
            return
        both_inside.wait(60)
        with pytest.raises(PolicyError, match="must not allocate") as refused:
            store.manager(other).allocate(1)
        refusals.append(str(refused.value))

    policies[Tier.G1].hook = partial(reach_over, Tier.G2)
    policies[Tier.G2].hook = partial(reach_over, Tier.G1)
    run_together(*(lambda tier=tier: store.manager(tier).allocate(4).release() for tier in policies))
    for policy in policies.values():
        policy.hook = lambda _name: None
    assert len(refusals) == 2
    for tier in policies:
        assert_conserved(store.manager(tier))


def test_a_policy_may_allocate_from_a_native_pool() -> None:
    policy = StrictLru()
    store = BlockStore(
        [PoolConfig(8, tier=Tier.G1, policy=policy), PoolConfig(8, tier=Tier.G2, policy="lru")]
    )
    host = store.manager(Tier.G2)

    def copy_down(name: str) -> None:
        if name == "select":
            host.allocate(2).release()

    policy.hook = copy_down
    store.manager(Tier.G1).allocate(4).release()
    policy.hook = lambda _name: None
    assert host.metrics().allocations == 2
    assert_conserved(host)
