"""Flags of `understudy replay` for the model, its GPUs and the source of step times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError
from understudy.plain_numbers import refuse_number
from understudy.timing.gpu_flags import GPU_FLAGS, KV_DTYPE_HELP, TIMING_HELP, timing_settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Mapping

EXAMPLES = """\
  understudy replay trace.jsonl --model Llama-3.1-70B --gpu H100 --tensor-parallel-size 4
  understudy replay trace.jsonl --model ./config.json --gpu-bandwidth-gbps 960 --gpu-tflops 209 --gpu-memory 48GiB
  understudy replay trace.jsonl --model Llama-3.1-8B --gpu RTX-4090 --timing profiles/tp1       measured kernel times
  understudy replay trace.jsonl --model Llama-3.1-8B --gpu H100 --timing aiconfigurator      that package's kernel times
  understudy replay trace.jsonl --timing timing.yaml       times, GPUs and blocks from `calibrate`
  understudy replay trace.jsonl --model Llama-3.1-8B --gpu-memory 80GiB --gpu-weights 16GB     only the number of blocks
"""


KINDS = {"str": str, "int": int, "float": float}


def add_gpu_flags(verb: argparse.ArgumentParser) -> None:
    """Add the model, GPU and timing flags to a verb, in one group."""
    group = verb.add_argument_group("model and GPU: step times and the number of KV blocks")
    group.add_argument("--model", metavar="NAME", help="known model name, or path of a config.json")
    group.add_argument("--kv-dtype", metavar="TYPE", help=KV_DTYPE_HELP)
    add_gpu_setting_flags(group)
    group.add_argument("--timing", metavar="FILE|NAME", help=TIMING_HELP)


def add_gpu_setting_flags(
    group: argparse._ArgumentGroup,
    *,
    leave_out: Collection[str] = (),
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Add one flag per setting of `gpu`; `aliases` maps a flag to its second name."""
    for name, about in GPU_FLAGS.items():
        if name in leave_out:
            continue
        names = [f"--{name}", *([f"--{aliases[name]}"] if aliases and name in aliases else [])]
        if about.kind == "bool":
            group.add_argument(*names, action="store_true", default=None, help=about.help)
        else:
            group.add_argument(*names, type=str, metavar=about.metavar, help=about.help)


def read_gpu_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of `gpu` that were given as flags. ConfigError names a flag that is not a number."""
    gpu: dict[str, Any] = {}
    for name, about in GPU_FLAGS.items():
        value = getattr(args, name.replace("-", "_"), None)
        if value is None:
            continue
        try:
            gpu[about.field] = value if about.kind == "bool" else KINDS[about.kind](value)
        except ValueError:
            refused = refuse_number(value, whole=about.kind == "int", unit=about.metavar)
            raise ConfigError(f"--{name} {refused}") from None
    return gpu


def gpu_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given as flags, nested as in a configuration file."""
    gpu, timing = timing_settings(args.timing, read_gpu_flags(args))
    names_gpu = "name" in gpu or "bandwidth_gbps" in gpu
    is_fitted = timing is not None and timing.get("fitted_for") is not None  # a timing file names its own GPU
    if gpu and not names_gpu and not is_fitted:
        if not {"memory", "weights"} <= gpu.keys():
            flags = ", ".join(f"--{name}" for name, about in GPU_FLAGS.items() if about.field in gpu)
            raise ConfigError(
                f"{flags} needs a GPU; give --gpu, or --gpu-bandwidth-gbps, --gpu-tflops and --gpu-memory, "
                "or --gpu-memory and --gpu-weights together"
            )
        if args.num_gpu_blocks is not None:
            raise ConfigError("--num-gpu-blocks and --gpu-memory both set the number of blocks; give one")
    if names_gpu and args.model is None and not is_fitted:
        raise ConfigError("--gpu needs --model; give a known name or the path of a config.json")
    settings: dict[str, Any] = {"gpu": gpu} if gpu else {}
    if timing is not None:
        settings["engine"] = {"timing": timing}
    return settings
