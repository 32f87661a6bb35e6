"""Size of a fleet: its engines, their data-parallel ranks and GPUs. Nothing else counts GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from understudy.run.fitted_times import fitted_deployment
from understudy.timing.gpus import find_gpu

if TYPE_CHECKING:
    from understudy.engines.engine_config import EngineConfig
    from understudy.run.settings import ReplaySettings
    from understudy.tiers.gpu import GpuSettings


class GroupSize(NamedTuple):
    """Equal engines: how many, the data-parallel ranks of each, and the GPUs of each rank."""

    engines: int
    ranks: int
    rank_gpus: int
    gpu_name: str | None = None
    """Data sheet of the GPUs; None: the GPU is not named."""

    @property
    def engine_gpus(self) -> int:
        """GPUs of one engine."""
        return self.ranks * self.rank_gpus

    @property
    def gpus(self) -> int:
        """GPUs of all engines."""
        return self.engines * self.engine_gpus

    @property
    def workers(self) -> int:
        """Workers as a run numbers them: every rank is one."""
        return self.engines * self.ranks

    def describe(self) -> str:
        """Return the size in words, such as `2 engines x 8 ranks`."""
        return describe_engines(self.engines, self.ranks)


def describe_engines(engines: int, ranks: int) -> str:
    """Return a number of engines and of their ranks in words, such as `2 engines x 8 ranks`."""
    named = f"{engines:,} engine{'' if engines == 1 else 's'}"
    return named if ranks == 1 else f"{named} x {ranks:,} ranks"


def size_group(engines: int, engine: EngineConfig, gpu: GpuSettings | None) -> GroupSize:
    """Return the size of `engines` equal engines. A rank without a known GPU counts as one GPU per stage."""
    ranks, fitted = engine.data_parallel_size, fitted_deployment(engine)
    if gpu is not None:
        name = None if gpu.name is None else find_gpu(gpu.name).name
        return GroupSize(engines, ranks, gpu.tensor_parallel_size * gpu.pipeline_parallel_size, name)
    if fitted is None:
        return GroupSize(engines, ranks, engine.num_stages)
    return GroupSize(engines, ranks, fitted.parallel.rank_gpus, fitted.gpu.name)


def list_sizes(settings: ReplaySettings) -> list[GroupSize]:
    """Return the size of every pool, of prefill and decode engines, or of the one group of equal engines."""
    if settings.pools:
        return [size_group(pool.workers, pool.engine, settings.gpu) for pool in settings.pools]
    split = settings.disaggregation
    counts = [settings.workers]
    if split is not None:
        counts = [split.prefill_workers or 0, split.decode_workers or 0]
    return [size_group(count, settings.engine, settings.gpu) for count in counts]


def count_gpus(settings: ReplaySettings) -> int:
    """Return the GPUs of a fleet: engines x data-parallel ranks x GPUs per rank, over all groups."""
    return sum(size.gpus for size in list_sizes(settings))


def count_workers(settings: ReplaySettings) -> int:
    """Return the workers of a run: the data-parallel ranks of all engines."""
    return sum(size.workers for size in list_sizes(settings))


def names_gpus(settings: ReplaySettings) -> bool:
    """Whether the GPUs of all engines are known, so that none is counted as one for want of knowledge."""
    if settings.gpu is not None:
        return True
    engines = [pool.engine for pool in settings.pools] or [settings.engine]
    return all(fitted_deployment(engine) is not None for engine in engines)
