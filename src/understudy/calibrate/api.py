"""`understudy.calibrate`: fit step times to benchmarks, or score a timing file, from Python."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.calibrate.engine_flags import EngineFlags
from understudy.calibrate.fit import Fit, fit, score
from understudy.calibrate.held import list_notes
from understudy.calibrate.measured_run import Run
from understudy.calibrate.readers import read_benchmarks
from understudy.checks import check_model, share
from understudy.errors import ConfigError
from understudy.outputs import check_outputs, create
from understudy.text import visible
from understudy.tiers.gpu import GpuSettings
from understudy.timing.presets import preset
from understudy.timing.timing_file import FittedInput, TimingFile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_SETTINGS = tuple(EngineFlags.__struct_fields__)


class Calibration(Fit, frozen=True):
    """A timing file with its scores: simulated over measured, per benchmark. `save` writes it for `--timing`."""

    scores: tuple[FittedInput, ...] = ()
    """Relative errors of the simulated means in percent, one entry per benchmark."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timing file. InvalidArgument if it cannot be written."""
        with create(Path(path)) as file:
            file.write(self.file.text().encode())

    def __str__(self) -> str:
        lines = [f"simulated / measured − 1: {self.file.model.name} on {self.file.gpu.name}"]
        lines += [f"  {_describe(one)}" for one in self.scores]
        lines += [
            f"  {one.name} {one.value:.4g} ± {one.plus_minus_percent:.1f} % (preset {one.preset:.4g}; determined by "
            f"the data: {one.describe_determination()})"
            for one in self.file.fitted
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def __repr__(self) -> str:
        errors = "; ".join(map(_describe, self.scores))
        return f"<Calibration of {self.file.model.name} on {self.file.gpu.name}: {errors}>"


def calibrate(
    benchmarks: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    model: str | None = None,
    gpu: str | GpuSettings | None = None,
    kv_dtype: str | None = None,
    timing: str | os.PathLike[str] | None = None,
    least_length: float | None = None,
    in_engine: bool = False,
    settings: dict[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Calibration:
    """Fit step times to benchmarks of a deployment; with `timing`, score that file on them instead.

    Parameters:
        benchmarks: result files of `understudy load`, vllm bench serve, aiperf or guidellm, tables of summaries, or
            requests of a replay.
        model: name of a known model, or path of a config.json; needed for a fit.
        gpu: name of the GPU, or GpuSettings; needed for a fit.
        kv_dtype: data type of the KV cache; default: the model's own.
        timing: timing file to score, which names its own model and GPU.
        least_length: shortest random length as a share of the longest, for summaries that lack it; default: 0.8.
        in_engine: times were measured inside the engine; no front-end time is fitted.
        settings: engine settings of files that lack them, such as `{"max_num_seqs": 64}`.
        progress: called with the number of finished rounds.

    Errors: ConfigError for a missing or superfluous argument; InvalidArgument for a file that cannot be read.

    Example:
        engine = us.VllmConfig(enable_prefix_caching=False)
        report = us.replay(us.read_trace("trace.jsonl").head(50), engine, model="Llama-3.1-8B", gpu="H100")
        report.requests_jsonl("measured.jsonl")
        found = us.calibrate("measured.jsonl", model="Llama-3.1-8B", gpu="H100")
        found.save("timing.yaml")
    """
    if least_length is not None:
        share("least_length", least_length)
    given = [benchmarks] if isinstance(benchmarks, str | os.PathLike) else list(benchmarks)
    paths = [Path(one) for one in given]
    if not paths:
        raise ConfigError("benchmarks: there is nothing to fit; give at least one result file")
    flags = _read_settings(settings or {})
    if timing is not None:
        named = {"model": model, "gpu": gpu, "kv_dtype": kv_dtype}
        return _score(paths, Path(timing), named, flags, least_length, in_engine)
    check_model(model)
    if model is None or gpu is None:
        raise ConfigError("model, gpu: a fit needs both; name the model that ran and its GPU")
    gpus = GpuSettings(name=gpu) if isinstance(gpu, str) else gpu
    gpus.reject_unused_settings(None, has_blocks=flags.num_gpu_blocks is not None, has_timing=False)
    deployment = gpus.deployment(model, kv_dtype)
    if gpus.gpu_memory_utilization is not None:
        flags = msgspec.structs.replace(flags, gpu_memory_utilization=gpus.gpu_memory_utilization)
    read = [
        one
        for path in paths
        for one in read_benchmarks(
            path, least_length=least_length, data_parallel_size=deployment.parallel.data
        )
    ]
    start = preset(deployment.model, deployment.gpu, deployment.weights, deployment.kv)
    found = fit(
        read, deployment, start.efficiencies, flags, model=model, in_engine=in_engine, progress=progress
    )
    return Calibration(found.file, found.outcomes, found.notes, found.file.inputs)


def _score(
    paths: list[Path],
    timing: Path,
    superfluous: Mapping[str, object],
    flags: EngineFlags,
    least_length: float | None,
    in_engine: bool,
) -> Calibration:
    if named := [name for name, value in superfluous.items() if value is not None]:
        raise ConfigError(f"{named[0]}: timing already names the model and its GPUs; leave it out")
    check_outputs({}, {"timing": timing})
    file = TimingFile.read(timing)
    ranks = file.deployment.parallel.data
    read = [
        one
        for path in paths
        for one in read_benchmarks(path, least_length=least_length, data_parallel_size=ranks)
    ]
    efficiencies = file.efficiencies
    if in_engine:
        efficiencies = msgspec.structs.replace(efficiencies, front_end_ms=0.0)
    outcomes = tuple(Run.of(one, file.deployment, flags).replay(efficiencies) for one in read)
    scores = tuple(score(one, outcome) for one, outcome in zip(read, outcomes, strict=True))
    return Calibration(file, outcomes, tuple(list_notes(file, read)), scores)


def _read_settings(settings: dict[str, Any]) -> EngineFlags:
    if unknown := [name for name in settings if name not in _SETTINGS]:
        raise ConfigError(f"settings: {unknown[0]} is not known; known are {', '.join(_SETTINGS)}")
    return EngineFlags(**settings)


def _describe(one: FittedInput) -> str:
    named = (("TTFT", one.ttft_percent), ("TPOT", one.tpot_percent), ("E2E", one.e2e_percent))
    errors = ", ".join(f"{name} {value:+.1f} %" for name, value in named if value is not None)
    return f"{visible(one.file)} ({one.requests:,} requests): {errors}"
