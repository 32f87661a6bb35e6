from __future__ import annotations

import random

import numpy as np
import pytest

from model import hashing
from understudy.errors import InvalidArgument
from understudy.tokens import (
    Identities,
    TokenBlocks,
    lineage_bytes,
    lineage_extend,
    lineage_from_bytes,
    lineage_hash,
    lineage_parts,
    lineage_sort_key,
    lineage_text,
    positional_sequence_hash,
)

CURRENT = 0x1234567890ABCDEF
PARENT = 0xFEDCBA9876543210
BOUNDARIES = [100, 255, 256, 1000, 65_535, 65_536, 100_000, 2**24 - 1]


@pytest.fixture
def ids() -> Identities:
    return TokenBlocks(range(1, 41), 4).identities


# --- lineage hashes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (100, 0x19048D159E242AF37BDCBA9876543210),
        (255, 0x3FC48D159E242AF37BDCBA9876543210),
        (256, 0x4040048D159E242AF37BFA9876543210),
        (65_535, 0x7FFFC48D159E242AF37BFA9876543210),
        (65_536, 0x804000048D159E242AF37BD876543210),
    ],
)
def test_lineage_hashes_match_the_golden_vectors(position: int, expected: int) -> None:
    assert lineage_hash(CURRENT, PARENT, position) == expected


@pytest.mark.parametrize("position", BOUNDARIES)
def test_a_lineage_hash_unpacks_into_what_it_was_made_of(position: int) -> None:
    bits = hashing.fragment_bits(position)
    plh = lineage_hash(CURRENT, PARENT, position)
    assert plh == hashing.lineage_hash(CURRENT, PARENT, position)
    assert lineage_parts(plh) == ({54: 0, 46: 1, 38: 2}[bits], position, CURRENT, PARENT % 2**bits)


@pytest.mark.parametrize("position", [0, 254, 255, 256, 65_534, 65_535, 65_536])
def test_the_child_decides_how_much_of_its_parent_it_remembers(position: int) -> None:
    child = lineage_extend(lineage_hash(CURRENT, PARENT, position), 77)
    assert child == lineage_hash(hashing.chain(CURRENT, 77), CURRENT, position + 1)
    assert lineage_parts(child)[3] == CURRENT % 2 ** hashing.fragment_bits(position + 1)


def test_a_missing_parent_is_stored_as_zero() -> None:
    assert lineage_parts(lineage_hash(CURRENT, None, 0)) == (0, 0, CURRENT, 0)
    assert lineage_parts(lineage_hash(CURRENT, None, 300)) == (1, 300, CURRENT, 0)


def test_positions_end_at_24_bits() -> None:
    with pytest.raises(InvalidArgument, match=r"^position must be 0 to 16777215, got 16777216"):
        lineage_hash(CURRENT, None, 2**24)
    with pytest.raises(InvalidArgument, match="past the largest block position"):
        lineage_extend(lineage_hash(CURRENT, None, 2**24 - 1), 1)


@pytest.mark.parametrize("salt", ["", "other"])
def test_extending_lineage_hashes_reproduces_the_chain_of_token_blocks(salt: str) -> None:
    ids = TokenBlocks(range(1200), 4, salt=salt).identities
    plh = lineage_hash(ids[0].local_hash, None, 0)
    assert plh == ids[0].lineage_hash
    for block in ids[1:]:
        plh = lineage_extend(plh, block.local_hash)
        assert plh == block.lineage_hash


def test_text_matches_the_golden_vectors(ids: Identities) -> None:
    assert lineage_text(ids[0].lineage_hash) == "0:azWbh91idkf"
    assert lineage_text(ids[1].lineage_hash) == "1:CUrLYDFnmBa:13A3sGnbCSf"


@pytest.mark.parametrize(
    ("current", "text"),
    [
        (0, "11111111"),
        (1, "11111112"),
        (57, "1111111z"),
        (58, "111111121"),
        (255, "11111115Q"),
        (256, "1111115R"),
    ],
)
def test_leading_zero_bytes_are_written_as_ones(current: int, text: str) -> None:
    assert lineage_text(lineage_hash(current, None, 0)) == f"0:{text}"


def test_sixteen_big_endian_bytes_round_trip() -> None:
    for position in BOUNDARIES:
        plh = lineage_hash(CURRENT, PARENT, position)
        data = lineage_bytes(plh)
        assert data == plh.to_bytes(16, "big")
        assert lineage_from_bytes(data) == lineage_from_bytes(list(data)) == plh


@pytest.mark.parametrize(
    "data", [b"", bytes(15), bytes(17), [0] * 15, [256] + [0] * 15, [-1] + [0] * 15, "x" * 16, 5]
)
def test_anything_but_sixteen_bytes_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument, match=r"^data"):
        lineage_from_bytes(data)


def test_the_order_is_position_then_sequence_hash_then_raw_value() -> None:
    in_order = [
        lineage_hash(9, None, 1),
        lineage_hash(9, 5, 1),
        lineage_hash(10, 4, 1),
        lineage_hash(1, None, 2),
        lineage_hash(0, None, 256),
        lineage_hash(2**64 - 1, None, 65_535),
        lineage_hash(0, None, 65_536),
    ]
    shuffled = random.Random(5).sample(in_order, len(in_order))
    assert sorted(shuffled, key=lineage_sort_key) == in_order
    assert len(set(in_order)) == len(in_order)


@pytest.mark.parametrize(
    "bad", [3 << 126, 1 << 126 | 255 << 110, 2 << 126 | 65_535 << 102, -1, 2**128, 1.5, "0"]
)
def test_bits_that_are_no_lineage_hash_are_refused(bad: int) -> None:
    for call in (lineage_parts, lineage_text, lineage_bytes, lineage_sort_key):
        with pytest.raises(InvalidArgument, match=r"^plh"):
            call(bad)
    with pytest.raises(InvalidArgument, match=r"^lineage_hashes\[1\]"):
        Identities.from_lineage_hashes([lineage_hash(1, None, 0), bad])


@pytest.mark.parametrize(
    ("position", "mode", "bits"),
    [(0, 0, 54), (255, 0, 54), (256, 1, 46), (65_536, 2, 38), (2**24, 3, 31), (2**31 - 1, 3, 31)],
)
def test_positional_sequence_hashes_have_four_modes(position: int, mode: int, bits: int) -> None:
    expected = mode << 126 | position << (64 + bits) | (PARENT % 2**bits) << 64 | CURRENT
    assert positional_sequence_hash(CURRENT, PARENT, position) == expected


def test_a_positional_sequence_hash_ends_at_31_bits() -> None:
    with pytest.raises(InvalidArgument, match=r"^position"):
        positional_sequence_hash(CURRENT, PARENT, 2**31)


# --- a sequence -----------------------------------------------------------------------------------


def test_identities_are_a_sequence(ids: Identities) -> None:
    assert len(ids) == 10
    assert [i.position for i in ids] == list(range(10))
    assert ids[-1] == ids[9]
    assert ids[2] != ids[3]
    assert len({ids[0], ids[0], ids[1]}) == 2
    for index in (10, -11):
        with pytest.raises(IndexError):
            ids[index]


@pytest.mark.parametrize(
    "part",
    [
        slice(2, 5),
        slice(None),
        slice(-3, None),
        slice(5, 2),
        slice(20, 30),
        slice(None, None, -1),
        slice(1, 9, 3),
    ],
)
def test_slices_agree_with_lists(ids: Identities, part: slice) -> None:
    assert list(ids[part]) == list(ids)[part]
    assert ids[part].lineage_hashes == ids.lineage_hashes[part]
    assert list(ids[part][1:3]) == list(ids)[part][1:3]


def test_a_slice_outlives_its_source() -> None:
    part = TokenBlocks(range(1, 41), 4).identities[3:6]
    assert part.positions.tolist() == [3, 4, 5]


def test_parts_add_up_to_the_whole(ids: Identities) -> None:
    assert ids[:4] + ids[4:] == ids
    assert ids + Identities() == ids == Identities() + ids
    assert ids[:4] + ids[5:] != ids
    assert ids != ids.lineage_hashes


def test_identities_are_not_hashable(ids: Identities) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(ids)


def test_columns_have_fixed_types(ids: Identities) -> None:
    assert ids.sequence_hashes.dtype == ids.local_hashes.dtype == np.uint64
    assert ids.positions.dtype == np.uint32
    assert Identities().sequence_hashes.shape == Identities().positions.shape == (0,)


def test_columns_are_copies(ids: Identities) -> None:
    ids.sequence_hashes[0] = 1
    assert ids.sequence_hashes[0] != 1


# --- without tokens -------------------------------------------------------------------------------


def test_local_hashes_chain_as_token_blocks_do(ids: Identities) -> None:
    assert Identities.from_local_hashes(ids.local_hashes) == ids
    assert Identities.from_local_hashes(ids.local_hashes.tolist()) == ids


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_local_hashes_continue_behind_a_parent(ids: Identities, cut: int) -> None:
    assert Identities.from_local_hashes(ids.local_hashes[cut:], parent=ids[:cut]) == ids[cut:]


def test_sequence_hashes_are_taken_as_they_are(ids: Identities) -> None:
    assert Identities.from_sequence_hashes(ids.sequence_hashes, local_hashes=ids.local_hashes) == ids
    tail = Identities.from_sequence_hashes(
        ids.sequence_hashes[4:],
        local_hashes=ids.local_hashes[4:],
        parent_hash=ids[3].sequence_hash,
        start_position=4,
    )
    assert tail == ids[4:]


def test_sequence_hashes_need_no_local_hashes(ids: Identities) -> None:
    bare = Identities.from_sequence_hashes(ids.sequence_hashes)
    assert bare.lineage_hashes == ids.lineage_hashes
    assert bare.local_hashes.tolist() == [0] * 10


def test_a_block_whose_parent_is_not_known_remembers_none() -> None:
    ids = Identities.from_sequence_hashes([11, 12], start_position=300)
    assert [i.parent_hash for i in ids] == [None, 11]
    assert lineage_parts(ids[0].lineage_hash) == (1, 300, 11, 0)


def test_lineage_hashes_find_their_parents_where_the_edge_holds(ids: Identities) -> None:
    again = Identities.from_lineage_hashes(ids.lineage_hashes)
    assert again.sequence_hashes.tolist() == ids.sequence_hashes.tolist()
    assert [i.parent_hash for i in again] == [i.parent_hash for i in ids]
    assert again.local_hashes.tolist() == [0] * 10


def test_lineage_hashes_across_a_gap_have_no_known_parent(ids: Identities) -> None:
    plhs = ids.lineage_hashes
    stranger = lineage_hash(5, 6, 9)
    gappy = Identities.from_lineage_hashes([plhs[0], plhs[2], plhs[3], stranger])
    assert [i.parent_hash for i in gappy] == [None, None, ids[2].sequence_hash, None]


def test_empty_inputs_give_no_identities() -> None:
    assert len(Identities.from_local_hashes([])) == 0
    assert len(Identities.from_sequence_hashes([])) == 0
    assert len(Identities.from_lineage_hashes([])) == 0


BAD_HASHES: list[object] = [
    [1, -1],
    [1, 2**64],
    [1.0],
    ["1"],
    "1",
    5,
    np.zeros((1, 1), np.uint64),
    np.ones(3),
    np.array([3, -1]),
    np.array([True]),
    [1, 0],
    np.array([0], np.uint64),
]


@pytest.mark.parametrize("bad", BAD_HASHES, ids=str)
def test_bad_hashes_are_named(bad: list[int]) -> None:
    with pytest.raises(InvalidArgument, match=r"^local_hashes"):
        Identities.from_local_hashes(bad)
    with pytest.raises(InvalidArgument, match=r"^sequence_hashes"):
        Identities.from_sequence_hashes(bad)


@pytest.mark.parametrize("bad", [5, None, {1}, [0]])
def test_bad_lineage_hashes_are_named(bad: list[int]) -> None:
    with pytest.raises((InvalidArgument, TypeError), match="lineage_hashes"):
        Identities.from_lineage_hashes(bad)


def test_local_hashes_must_be_as_many_as_sequence_hashes() -> None:
    for local_hashes in ([], [1], [1, 2, 3]):
        with pytest.raises(InvalidArgument, match=r"^local_hashes has"):
            Identities.from_sequence_hashes([1, 2], local_hashes=local_hashes)


def test_a_root_cannot_have_a_parent() -> None:
    with pytest.raises(InvalidArgument, match=r"^parent_hash is given, but start_position is 0"):
        Identities.from_sequence_hashes([1], parent_hash=5)


@pytest.mark.parametrize("bad", [0, -1, 2**64, "5"])
def test_a_bad_parent_hash_is_named(bad: int) -> None:
    with pytest.raises(InvalidArgument, match=r"^parent_hash"):
        Identities.from_sequence_hashes([1], parent_hash=bad, start_position=1)


def test_an_empty_parent_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"^parent is empty"):
        Identities.from_local_hashes([1], parent=Identities())


def test_identities_end_where_positions_end() -> None:
    last = 2**24 - 1
    ids = Identities.from_sequence_hashes([1], start_position=last)
    assert ids[0].position == last
    with pytest.raises(InvalidArgument, match="pass the largest block position"):
        Identities.from_sequence_hashes([1, 2], start_position=last)
    with pytest.raises(InvalidArgument, match="pass the largest block position"):
        Identities.from_local_hashes([1], parent=ids)
    with pytest.raises(InvalidArgument, match=r"^start_position"):
        Identities.from_sequence_hashes([1], start_position=last + 1)
