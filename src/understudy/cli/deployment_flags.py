"""Flags that name the model and its GPUs, for verbs that predict and fit times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.timing.gpu_flags import GPU_FLAGS, KV_DTYPE_HELP

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection

    from understudy.engines.engine_config import EngineConfig
    from understudy.tiers.gpu import GpuSettings
    from understudy.timing.deployment import Deployment
    from understudy.timing.fitted_engine import FittedEngine


UNUSED_IN_FITS = ("gpu-weights", "front-end-ms", "extrapolate", "pipeline-parallel-size", "stage-link-gbps")
MODEL_AND_GPU_FLAGS = ("model", "kv-dtype", *GPU_FLAGS)
ENGINE_FLAGS = (
    "max-num-seqs",
    "max-num-batched-tokens",
    "max-model-len",
    "num-gpu-blocks",
    "vllm-version",
    "enable-prefix-caching",
)


def add_deployment_flags(
    verb: argparse.ArgumentParser, *, leave_out: Collection[str], speculation: bool = False
) -> None:
    """Add the model, GPU and engine flags to a verb, except those in `leave_out`."""
    import argparse

    from understudy.cli.engine_flags import add_speculation_flag
    from understudy.cli.gpu_flags import add_gpu_setting_flags
    from understudy.engines.profiles import NEWEST

    group = verb.add_argument_group("model and GPU")
    group.add_argument("--model", metavar="NAME", help="known model name, or path of a config.json")
    group.add_argument("--kv-dtype", metavar="TYPE", help=KV_DTYPE_HELP)
    add_gpu_setting_flags(group, leave_out=leave_out, aliases={"weight-dtype": "weights"})
    engine = verb.add_argument_group("engine")
    engine.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="requests in a batch (default: vLLM's for the GPU)"
    )
    engine.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="tokens per step (default: vLLM's for the GPU)",
    )
    engine.add_argument("--max-model-len", type=int, metavar="N", help="context window (default: none)")
    engine.add_argument(
        "--num-gpu-blocks", type=int, metavar="N", help="usable KV blocks of 16 tokens (default: an estimate)"
    )
    engine.add_argument(
        "--vllm-version",
        metavar="VERSION",
        help=f"vLLM release to simulate, such as 0.19.0 (default: {NEWEST})",
    )
    engine.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="reuse cached prefixes, also those of preempted requests (default: yes)",
    )
    if speculation:
        add_speculation_flag(engine)


def list_given_flags(args: argparse.Namespace, names: Collection[str]) -> list[str]:
    """Return those of the flags `names` that were given, spelled as on the command line."""
    values = {name: getattr(args, name.replace("-", "_"), None) for name in names}
    return [
        f"--{'no-' if value is False else ''}{name}" for name, value in values.items() if value is not None
    ]


def reject_flags_set_by_timing_file(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags whose values the timing file already contains."""
    from understudy.errors import ConfigError

    if flags := list_given_flags(args, MODEL_AND_GPU_FLAGS):
        raise ConfigError(
            f"--timing already names the model and its GPUs; leave out {', '.join(flags)} (give the number of "
            "KV blocks with --num-gpu-blocks)"
        )


def engine_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine settings that the flags give, by name."""
    from understudy.cli.engine_flags import read_speculation

    values = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name in ENGINE_FLAGS}
    values["speculative_config"] = read_speculation(args)
    return {name: value for name, value in values.items() if value is not None}


def names_model_and_gpu(args: argparse.Namespace) -> bool:
    """Whether the flags name both a model and a GPU."""
    return bool(args.model and (args.gpu or args.gpu_bandwidth_gbps))


def read_gpu(args: argparse.Namespace) -> GpuSettings:
    """Build the GPU settings that the flags give."""
    from understudy.checks import read_as
    from understudy.cli.gpu_flags import read_gpu_flags
    from understudy.tiers.gpu import GpuSettings

    return read_as(GpuSettings, read_gpu_flags(args), "gpu")


def read_deployment(args: argparse.Namespace) -> Deployment:
    """Build the deployment that the flags describe. ConfigError names the invalid flag."""
    gpu = read_gpu(args)
    gpu.reject_unused_settings(None, has_blocks=args.num_gpu_blocks is not None, has_timing=False)
    return gpu.deployment(args.model, args.kv_dtype)


def build_engine(
    args: argparse.Namespace, deployment: Deployment | None, fitted: FittedEngine | None = None
) -> EngineConfig:
    """Build the engine's configuration without its timing; a missing deployment needs --num-gpu-blocks.

    `fitted` is the engine of a timing file, whose blocks are used unless others are given.
    """

    from understudy.calibrate.experiment import build_engine_config
    from understudy.calibrate.predict import build_engine_on_gpu

    values = engine_values(args)
    if names_model_and_gpu(args):
        return build_engine_on_gpu(read_gpu(args), args.model, args.kv_dtype, **values)
    if fitted is None or "num_gpu_blocks" in values:
        return build_engine_config(deployment, **values)
    share = fitted.gpu_memory_utilization
    known = {} if fitted.blocks_estimated else {"num_gpu_blocks": fitted.num_gpu_blocks}
    return build_engine_config(
        deployment, gpu_memory_utilization=share, **{"block_size": fitted.block_size, **known, **values}
    )
