"""The flags of `understudy replay` that say which model runs on which GPUs, and where step times come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError
from understudy.timing.gpu_flags import GPU_FLAGS, TIMING_HELP, timing_settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Mapping

EXAMPLES = """\
  understudy replay trace.jsonl --model Llama-3.1-70B --gpu H100 --tensor-parallel-size 4
  understudy replay trace.jsonl --model ./config.json --gpu-bandwidth-gbps 960 --gpu-tflops 209 --gpu-memory 48GiB
  understudy replay trace.jsonl --model Llama-3.1-8B --gpu RTX-4090 --timing profiles/tp1       measured kernels
  understudy replay trace.jsonl --model Llama-3.1-8B --gpu H100 --timing aiconfigurator          that package's kernels
  understudy replay trace.jsonl --timing timing.yaml --block-size 16 --num-gpu-blocks 27000      what `calibrate` wrote
  understudy replay trace.jsonl --model Llama-3.1-8B --gpu-memory 80GiB --gpu-weights 16GB     blocks alone
"""


KINDS = {"str": str, "int": int, "float": float}


def add_gpu_flags(verb: argparse.ArgumentParser) -> None:
    """Describe them, in a group of their own."""
    group = verb.add_argument_group("model and GPU: how long steps take, how many blocks there are")
    group.add_argument("--model", metavar="NAME", help="a name, or the path of a config.json")
    group.add_argument("--kv-dtype", metavar="NAME", help="of the KV cache (default: the model's own)")
    add_flags_of_gpu(group)
    group.add_argument("--timing", metavar="FILE|NAME", help=TIMING_HELP)


def add_flags_of_gpu(
    group: argparse._ArgumentGroup, *, leave_out: Collection[str] = (), more: Mapping[str, str] | None = None
) -> None:
    """The flags of the settings `gpu`; `more` has other names of some."""
    for name, about in GPU_FLAGS.items():
        if name in leave_out:
            continue
        names = [f"--{name}", *([f"--{more[name]}"] if more and name in more else [])]
        if about.kind == "bool":
            group.add_argument(*names, action="store_true", default=None, help=about.help)
        else:
            group.add_argument(*names, type=str, metavar=about.metavar, help=about.help)


def given_gpu(args: argparse.Namespace) -> dict[str, Any]:
    """The settings `gpu` that were given as flags."""
    gpu: dict[str, Any] = {}
    for name, about in GPU_FLAGS.items():
        value = getattr(args, name.replace("-", "_"), None)
        if value is None:
            continue
        try:
            gpu[about.field] = value if about.kind == "bool" else KINDS[about.kind](value)
        except ValueError:
            raise ConfigError(f"--{name} must be a number, got {value!r}") from None
    return gpu


def gpu_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given as flags, nested as in a configuration file."""
    gpu = given_gpu(args)
    gpu, timing = timing_settings(args.timing, gpu)
    known = "name" in gpu or "bandwidth_gbps" in gpu
    if gpu and not known:
        if not {"memory", "weights"} <= gpu.keys():
            flags = ", ".join(f"--{name}" for name, about in GPU_FLAGS.items() if about.field in gpu)
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
    if timing is not None:
        settings["engine"] = {"timing": timing}
    return settings
