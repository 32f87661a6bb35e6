"""Step times of `understudy predict`: a fitted file, a GPU's, or recorded ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from understudy.cli import deployment_flags

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from understudy.engines.timing import Timing
    from understudy.timing.deployment import Deployment
    from understudy.timing.fitted_engine import FittedEngine


class Source(NamedTuple):
    """Timing model without front-end time, the deployment if it is known, and the front-end time in ms."""

    timing: Timing
    deployment: Deployment | None
    front_end_ms: float = 0.0
    engine: FittedEngine | None = None
    """Engine of the fitted deployment, if the timing file has it."""


def read_fitted_times(file: Path) -> Source:
    """Read a timing file that `calibrate` wrote."""
    import msgspec

    from understudy.timing.timing_file import TimingFile

    fitted = TimingFile.read(file)
    timing = fitted.timing()
    plain = msgspec.structs.replace(timing, front_end_ms=0.0)
    return Source(plain, fitted.deployment, timing.front_end_ms, fitted.engine)


def build_gpu_times(args: argparse.Namespace) -> Source:
    """Build step times from the model and GPU flags, or read those that --timing names."""
    from understudy.checks import read_as
    from understudy.cli.gpu_flags import read_gpu_flags
    from understudy.tiers.gpu import GpuSettings
    from understudy.timing.gpu_flags import timing_settings

    gpu, named = timing_settings(args.timing, read_gpu_flags(args))
    settings = read_as(GpuSettings, {**gpu, "front_end_ms": 0.0}, "gpu")
    timing: Timing = settings.timing(args.model, args.kv_dtype) if named is None else _build_timing(named)
    own = read_as(GpuSettings, gpu, "gpu")
    front_end_ms = own.timing(args.model, args.kv_dtype).front_end_ms if named is None else 0.0
    has_blocks, has_timing = args.num_gpu_blocks is not None, named is not None
    deployment_flags.read_gpu(args).reject_unused_settings(
        timing, has_blocks=has_blocks, has_timing=has_timing
    )
    return Source(timing, settings.deployment(args.model, args.kv_dtype), front_end_ms)


def read_named_times(args: argparse.Namespace) -> Source:
    """Read recorded steps or the polynomial that --timing names; they need --num-gpu-blocks."""
    from understudy.cli.gpu_flags import read_gpu_flags
    from understudy.errors import ConfigError
    from understudy.timing.gpu_flags import timing_settings

    _, named = timing_settings(args.timing, read_gpu_flags(args))
    if flags := deployment_flags.list_given_flags(args, deployment_flags.MODEL_AND_GPU_FLAGS):
        raise ConfigError(
            f"{', '.join(flags)}: the number of blocks needs both --model and --gpu; give both, or only "
            "--num-gpu-blocks"
        )
    if args.num_gpu_blocks is None:
        raise ConfigError(
            f"--timing {args.timing} does not set the number of KV blocks; give --num-gpu-blocks, or --model and --gpu"
        )
    assert named is not None  # timing_settings raises for kinds that need a GPU
    return Source(_build_timing(named), None)


def _build_timing(setting: dict[str, Any]) -> Timing:
    from understudy.engines.kinds.registry import read_engine

    return read_engine({"timing": setting}).timing
