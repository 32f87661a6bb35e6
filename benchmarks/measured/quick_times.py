"""TPOT and TTFT of a closed loop in closed form: near those of the engine, in less than a millisecond.

A fit of many numbers to many rows asks for thousands of predictions. In the steady state of a closed loop, `c` requests
decode, and each of them waits for the prompts of the others once per answer; its first wave sends all prompts at once.
The engine scores what was fitted.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from understudy.timing.coefficients import captures_up_to

if TYPE_CHECKING:
    from understudy.calibrate.experiment import Experiment
    from understudy.timing.coefficients import StepCoefficients

_LARGEST_GRAPH = 512
_USUAL_STEP = 8192.0
_USUAL_SEQUENCES = 1024.0


class ClosedLoop(NamedTuple):
    """Means of a closed loop of random lengths, and the limits of its engine."""

    streams: float
    waves: float
    prompt: float
    output: float
    step_tokens: float
    sequences: float
    captures: tuple[int, ...]

    @classmethod
    def of(cls, one: Experiment) -> ClosedLoop:
        """Read the load of an experiment."""
        load = one.loads[0]
        prompts, outputs = load.workload.prompt_tokens, load.workload.output_tokens
        return cls(
            load.concurrency,
            max(len(prompts) / max(load.concurrency, 1), 1.0),
            float(np.mean(prompts)),
            max(float(np.mean(outputs)), 1.0),
            float(one.engine.step_tokens or _USUAL_STEP),
            float(one.engine.max_num_seqs or _USUAL_SEQUENCES),
            captures_up_to(_LARGEST_GRAPH) if one.captures is None else one.captures,
        )


class QuickTimes:
    """Times of steps with some coefficients, as the core has them."""

    def __init__(self, coefficients: StepCoefficients, loop: ClosedLoop) -> None:
        self._of = coefficients
        self._loop = loop
        above = coefficients.floor_above_tokens
        self._graphs = loop.captures[-1] if above is None else above

    def means(self, front_end_ms: float) -> tuple[float, float]:
        """Return mean TPOT and TTFT in ms."""
        loop, streams = (
            self._loop,
            min(self._loop.streams / self._of.ranks, self._loop.sequences),
        )
        context = loop.prompt + loop.output / 2
        decode = self._base_ms(streams, streams, streams) + self._context_ms(streams, context)
        alone, _ = self._prefill(1.0, max(streams - 1, 0.0), context)
        together = min(alone / max(decode * loop.output / streams, 1e-9), 4.0)
        prompts = max(together, 1.0)
        time, steps = self._prefill(prompts, max(streams - prompts, 0.0), context)
        added = max((time - steps * decode) / prompts, 0.0)
        tpot = decode + (streams - 1) / loop.output * added
        burst, _ = self._prefill(max(streams, 1.0), 0.0, context)
        first = burst / 2 * (1 + 1 / streams) if streams > 1 else alone
        steady = alone + (1.5 * decode if streams > 1 else 0.0) + (prompts - 1) / 2 * alone
        return tpot, front_end_ms + (first + (loop.waves - 1) * steady) / loop.waves

    def _prefill(self, prompts: float, decodes: float, context: float) -> tuple[float, int]:
        """Return time and number of the steps that compute `prompts` prompts beside decodes."""
        of, length = self._of, self._loop.prompt
        total = prompts * length
        steps = max(math.ceil(total / max(self._loop.step_tokens - decodes, 1.0) - 1e-9), 1)
        chunk, ms = total / steps, 0.0
        for place in range(steps):
            step = self._base_ms(chunk + decodes, decodes + prompts, decodes + prompts)
            step += self._context_ms(decodes, context) * of.mix + of.prefill_ms
            step += prompts * self._attention_ms(length / steps, length / steps * place)
            if chunk + decodes > self._graphs:
                step = max(step, of.floor_ms)
            ms += step
        return ms, steps

    def _base_ms(self, tokens: float, sequences: float, rows: float) -> float:
        of = self._of
        captures = self._loop.captures
        wide = captures[bisect_left(captures, tokens)] if tokens <= captures[-1] else tokens
        everything = tokens * of.ranks
        experts = 0.0
        if of.local_experts > 0:
            hit = 1 - (1 - of.expert_share) ** everything
            most = of.local_experts * hit + of.expert_spread * math.sqrt(of.local_experts * hit * (1 - hit))
            used = min(most, of.local_experts)
            experts = self._soft(of.expert_ms * used, of.expert_token_ms * everything)
        return (
            self._soft(of.weights_ms, of.token_ms * wide)
            + experts
            + self._soft(of.head_ms, of.head_sequence_ms * rows)
            + of.comm_ms
            + of.comm_token_ms * wide
            + of.comm_rank_token_ms * everything
            + of.step_ms
            + of.sequence_ms * sequences
        )

    def _context_ms(self, requests: float, context: float) -> float:
        of = self._of
        ms = of.context_ms * requests * context
        return ms + of.window_context_ms * requests * min(context, of.window) if of.window else ms

    def _attention_ms(self, chunk: float, history: float) -> float:
        of, middle = self._of, history + chunk / 2
        ms = of.attention_ms * chunk * middle + of.history_ms * history
        return ms + of.window_attention_ms * chunk * min(middle, of.window) if of.window else ms

    def _soft(self, reading: float, computing: float) -> float:
        p = self._of.softness
        return float((reading**p + computing**p) ** (1 / p))
