"""docs/connectors.md: its connector is the compiled one, and loads as the page says."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

from understudy import _core
from understudy.conformance.submit import blocks_of
from understudy.errors import ConfigError

ROOT = Path(__file__).parents[2]
MS = 1_000_000
DELAY_NS = 5 * MS

pytestmark = pytest.mark.skipif(
    not hasattr(_core, "with_slow_loads"), reason="built without UNDERSTUDY_TEST_ENGINES"
)


def engine(*, asynchronous: bool = False, blocks: int = 64, delay_ns: int = DELAY_NS) -> _core.VllmEngine:
    config = _core.VllmEngineConfig(
        block_size=16,
        num_gpu_blocks=blocks,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_model_len=2048,
        async_scheduling=asynchronous,
        check=True,
    )
    return _core.VllmEngine(_core.with_slow_loads(config, delay_ns), _core.constant_timing(2.0, 1.0))


def submit(of: _core.VllmEngine, index: int, prompt: int, outputs: int, now_ns: int) -> None:
    tokens = np.arange(index * 10_000, index * 10_000 + prompt + outputs, dtype=np.uint32)
    identities, _ = blocks_of(tokens, 16)
    of.submit(_core.RequestSpec(index, f"r{index}", prompt, outputs, identities, arrival_time=now_ns), now_ns)


def finish(of: _core.VllmEngine, *, steps: bool) -> list[_core.RequestRecord]:
    """Run to the end, by single steps or by fast-forwarding."""
    records: list[_core.RequestRecord] = []
    wake_ns = of.now_ns
    while not of.idle:
        if of.in_step:
            effects = of.end_step(of.now_ns)
        else:
            effects = of.begin_step(wake_ns) if steps else of.advance(1 << 60, True)
        assert effects.wake_ns is not None or of.idle
        wake_ns = effects.wake_ns or wake_ns
        records += effects.finished
    return records


def test_the_page_has_the_connector_that_is_compiled() -> None:
    page = (ROOT / "docs" / "connectors.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```cpp\n(class .*?)^```", page, re.MULTILINE | re.DOTALL)
    assert code in (ROOT / "core" / "tests" / "slow_loads.hpp").read_text(encoding="utf-8")
    assert len(code.splitlines()) <= 60


def test_a_prompt_is_loaded_and_its_rest_computed_after_the_delay() -> None:
    of = engine()
    submit(of, 0, 100, 3, 0)
    effects = of.begin_step(0)
    assert of.loading == [0]
    assert effects.wake_ns == DELAY_NS
    (record,) = finish(of, steps=True)
    assert record.cached_first == 96
    assert record.first_admit_ns >= DELAY_NS
    assert of.free_blocks == 64


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(4))
def test_fast_forwarding_gives_what_single_steps_give(seed: int, asynchronous: bool) -> None:
    draw = random.Random(seed)
    requests = [(draw.randint(1, 300), draw.randint(1, 40)) for _ in range(12)]
    delay_ns = draw.choice([0, MS // 2, 7 * MS, 40 * MS])
    seen = []
    for steps in (True, False):
        of = engine(asynchronous=asynchronous, blocks=40, delay_ns=delay_ns)
        for index, (prompt, outputs) in enumerate(requests):
            submit(of, index, prompt, outputs, 0)
        records = finish(of, steps=steps)
        of.check()
        assert of.free_blocks == 40
        seen.append(
            sorted((r.id, r.first_admit_ns, r.first_token_ns, r.finish_ns, r.preemptions) for r in records)
        )
    assert len(seen[0]) == len(requests)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("tick", [0, 2, 6])
def test_an_aborted_request_leaves_no_block_behind(tick: int) -> None:
    of = engine()
    submit(of, 0, 100, 30, 0)
    submit(of, 1, 50, 30, 0)
    of.advance(tick * MS)
    of.cancel(0, max(of.now_ns, tick * MS) if not of.in_step else tick * MS)
    finish(of, steps=False)
    of.finish_transfers()
    of.check()
    assert of.free_blocks == 64


def test_a_connector_does_not_mix_with_others() -> None:
    config = _core.with_transfer(_core.VllmEngineConfig(), _core.VllmTransfer(consumes=True))
    with pytest.raises(ConfigError, match="does not work with kv_role"):
        _core.VllmEngine(_core.with_slow_loads(config, 1), _core.constant_timing(1.0, 1.0))
