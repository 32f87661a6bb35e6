"""A trace for the tests of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from understudy.workload import Normal, Poisson, SharedRatio, SyntheticSpec, synthesise, write_mooncake

if TYPE_CHECKING:
    from pathlib import Path


ROWS = 40


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small trace with blocks of 64."""
    spec = SyntheticSpec(
        sessions=ROWS,
        prompt_tokens=Normal(mean=300, std=100),
        output_tokens=Normal(mean=20, std=5),
        arrivals=Poisson(qps=20),
        prefixes=SharedRatio(groups=3, ratio=0.5),
    )
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    write_mooncake(synthesise(spec).normalised(), path)
    return path
