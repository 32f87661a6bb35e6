"""A request as blocks, and the signals that it sends."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.errors import ConfigError, InvalidArgument, WrongState
from understudy.kv.sequence import Acquire, ActiveSequence, Release, Seal
from understudy.tokens import Identity, TokenBlocks


def sequence(tokens: int, max_output: int = 100, block_size: int = 16, **settings: Any) -> ActiveSequence:
    settings.setdefault("rng", random.Random(7))
    return ActiveSequence(range(1, tokens + 1), max_output, block_size=block_size, **settings)


def full(blocks: tuple[Identity | int, ...]) -> int:
    return sum(isinstance(block, Identity) for block in blocks)


def test_an_unfilled_prompt_is_one_partial_block() -> None:
    short = sequence(15)
    assert len(short.blocks) == 1
    assert full(short.blocks) == 0
    assert len(sequence(16).blocks) == full(sequence(16).blocks) == 1
    assert sequence(0).blocks == ()


def test_the_token_that_fills_a_block_is_silent_and_the_next_seals_it() -> None:
    request = sequence(15)
    partial = request.blocks[0]
    assert isinstance(partial, int)
    assert request.push(16) == []
    assert list(request.blocks) == [partial]
    signals = request.push(17)
    identity = TokenBlocks(range(1, 18), 16).identities[0]
    assert signals == [Seal(partial, identity), Acquire((request.blocks[1],))]
    assert identity.parent_hash is None
    assert request.blocks[0] == identity
    assert isinstance(request.blocks[1], int)


def test_signals_of_a_whole_output() -> None:
    request = sequence(14, 5)
    assert request.generate() == []
    assert request.generate() == []
    seal, acquire = request.generate()
    assert isinstance(seal, Seal)
    assert isinstance(acquire, Acquire)
    assert request.generate() == []
    blocks = request.blocks
    assert request.generate() == [Release((blocks[1], blocks[0]))]
    assert request.finished
    with pytest.raises(WrongState, match="all 5 output tokens"):
        request.generate()


def test_a_second_seal_names_the_first_full_block_as_its_parent() -> None:
    request = sequence(3, block_size=4)
    seals = [s for token in range(10) for s in request.push(token) if isinstance(s, Seal)]
    assert [seal.identity.parent_hash for seal in seals] == [
        None,
        seals[0].identity.sequence_hash,
        seals[1].identity.sequence_hash,
    ]


def test_an_allocation_covers_the_blocks_of_its_tokens() -> None:
    request = sequence(10, block_size=4)
    counts = []
    for tokens in [4, 8, 10]:
        signal = request.prepare_allocation(tokens)
        assert signal is not None
        counts.append((len(signal.blocks), full(signal.blocks)))
    assert counts == [(1, 1), (2, 2), (3, 2)]


def test_preparing_changes_nothing_and_committing_moves_on() -> None:
    request = sequence(10, block_size=4)
    first = request.prepare_allocation(4)
    assert first == request.prepare_allocation(4)
    request.commit_allocation(4)
    assert request.prepare_allocation(4) is None
    second = request.prepare_allocation(8)
    assert second == Acquire((request.blocks[1],))
    block = request.blocks[1]
    assert isinstance(block, Identity)
    assert block.parent_hash == request.identities[0].sequence_hash


def test_preemption_releases_what_is_allocated_tail_first_and_keeps_tokens() -> None:
    request = sequence(10, block_size=4)
    assert request.free() == []
    assert request.preempt() == []
    request.commit_allocation(10)
    request.generate()
    blocks = request.blocks
    assert request.free() == [Release((blocks[2], blocks[1], blocks[0]))]
    assert request.preempt() == [Release((blocks[2], blocks[1], blocks[0]))]
    assert (request.generated_tokens, request.allocated_tokens, request.blocks) == (1, 0, blocks)
    assert request.preempt() == []
    request.commit_allocation(5)
    assert request.free() == [Release((blocks[1], blocks[0]))]


@given(st.integers(0, 20), st.integers(1, 20), st.integers(1, 6))
def test_tokens_make_the_same_full_blocks_whether_given_or_generated(
    prompt: int, output: int, block_size: int
) -> None:
    history = list(range(50, 50 + prompt + output))
    generated = ActiveSequence(
        history[:prompt], output + 1, block_size=block_size, planned_output=history[prompt:]
    )
    given_ = ActiveSequence(history, 1, block_size=block_size)
    for _ in range(output):
        generated.generate()
    sealed = len(generated.identities)
    assert generated.identities == given_.identities[:sealed]
    assert len(given_.identities) - sealed <= 1  # the last one may be waiting for a token behind it
    assert len(generated.blocks) == generated.known_blocks == given_.known_blocks


def test_taking_back_the_token_that_opened_a_block_drops_the_block() -> None:
    request = sequence(15)
    request.push(16)
    request.push(17)
    assert request.pop() == []
    assert len(request) == 16
    assert request.blocks == tuple(request.identities)
    assert request.identities == TokenBlocks(range(1, 17), 16).identities
    with pytest.raises(WrongState, match="in a full block"):
        request.pop()
    (again,) = request.push(99)
    assert again == Acquire((request.blocks[1],))


def test_taking_back_an_allocated_block_releases_it() -> None:
    request = sequence(16)
    request.push(17)
    request.commit_allocation(17)
    opened = request.blocks[1]
    assert request.pop() == [Release((opened,))]
    assert request.allocated_tokens == 16


def test_taking_back_inside_a_partial_block_keeps_it() -> None:
    request = sequence(14)
    request.push(15)
    request.push(16)
    blocks = request.blocks
    request.pop()
    assert request.blocks == blocks
    request.pop()
    with pytest.raises(WrongState, match="no output token"):
        request.pop()


def test_blocks_without_prefix_caching_are_independent_and_keep_their_names() -> None:
    rng = random.Random(3)
    one = sequence(40, enable_prefix_caching=False, rng=rng)
    other = sequence(40, enable_prefix_caching=False, rng=rng)
    assert not set(one.identities.lineage_hashes) & set(other.identities.lineage_hashes)
    assert [(b.parent_hash, b.local_hash, b.position) for b in one.identities] == [(None, 0, 0), (None, 0, 1)]
    before = one.blocks
    one.commit_allocation(40)
    one.preempt()
    assert one.blocks == before
    for _ in range(9):
        signals = one.generate()
    assert isinstance(signals[0], Seal)
    assert one.identities[2] == signals[0].identity
    assert signals[0].identity.parent_hash is None


def test_token_ids_go_with_the_full_blocks() -> None:
    request = sequence(6, block_size=4, emit_token_ids=True)
    assert request.prepare_allocation(6) == Acquire(request.blocks, (1, 2, 3, 4))
    request.commit_allocation(4)
    assert request.prepare_allocation(6) == Acquire(request.blocks[1:], ())
    request.push(7)
    request.push(8)
    seal, acquire = request.push(9)
    assert isinstance(seal, Seal)
    assert isinstance(acquire, Acquire)
    assert (seal.token_ids, acquire.token_ids) == ((5, 6, 7, 8), ())
    with pytest.raises(ConfigError, match="emit_token_ids"):
        sequence(4, emit_token_ids=True, enable_prefix_caching=False)


def test_planned_tokens_come_first_and_then_random_ones() -> None:
    request = ActiveSequence([1], 3, block_size=2, planned_output=[5, 6], rng=random.Random(1))
    twin = ActiveSequence([1, 5, 6], 1, block_size=2)
    request.generate()
    request.generate()
    assert request.identities[:1] == twin.identities[:1]
    request.generate()
    assert request.finished


def test_lengths_are_known_ahead() -> None:
    request = sequence(10, 7, 4)
    assert (request.known_blocks, request.completion_blocks) == (3, 5)
    assert (len(request), request.prompt_tokens, request.block_size) == (10, 10, 4)


def test_bad_lengths_are_refused_and_change_nothing() -> None:
    request = sequence(10, block_size=4)
    request.commit_allocation(6)
    for tokens in [-1, 11]:
        with pytest.raises(InvalidArgument, match=r"tokens must be in 0\.\.10"):
            request.prepare_allocation(tokens)
        with pytest.raises(InvalidArgument, match=r"tokens must be in 0\.\.10"):
            request.commit_allocation(tokens)
    with pytest.raises(InvalidArgument, match="at least the 6 allocated"):
        request.commit_allocation(5)
    assert request.allocated_tokens == 6
    with pytest.raises(InvalidArgument, match="max_output_tokens"):
        sequence(4, -1)
    with pytest.raises(InvalidArgument, match="block_size"):
        sequence(4, block_size=0)
    with pytest.raises(InvalidArgument):
        ActiveSequence([1], 3, block_size=2, planned_output=[2**40]).generate()
