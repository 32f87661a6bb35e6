"""The flags of `understudy replay` that say which model runs on which GPUs, and where step times come from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from understudy.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from understudy.run.settings import ReplaySettings
    from understudy.timing.op_tables import OpTables

EXAMPLES = """\
  understudy replay trace.jsonl --model Llama-3.1-70B --gpu H100 --tensor-parallel-size 4
  understudy replay trace.jsonl --model ./config.json --gpu-bandwidth-gbps 960 --gpu-tflops 209 --gpu-memory 48GiB
  understudy replay trace.jsonl --model Llama-3.1-8B --gpu RTX-4090 --timing profiles/tp1       measured kernels
  understudy replay trace.jsonl --timing timing.yaml --block-size 16 --num-gpu-blocks 27000      what `calibrate` wrote
  understudy replay trace.jsonl --model Llama-3.1-8B --gpu-memory 80GiB --gpu-weights 16GB     blocks alone
"""


class GpuFlag(NamedTuple):
    """A field of the settings `gpu` as a flag."""

    field: str
    kind: Callable[[str], Any]
    metavar: str
    help: str


GPU = {
    "--gpu": GpuFlag("name", str, "NAME", "H100, H200, B200, A100, L40S, RTX-4090 or RTX-PRO-6000"),
    "--gpu-bandwidth-gbps": GpuFlag(
        "bandwidth_gbps", float, "X", "or any GPU by its data sheet: of its memory, 10^9 bytes a second"
    ),
    "--gpu-tflops": GpuFlag("tflops", float, "X", "and its peak of dense bf16 products"),
    "--gpu-link-gbps": GpuFlag("link_gbps", float, "X", "and its link to the other GPUs, one direction"),
    "--gpu-memory": GpuFlag("memory", str, "SIZE", "its memory, such as 80GiB; alone, it gives blocks only"),
    "--gpu-weights": GpuFlag(
        "weights", str, "SIZE", "of the whole model, such as 16GiB, in place of its shape's"
    ),
    "--gpu-memory-utilization": GpuFlag("gpu_memory_utilization", float, "X", "of its memory (default: 0.9)"),
    "--weight-dtype": GpuFlag(
        "weight_dtype", str, "NAME", "bf16, fp8, int4, mxfp4 or nvfp4 (default: the model's)"
    ),
    "--tensor-parallel-size": GpuFlag("tensor_parallel_size", int, "N", "GPUs of a worker (default: 1)"),
    "--data-parallel-size": GpuFlag(
        "data_parallel_size", int, "N", "ranks that share experts, each a worker (default: 1)"
    ),
    "--expert-parallel-size": GpuFlag(
        "expert_parallel_size", int, "N", "groups that experts are dealt out to (default: 1)"
    ),
    "--front-end-ms": GpuFlag(
        "front_end_ms",
        float,
        "MS",
        "between client and engine (default: the preset's; 0: times of the engine)",
    ),
}


def add_gpu_flags(verb: argparse.ArgumentParser) -> None:
    """Describe them, in a group of their own."""
    group = verb.add_argument_group("model and GPU: how long steps take, how many blocks there are")
    group.add_argument("--model", metavar="NAME", help="a name, or the path of a config.json")
    group.add_argument("--kv-dtype", metavar="NAME", help="of the KV cache (default: the model's own)")
    for flag, about in GPU.items():
        group.add_argument(flag, type=str, metavar=about.metavar, help=about.help)
    group.add_argument(
        "--timing",
        metavar="FILE|NAME",
        help="a timing file, a folder of op tables (with --gpu), physical (implied by --gpu) or polynomial (of no GPU; "
        "the default without one)",
    )
    group.add_argument(
        "--extrapolate",
        action="store_true",
        help="go on past the ends of op tables, which refuse it otherwise",
    )


def op_tables(args: argparse.Namespace, settings: ReplaySettings) -> OpTables | None:
    """The timing model of the tables that --timing names, if it names some."""
    if args.timing is None or settings.gpu is None or not Path(args.timing).is_dir():
        return None
    tiers = settings.tiers
    return settings.gpu.op_tables(
        Path(args.timing), tiers.model, tiers.kv_dtype, extrapolate=args.extrapolate
    )


def gpu_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given as flags, nested as in a configuration file."""
    gpu: dict[str, Any] = {}
    for flag, about in GPU.items():
        value = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if value is None:
            continue
        try:
            gpu[about.field] = about.kind(value)
        except ValueError:
            raise ConfigError(f"{flag} must be a number, got {value!r}") from None
    from understudy.timing.timing_file import timing_setting

    known = "name" in gpu or "bandwidth_gbps" in gpu
    if gpu and not known:
        if not {"memory", "weights"} <= gpu.keys():
            flags = ", ".join(flag for flag, about in GPU.items() if about.field in gpu)
            raise ConfigError(
                f"{flags} needs --gpu, the data sheet of one "
                "(--gpu-bandwidth-gbps, --gpu-tflops, --gpu-memory), or --gpu-memory and --gpu-weights together"
            )
        if args.num_gpu_blocks is not None:
            raise ConfigError(
                "--num-gpu-blocks and --gpu-memory both say how many blocks there are; give one"
            )
    if known and args.model is None:
        raise ConfigError(
            "--gpu needs --model, to know what a step computes: a name or the path of a config.json"
        )
    settings: dict[str, Any] = {"gpu": gpu} if gpu else {}
    if args.timing is not None and Path(args.timing).is_dir():
        if not known:
            raise ConfigError(
                "--timing with a folder of op tables needs --gpu and --model, whose tables they are"
            )
        return settings
    if args.extrapolate:
        raise ConfigError("--extrapolate is for op tables: give their folder as --timing")
    if (timing := timing_setting(args.timing, has_gpu=known)) is not None:
        settings["engine"] = {"timing": timing}
    return settings
