"""The gaps of a run are the differences between the times of consecutive tokens, each once, ascending, and counted."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from replay.building import single_turns
from understudy import _core

LONG = 2**32
"""Gaps in ns from here on are kept apart."""


class Drawn:
    """Step times out of a list of long and short ones."""

    def __init__(self, seed: int, different: int) -> None:
        self._random = Random(f"steps {seed}")
        edges = [LONG - 1, LONG, LONG + 1, 1, 2**33 + 5]
        self._ns = edges + [
            self._random.randrange(1, 2 ** self._random.randrange(1, 35)) for _ in range(different)
        ]

    def prefill_ms(self, *_: int) -> float:
        return 1.0

    def decode_ms(self, *_: int) -> float:
        return self._random.choice(self._ns) / 1e6


@pytest.mark.parametrize("stays", [1, 9_000])  # requests of thousands of steps see what is folded on the way
@pytest.mark.parametrize("different", [3, 20_000])
def test_gaps_are_counted(different: int, stays: int) -> None:
    rng = Random(f"gaps {different} {stays}")
    outputs = [rng.randrange(1, 60) for _ in range(400)] + [stays]
    ends: list[int] = []

    def look(_worker: int, engine: _core.VllmEngine, ended: bool) -> None:
        if ended:
            ends.append(engine.now_ns)

    settings = _core.VllmEngineConfig(
        block_size=16, num_gpu_blocks=1_000, max_num_seqs=1, async_scheduling=False
    )
    pool = _core.Pool(engine=settings, timing=_core.python_timing(Drawn(different, different)), workers=1)
    result = _core.run_fleet(
        single_turns([4] * len(outputs), outputs),
        _core.FleetSettings(pools=[pool], routing="round_robin"),
        on_step=look,
    )

    expected: Counter[int] = Counter()
    for tokens in outputs:  # one request after another, a token a step
        expected.update(after - before for before, after in pairwise(ends[:tokens]))
        del ends[:tokens]
    assert not ends
    assert list(zip(result.itl_ns.tolist(), result.itl_count.tolist(), strict=True)) == sorted(
        expected.items()
    )
    assert max(expected) >= LONG > min(expected)
