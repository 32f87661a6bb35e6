"""`Experiment`: a deployment, its engine's settings, its load, and the measured times."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from understudy.calibrate.simulate import Outcome, mean_of_known, simulate
from understudy.defaults import choose_limits, is_default
from understudy.engines.kinds.registry import find_kind
from understudy.errors import ConfigError, InvalidArgument
from understudy.timing.capacity import kv_blocks
from understudy.timing.physical import Basis, Physical
from understudy.timing.pipeline import label_stages, stage_coefficients
from understudy.timing.presets import Preset, preset

if TYPE_CHECKING:
    from understudy.calibrate.load import Load
    from understudy.engines.engine_config import EngineConfig
    from understudy.timing.coefficients import StepCoefficients
    from understudy.timing.deployment import Deployment
    from understudy.timing.efficiencies import Efficiencies

MEASURES = ("ttft_ms", "tpot_ms", "e2e_ms")
THROUGHPUT = ("req_per_s", "output_tok_s", "output_tok_s_per_gpu")
"""Rates over the whole of an experiment."""
MAX_TOKENS = 2**26
"""Limit of an estimated KV cache: more than any benchmark fills."""


class Experiment(msgspec.Struct, frozen=True, kw_only=True):
    """One experiment and its measured means."""

    name: str
    deployment: Deployment
    engine: EngineConfig
    loads: tuple[Load, ...]
    """Samples of one random load; their outcomes are averaged."""
    measured: dict[str, str]
    """Cells of measured means (ms) by name, unparsed; `measurement` reads them."""
    release: str = ""
    """Release of the engine, if known."""
    backend: str = "vllm"
    """Engine that was measured: vllm, sglang or trtllm."""
    captures: tuple[int, ...] | None = None
    """Sizes of captured graphs; None: vLLM's."""
    notes: tuple[str, ...] = ()
    """Assumptions of a prediction about its row."""
    where: str = ""
    """File and line, for errors."""
    client_output_tokens: float | None = None
    """Output tokens as counted by the client, if its count differs from the engine's."""

    def preset(self) -> Preset:
        """Find the preset of the deployment."""
        deployment = self.deployment
        found = preset(
            deployment.model,
            deployment.gpu,
            deployment.weights,
            deployment.kv,
            release=self.release,
            engine=self.backend,
        )
        return label_stages(found, deployment.parallel.pipeline)

    def measurement(self, name: str) -> float:
        """Return a measured mean. InvalidArgument if it is missing or not a number above 0."""
        text = self.measured.get(name, "")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise InvalidArgument(
                f"{self.where}: {name} must be a number above 0 to compare with, got {text or 'nothing'}; correct the "
                "cell, or remove the row"
            )
        return value

    def outcomes(self, efficiencies: Efficiencies) -> list[Outcome]:
        """Replay each load with these efficiencies."""
        coefficients = self.deployment.coefficients(efficiencies)
        if self.captures is not None:
            coefficients = msgspec.structs.replace(coefficients, captures=self.captures)
        timing = Physical(
            coefficients=coefficients,
            stages=self._stages(efficiencies),
            basis=Basis(deployment=self.deployment, efficiencies=efficiencies),
        )
        engine = msgspec.structs.replace(self.engine, timing=timing)
        return [
            simulate(
                load,
                engine,
                front_end_ms=efficiencies.front_end_ms,
                workers=self.deployment.parallel.data,
                ranks=self.deployment.steps_together,
            )
            for load in self.loads
        ]

    def _stages(self, efficiencies: Efficiencies) -> tuple[StepCoefficients, ...]:
        """Return the coefficients of a pipeline's stages, with the row's captured graphs."""
        stages = stage_coefficients(self.deployment, efficiencies)
        if self.captures is None:
            return stages
        return tuple(msgspec.structs.replace(one, captures=self.captures) for one in stages)

    def _rates(self, outcomes: list[Outcome]) -> dict[str, float]:
        """Return requests and tokens per second."""
        requests = float(np.mean([len(one.output_tokens) / one.seconds for one in outcomes]))
        tokens = float(np.mean([int(one.output_tokens.sum()) / one.seconds for one in outcomes]))
        gpus = self.deployment.parallel.gpus
        return dict(zip(THROUGHPUT, (requests, tokens, tokens / gpus), strict=True))

    def predict(self, efficiencies: Efficiencies) -> dict[str, float]:
        """Predict the mean times (ms) over all requests, and rates; NaN for TPOT and ITL of one-token answers."""
        outcomes = self.outcomes(efficiencies)
        means = {name: mean_of_known(np.array([one.mean(name) for one in outcomes])) for name in MEASURES}
        means |= self._rates(outcomes)
        if self.client_output_tokens is not None:
            gaps = self.client_output_tokens - 1
            span = means["e2e_ms"] - means["ttft_ms"]
            means["itl_ms"] = span / max(gaps, 1.0) if gaps > 0 and span > 0 else math.nan
        return means


def build_engine_config(
    deployment: Deployment | None,
    *,
    gpu_memory_utilization: float | None = None,
    engine: str = "vllm",
    **given: Any,
) -> EngineConfig:
    """Configure an engine (vllm, sglang) with the settings that were given, by name.

    The others are what the engine chooses for the GPU. Without a deployment `num_gpu_blocks` is required.
    """
    kind = find_kind(engine)
    if deployment is not None and (stages := deployment.parallel.pipeline) > 1:
        if "pipeline_parallel_size" not in kind.config_class.__struct_fields__:
            raise ConfigError(f"pipeline_parallel_size={stages}: pipelines of {kind.title} are not simulated")
        given = {**given, "pipeline_parallel_size": stages}
    config = kind.config_class(**given)
    if deployment is None:
        return config
    gpu = deployment.gpu
    limits = choose_limits(gpu.name, gpu.memory_gb * 1e9, has_largest=config.profile.has_largest_limits)
    config = config.choose_limits(limits)
    if not is_default(config.num_gpu_blocks):
        return config
    speculation = config.speculative_config
    fit = kv_blocks(
        deployment,
        block_size=config.block_size,
        max_num_batched_tokens=config.step_tokens or limits.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs or limits.max_num_seqs,
        gpu_memory_utilization=config.memory_share
        if gpu_memory_utilization is None
        else gpu_memory_utilization,
        drafter=None if speculation is None else speculation.drafter(deployment),
    )
    return msgspec.structs.replace(config, num_gpu_blocks=min(fit, MAX_TOKENS // config.block_size))


def count_draws(concurrency: int, prompts: int, *, enough: int = 400, most: int = 5) -> int:
    """Return how many samples of random lengths to average; small benchmarks need more."""
    return max(1, min(most, math.ceil(enough / max(prompts, concurrency, 1))))
