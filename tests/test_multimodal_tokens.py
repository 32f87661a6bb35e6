from __future__ import annotations

import pytest

from model import hashing
from understudy.errors import InvalidArgument
from understudy.tokens import TokenBlocks


def test_a_run_inside_a_block_matches_the_golden_vector() -> None:
    tokens = [100, 101, 102, 103, 0, 0, 106, 107]
    runs = [(0xAA, 4, 2)]
    assert len(hashing.TokenBlocks(8, tokens=tokens, runs=runs).block_bytes(0)) == 104
    assert TokenBlocks(tokens, 8, mm_runs=runs).identities[0].local_hash == 12380118950545462472


def test_a_block_of_placeholders_matches_the_golden_vector() -> None:
    runs = [(0xDEADBEEFDEADBEEF, 0, 16)]
    assert len(hashing.TokenBlocks(16, tokens=[0] * 16, runs=runs).block_bytes(0)) == 208
    assert TokenBlocks([0] * 16, mm_runs=runs).identities[0].local_hash == 3815484712247314008


def test_tokens_under_a_run_do_not_count() -> None:
    runs = [(0xAA, 4, 2)]
    a = TokenBlocks([1, 2, 3, 4, 0, 0, 7, 8], 8, mm_runs=runs)
    b = TokenBlocks([1, 2, 3, 4, 5, 6, 7, 8], 8, mm_runs=runs)
    assert a.identities == b.identities
    assert b.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_block_without_placeholders_keeps_its_text_identity() -> None:
    tokens = list(range(32))
    text = TokenBlocks(tokens, 8).identities
    mixed = TokenBlocks(tokens, 8, mm_runs=[(0xAA, 18, 3)]).identities
    assert mixed[:2] == text[:2]
    assert mixed[2].local_hash != text[2].local_hash
    assert mixed[3].local_hash == text[3].local_hash
    assert mixed[3].sequence_hash != text[3].sequence_hash


def test_placeholders_at_different_slots_do_not_collide() -> None:
    hashes = {
        TokenBlocks([0] * 4, 4, mm_runs=[(7, offset, length)]).identities[0].local_hash
        for offset in range(4)
        for length in range(1, 5 - offset)
    }
    assert len(hashes) == 10


def test_a_run_over_several_blocks_gives_each_its_own_hash() -> None:
    ids = TokenBlocks([0] * 64, 16, mm_runs=[(7, 0, 64)]).identities
    assert len(set(ids.local_hashes.tolist())) == 4


def test_the_hash_of_the_object_matters() -> None:
    a, b = (TokenBlocks([0] * 16, mm_runs=[(mm, 3, 5)]).identities for mm in (1, 2))
    assert a[0].local_hash != b[0].local_hash


def test_runs_do_not_enter_the_salt() -> None:
    assert TokenBlocks([0] * 16, mm_runs=[(7, 0, 3)]).salt_hash == 1337


def test_touching_runs_are_allowed_and_come_back_sorted() -> None:
    blocks = TokenBlocks([0] * 8, 4, mm_runs=[(2, 4, 2), (1, 0, 4), (3, 6, 2)])
    assert blocks.mm_runs == [(1, 0, 4), (2, 4, 2), (3, 6, 2)]


def test_streaming_equals_batch() -> None:
    tokens = [1, 2, 3, *[0] * 10, 4, 5, 6, 7, 0, 0, 8, 9, 10, 11, 12]
    runs = [(0xA, 3, 10), (0xB, 17, 2)]
    batch = TokenBlocks(tokens, 4, mm_runs=runs)

    pushed = TokenBlocks([], 4)
    pushed.extend([1, 2, 3])
    assert pushed.extend([0] * 10, [(0xA, 0, 10)]) == range(3)
    for token in [4, 5, 6, 7]:
        pushed.append(token)
    pushed.extend([0] * 2, [(0xB, 0, 2)])
    pushed.extend([8, 9, 10, 11, 12])

    chunked = TokenBlocks([1, 2], 4)
    chunked.extend(tokens[2:15], [(0xA, 1, 10)])
    chunked.extend(tokens[15:], [(0xB, 2, 2)])

    assert pushed.identities == chunked.identities == batch.identities
    assert pushed.mm_runs == chunked.mm_runs == batch.mm_runs == runs


@pytest.mark.parametrize("length", range(25))
def test_truncation_trims_the_runs_with_the_tokens(length: int) -> None:
    tokens = [1, 2, 3, *[0] * 10, 4, 5, 6, 7, 0, 0, 8, 9, 10, 11, 12]
    blocks = TokenBlocks(tokens, 4, mm_runs=[(0xA, 3, 10), (0xB, 17, 2)])
    blocks.truncate(length)
    kept = [(mm, at, min(n, length - at)) for mm, at, n in [(0xA, 3, 10), (0xB, 17, 2)] if at < length]
    shorter = TokenBlocks(tokens[:length], 4, mm_runs=kept)
    for text_or_image in (blocks, shorter):
        text_or_image.extend([50, 51, 52, 53])
        text_or_image.extend([0] * 3, [(0xC, 0, 3)])
    assert blocks.mm_runs == shorter.mm_runs
    assert blocks.identities == shorter.identities


def test_pop_and_truncate_work_inside_a_run() -> None:
    blocks = TokenBlocks([1, 2], 4)
    blocks.extend([0] * 5, [(0xA, 0, 5)])
    assert blocks.pop() == 0
    blocks.truncate(4)
    assert blocks.mm_runs == [(0xA, 2, 2)]
    assert blocks.identities == TokenBlocks([1, 2, 0, 0], 4, mm_runs=[(0xA, 2, 2)]).identities
    blocks.truncate(0)
    assert blocks.mm_runs == []


BAD_RUNS = [
    ([(1, 0, 0)], "the multimodal run at offset 0 is empty"),
    ([(1, 2**64 - 1, 2)], "does not lie inside 8 tokens"),
    ([(1, 4, 2**64 - 1)], "does not lie inside 8 tokens"),
    ([(1, 7, 2)], "at offset 7 with length 2 does not lie inside 8 tokens"),
    ([(1, 8, 1)], "does not lie inside 8 tokens"),
    ([(1, 0, 3), (2, 2, 2)], "multimodal runs overlap at offset 2"),
    ([(1, 3, 2), (2, 3, 1)], "multimodal runs overlap at offset 3"),
    ([(1, 0, 8), (2, 2, 2)], "multimodal runs overlap at offset 2"),
    ([(1, 0)], r"^mm_runs\[0\] must be \(mm_hash, offset, length\)"),
    ([(1, 0, 1), (-1, 2, 2)], r"^mm_runs\[1\]\.mm_hash must be 0 to"),
    ([(1, -1, 1)], r"^mm_runs\[0\]\.offset must be 0 to"),
    ([(1, 0, "1")], r"^mm_runs\[0\]\.length must be an int"),
    ([5], r"^mm_runs\[0\] must be a sequence"),
    (5, "^mm_runs must be a sequence"),
]


@pytest.mark.parametrize(("runs", "message"), BAD_RUNS)
def test_bad_runs_are_refused_before_anything_changes(runs: list[hashing.Run], message: str) -> None:
    blocks = TokenBlocks([1, 2, 3, 4, 5], 4, mm_runs=[(9, 1, 2)])
    before = blocks.identities
    with pytest.raises(InvalidArgument, match=message):
        blocks.extend(range(8), runs)
    with pytest.raises(InvalidArgument, match=message):
        TokenBlocks(range(8), 4, mm_runs=runs)
    assert blocks.tokens.tolist() == [1, 2, 3, 4, 5]
    assert blocks.mm_runs == [(9, 1, 2)]
    assert blocks.identities == before
