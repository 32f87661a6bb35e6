"""`understudy capacity`: KV cache groups of a model, their blocks, and the capacity that vLLM reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.cli.engine_flags import add_speculation_flag, read_speculation
from understudy.cli.gpu_flags import add_gpu_setting_flags, read_gpu_flags
from understudy.timing.gpu_flags import KV_DTYPE_HELP

if TYPE_CHECKING:
    import argparse

    from understudy.cli.verbs import Verbs
    from understudy.defaults import BatchLimits
    from understudy.groups import GroupPlan
    from understudy.timing.fitted_engine import FittedEngine

EXAMPLES = """\
examples:
  understudy capacity --model gpt-oss-120b --gpu H200 --max-model-len 131072
  understudy capacity --model Gemma-3-27B --gpu H100 --max-model-len 32768 --kv-dtype fp8
  understudy capacity --model gpt-oss-20b --kv-memory 2GiB --max-model-len auto
  understudy capacity --model Qwen3-Next-80B-A3B --gpu H200 --gpu-weights 163GB --tensor-parallel-size 2 \\
    --max-model-len 262144
  understudy capacity --model ./config.json --kv-memory 21.5GiB --max-model-len 8192

--kv-memory is what vLLM logs as "Available KV cache memory"; without it, the memory that weights leave is estimated.
"""
_UNUSED = (
    *("gpu-bandwidth-gbps", "gpu-tflops", "gpu-link-gbps", "data-parallel-size", "expert-parallel-size"),
    *("enable-expert-parallel", "front-end-ms", "extrapolate"),
)


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy capacity`."""
    verb = verbs.add_parser(
        "capacity",
        help="show the KV cache groups of a model and how many requests fit",
        description="Divide a model's layers into KV cache groups as vLLM does, and count the blocks that fit.",
        epilog=EXAMPLES,
    )
    verb.add_argument("--model", metavar="NAME", help="known model name, or path of a config.json")
    verb.add_argument(
        "--timing", type=Path, metavar="FILE", help="timing file, for its model, GPU, sizes and KV blocks"
    )
    verb.add_argument(
        "--max-model-len",
        required=True,
        type=_parse_length,
        metavar="N|auto",
        help="context window; auto (or -1): the model's, or as much of it as fits",
    )
    verb.add_argument(
        "--kv-memory", metavar="SIZE", help="memory of one GPU for the KV cache, such as 21.5GiB"
    )
    verb.add_argument("--kv-dtype", metavar="TYPE", help=KV_DTYPE_HELP)
    verb.add_argument(
        "--state-dtype", metavar="TYPE", help="type of recurrent states: bfloat16, float16 or float32"
    )
    verb.add_argument("--block-size", type=int, metavar="N", help="tokens per block (default: 16; MLA: 64)")
    verb.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="tokens per step (default: vLLM's for the GPU; 2048 without one)",
    )
    verb.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="requests in a batch (default: vLLM's for the GPU)"
    )
    verb.add_argument("--no-async-scheduling", action="store_true", help="one step in flight, not two")
    verb.add_argument("--no-enable-prefix-caching", action="store_true", help="keep only the newest states")
    add_speculation_flag(verb)
    verb.add_argument("--json", action="store_true", help="print the plan as JSON")
    add_gpu_setting_flags(verb.add_argument_group("GPU"), leave_out=_UNUSED)


def run(args: argparse.Namespace) -> int:
    """Print the groups and the capacity."""
    import json

    gpu, fitted = _read_gpu(args)
    limits = _read_limits(args, gpu)
    plan = _plan(args, gpu, limits)
    if args.json:
        found = plan.to_dict()
        if args.max_model_len is None:
            found["max_model_len"] = plan.max_model_len
        print(json.dumps(found, indent=2))
    else:
        from understudy.run.model_groups import note_on_dtype
        from understudy.timing.gpus import find_gpu

        requests = "" if args.kv_memory else f" of at most {limits.max_num_seqs:,} requests"
        said = f"limits: {limits.max_num_batched_tokens:,} tokens per step{requests}"
        print("\n".join(_describe(plan, args.model, said, caches=not args.no_enable_prefix_caching)))
        notes = list(note_on_dtype(args.model))
        if "name" in gpu and (sheet := find_gpu(gpu["name"])).like:
            notes.append(f"{sheet.name} was never measured: {sheet.origin}")
        if fitted is not None and not fitted.blocks_estimated:
            notes.append(
                f"the timing file's engine had {fitted.num_gpu_blocks:,} usable blocks of {fitted.block_size} tokens"
            )
        for note in notes:
            print(f"note: {note}")
    return 0


def _parse_length(text: str) -> int | None:
    """Parse a number of tokens; None for auto."""
    import argparse

    try:
        return None if text in ("auto", "-1") else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of tokens or auto, got {text!r}") from None


def _read_gpu(args: argparse.Namespace) -> tuple[dict[str, Any], FittedEngine | None]:
    """Return the settings of the GPU, completed by a timing file, and the engine in it; set the model's name too."""
    from understudy.errors import ConfigError
    from understudy.tiers.gpu import GpuSettings
    from understudy.timing.fitted_settings import (
        find_fitted_model,
        fitted_gpu_settings,
        fitted_kv_dtype,
        merge_fitted_gpu,
    )
    from understudy.timing.timing_file import TimingFile

    gpu = read_gpu_flags(args)
    if args.timing is None:
        if args.model is None:
            raise ConfigError("--model: missing; give a known name or the path of a config.json, or --timing")
        return gpu, None
    if args.kv_memory is not None:
        raise ConfigError("--kv-memory: contradicts --timing, whose GPU has its own memory; give one")
    file = TimingFile.read(args.timing)
    known = find_fitted_model(file.deployment, file.engine)
    args.model = args.model or known
    if args.model is None:
        raise ConfigError(
            f"--model: {file.model.name} of the timing file is not known here; give the path of its config.json"
        )
    args.kv_dtype = args.kv_dtype or fitted_kv_dtype(file.deployment)
    if args.block_size is None and file.engine is not None:
        args.block_size = file.engine.block_size
    gpu = merge_fitted_gpu(fitted_gpu_settings(file.deployment, file.engine, known), gpu)
    GpuSettings(**gpu).check_timing(file.timing(), args.model, args.kv_dtype)
    return gpu, file.engine


def _read_limits(args: argparse.Namespace, gpu: dict[str, Any]) -> BatchLimits:
    """Return the limits of a step: those given, else what vLLM chooses for the GPU."""
    from understudy.checks import whole_number
    from understudy.defaults import UNKNOWN_DEVICE, BatchLimits
    from understudy.tiers.gpu import GpuSettings

    chosen = UNKNOWN_DEVICE if args.kv_memory is not None or not gpu else GpuSettings(**gpu).batch_limits()
    tokens, sequences = args.max_num_batched_tokens, args.max_num_seqs
    for name, value in (("max-num-batched-tokens", tokens), ("max-num-seqs", sequences)):
        if value is not None:
            whole_number(f"--{name}", value, 1)
    tokens = chosen.max_num_batched_tokens if tokens is None else tokens
    return BatchLimits(tokens, min(chosen.max_num_seqs, tokens) if sequences is None else sequences)


def _plan(args: argparse.Namespace, gpu: dict[str, Any], limits: BatchLimits) -> GroupPlan:
    from understudy.errors import ConfigError
    from understudy.groups import groups_of_model
    from understudy.groups.of_model import config_of_model
    from understudy.tiers.gpu import GpuSettings
    from understudy.tiers.sizes import parse_bytes
    from understudy.timing.contexts import known_context

    config_of_model(args.model)  # names an unknown model
    is_auto = args.max_model_len is None
    length = known_context(args.model) if is_auto else args.max_model_len
    if length is None:
        raise ConfigError(f"--max-model-len: the context of {args.model} is not known; give a number")
    speculation = read_speculation(args)
    settings = {
        "max_model_len": length,
        "auto_fit": is_auto,
        "block_size": args.block_size,
        "state_dtype": args.state_dtype,
        "async_scheduling": not args.no_async_scheduling,
        "prefix_caching": not args.no_enable_prefix_caching,
    }
    if args.kv_memory is None:
        if not gpu:
            raise ConfigError("--kv-memory: the memory is not known; give it, or --gpu")
        gpus = GpuSettings(**gpu)
        drafter = (
            None if speculation is None else speculation.drafter(gpus.deployment(args.model, args.kv_dtype))
        )
        plan = gpus.groups(
            args.model,
            args.kv_dtype,
            drafter=drafter,
            step_tokens=limits.max_num_batched_tokens,
            sequences=limits.max_num_seqs,
            **settings,
        )
        if drafter is not None and len(plan.groups) > 1:
            raise ConfigError(
                f"--speculative-config: {args.model} has several KV cache groups, and none is planned for a drafter's "
                "layers; leave it out, or give --disable-hybrid-kv-cache-manager"
            )
        return plan
    if speculation is not None:
        raise ConfigError(
            "--speculative-config: a drafter's part of --kv-memory is not known; give --gpu instead, or leave one out"
        )
    tensor_parallel = gpu.pop("tensor_parallel_size", 1)
    disable_hybrid = gpu.pop("disable_hybrid_kv_cache_manager", None)
    if gpu or args.max_num_seqs is not None:
        raise ConfigError("--kv-memory and the GPU's flags both set the memory; give one")
    return groups_of_model(
        args.model,
        memory_bytes=parse_bytes("--kv-memory", args.kv_memory),
        kv_dtype=args.kv_dtype,
        tensor_parallel=tensor_parallel,
        disable_hybrid=disable_hybrid,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        **settings,
    )


def _describe(plan: GroupPlan, model: str, limits: str, *, caches: bool) -> list[str]:
    head = ("group", "kind", "layers", "block", "page bytes", "window", "blocks per request")
    rows = [
        (
            str(number),
            group.kind,
            str(len(group.layers)),
            str(group.block_size),
            f"{group.page_bytes:,}",
            "-" if group.window is None else f"{group.window:,}",
            f"{group.blocks_per_request:,}",
        )
        for number, group in enumerate(plan.groups)
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    table = [
        "  ".join(
            cell.ljust(width) if column == 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    ]
    units = f"hashes of {plan.hash_block_size} tokens, hits in multiples of {plan.cache_hit_alignment}"
    return [
        f"KV cache groups of {model}",
        *table,
        f"{plan.num_blocks:,} blocks of {plan.bytes_per_block:,} bytes on each GPU",
        *([f"prefix cache: {units}"] if caches else []),
        limits,
        f"GPU KV cache size: {plan.kv_cache_size_tokens:,} tokens",
        f"Maximum concurrency for {plan.max_model_len:,} tokens per request: {plan.max_concurrency:.2f}x",
    ]
