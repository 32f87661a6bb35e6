"""An experiment: a deployment, the settings of its engine, and the load that was put on it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from understudy.calibrate.simulate import Outcome, simulate
from understudy.engines.config import VllmConfig
from understudy.engines.profiles import NEWEST
from understudy.errors import InvalidArgument
from understudy.timing.capacity import kv_blocks
from understudy.timing.physical import Physical
from understudy.timing.presets import Preset, preset

if TYPE_CHECKING:
    from understudy.calibrate.load import Load
    from understudy.timing.deployment import Deployment
    from understudy.timing.efficiencies import Efficiencies

MEASURES = ("ttft_ms", "tpot_ms", "e2e_ms")
_BLOCK_SIZE = 16
MAX_BLOCKS = 2**22
"""Of an estimate: more than any benchmark fills."""


class Experiment(msgspec.Struct, frozen=True, kw_only=True):
    """What was run, and what of it was measured."""

    name: str
    deployment: Deployment
    engine: VllmConfig
    loads: tuple[Load, ...]
    """Draws of the same random load: their outcomes are averaged."""
    measured: dict[str, str]
    """Means of milliseconds by name, as far as they are there, as they are written: `measurement` reads them."""
    release: str = ""
    """Of vLLM, where it is told."""
    where: str = ""
    """File and line, for errors."""
    client_output_tokens: float | None = None
    """Tokens that the client counted in an answer, where it did not count those that the engine made."""

    def preset(self) -> Preset:
        """The efficiencies that nothing but its deployment tells."""
        what = self.deployment
        return preset(what.model, what.gpu, what.weights, what.kv, release=self.release)

    def measurement(self, name: str) -> float:
        """What was measured. InvalidArgument where nothing is, or nothing that can be compared with."""
        text = self.measured.get(name, "")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise InvalidArgument(
                f"{self.where}: {name} must be a number above 0 to compare with, got {text or 'nothing'}; correct the "
                "cell, or leave the row out"
            )
        return value

    def outcomes(self, reached: Efficiencies) -> list[Outcome]:
        """Each load replayed with these efficiencies."""
        timing = Physical(coefficients=self.deployment.coefficients(reached))
        engine = msgspec.structs.replace(self.engine, timing=timing)
        return [
            simulate(
                load,
                engine,
                front_end_ms=reached.front_end_ms,
                workers=self.deployment.parallel.data,
                ranks=self.deployment.steps_together,
            )
            for load in self.loads
        ]

    def predict(self, reached: Efficiencies) -> dict[str, float]:
        """Means over all requests."""
        outcomes = self.outcomes(reached)
        means = {name: float(np.mean([one.mean(name) for one in outcomes])) for name in MEASURES}
        if self.client_output_tokens is not None:
            gaps = max(self.client_output_tokens - 1, 1.0)
            means["itl_ms"] = (means["e2e_ms"] - means["ttft_ms"]) / gaps
        return means


def build_engine_config(
    deployment: Deployment | None,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    enable_prefix_caching: bool,
    max_model_len: int | None = None,
    num_gpu_blocks: int | None = None,
    vllm_version: str = NEWEST,
) -> VllmConfig:
    """vLLM as a benchmark runs it: blocks of 16 tokens, as many as fit, schedules decided one step ahead.

    Without a deployment `num_gpu_blocks` has to say how many there are.
    """
    if num_gpu_blocks is None:
        assert deployment is not None
        fit = kv_blocks(
            deployment,
            block_size=_BLOCK_SIZE,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
        )
        num_gpu_blocks = min(fit, MAX_BLOCKS)
    return VllmConfig(
        block_size=_BLOCK_SIZE,
        num_gpu_blocks=num_gpu_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_prefix_caching=enable_prefix_caching,
        async_scheduling=True,
        vllm_version=vllm_version,
    )


def draws_of(concurrency: int, prompts: int, *, enough: int = 400, most: int = 5) -> int:
    """How many draws of random lengths make the mean steady: a small benchmark is an accident of its lengths."""
    return max(1, min(most, math.ceil(enough / max(prompts, concurrency, 1))))
