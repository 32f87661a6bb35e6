"""Bad input: a typed error that names what and why, and a state that did not change."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from kv.building import AnyGuard, cache, chain, ids, refused, register
from model.eviction import AsPolicy, Lru
from model.side_by_side import DUPLICATES, DuplicatesName
from understudy.errors import (
    CapacityExhausted,
    ConfigError,
    InvalidArgument,
    UnderstudyError,
    WrongState,
)
from understudy.kv import (
    BlockGuard,
    BlockManager,
    BlockStore,
    EvictionPolicy,
    MutableBlocks,
    PoolConfig,
    Tier,
)
from understudy.tokens import Identities

NOT_A_COUNT = [
    (-1, "got -1"),
    (2**70, "got 1180591620717411303424"),
    (-(2**70), "got -1180591620717411303424"),
    (1.5, "must be an int, got 1.5"),
    ("x", "must be an int, got 'x'"),
    ([3], r"must be an int, got \[3\]"),
]


@pytest.fixture(params=DUPLICATES)
def busy(request: pytest.FixtureRequest) -> Any:
    """A manager with blocks in every state."""
    duplicates: DuplicatesName = request.param
    manager = BlockManager(16, block_size=2, duplicates=duplicates, events=True, policy="lru")
    guards: list[AnyGuard] = [
        manager.allocate(2),
        manager.allocate(2).stage(chain(2, 1)),
        register(manager, chain(2, 2)),
        register(manager, chain(1, 2)),
    ]
    cache(manager, chain(3, 3))
    yield manager
    for guard in guards:
        guard.release()
    assert manager.available == 16


# --- construction ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be in 1..1073741824, got 0"),
        ({"num_blocks": 2**31}, "num_blocks must be in 1..1073741824, got 2147483648"),
        ({"num_blocks": 2**64 - 1}, "num_blocks must be in"),
        ({"block_size": 0}, "block_size must be in 1..1048576, got 0"),
        ({"block_size": 2**20 + 1}, "block_size must be in 1..1048576, got 1048577"),
        ({"duplicates": "merge"}, "duplicates must be allow, reject or keep, got 'merge'"),
        ({"policy": "random"}, "policy 'random' is not known; choose one of lineage, "),
        ({"policy": EvictionPolicy}, "got the class EvictionPolicy: pass an instance of it"),
        ({"policy": 7}, r"policy must be a name or an EvictionPolicy; this one has no on_freed\(\)"),
        ({"policy": "lru", "thresholds": [1, 2, 3]}, "thresholds belong to policy multi_lru, not to lru"),
        ({"policy": AsPolicy(Lru()), "thresholds": [1, 2, 3]}, "thresholds belong to policy multi_lru"),
        ({"policy": "multi_lru", "thresholds": [1, 2]}, "thresholds must be three numbers, got 2"),
        ({"policy": "multi_lru", "thresholds": [0, 1, 2]}, "rise strictly within 1..15, got 0, 1, 2"),
        ({"policy": "multi_lru", "thresholds": [3, 3, 4]}, "rise strictly within 1..15, got 3, 3, 4"),
        ({"policy": "multi_lru", "thresholds": [3, 8, 16]}, "rise strictly within 1..15, got 3, 8, 16"),
        ({"policy": "multi_lru", "thresholds": [3, 8, 300]}, "rise strictly within 1..15, got 3, 8, 300"),
        ({"event_capacity": 4}, "event_capacity has no effect without events=True"),
        ({"event_token_ids": True}, "event_token_ids has no effect without events=True"),
        ({"events": True, "event_capacity": 0}, "event_capacity must be at least 1"),
        ({"sketch_capacity": 0}, "sketch_capacity must be at least 1"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlockManager(**({"num_blocks": 4} | settings))


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "dp_rank", "event_capacity", "sketch_capacity"])
@pytest.mark.parametrize(("value", "message"), NOT_A_COUNT, ids=lambda v: str(v)[:12])
def test_a_setting_that_is_no_count_is_named(name: str, value: object, message: str) -> None:
    settings: dict[str, Any] = {"num_blocks": 4, "events": name == "event_capacity"} | {name: value}
    with pytest.raises(InvalidArgument, match=f"{name} .*{message}"):
        BlockManager(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"tier": "G1"},
        {"tier": 9},
        {"duplicates": 5},
        {"reset_on_release": "yes"},
        {"events": "yes"},
        {"event_token_ids": 3},
        {"num_block": 4},
        {"policy": None},
    ],
    ids=str,
)
def test_a_setting_of_a_wrong_type_or_name_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        BlockManager(4, **settings)


def test_a_store_needs_tiers_each_once_and_within_bounds() -> None:
    for pools, message in (
        ([], "pools must name at least one tier"),
        ([PoolConfig(1), PoolConfig(2)], "tier G1 is given twice"),
        ([PoolConfig(0)], "num_blocks must be in"),
        ([PoolConfig(2**30), PoolConfig(1, tier=Tier.G2)], "all tiers together must be at most 1073741824"),
    ):
        with pytest.raises(ConfigError, match=message):
            BlockStore(pools)
    with pytest.raises(TypeError):
        BlockStore(["G1"])  # type: ignore[list-item]


def test_guards_cannot_be_made_by_hand() -> None:
    for kind in (BlockGuard, MutableBlocks):
        with pytest.raises(TypeError, match="no constructor"):
            kind()


# --- counts and lengths ---------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "message"), NOT_A_COUNT, ids=lambda v: str(v)[:12])
def test_a_count_that_is_none_is_refused_everywhere(busy: BlockManager, value: Any, message: str) -> None:
    with busy.allocate(1) as mutable, busy.match_prefix(chain(1, 2)) as registered:
        for name, call in (
            ("count", busy.allocate),
            ("count", mutable.take),
            ("count", registered.take),
            ("limit", busy.eviction_order),
            ("limit", busy.store.drain_events),
        ):
            refused(busy.store, InvalidArgument, f"{name} .*{message}", lambda call=call: call(value))  # type: ignore[misc]
        assert (len(mutable), len(registered)) == (1, 1)


@pytest.mark.parametrize("count", [17, 2**31, 2**63, 2**64 - 1])
def test_an_absurd_allocation_is_a_shortage_and_takes_no_memory(busy: BlockManager, count: int) -> None:
    refused(busy.store, CapacityExhausted, f"asked for {count} blocks", lambda: busy.allocate(count))


def test_an_allocation_beyond_what_is_available_says_how_many_are(busy: BlockManager) -> None:
    available = busy.available
    refused(
        busy.store,
        CapacityExhausted,
        f"asked for {available + 1} blocks of tier G1 but only {available} of 16 are available",
        lambda: busy.allocate(available + 1),
    )


@pytest.mark.parametrize("given", [0, 1, 2, 4, 100])
def test_identities_must_be_as_many_as_the_blocks(busy: BlockManager, given: int) -> None:
    with busy.allocate(3) as blocks:
        before = blocks.ids.tolist()
        message = f"identities must name each of the 3 blocks, got {given}"
        refused(busy.store, InvalidArgument, message, lambda: blocks.stage(chain(given)))
        refused(busy.store, InvalidArgument, message, lambda: blocks.register(chain(given)))
        assert blocks.ids.tolist() == before
        with blocks.register(chain(3, 8)) as registered:
            assert ids(registered) == before


def test_more_blocks_than_a_guard_holds_cannot_be_taken(busy: BlockManager) -> None:
    with busy.allocate(2) as mutable, busy.match_prefix(chain(2, 2)) as registered:
        for blocks in (mutable, registered):
            refused(
                busy.store,
                InvalidArgument,
                "count must be at most the 2 blocks held, got 3",
                lambda blocks=blocks: blocks.take(3),  # type: ignore[misc]
            )
            assert len(blocks) == 2
            assert not blocks.released


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2, 3], "token_ids must hold 4 tokens for 2 blocks of 2, got 3"),
        ([1, 2, 3, 4, 5], "token_ids must hold 4 tokens for 2 blocks of 2, got 5"),
        ([1, 2, 3, -1], r"token_ids\[3\] must be 0 to 4294967295, got -1"),
        ([1, 2**32, 3, 4], r"token_ids\[1\] must be 0 to 4294967295, got 4294967296"),
        ([1, 2, 1.5, 4], r"token_ids\[2\] must be an int, got 1.5"),
        (np.zeros((2, 2), np.uint32), "token_ids must have one dimension, got 2"),
        (np.zeros(4, np.float64), "token_ids must hold integers"),
        ("four", r"token_ids\[0\] must be an int, got 'f'"),
        (4, "token_ids must be a sequence, got 4"),
    ],
)
def test_token_ids_that_do_not_fit_are_refused(busy: BlockManager, tokens: Any, message: str) -> None:
    mutable = busy.allocate(2)
    refused(busy.store, InvalidArgument, message, lambda: mutable.register(chain(2, 8), token_ids=tokens))
    with mutable.stage(chain(2, 8)) as staged:
        refused(busy.store, InvalidArgument, message, lambda: staged.register(token_ids=tokens))
        with staged.register(token_ids=[1, 2, 3, 4]) as registered:
            assert len(registered) == 2


# --- wrong types and wrong states -----------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "x", 5, [1, 2]], ids=str)
def test_what_is_not_identities_is_refused(busy: BlockManager, value: Any) -> None:
    with busy.allocate(1) as blocks:
        for call in (
            busy.match_prefix,
            busy.match_scattered,
            busy.scan,
            busy.prefix_length,
            busy.has_blocks,
            busy.touch,
            blocks.stage,
            blocks.register,
        ):
            refused(busy.store, InvalidArgument, "identities must be", partial(call, value))
        assert len(blocks) == 1


def test_a_flag_that_is_no_bool_is_refused(busy: BlockManager) -> None:
    with busy.match_prefix(chain(1, 2)) as blocks:
        flag: Any = "x"
        refused(busy.store, TypeError, "bool", lambda: blocks.set_reset_on_release(flag))
        refused(busy.store, TypeError, "bool", lambda: blocks.release(flag))
        refused(busy.store, TypeError, "bool", lambda: busy.scan(chain(1), touch=flag))
        assert not blocks.released


@pytest.mark.parametrize("value", [-1, 2**128, 1.5, "x", 3 << 126], ids=str)
def test_the_frequency_of_what_is_no_lineage_hash_is_refused(busy: BlockManager, value: Any) -> None:
    refused(busy.store, InvalidArgument, "lineage_hash ", lambda: busy.frequency(value))


def test_a_guard_that_handed_its_blocks_on_is_refused_and_the_new_owner_keeps_them(
    busy: BlockManager,
) -> None:
    mutable = busy.allocate(2)
    staged = mutable.stage(chain(2, 8))
    for call in (
        lambda: mutable.stage(chain(2)),
        lambda: mutable.register(chain(2)),
        lambda: mutable.take(1),
    ):
        refused(busy.store, WrongState, "released or handed on", call)
    registered = staged.register()
    for again in (staged.register, staged.reset):
        refused(busy.store, WrongState, "released or handed on", again)
    assert len(registered) == 2
    registered.release()


def test_every_error_is_an_understudy_error_and_a_familiar_one() -> None:
    assert issubclass(InvalidArgument, (UnderstudyError, ValueError))
    manager = BlockManager(1)
    with pytest.raises(ValueError, match="count"):
        manager.allocate(-1)
    with pytest.raises(UnderstudyError):
        manager.allocate(2)


def test_a_block_hash_of_zero_never_gets_as_far_as_the_store() -> None:
    for make in (
        Identities.from_local_hashes,
        Identities.from_sequence_hashes,
        Identities.from_lineage_hashes,
    ):
        with pytest.raises(InvalidArgument, match=r"hashes\[1\] is the hash 0"):
            make([1 << 54, 0])  # as a lineage hash: position 0, hash 1
