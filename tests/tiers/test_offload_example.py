"""The example of an offload policy does what it says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from understudy.tiers import OffloadPolicy

if TYPE_CHECKING:
    import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "offload_policy.py"


def test_a_block_is_copied_when_it_was_hit_or_comes_a_second_time() -> None:
    policy = runpy.run_path(str(EXAMPLE))["SecondTime"]()
    assert isinstance(policy, OffloadPolicy)
    none = np.zeros(2, np.uint32)
    assert policy.select([1, 2], none) == [False, False]
    assert policy.select([2, 3], none) == [True, False]
    assert policy.select([4, 3], np.array([1, 0], np.uint32)) == [True, True]


def test_the_example_copies_fewer_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    everything, second = (
        int(count.replace(",", ""))
        for count in re.findall(r"([\d,]+) blocks copied", capsys.readouterr().out)
    )
    assert 0 < second < everything
