"""A step that is retried after the timing model raised is the step that it would have been, with tiers too."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from engines.test_failing_timing import Fragile
from tiers.building import INF, MS, forked, shared, tiers
from tiers.fleets import random_tiers
from understudy import _core


class ByTokens(Fragile):
    """Times that grow with a prompt's new tokens and with the context, and an error at one call."""

    def __init__(self, fails_at: int, prefill_ms: float, decode_ms: float) -> None:
        super().__init__(fails_at)
        self.token_ms, self.least_ms = prefill_ms, decode_ms

    def prefill_ms(self, requests: int, mean_input: int, mean_cached: int) -> float:  # noqa: ARG002
        return self._ms(self.token_ms * max(mean_input - mean_cached, 0))

    def decode_ms(self, requests: int, context: int, mean: int, capacity: int) -> float:  # noqa: ARG002
        return self._ms(self.least_ms + 0.001 * context)


def play(seed: int, fails_at: int) -> tuple[list[Any], int, int]:
    """Everything about requests that arrive at random; how often the model raised, and was asked."""
    rng = Random(f"retried {seed}")
    below = random_tiers(rng, rng.random() < 0.5) | {"recompute_fallback": rng.random() < 0.7}
    if rng.random() < 0.3:
        below["g3"] = shared(
            rng.choice([6, 30, 300]),
            worker=rng.choice([0.2, 1.0, INF]),
            backend=rng.choice([0.5, 2.0, INF]),
        )
    manager = rng.choice(["native", "native", "kvbm"])
    config: dict[str, Any] = {
        "num_gpu_blocks": rng.choice([9, 12, 16, 24]),
        "max_num_seqs": rng.choice([2, 3, 16]),
        "max_num_batched_tokens": rng.choice([8, 16, 64, 2048]),
        "scheduler_reserve_full_isl": rng.random() < 0.5,
        "kv_manager": manager,
        "async_scheduling": manager == "native" and rng.random() < 0.4,
        **rng.choice([{}, {}, {"scheduling_policy": "priority"}, {"preemption_mode": "fifo"}]),
    }
    model = ByTokens(fails_at, rng.choice([0.0, 0.1, 1.0]), rng.choice([0.25, 1.0]))
    timing = _core.python_timing(model)
    engine = _core.VllmEngine(_core.VllmEngineConfig(block_size=4, **config), timing, tiers=tiers(**below))
    engine.set_fast_forward(rng.random() < 0.5)
    seen: list[Any] = []
    raised = until_ns = 0
    for number in range(14):
        until_ns += 10**5 * MS if number == 13 else rng.choice([0, 0, 1, 3, 12]) * rng.choice([MS // 4, MS])
        while True:
            try:
                effects = engine.advance(until_ns)
                break
            except RuntimeError:
                raised += 1
                engine.check()
        for record in effects.finished:
            times = (record.first_admit_ns, record.first_token_ns, record.second_token_ns, record.finish_ns)
            seen.append((record.id, *times, record.output_tokens, record.preemptions))
        if engine.idle:
            engine.skip_to(until_ns)
        prompt, output = rng.randrange(1, 28), rng.randrange(1, 14)
        blocks = forked(rng.randrange(4), rng.randrange(6), rng.randrange(1000))
        if number < 13 and engine.never_fits(prompt, output) is None:
            engine.submit("", prompt, output, blocks, priority=rng.randrange(3), arrival_time=float(number))
    return [*seen, engine.idle, engine.steps, engine.preemptions], raised, model.calls


# Seeds whose retries differed: by tokens, by a request that got none, or by what the first attempt made land.
SEEDS = (8, 49, 53, 175, 217, 229, 260, 288, 307, 308, 395, 554, 558, 580, 593, 902)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_retry_is_the_step_that_the_timing_model_stopped(seed: int) -> None:
    whole, _, calls = play(seed, -1)
    for fails_at in range(1, calls + 1):
        again, raised, _ = play(seed, fails_at)
        assert raised == 1
        assert again == whole, fails_at
