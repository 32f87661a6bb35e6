from __future__ import annotations

import threading
from array import array
from typing import TYPE_CHECKING

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from model import hashing
from understudy.errors import InvalidArgument
from understudy.tokens import TokenBlocks, positional_sequence_hash, salt_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.tokens import Identities

ONE_TO_SIXTEEN = list(range(1, 17))
LOCAL_HASHES = [14643705804678351452, 16777012769546811212, 483935686894639516, 135165725823939817]
SEQUENCE_HASHES = [14643705804678351452, 4945711292740353085, 12583592247330656132, 1921452330601040443]

State = tuple[list[int], list[tuple[int, int, int]], "Identities"]


def state(blocks: TokenBlocks) -> State:
    return blocks.tokens.tolist(), blocks.mm_runs, blocks.identities


def local_hash(tokens: Sequence[int], salt: int) -> int:
    return TokenBlocks(tokens, len(tokens), salt_hash=salt).identities[0].local_hash


# --- golden hashes --------------------------------------------------------------------------------


def test_local_and_sequence_hashes_match_the_golden_vectors() -> None:
    ids = TokenBlocks(ONE_TO_SIXTEEN, 4).identities
    assert ids.local_hashes.tolist() == LOCAL_HASHES
    assert ids.sequence_hashes.tolist() == SEQUENCE_HASHES
    assert [i.parent_hash for i in ids] == [None, *SEQUENCE_HASHES[:3]]
    assert ids.positions.tolist() == [0, 1, 2, 3]


def test_lineage_hashes_match_the_golden_vectors() -> None:
    assert TokenBlocks(ONE_TO_SIXTEEN, 4).identities[:3].lineage_hashes == [
        0x32CE3935FECB729700000000000000,
        0x5128AC8DE75B4F0F78E4D7FB2DCA5C,
        0xABA8799E9B2033E122B2379D6D3C3D,
    ]


def test_positional_sequence_hashes_match_the_golden_vectors() -> None:
    ids = TokenBlocks(ONE_TO_SIXTEEN, 4).identities[:3]
    assert [positional_sequence_hash(i.sequence_hash, i.local_hash, i.position) for i in ids] == [
        0x38E4D7FB2DCA5CCB38E4D7FB2DCA5C,
        0x53EC39B907B74C44A2B2379D6D3C3D,
        0xB748F1777D599CAEA1E67A6C80CF84,
    ]


@pytest.mark.parametrize(
    ("tokens", "salt", "expected"),
    [
        ([1, 2, 3, 4], 0, 8052976908588476977),
        ([100, 101, 102, 103], 42, 7284644587603886471),
        (list(range(16)), 1337, 15310707395893867146),
    ],
)
def test_salted_blocks_match_the_golden_vectors(tokens: list[int], salt: int, expected: int) -> None:
    assert local_hash(tokens, salt) == expected


def test_a_plain_request_hashes_as_the_router_does() -> None:
    data = np.arange(1, 5, dtype="<u4").tobytes()
    assert TokenBlocks([1, 2, 3, 4], 4).identities[0].local_hash == xxh3_64_intdigest(data, 1337)


def test_a_lora_request_hashes_as_the_router_does() -> None:
    data = np.arange(1, 5, dtype="<u4").tobytes()
    seed = (1337 + xxh3_64_intdigest(b"alpha-7b", 0)) % 2**64
    assert TokenBlocks([1, 2, 3, 4], 4, lora="alpha-7b").identities[0].local_hash == xxh3_64_intdigest(
        data, seed
    )


# --- salt -----------------------------------------------------------------------------------------


def test_salt_hashes_match_the_golden_vectors() -> None:
    assert salt_hash() == 1337
    assert salt_hash(lora="alpha-7b") == 723495307357893745
    assert salt_hash("model-x") == 2648457776177593501
    assert salt_hash("model-x", "lora-a") == 1116576584730331561


def test_an_empty_salt_or_lora_is_no_salt_or_lora() -> None:
    assert salt_hash("", "lora-a") == salt_hash(lora="lora-a")
    assert salt_hash("model-x", "") == salt_hash(salt="model-x")
    assert TokenBlocks([1] * 16, salt="", lora="").identities == TokenBlocks([1] * 16).identities


@pytest.mark.parametrize(("salt", "lora"), [("a", ""), ("", "a"), ("a", "a"), ("ü", "語")])
def test_salt_and_lora_change_every_block(salt: str, lora: str) -> None:
    tokens = list(range(64))
    plain = TokenBlocks(tokens).identities
    salted = TokenBlocks(tokens, salt=salt, lora=lora)
    assert salted.salt_hash == salt_hash(salt, lora) == hashing.salt_hash(salt, lora)
    assert all(a.lineage_hash != b.lineage_hash for a, b in zip(plain, salted.identities, strict=True))
    assert salted.identities == TokenBlocks(tokens, salt=salt, lora=lora).identities
    assert salted.identities == TokenBlocks(tokens, salt_hash=salt_hash(salt, lora)).identities


def test_salt_and_lora_do_not_stand_for_each_other() -> None:
    assert salt_hash(salt="x") != salt_hash(lora="x")


def test_without_a_salt_the_base_is_1337() -> None:
    assert TokenBlocks().salt_hash == 1337


@pytest.mark.parametrize("given", [{"salt": "a"}, {"lora": "a"}, {"salt": "a", "lora": "b"}])
def test_a_salt_hash_beside_salt_or_lora_is_a_contradiction(given: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="salt_hash is given together with salt or lora"):
        TokenBlocks([1], salt=given.get("salt", ""), lora=given.get("lora", ""), salt_hash=1)


# --- a ten-token sequence through every boundary --------------------------------------------------


def test_append_reports_the_block_that_it_completes_at_once() -> None:
    blocks = TokenBlocks(range(10), 4)
    assert blocks.append(10) is None
    assert blocks.append(11) == 2
    assert blocks.append(12) is None
    assert (len(blocks), blocks.num_blocks) == (13, 3)
    assert blocks.identities == TokenBlocks(range(13), 4).identities


def test_extend_reports_the_range_of_blocks_completed() -> None:
    blocks = TokenBlocks([], 4)
    assert blocks.extend([]) == range(0)
    assert blocks.extend([0]) == range(0)
    assert blocks.extend([1, 2, 3]) == range(1)
    assert blocks.extend(range(4, 12)) == range(1, 3)
    assert blocks.extend(range(12, 18)) == range(3, 4)
    assert blocks.identities == TokenBlocks(range(18), 4).identities


@pytest.mark.parametrize("length", range(13))
def test_truncate_leaves_what_a_shorter_sequence_would_be(length: int) -> None:
    blocks = TokenBlocks(range(10), 4)
    blocks.truncate(length)
    assert state(blocks) == state(TokenBlocks(range(min(length, 10)), 4))
    blocks.extend(range(100, 107))
    assert state(blocks) == state(TokenBlocks([*range(min(length, 10)), *range(100, 107)], 4))


def test_pop_walks_back_to_empty_and_then_returns_none() -> None:
    blocks = TokenBlocks(range(10), 4)
    for token in reversed(range(10)):
        assert blocks.pop() == token
        assert state(blocks) == state(TokenBlocks(range(token), 4))
    assert blocks.pop() is None
    assert len(blocks) == 0


def test_tokens_at_is_empty_for_a_range_that_is_not_inside() -> None:
    blocks = TokenBlocks(range(10), 4)
    assert blocks.tokens_at(2, 7).tolist() == [2, 3, 4, 5, 6]
    assert blocks.tokens_at(0, 10).tolist() == list(range(10))
    for start, stop in [(3, 3), (7, 2), (5, 11), (11, 12), (2**64 - 1, 2**64 - 1)]:
        assert blocks.tokens_at(start, stop).tolist() == []


def test_a_partial_tail_is_never_hashed() -> None:
    blocks = TokenBlocks(range(11), 4)
    assert blocks.num_blocks == len(blocks.identities) == 2
    assert blocks.identities == TokenBlocks([*range(8), 99], 4).identities


def test_a_block_size_need_not_be_a_power_of_two() -> None:
    model = hashing.TokenBlocks(7, tokens=list(range(30)))
    assert TokenBlocks(range(30), 7).identities.lineage_hashes == [b.lineage for b in model.blocks()]


def test_a_block_of_one_token_is_a_block() -> None:
    assert TokenBlocks([5, 6], 1).num_blocks == 2


def test_positions_cross_both_lineage_modes() -> None:
    tokens = np.arange(65_540, dtype=np.uint32)
    ids = TokenBlocks(tokens, 1).identities
    for position in (254, 255, 256, 257, 65_534, 65_535, 65_536, 65_537):
        identity = ids[position]
        assert identity.position == position
        assert identity.lineage_hash == hashing.lineage_hash(
            identity.sequence_hash, ids[position - 1].sequence_hash, position
        )


# --- snapshots ------------------------------------------------------------------------------------


def test_a_snapshot_keeps_what_it_saw_whatever_follows() -> None:
    blocks = TokenBlocks(range(64), 4)
    before = blocks.identities
    hashes = before.lineage_hashes
    blocks.extend(range(1000))
    blocks.truncate(6)
    blocks.extend(range(7, 77))
    assert before.lineage_hashes == hashes
    assert blocks.identities[1:2] != before[1:2]
    assert blocks.identities[:1] == before[:1]


def test_a_snapshot_survives_its_sequence() -> None:
    snapshot = TokenBlocks(ONE_TO_SIXTEEN, 4).identities
    assert snapshot.sequence_hashes.tolist() == SEQUENCE_HASHES


def test_tokens_are_a_copy() -> None:
    blocks = TokenBlocks(range(8), 4)
    blocks.tokens[0] = 99
    assert blocks.tokens[0] == 0


# --- what tokens may be ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(ONE_TO_SIXTEEN),
        range(1, 17),
        bytes(ONE_TO_SIXTEEN),
        array("I", ONE_TO_SIXTEEN),
        [np.int64(t) for t in ONE_TO_SIXTEEN],
        np.arange(1, 17, dtype=np.uint32),
        np.arange(1, 33, dtype=np.uint32)[:16],
        np.arange(2, 34, dtype=np.uint32)[::2] // 2,
        np.repeat(np.arange(1, 17, dtype=np.uint32), 2)[::2],
        np.arange(16, 0, -1, dtype=np.uint32)[::-1],
        np.frombuffer(b"\0" + np.arange(1, 17, dtype=np.uint32).tobytes(), dtype=np.uint32, offset=1),
        np.arange(1, 17, dtype=">u4"),
        *(
            np.arange(1, 17, dtype=t)
            for t in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.int64, np.uint64)
        ),
    ],
    ids=lambda tokens: f"{type(tokens).__name__}-{getattr(tokens, 'dtype', '')}",
)
def test_any_sequence_of_ints_gives_the_same_blocks(tokens: Sequence[int]) -> None:
    assert TokenBlocks(tokens, 4).identities.sequence_hashes.tolist() == SEQUENCE_HASHES


def test_a_read_only_array_is_read() -> None:
    tokens = np.arange(1, 17, dtype=np.uint32)
    tokens.setflags(write=False)
    assert TokenBlocks(tokens, 4).num_blocks == 4


def test_the_largest_token_is_accepted() -> None:
    assert TokenBlocks([2**32 - 1], 1).tokens.tolist() == [2**32 - 1]
    assert TokenBlocks(np.array([2**32 - 1]), 1).tokens.tolist() == [2**32 - 1]


BAD_TOKENS: list[object] = [
    [1, -1],
    [1, 2**32],
    [1, 1.0],
    [1, "2"],
    [1, None],
    "12",
    7,
    {1, 2},
    {1: 2},
    np.array(3),
    np.zeros((2, 2), np.uint32),
    np.zeros(2),
    np.array([1, -1]),
    np.array([1, 2**32]),
    np.array([True]),
]


@pytest.mark.parametrize("bad", BAD_TOKENS, ids=str)
def test_bad_tokens_are_named_and_change_nothing(bad: Sequence[int]) -> None:
    blocks = TokenBlocks(range(10), 4)
    before = state(blocks)
    with pytest.raises(InvalidArgument, match=r"^tokens"):
        blocks.extend(bad)
    with pytest.raises(InvalidArgument, match=r"^tokens"):
        TokenBlocks(bad, 4)
    assert state(blocks) == before


def test_a_bad_element_is_named_by_its_index() -> None:
    with pytest.raises(InvalidArgument, match=r"^tokens\[2\] must be 0 to 4294967295, got -5$"):
        TokenBlocks([1, 2, -5])
    with pytest.raises(InvalidArgument, match=r"^tokens\[2\] must be 0 to 4294967295, got -5$"):
        TokenBlocks(np.array([1, 2, -5]))


def test_an_int_too_long_to_print_is_refused_all_the_same() -> None:
    with pytest.raises(InvalidArgument, match=r"^tokens\[1\] must be 0 to 4294967295, got int$"):
        TokenBlocks([1, 10**5000])


def test_an_error_of_the_caller_s_own_int_passes_through() -> None:
    class Broken:
        def __index__(self) -> int:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        TokenBlocks([Broken()])  # type: ignore[list-item]


@pytest.mark.parametrize("size", [0, -1, 2**20 + 1, 2**64, 1.5, "16", None])
def test_an_absurd_block_size_is_refused(size: int) -> None:
    with pytest.raises((InvalidArgument, TypeError), match="block_size"):
        TokenBlocks([1], size)


@pytest.mark.parametrize("call", ["append", "truncate"])
@pytest.mark.parametrize("bad", [-1, 2**64, 1.5, "1"])
def test_bad_numbers_are_refused_and_change_nothing(call: str, bad: int) -> None:
    blocks = TokenBlocks(range(10), 4)
    before = state(blocks)
    with pytest.raises(InvalidArgument, match=r"^(token|length) must be"):
        getattr(blocks, call)(bad)
    assert state(blocks) == before


def test_a_sequence_ends_where_positions_end() -> None:
    blocks = TokenBlocks(range(10), 1)
    before = state(blocks)
    with pytest.raises(InvalidArgument, match="holds at most 16777216"):
        blocks.extend(np.zeros(2**24 - 9, np.uint32))
    assert state(blocks) == before


# --- threads --------------------------------------------------------------------------------------


def test_two_threads_may_extend_one_sequence() -> None:
    blocks = TokenBlocks([], 16)
    chunk = np.arange(16 * 1024, dtype=np.uint32)
    completed: list[int] = []

    def work() -> None:
        for _ in range(20):
            completed.extend(blocks.extend(chunk))
            assert len(blocks.identities) <= 2 * 20 * 1024

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(completed) == list(range(2 * 20 * 1024))
    assert blocks.identities == TokenBlocks(np.tile(chunk, 40), 16).identities
