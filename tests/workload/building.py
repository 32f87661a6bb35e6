"""Small workloads and traces for the tests."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.workload import Workload, read_mooncake

if TYPE_CHECKING:
    from pathlib import Path


def workload(prompts: list[int] | None = None, **columns: Any) -> Workload:
    """Prompts of `prompts` tokens in trace blocks of 4, of unique content unless a column says otherwise."""
    prompts = [4, 8, 5] if prompts is None else prompts
    counts = [-(-tokens // 4) for tokens in prompts]
    defaults: dict[str, Any] = {
        "arrival_ns": np.arange(len(prompts)) * 1_000,
        "prompt_tokens": prompts,
        "output_tokens": [3] * len(prompts),
        "hash_offsets": np.cumsum([0, *counts]),
        "hash_ids": np.arange(sum(counts)),
        "trace_block_size": 4,
    }
    return Workload(**(defaults | columns))


def row(**keys: Any) -> dict[str, Any]:
    """One good line of a trace with blocks of 512, changed by `keys`; a key set to ... is left out."""
    good = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}
    return {key: value for key, value in (good | keys).items() if value is not ...}


def trace_file(directory: Path, *rows: dict[str, Any] | str, name: str = "trace.jsonl") -> Path:
    """Write rows (a string is written as it is) one per line."""
    path = directory / name
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in rows))
    return path


def read(directory: Path, *rows: dict[str, Any] | str, **options: Any) -> Any:
    """Write rows as a trace and read it."""
    return read_mooncake(trace_file(directory, *rows), **options)


def assert_same(left: Workload, right: Workload, *, but: tuple[str, ...] = ()) -> None:
    """Assert that two workloads have the same columns."""
    for field in fields(Workload):
        if field.name in but:
            continue
        ours, theirs = getattr(left, field.name), getattr(right, field.name)
        if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
            assert ours.dtype == theirs.dtype, field.name
            np.testing.assert_array_equal(ours, theirs, err_msg=field.name)
        else:
            assert ours is None if theirs is None else ours == theirs, field.name
