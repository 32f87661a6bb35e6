"""Fit a deployment's efficiencies to benchmarks by replaying their loads."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from understudy.calibrate.fitted_engine import describe_engine
from understudy.calibrate.held import find_undetermined, is_above_peak, list_notes
from understudy.calibrate.least_squares import solve
from understudy.calibrate.measured_run import Run
from understudy.errors import ConfigError
from understudy.timing.physical import Domain, Residuals
from understudy.timing.timing_file import FittedInput, FittedNumber, TimingFile
from understudy.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from understudy.calibrate.benchmark import Benchmark
    from understudy.calibrate.engine_flags import EngineFlags
    from understudy.calibrate.simulate import Outcome
    from understudy.timing.deployment import Deployment
    from understudy.timing.efficiencies import Efficiencies

    Vector = NDArray[np.float64]

_PRIOR = 0.25
"""Standard deviation of a parameter's logarithm around its preset."""
_TIGHT_PRIOR = 0.1
"""Standard deviation for parameters that the data hardly determine."""
_NOISE = 0.02
"""Residual noise of a perfect model."""
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
"""Standard deviation (of the logarithm) of parameters that a fit leaves at their preset."""
_LINK = ("link", "link_latency_us")


class Fit(msgspec.Struct, frozen=True):
    """Result of a fit: the timing file, the simulated benchmarks, and notes."""

    file: TimingFile
    """The fitted times with their uncertainty, as `calibrate -o` writes them."""
    outcomes: tuple[Outcome, ...]
    """Simulated times of each benchmark."""
    notes: tuple[str, ...]
    """Remarks on the data, such as a setting that no file names."""


def select_parameters(
    deployment: Deployment, benchmarks: Sequence[Benchmark], *, detailed: bool | None = None
) -> dict[str, float]:
    """Select the efficiencies that the benchmarks can determine, with their priors (of the logarithm)."""
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
            "weights": _TIGHT_PRIOR,
        }
    if len(prompts) > 1 or detailed:
        wanted["front_end_ms"] = _PRIOR
    if detailed:
        wanted |= {"prefill_ms": _PRIOR, "mixed_kv_factor": _TIGHT_PRIOR, "sequence_us": _PRIOR}
    if len(sizes) > 1:
        wanted |= {"link_latency_us": _PRIOR, "link": _PRIOR}
    return wanted


def fit(
    benchmarks: Sequence[Benchmark],
    deployment: Deployment,
    start: Efficiencies,
    flags: EngineFlags,
    *,
    model: str | None = None,
    in_engine: bool = False,
    iterations: int = 8,
    progress: Callable[[int], None] | None = None,
) -> Fit:
    """Fit efficiencies to benchmarks by damped least squares from `start`, which is also the prior.

    `model` is the model's name as it was given, for the file. `in_engine` means that the times were measured inside the
    engine, so the front-end time is 0.
    """
    if not benchmarks:
        raise ConfigError("there is nothing to fit; give at least one benchmark")
    if in_engine:
        start = msgspec.structs.replace(start, front_end_ms=0.0)
    wanted = {
        name: spread
        for name, spread in select_parameters(deployment, benchmarks).items()
        if getattr(start, name) > 0
    }
    prior = dict(wanted)
    names = list(wanted)
    runs = [Run.of(one, deployment, flags) for one in benchmarks]
    above: dict[str, float] = {}
    efficiencies = start

    def build_efficiencies(values: Vector) -> Efficiencies:
        found = dict(zip(names, map(float, values), strict=True))
        if "mixed_kv_factor" in found:
            found["mixed_kv_factor"] = max(found["mixed_kv_factor"], 1.0)
        return msgspec.structs.replace(start, **found)

    def residuals(values: Vector) -> Vector:
        efficiencies = build_efficiencies(values)
        return np.concatenate([run.residuals(run.replay(efficiencies)) for run in runs])

    noise = float(np.hypot(_NOISE, _estimate_sampling_noise(runs, start)))
    guess: Vector | None = None
    found: dict[str, float] = {}
    while names:
        solution = solve(
            residuals,
            np.array([getattr(start, name) for name in names]),
            prior=np.array([wanted[name] for name in names]),
            noise=noise,
            iterations=iterations if guess is None else max(iterations // 2, 1),
            progress=progress if guess is None else None,
            guess=guess,
        )
        efficiencies = build_efficiencies(solution.values)
        held = {name: prior[name] for name in prior if name not in names}
        shared = _estimate_shared_errors(runs, efficiencies, wanted, solution.residuals, held)
        found = dict(zip(names, map(float, solution.deviations(shared)), strict=True))
        dropped = find_undetermined(efficiencies, start, found, prior)
        if dropped is None:
            break
        if is_above_peak(dropped, efficiencies, start):
            above[dropped] = round(getattr(efficiencies, dropped), 6)
        del found[dropped], wanted[dropped]
        kept = [place for place, name in enumerate(names) if name != dropped]
        names.remove(dropped)
        guess = solution.values[kept]
    efficiencies = build_efficiencies(np.array([getattr(efficiencies, name) for name in names]))
    outcomes = tuple(run.replay(efficiencies) for run in runs)
    fitted = tuple(
        FittedNumber(
            name=name,
            value=round(getattr(efficiencies, name), 6) if name in found else getattr(start, name),
            plus_minus_percent=round(100 * found.get(name, spread), 1),
            preset=getattr(start, name),
            determined=name in found,
            times_peak=above.get(name),
        )
        for name, spread in prior.items()
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
        engine=describe_engine(runs, deployment, flags, model),
        efficiencies=efficiencies,
        fitted=fitted,
        inputs=inputs,
        residuals=summarise(inputs),
        domain=_domain(runs),
    )
    return Fit(file, outcomes, list_notes(file, benchmarks))


def _estimate_sampling_noise(runs: Sequence[Run], efficiencies: Efficiencies) -> float:
    """Return the root mean square difference of residuals between samples of unknown lengths."""
    squares = []
    for run in runs:
        others = [run.residuals(run.replay(efficiencies, load)) for load in run.benchmark.other_draws]
        own = run.residuals(run.replay(efficiencies))
        squares.append(
            np.mean([(other - own) ** 2 for other in others], axis=0) if others else np.zeros_like(own)
        )
    return float(np.sqrt(np.concatenate(squares).mean()))


def _estimate_shared_errors(
    runs: Sequence[Run],
    efficiencies: Efficiencies,
    wanted: dict[str, float],
    left: Vector,
    held: dict[str, float],
) -> Vector:
    """Return errors that many residuals share, one standard deviation per column.

    They are the run-to-run variation of a whole benchmark, and the errors of parameters that are not fitted, or held.
    """
    columns: list[Vector] = []
    start = 0
    for run in runs:
        for measure in run.measures():
            column = np.zeros(len(left))
            size = len(measure)
            column[start : start + size] = measure
            columns.append(column)
            start += size
    single_gpu = all(run.deployment.parallel.tensor * run.deployment.parallel.data == 1 for run in runs)
    for name, spread in (NOT_FITTED | held).items():
        value = getattr(efficiencies, name)
        if name in wanted or value <= 0 or (name in _LINK and single_gpu):
            continue
        moved = msgspec.structs.replace(efficiencies, **{name: value * float(np.exp(spread))})
        columns.append(np.concatenate([run.residuals(run.replay(moved)) for run in runs]) - left)
    return np.stack(columns, axis=1)


def score(benchmark: Benchmark, outcome: Outcome) -> FittedInput:
    """Compute the relative errors of the simulated means, in percent."""
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
    """Compute the medians of |simulated / measured − 1| over files, in percent."""
    medians: dict[str, float] = {}
    for name in ("ttft_percent", "tpot_percent", "e2e_percent"):
        found = [abs(value) for one in inputs if (value := getattr(one, name)) is not None]
        if found:
            medians[name] = round(float(np.median(found)), 2)
    return Residuals(measurements=len(inputs), **medians)


def _domain(runs: Sequence[Run]) -> Domain:
    """Return the largest step sizes that the loads contain."""
    prompts = max(int(run.benchmark.load.workload.prompt_tokens.max()) for run in runs)
    budget = max(run.engine.max_num_batched_tokens or 0 for run in runs)
    requests = max(_max_running(run) for run in runs)
    longest = max(
        int((run.benchmark.load.workload.prompt_tokens + run.benchmark.load.workload.output_tokens).max())
        for run in runs
    )
    return Domain(tokens=budget, requests=requests, context_tokens=requests * longest, prompt_tokens=prompts)


def _max_running(run: Run) -> int:
    load = run.benchmark.load
    concurrency = load.concurrency or len(load.workload)
    return min(concurrency, run.engine.max_num_seqs or concurrency)
