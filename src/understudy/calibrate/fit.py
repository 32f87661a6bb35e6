"""Fit a deployment's efficiencies to benchmarks, by replaying their very loads."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from understudy import __version__
from understudy.calibrate.experiment import build_engine_config
from understudy.calibrate.least_squares import solve
from understudy.calibrate.simulate import simulate
from understudy.engines.profiles import NEWEST
from understudy.errors import ConfigError
from understudy.timing.deployment import Parallelism
from understudy.timing.efficiencies import PEAKS
from understudy.timing.physical import Domain, Physical, Residuals
from understudy.timing.timing_file import FittedInput, FittedNumber, TimingFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from understudy.calibrate.benchmark import Benchmark
    from understudy.calibrate.load import Load
    from understudy.calibrate.simulate import Outcome
    from understudy.engines.config import VllmConfig
    from understudy.timing.deployment import Deployment
    from understudy.timing.efficiencies import Efficiencies

    Vector = NDArray[np.float64]

_WEIGHTS = {"tpot_ms": 1.5, "ttft_ms": 0.5, "e2e_ms": 1.0}
_PLUS_MS = 30.0
"""Added to both TTFTs of single requests before they are compared: what is below it is accident."""
_PRIOR = 0.25
"""How far a number may be from its preset: a standard deviation of its logarithm."""
_TIGHT = 0.1
"""The same for numbers that hardly anything but the prior tells."""
_NOISE = 0.02
"""Of equal benchmarks: what is left when everything is right."""
REPEATED = {"ttft_ms": 0.04, "tpot_ms": 0.02, "e2e_ms": 0.02}
"""By how much a benchmark comes out otherwise when it is run again, all of its requests together."""
NOT_FITTED = {
    "attention": 0.15,
    "layer_us": 0.25,
    "sequence_us": 0.25,
    "prefill_ms": 0.25,
    "front_end_ms": 0.25,
    "weights": 0.1,
    "compute": 0.1,
    "routing_ns": 0.25,
    "link": 0.2,
    "link_latency_us": 0.2,
}
"""How far numbers may be from the preset that a fit leaves there."""
_LINK = ("link", "link_latency_us")
_DETERMINED = 0.6
"""A number is determined where the data left less than this share of the prior's uncertainty."""


class EngineFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the engine that ran the benchmarks, where a file does not name its own."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    num_gpu_blocks: int | None = None
    enable_prefix_caching: bool = True
    vllm_version: str = NEWEST


class Fit(msgspec.Struct, frozen=True):
    """What was found, and how the benchmarks come out of it."""

    file: TimingFile
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...]


def numbers_to_fit(
    deployment: Deployment, benchmarks: Sequence[Benchmark], *, detailed: bool | None = None
) -> dict[str, float]:
    """Which efficiencies these benchmarks may tell, and how far each may move (of its logarithm)."""
    sizes = {one.engine.get("tensor_parallel_size", deployment.parallel.tensor) for one in benchmarks}
    prompts = {round(float(np.median(one.load.workload.prompt_tokens)), -2) for one in benchmarks}
    if detailed is None:
        detailed = any(one.detailed for one in benchmarks)
    experts = bool(deployment.model.num_experts)
    wanted = {"weights": _PRIOR, "compute": _PRIOR, "kv": _PRIOR, "step_ms": _PRIOR}
    if experts:
        wanted = {
            "experts": _PRIOR,
            "expert_compute": _PRIOR,
            "kv": _PRIOR,
            "step_ms": _PRIOR,
            "weights": _TIGHT,
        }
    if len(prompts) > 1 or detailed:
        wanted["front_end_ms"] = _PRIOR
    if detailed:
        wanted |= {"prefill_ms": _PRIOR, "mixed_kv_factor": _TIGHT, "sequence_us": _PRIOR}
    if len(sizes) > 1:
        wanted |= {"link_latency_us": _PRIOR, "link": _PRIOR}
    return wanted


def fit(
    benchmarks: Sequence[Benchmark],
    deployment: Deployment,
    start: Efficiencies,
    flags: EngineFlags,
    *,
    in_engine: bool = False,
    iterations: int = 8,
    progress: Callable[[int], None] | None = None,
) -> Fit:
    """Damped least squares from `start`, which is also the prior. `in_engine`: the times were taken in the engine, so
    that nothing passes between client and engine.
    """
    if not benchmarks:
        raise ConfigError("nothing to fit: give at least one benchmark")
    if in_engine:
        start = msgspec.structs.replace(start, front_end_ms=0.0)
    wanted = {
        name: spread
        for name, spread in numbers_to_fit(deployment, benchmarks).items()
        if getattr(start, name) > 0
    }
    names = list(wanted)
    runs = [Run.of(one, deployment, flags) for one in benchmarks]

    def efficiencies(values: Vector) -> Efficiencies:
        found = dict(zip(names, map(float, values), strict=True))
        if "mixed_kv_factor" in found:
            found["mixed_kv_factor"] = max(found["mixed_kv_factor"], 1.0)
        return msgspec.structs.replace(start, **found)

    def residuals(values: Vector) -> Vector:
        reached = efficiencies(values)
        return np.concatenate([run.residuals(run.play(reached)) for run in runs])

    solution = solve(
        residuals,
        np.array([getattr(start, name) for name in names]),
        prior=np.array(list(wanted.values())),
        noise=float(np.hypot(_NOISE, _chance_of_draws(runs, start))),
        iterations=iterations,
        progress=progress,
    )
    reached = efficiencies(solution.values)
    outcomes = tuple(run.play(reached) for run in runs)
    deviations = solution.deviations(_in_common(runs, reached, wanted, solution.residuals))
    fitted = tuple(
        FittedNumber(
            name=name,
            value=round(getattr(reached, name), 6),
            plus_minus_percent=round(100 * float(deviation), 1),
            preset=getattr(start, name),
            determined=bool(deviation < _DETERMINED * wanted[name]),
        )
        for name, deviation in zip(names, deviations, strict=True)
    )
    inputs = tuple(score(run.benchmark, outcome) for run, outcome in zip(runs, outcomes, strict=True))
    file = TimingFile(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        understudy=__version__,
        model=deployment.model,
        gpu=deployment.gpu,
        weights=deployment.weights,
        kv=deployment.kv,
        parallel=deployment.parallel,
        efficiencies=reached,
        fitted=fitted,
        inputs=inputs,
        residuals=summarise(inputs),
        domain=_domain(runs),
    )
    notes = tuple(f"{one.file}: {note}" for one in benchmarks for note in one.notes)
    return Fit(file, outcomes, notes + _beyond_the_peak(file))


def _beyond_the_peak(file: TimingFile) -> tuple[str, ...]:
    """Numbers that no such GPU can reach; where the preset does, what is above 1 stands for what is not modelled."""
    return tuple(
        f"{one.name} is {one.value:.3g} of what a {file.gpu.name} can do at most, which cannot be (± "
        f"{one.plus_minus_percent:.0f} %): "
        + (
            "the benchmark did not run as the flags say (model, types, GPU, sizes, prefixes that were found in a cache)"
            if one.determined
            else "the data does not determine it, or did not come about as the flags say"
        )
        for one in file.fitted
        if one.name in PEAKS and one.value > 1 >= one.preset
    )


def _chance_of_draws(runs: Sequence[Run], reached: Efficiencies) -> float:
    """By how much a residual differs between draws of lengths that a file does not have, root mean square."""
    squares = []
    for run in runs:
        others = [run.residuals(run.play(reached, load)) for load in run.benchmark.other_draws]
        here = run.residuals(run.play(reached))
        squares.append(
            np.mean([(other - here) ** 2 for other in others], axis=0) if others else np.zeros_like(here)
        )
    return float(np.sqrt(np.concatenate(squares).mean()))


def _in_common(runs: Sequence[Run], reached: Efficiencies, wanted: dict[str, float], left: Vector) -> Vector:
    """What many residuals have wrong together, a standard deviation a column: a benchmark that was as a whole a little
    fast or slow, and the numbers that are not fitted, which may be off as well."""
    columns: list[Vector] = []
    start = 0
    for run in runs:
        for measure in run.measures():
            column = np.zeros(len(left))
            size = len(measure)
            column[start : start + size] = measure
            columns.append(column)
            start += size
    alone = all(run.deployment.parallel.tensor * run.deployment.parallel.data == 1 for run in runs)
    for name, spread in NOT_FITTED.items():
        value = getattr(reached, name)
        if name in wanted or value <= 0 or (name in _LINK and alone):
            continue
        moved = msgspec.structs.replace(reached, **{name: value * float(np.exp(spread))})
        columns.append(np.concatenate([run.residuals(run.play(moved)) for run in runs]) - left)
    return np.stack(columns, axis=1)


class Run(msgspec.Struct, frozen=True):
    """A benchmark with the deployment and the engine that it ran on."""

    benchmark: Benchmark
    deployment: Deployment
    engine: VllmConfig

    @classmethod
    def of(cls, benchmark: Benchmark, deployment: Deployment, flags: EngineFlags) -> Run:
        """The settings that the file names win over the flags."""
        own = benchmark.engine
        tensor = own.get("tensor_parallel_size", deployment.parallel.tensor)
        if tensor != deployment.parallel.tensor:
            parallel = Parallelism(
                tensor=tensor, data=deployment.parallel.data, expert=deployment.parallel.expert
            )
            deployment = msgspec.structs.replace(deployment, parallel=parallel)
        engine = build_engine_config(
            deployment,
            max_num_seqs=own.get("max_num_seqs", flags.max_num_seqs),
            max_num_batched_tokens=own.get("max_num_batched_tokens", flags.max_num_batched_tokens),
            max_model_len=flags.max_model_len,
            num_gpu_blocks=own.get("num_gpu_blocks", flags.num_gpu_blocks),
            enable_prefix_caching=flags.enable_prefix_caching,
            vllm_version=flags.vllm_version,
        )
        return cls(benchmark, deployment, engine)

    def play(self, reached: Efficiencies, load: Load | None = None) -> Outcome:
        """Its load, or another draw of it, replayed with these efficiencies."""
        timing = Physical(coefficients=self.deployment.coefficients(reached))
        return simulate(
            self.benchmark.load if load is None else load,
            msgspec.structs.replace(self.engine, timing=timing),
            front_end_ms=reached.front_end_ms,
            workers=self.deployment.parallel.data,
            ranks=self.deployment.steps_together,
        )

    def residuals(self, outcome: Outcome) -> Vector:
        """Logarithms of simulated over measured, weighted; by measure.

        Of a file with every request, these are means of groups, by when requests came and by how long they are: one
        request more or less in a batch moves single times by a step, and groups of them hardly.
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
                * _off(getattr(self.benchmark, name)[group], getattr(outcome, name)[group], name)
                for name, weight in _WEIGHTS.items()
                for group in self._groups
            ]
        )

    def measures(self) -> list[Vector]:
        """What a standard deviation of one measure of the whole benchmark does to the residuals that it is part of."""
        if not self.benchmark.detailed:
            names = [name for name, value in self.benchmark.means.items() if value > 0]
            return [np.array([_WEIGHTS[name] * REPEATED[name]]) for name in names]
        weights = _DETAILED_WEIGHT / np.sqrt(len(self._groups))
        return [
            np.full(len(self._groups), weights * weight * REPEATED[name]) for name, weight in _WEIGHTS.items()
        ]

    @property
    def _groups(self) -> list[NDArray[np.intp]]:
        prompts = self.benchmark.load.workload.prompt_tokens
        return [
            *np.array_split(np.arange(len(prompts)), min(_GROUPS_BY_TIME, len(prompts))),
            *np.array_split(np.argsort(prompts, kind="stable"), min(_GROUPS_BY_LENGTH, len(prompts))),
        ]


_GROUPS_BY_TIME = 8
_GROUPS_BY_LENGTH = 4
_DETAILED_WEIGHT = 3.0
"""A file with every request weighs as much as nine summaries."""


def _off(measured: Vector, simulated: Vector, name: str) -> float:
    known = np.isfinite(measured) & np.isfinite(simulated)
    if not known.any():
        return 0.0
    plus = _PLUS_MS if name == "ttft_ms" else 1e-9
    return float(np.log((simulated[known].mean() + plus) / (measured[known].mean() + plus)))


def score(benchmark: Benchmark, outcome: Outcome) -> FittedInput:
    """How far simulated means are from measured ones."""
    off = {
        name: 100 * (outcome.mean(name) / value - 1)
        for name, value in benchmark.means.items()
        if value > 0 and np.isfinite(getattr(outcome, name)).any()
    }
    return FittedInput(
        file=benchmark.file,
        sha256=benchmark.sha256,
        format=benchmark.format,
        requests=len(benchmark.load.workload),
        **{name.replace("_ms", "_percent"): round(value, 2) for name, value in off.items()},
    )


def summarise(inputs: Sequence[FittedInput]) -> Residuals:
    """Medians of |simulated / measured − 1| over files."""
    medians: dict[str, float] = {}
    for name in ("ttft_percent", "tpot_percent", "e2e_percent"):
        found = [abs(value) for one in inputs if (value := getattr(one, name)) is not None]
        if found:
            medians[name] = round(float(np.median(found)), 2)
    return Residuals(measurements=len(inputs), **medians)


def _domain(runs: Sequence[Run]) -> Domain:
    """The most that steps had of each in these loads."""
    prompts = max(int(run.benchmark.load.workload.prompt_tokens.max()) for run in runs)
    budget = max(run.engine.max_num_batched_tokens or 0 for run in runs)
    together = max(_together(run) for run in runs)
    longest = max(
        int((run.benchmark.load.workload.prompt_tokens + run.benchmark.load.workload.output_tokens).max())
        for run in runs
    )
    return Domain(tokens=budget, requests=together, context_tokens=together * longest, prompt_tokens=prompts)


def _together(run: Run) -> int:
    load = run.benchmark.load
    most = load.concurrency or len(load.workload)
    return min(most, run.engine.max_num_seqs or most)
