from __future__ import annotations

import random

import pytest
from xxhash import xxh3_64_intdigest

from understudy.errors import InvalidArgument
from understudy.tokens import xxh3_64

DATA = random.Random(3).randbytes(1 << 20)


@pytest.mark.parametrize("seed", [0, 1, 1337, 2**63, 2**64 - 1])
def test_every_length_to_2048_equals_the_xxhash_package(seed: int) -> None:
    for length in range(2049):
        assert xxh3_64(DATA[:length], seed) == xxh3_64_intdigest(DATA[:length], seed), length


def test_random_lengths_offsets_and_seeds_equal_the_xxhash_package() -> None:
    rng = random.Random(7)
    for _ in range(300):
        start = rng.randrange(64)
        stop = min(len(DATA), start + int(2 ** rng.uniform(0, 20)))
        seed = rng.getrandbits(64)
        assert xxh3_64(DATA[start:stop], seed) == xxh3_64_intdigest(DATA[start:stop], seed), (
            start,
            stop,
            seed,
        )


def test_one_mebibyte_equals_the_xxhash_package() -> None:
    assert xxh3_64(DATA, 42) == xxh3_64_intdigest(DATA, 42)


def test_the_seed_defaults_to_zero() -> None:
    assert xxh3_64(b"abc") == xxh3_64(b"abc", 0) == xxh3_64_intdigest(b"abc")


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_outside_64_bits_is_named(seed: int) -> None:
    with pytest.raises(InvalidArgument, match=r"^seed must be 0 to"):
        xxh3_64(b"", seed)
