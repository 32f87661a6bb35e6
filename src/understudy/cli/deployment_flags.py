"""The flags that say which model runs on which GPUs, for verbs that predict and fit times."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from understudy.timing.gpu_flags import GPU_FLAGS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection

    from understudy.engines.config import VllmConfig
    from understudy.tiers.gpu import GpuSettings
    from understudy.timing.deployment import Deployment


IDLE_IN_A_FIT = ("gpu-weights", "gpu-memory-utilization", "front-end-ms", "extrapolate")
WHAT_RUNS = ("model", "kv-dtype", *GPU_FLAGS)
ENGINE = (
    "max-num-seqs",
    "max-num-batched-tokens",
    "max-model-len",
    "num-gpu-blocks",
    "vllm-version",
    "enable-prefix-caching",
)


class EngineValues(NamedTuple):
    """The settings of the engine, with defaults where flags do not say them."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    num_gpu_blocks: int | None
    vllm_version: str
    enable_prefix_caching: bool


def add_deployment_flags(verb: argparse.ArgumentParser, *, leave_out: Collection[str]) -> None:
    """Describe them, in groups of their own, without those that mean nothing to the verb."""
    import argparse

    from understudy.cli.gpu_flags import add_flags_of_gpu
    from understudy.engines.profiles import NEWEST

    group = verb.add_argument_group("what runs on what")
    group.add_argument("--model", metavar="NAME", help="a known name, or a config.json")
    group.add_argument("--kv-dtype", metavar="TYPE", help="of the KV cache: bf16 (default) or fp8")
    add_flags_of_gpu(group, leave_out=leave_out, more={"weight-dtype": "weights"})
    engine = verb.add_argument_group("engine")
    engine.add_argument("--max-num-seqs", type=int, metavar="N", help="requests in a batch (default: 128)")
    engine.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="tokens in a step (default: 2048)",
    )
    engine.add_argument("--max-model-len", type=int, metavar="N", help="context window (default: none)")
    engine.add_argument(
        "--num-gpu-blocks", type=int, metavar="N", help="usable KV blocks of 16 tokens (default: an estimate)"
    )
    engine.add_argument(
        "--vllm-version",
        metavar="VERSION",
        help=f"a release of vLLM, as 0.19.0 (default: {NEWEST})",
    )
    engine.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="find prefixes in the cache, as those of preempted requests (default: yes)",
    )


def given(args: argparse.Namespace, names: Collection[str]) -> list[str]:
    """Those of these flags that were given, as one writes them."""
    values = {name: getattr(args, name.replace("-", "_"), None) for name in names}
    return [
        f"--{'no-' if value is False else ''}{name}" for name, value in values.items() if value is not None
    ]


def refuse_beside_timing_file(args: argparse.Namespace) -> None:
    """Refuse flags that say what a timing file says. ConfigError names them."""
    from understudy.errors import ConfigError

    if said := given(args, WHAT_RUNS):
        raise ConfigError(
            f"--timing says which model ran on which GPUs; leave out {', '.join(said)} (how many KV blocks "
            "there are is --num-gpu-blocks)"
        )


def engine_values(args: argparse.Namespace) -> EngineValues:
    """What the flags say of the engine."""
    from understudy.engines.profiles import NEWEST

    return EngineValues(
        max_num_seqs=128 if args.max_num_seqs is None else args.max_num_seqs,
        max_num_batched_tokens=2048 if args.max_num_batched_tokens is None else args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        num_gpu_blocks=args.num_gpu_blocks,
        vllm_version=NEWEST if args.vllm_version is None else args.vllm_version,
        enable_prefix_caching=args.enable_prefix_caching is not False,
    )


def is_described(args: argparse.Namespace) -> bool:
    """Whether the flags say what runs on what."""
    return bool(args.model and (args.gpu or args.gpu_bandwidth_gbps))


def gpu_of(args: argparse.Namespace) -> GpuSettings:
    """The GPUs that the flags describe; --timing may say where their times come from."""
    from understudy.checks import read_as
    from understudy.cli.gpu_flags import given_gpu
    from understudy.tiers.gpu import GpuSettings

    return read_as(GpuSettings, given_gpu(args), "gpu")


def deployment_of(args: argparse.Namespace) -> Deployment:
    """What the flags describe. ConfigError names the one at fault."""
    gpu = gpu_of(args)
    gpu.refuse_idle(None, has_blocks=args.num_gpu_blocks is not None, has_timing=False)
    return gpu.deployment(args.model, args.kv_dtype)


def engine_of(args: argparse.Namespace, deployment: Deployment | None) -> VllmConfig:
    """The engine that the flags describe, without its timing; what it runs on may be unknown where they say blocks."""
    from understudy.calibrate.experiment import MOST_BLOCKS, engine_for

    values = engine_values(args)
    blocks = values.num_gpu_blocks
    if blocks is None and is_described(args):
        found = gpu_of(args).num_blocks(
            args.model,
            args.kv_dtype,
            16,
            step_tokens=values.max_num_batched_tokens,
            sequences=values.max_num_seqs,
        )
        blocks = min(found.blocks, MOST_BLOCKS)
    return engine_for(deployment, **values._replace(num_gpu_blocks=blocks)._asdict())
