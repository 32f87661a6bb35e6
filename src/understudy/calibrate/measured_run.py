"""A measured benchmark as a run: its deployment and engine, its replay, and how far the replay is off."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from understudy.calibrate.experiment import build_engine_config
from understudy.calibrate.simulate import simulate
from understudy.timing.deployment import Parallelism
from understudy.timing.physical import Physical

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.calibrate.benchmark import Benchmark
    from understudy.calibrate.engine_flags import EngineFlags
    from understudy.calibrate.load import Load
    from understudy.calibrate.simulate import Outcome
    from understudy.engines.engine_config import EngineConfig
    from understudy.timing.deployment import Deployment
    from understudy.timing.efficiencies import Efficiencies

    Vector = NDArray[np.float64]

_WEIGHTS = {"tpot_ms": 1.5, "ttft_ms": 0.5, "e2e_ms": 1.0}
_PLUS_MS = 30.0
"""Added to measured and simulated TTFT before comparison, because smaller TTFTs are mostly chance."""
RUN_TO_RUN = {"ttft_ms": 0.04, "tpot_ms": 0.02, "e2e_ms": 0.02}
"""Relative standard deviation of a benchmark's means between repeated runs."""
_GROUPS_BY_TIME = 8
_GROUPS_BY_LENGTH = 4
_DETAILED_WEIGHT = 3.0
"""A file with single requests counts as much as nine summaries."""


class Run(msgspec.Struct, frozen=True):
    """A benchmark with its deployment and engine configuration."""

    benchmark: Benchmark
    deployment: Deployment
    engine: EngineConfig

    @classmethod
    def of(cls, benchmark: Benchmark, deployment: Deployment, flags: EngineFlags) -> Run:
        """Configure the engine of a benchmark; settings in the file override the flags."""
        own = benchmark.engine
        tensor = own.get("tensor_parallel_size", deployment.parallel.tensor)
        if tensor != deployment.parallel.tensor:
            parallel = Parallelism(
                tensor=tensor, data=deployment.parallel.data, expert=deployment.parallel.expert
            )
            deployment = msgspec.structs.replace(deployment, parallel=parallel)
        recorded = {name: value for name, value in own.items() if name != "tensor_parallel_size"}
        given = {**flags.given(), "gpu_memory_utilization": flags.memory_share}
        engine = build_engine_config(deployment, **{**given, **recorded})
        return cls(benchmark, deployment, engine)

    def replay(self, efficiencies: Efficiencies, load: Load | None = None) -> Outcome:
        """Replay the benchmark's load, or another sample of it, with these efficiencies."""
        timing = Physical(coefficients=self.deployment.coefficients(efficiencies))
        return simulate(
            self.benchmark.load if load is None else load,
            msgspec.structs.replace(self.engine, timing=timing),
            front_end_ms=efficiencies.front_end_ms,
            workers=self.deployment.parallel.data,
            ranks=self.deployment.steps_together,
        )

    def residuals(self, outcome: Outcome) -> Vector:
        """Return the weighted logarithms of simulated over measured times, by measure.

        A file with single requests is compared by means of groups (by arrival and by prompt length), because one
        request more or less in a batch shifts single times by a whole step.
        """
        if not self.benchmark.detailed:
            return np.array(
                [
                    _WEIGHTS[name] * float(np.log(max(outcome.mean(name), 1e-9) / value))
                    for name, value in self.benchmark.means.items()
                    if value > 0
                ]
            )
        weights = _DETAILED_WEIGHT / np.sqrt(len(self._groups))
        return np.array(
            [
                weights
                * weight
                * _log_ratio(getattr(self.benchmark, name)[group], getattr(outcome, name)[group], name)
                for name, weight in _WEIGHTS.items()
                for group in self._groups
            ]
        )

    def measures(self) -> list[Vector]:
        """Return the change of the residuals per standard deviation of each measure between repeated runs."""
        if not self.benchmark.detailed:
            names = [name for name, value in self.benchmark.means.items() if value > 0]
            return [np.array([_WEIGHTS[name] * RUN_TO_RUN[name]]) for name in names]
        weights = _DETAILED_WEIGHT / np.sqrt(len(self._groups))
        return [
            np.full(len(self._groups), weights * weight * RUN_TO_RUN[name])
            for name, weight in _WEIGHTS.items()
        ]

    @property
    def _groups(self) -> list[NDArray[np.intp]]:
        prompts = self.benchmark.load.workload.prompt_tokens
        return [
            *np.array_split(np.arange(len(prompts)), min(_GROUPS_BY_TIME, len(prompts))),
            *np.array_split(np.argsort(prompts, kind="stable"), min(_GROUPS_BY_LENGTH, len(prompts))),
        ]


def _log_ratio(measured: Vector, simulated: Vector, name: str) -> float:
    known = np.isfinite(measured) & np.isfinite(simulated)
    if not known.any():
        return 0.0
    plus = _PLUS_MS if name == "ttft_ms" else 1e-9
    return float(np.log((simulated[known].mean() + plus) / (measured[known].mean() + plus)))
