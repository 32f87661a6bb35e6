"""Any release string has its dialect, by the rules of the release that brought each change."""

from __future__ import annotations

from itertools import pairwise

import pytest

from understudy._core import Tier
from understudy.errors import ConfigError
from understudy.events.dialects import dialect, known_dialects


@pytest.mark.parametrize(
    ("name", "stored", "removed", "arrays"),
    [
        ("vllm-0.9.0", 5, 1, True),
        ("vllm-0.9.0.1", 5, 1, True),
        ("vllm 0.10.1.1", 5, 1, True),
        ("vllm:0.10.2", 6, 2, True),
        ("vllm-0.13.0", 6, 2, True),
        ("vllm-0.14.0", 7, 2, True),
        ("vllm-0.16.0", 7, 2, True),
        ("vllm-0.17.0", 8, 2, True),
        ("vllm-0.20.0", 9, 3, True),
        ("vllm-0.22.0", 11, 3, True),
        ("vllm-0.23.0", 11, 3, True),
        ("vllm-0.24.0rc1", 11, 3, False),
        ("vllm-v0.24", 11, 3, False),
        ("vllm-0.26.1", 12, 4, False),
        ("vllm-0.28.0.dev12+gabcdef0", 12, 4, False),
        ("vllm-0.29.0", 13, 5, False),
        ("VLLM-0.30.0", 14, 5, False),
        ("vllm-0.32.0", 14, 5, False),
        ("vllm-0.33.0", 15, 5, False),
        ("vllm", 15, 5, False),
        ("vllm-1.4.0", 15, 5, False),
        ("sglang-0.4.6.post5", 5, 1, True),
        ("sglang-0.5.8", 5, 1, True),
        ("sglang-0.5.3.post1", 5, 1, True),
        ("sglang-0.5.9", 6, 2, True),
        ("sglang-0.5.17", 6, 2, True),
        ("sglang-0.5.19", 6, 2, True),
        ("sglang-0.5.20", 8, 2, False),
        ("sglang-0.5.21", 8, 2, False),
        ("sglang-0.5.22", 9, 2, False),
        ("sglang", 9, 2, False),
    ],
)
def test_a_version_finds_its_rules(name: str, stored: int, removed: int, arrays: bool) -> None:
    rules = dialect(name)
    assert (len(rules.stored_fields), len(rules.removed_fields), rules.array_events) == (
        stored,
        removed,
        arrays,
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trtllm-1.0", "give a producer and its version"),
        ("vllm-0.8.5", r"choose at least 0\.9\.0"),
        ("sglang-0.4.6.post4", r"choose at least 0\.4\.6\.post5"),
        ("vllm-main", "'main' is not a version of vllm"),
        ("", "give a producer"),
    ],
)
def test_what_has_no_dialect_is_refused_with_the_remedy(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dialect(name)


def test_the_known_dialects_differ_from_their_neighbours() -> None:
    known = list(known_dialects())
    assert len(known) == 20
    for before, after in pairwise(known):
        same = {name for name in before.__struct_fields__ if getattr(before, name) == getattr(after, name)}
        assert same != set(before.__struct_fields__) - {"version"}


@pytest.mark.parametrize(
    ("name", "media"),
    [
        ("vllm-0.9.1", [None, None, None, None]),
        ("vllm-0.25.0", ["GPU", "CPU", None, None]),
        ("vllm-0.26.0", ["GPU", "CPU", "FS", "OBJ"]),
        ("vllm-0.27.0", ["GPU", "CPU", "STORAGE", "STORAGE"]),
        ("sglang-0.5.8", [None, None, None, None]),
        ("sglang-0.5.10", ["GPU", "CPU_PINNED", None, None]),
        ("sglang-0.5.11", ["GPU", "CPU_PINNED", "DISK", "EXTERNAL"]),
    ],
)
def test_tiers_have_the_names_of_the_release(name: str, media: list[str | None]) -> None:
    rules = dialect(name)
    assert [rules.media.get(tier) for tier in (Tier.G1, Tier.G2, Tier.G3, Tier.G4)] == media
    assert rules.publishes_tier(Tier.G1)
    assert rules.publishes_tier(Tier.G2) == (media[1] is not None)


def test_replay_answers_carry_the_topic_since_it_came() -> None:
    names = ("vllm-0.25.1", "vllm-0.26.0", "sglang-0.5.21", "sglang-0.5.22")
    assert [dialect(name).replay_topic for name in names] == [False, True, False, True]
