"""The core reads a workload's columns by name, and refuses by name what it cannot follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from replay.building import single_turns
from understudy import _core
from understudy.errors import InvalidArgument

COLUMNS = (
    "arrival_ns",
    "prompt_tokens",
    "output_tokens",
    "max_tokens",
    "priority",
    "strict_priority",
    "abort_after_ns",
    "turn",
    "next_turn",
    "delay_ns",
    "hash_offsets",
    "hash_ids",
    "output_in_next",
    "output_token_offsets",
    "output_token_ids",
    "accepted_draft_offsets",
    "accepted_drafts",
    "adapter",
    "queue_order",
    "trace_block_size",
)


def settings() -> _core.FleetSettings:
    pool = _core.Pool(
        engine=_core.VllmEngineConfig(block_size=16, num_gpu_blocks=64),
        timing=_core.constant_timing(1.0, 1.0),
    )
    return _core.FleetSettings(pools=[pool], routing="round_robin")


def columns(**changes: Any) -> SimpleNamespace:
    """Those of two requests, some of them changed."""
    workload = single_turns([20, 30], 3)
    return SimpleNamespace(**{name: getattr(workload, name) for name in COLUMNS} | changes)


def test_what_has_the_columns_of_a_workload_is_played() -> None:
    result = _core.run_fleet(columns(), settings())
    assert result.output_tokens.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_tokens": np.zeros(3, np.int32)}, "output_tokens has 3 rows, expected 2"),
        ({"hash_offsets": np.zeros(2, np.int64)}, "hash_offsets has 2 rows, expected 3"),
        ({"priority": "high"}, "priority must be a column"),
        ({"queue_order": np.zeros((2, 2), np.int64)}, "queue_order must be a column"),
        ({"turn": None}, "turn must be a column"),
        ({"strict_priority": np.zeros(1, np.int64)}, "strict_priority has 1 rows"),
        ({"trace_block_size": 0}, "trace_block_size must be at least 1"),
    ],
)
def test_a_column_that_cannot_be_followed_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        _core.run_fleet(columns(**changes), settings())


def test_names_are_as_many_as_requests() -> None:
    with pytest.raises(InvalidArgument, match="names has 1 rows, expected 2"):
        _core.run_fleet(columns(), settings(), names=["only"])
