"""The values of --vary and their combinations."""

from __future__ import annotations

import pytest

from understudy.errors import ConfigError
from understudy.sweep.space import Dimension, Space


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("workers=1..4", (1, 2, 3, 4)),
        ("workers=1..16*2", (1, 2, 4, 8, 16)),
        ("workers=3..20*2", (3, 6, 12)),
        ("workers=2..9+3", (2, 5, 8)),
        ("--workers=1..2,8", (1, 2, 8)),
        ("watermark=0,0.01", (0, 0.01)),
        ("routing=round_robin,kv", ("round_robin", "kv")),
        ("g2-bytes=,64GiB", (None, "64GiB")),
        (
            'speculative-config=,{"method": "mtp", "num_speculative_tokens": 3}',
            (None, '{"method": "mtp", "num_speculative_tokens": 3}'),
        ),
    ],
)
def test_values_are_lists_ranges_doublings_and_steps(text: str, values: tuple[object, ...]) -> None:
    assert Dimension.parse(text).values == values


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("workers", "no values"),
        ("workers=4..1", "empty or endless"),
        ("workers=0..8*2", "empty or endless"),
        ("workers=1..8*1", "empty or endless"),
        ("watermark=0.1..0.5", "no range of whole numbers"),
        ("workers=1..4,2", "2 is given twice"),
        ("workers=1..1000000", "more than 100,000 values"),
    ],
)
def test_a_range_without_meaning_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Dimension.parse(text)


def test_a_flag_is_varied_once() -> None:
    with pytest.raises(ConfigError, match="workers: given twice; join"):
        Space.parse(["workers=1,2", "workers=4"])


def test_points_are_all_combinations_in_grid_order() -> None:
    space = Space.parse(["workers=1,2", "routing=round_robin,kv"])
    assert space.size == 4
    assert [space.values(point) for point in space.points()] == [
        {"workers": 1, "routing": "round_robin"},
        {"workers": 1, "routing": "kv"},
        {"workers": 2, "routing": "round_robin"},
        {"workers": 2, "routing": "kv"},
    ]
