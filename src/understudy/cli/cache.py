"""`understudy cache TRACE`: hit ratios by cache size and policy, and what they mean for latency."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.cli import gpu_flags, run_flags, trace_flags
from understudy.cli.written import print_written
from understudy.outputs import check_outputs, create, files_named, is_stdout

if TYPE_CHECKING:
    from understudy.cli.verbs import Verbs
    from understudy.run.settings import ReplaySettings

EXAMPLES = """\
examples:
  understudy cache trace.jsonl                                     curve in blocks, without a fleet
  understudy cache trace.jsonl --model Llama-3.1-8B                the same in GiB, with the knee
  understudy cache trace.jsonl --model Llama-3.1-8B --gpu H100 --html cache.html
  understudy cache trace.jsonl --model Llama-3.1-8B --gpu H100 --sizes 8,16,32 --policies lru,multi_lru,optimal
  understudy cache trace.jsonl --model Llama-3.1-8B --gpu H100 --workers 4 --routing kv --host-gib 256 --disk-gib 2000
  understudy cache trace.jsonl --block-size 512 --prompts-only --warm-up 0.5 --sizes 1409blocks,5637blocks

Sizes are those of one worker. With a fleet (--gpu or --num-gpu-blocks), curves follow the order of its replay.
"""
_GROUPS_REMEDY = (
    "replay the sizes: `understudy sweep TRACE --vary num-gpu-blocks=4096..65536*2 --slo-ttft-ms 500`"
)


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy cache`."""
    verb = verbs.add_parser(
        "cache",
        help="show hit ratios by cache size and policy, and their effect on latency",
        description="Compute exact hit ratios of a trace by cache size and eviction policy; replay chosen sizes.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run_flags.add_trace(verb)
    run_flags.add_users(verb.add_argument)
    verb.add_argument(
        "--policies",
        default="lru,insertion,lineage,multi_lru,optimal",
        metavar="NAME,…",
        help="names of replay's --eviction-policy, insertion and optimal "
        "(default: lru,insertion,lineage,multi_lru,optimal)",
    )
    verb.add_argument(
        "--sizes",
        metavar="GIB,…",
        help="cache sizes of a worker in GiB, or blocks such as 4096blocks; they are also replayed "
        "(default: doubling sizes)",
    )
    verb.add_argument("--host-gib", type=float, metavar="X", help="host tier of each worker, GiB")
    verb.add_argument("--disk-gib", type=float, metavar="X", help="disk tier that all workers share, GiB")
    verb.add_argument(
        "--warm-up",
        type=float,
        default=0.0,
        metavar="X",
        help="share of requests, from the first, that fill the cache without being counted (default: 0)",
    )
    verb.add_argument(
        "--knee-points",
        type=float,
        default=0.1,
        metavar="X",
        help="the knee is the size from which one GiB more adds fewer than X percentage points of hits (default: 0.1)",
    )
    verb.add_argument(
        "--prompts-only",
        action="store_true",
        help="count prompts with their partly filled last block, and no outputs",
    )
    fleet = verb.add_argument_group("fleet")
    fleet.add_argument(
        "--block-size", type=int, metavar="N", help="tokens per block (default: 16; MLA: 64; as vLLM)"
    )
    fleet.add_argument(
        "--num-gpu-blocks", type=int, metavar="N", help="KV blocks per worker (default: from --gpu)"
    )
    run_flags.add_fleet_flags(fleet.add_argument)
    fleet.add_argument(
        "--kv-bytes-per-token",
        type=int,
        metavar="N",
        help="KV bytes per token of a worker, instead of --model",
    )
    run_flags.add_settings_flags(fleet.add_argument)
    fleet.add_argument("--no-replays", action="store_true", help="replay the fleet once, and no other sizes")
    gpu_flags.add_gpu_flags(verb)
    out = verb.add_argument_group("output (PATH may be -, for standard output)")
    out.add_argument("--json", type=Path, metavar="PATH", help="write the study as JSON")
    out.add_argument("--html", type=Path, metavar="PATH", help="write one self-contained page with the curve")
    out.add_argument("--quiet", action="store_true", help="print no tables and no progress")


def run(args: argparse.Namespace) -> int:
    """Compute the study, then print and write it."""
    import sys

    import msgspec

    from understudy.cache.lab import study_cache
    from understudy.cache.text import format_study
    from understudy.errors import InvalidArgument
    from understudy.workload import scale_users

    outputs = {
        flag: path for flag, path in (("--json", args.json), ("--html", args.html)) if path is not None
    }
    check_outputs(outputs, {"TRACE": trace_flags.path_read(args), **files_named({"--config": args.config})})
    request = _read_request(args)
    settings = _read_settings(args)
    request = msgspec.structs.replace(request, block_size=_choose_block_size(args, settings))
    if settings is not None:
        check_outputs(outputs, files_named(settings))
    workload = trace_flags.read_workload(args.trace, args.format, trace_flags.reader_options(args))
    if not len(workload):
        raise InvalidArgument(f"{args.trace} contains no requests; a cache study needs at least one")
    users = args.users if settings is None else settings.users
    workload = scale_users(workload, 1.0 if users is None else users, seed=settings.seed if settings else 0)

    def report_progress(text: str) -> None:
        if not args.quiet and sys.stderr.isatty():
            print(f"{text} …", file=sys.stderr)

    study = study_cache(workload, args.trace.name, request, settings, report_progress)
    if args.json is not None:
        with create(args.json) as file:
            file.write(msgspec.json.format(msgspec.json.encode(study), indent=2) + b"\n")
    if args.html is not None:
        from understudy.cache.page import build_page

        with create(args.html) as file:
            file.write(build_page(study).encode())
    if not args.quiet:
        to_stdout = any(map(is_stdout, outputs.values()))
        print(format_study(study), file=sys.stderr if to_stdout else sys.stdout)
        print_written(outputs.values())
    return 0


def _read_request(args: argparse.Namespace) -> Any:
    from understudy.cache.curves import POLICIES
    from understudy.cache.lab import StudyRequest, read_size
    from understudy.cli.parser import suggest
    from understudy.errors import ConfigError
    from understudy.user_code import names_file_and_class

    policies = tuple(dict.fromkeys(name.strip() for name in args.policies.split(",")))
    for name in policies:
        if names_file_and_class(name):
            raise ConfigError(
                f"--policies: curves have built-in policies only; replay {name} with `understudy replay "
                "--eviction-policy`"
            )
        if name not in POLICIES:
            remedy = suggest(name, POLICIES) or f"; choose from {', '.join(POLICIES)}"
            raise ConfigError(f"--policies: {name!r} is not known{remedy}")
    if args.model is not None and args.kv_bytes_per_token is not None:
        raise ConfigError("--model and --kv-bytes-per-token both set the KV bytes per token; give one")
    if args.kv_bytes_per_token is not None and args.kv_bytes_per_token < 1:
        raise ConfigError(f"--kv-bytes-per-token must be at least 1, got {args.kv_bytes_per_token}")
    if not 0 < args.knee_points <= 100:
        raise ConfigError(
            f"--knee-points must be above 0 and at most 100, got {args.knee_points:g}; 0.1 is usual"
        )
    tiers = tuple(
        (name, size) for name, size in (("host", args.host_gib), ("disk", args.disk_gib)) if size is not None
    )
    for name, size in tiers:
        if not 0 < size < 2**40:
            raise ConfigError(f"--{name}-gib must be above 0, got {size:g}; leave it out for no such tier")
    return StudyRequest(
        policies=policies,
        sizes=tuple(map(read_size, args.sizes.split(","))) if args.sizes is not None else (),
        tiers=tiers,
        kv_bytes_per_token=_read_bytes_per_token(args),
        prompts_only=args.prompts_only,
        warm_up=args.warm_up,
        knee_points=args.knee_points,
        replays=not args.no_replays,
    )


def _read_bytes_per_token(args: argparse.Namespace) -> int | None:
    from understudy.errors import ConfigError
    from understudy.run.model_groups import has_uniform_layers
    from understudy.tiers.model_shape import ModelShape

    if args.model is None:
        if args.kv_dtype is not None:
            raise ConfigError("--kv-dtype needs --model; give a known name or the path of a config.json")
        given: int | None = args.kv_bytes_per_token
        return given
    if not has_uniform_layers(args.model):
        raise ConfigError(
            f"--model {args.model} has several KV cache groups, and a curve has one; {_GROUPS_REMEDY}, or leave "
            "--model out and give --kv-bytes-per-token for a curve of one group"
        )
    return ModelShape.find(args.model).bytes_per_token(kv_dtype=args.kv_dtype)


def _choose_block_size(args: argparse.Namespace, settings: ReplaySettings | None) -> int:
    """Return the given tokens per block, those of the fleet, or those that vLLM chooses for the model."""
    from understudy.defaults import BLOCK_SIZE
    from understudy.engines.chosen import choose_block_size

    if args.block_size is not None:
        return int(args.block_size)
    if settings is not None:
        return int(settings.engine.block_size)
    return BLOCK_SIZE if args.model is None else choose_block_size(args.model)


def _read_settings(args: argparse.Namespace) -> ReplaySettings | None:
    """Return the fleet's settings; None if neither its blocks nor its GPU are known."""
    from understudy.engines.kinds.registry import kind_of
    from understudy.errors import ConfigError
    from understudy.run.settings import ReplaySettings

    flags = gpu_flags.gpu_settings(args)
    given = {"block_size": args.block_size, "num_gpu_blocks": args.num_gpu_blocks}
    engine = {
        **flags.get("engine", {}),
        **{name: value for name, value in given.items() if value is not None},
    }
    fleet = {name: getattr(args, name) for name in ("workers", "routing") if getattr(args, name) is not None}
    is_fitted = "fitted_for" in engine.get("timing", {})  # a timing file names its own GPU
    is_known = flags.get("gpu") or is_fitted or args.num_gpu_blocks is not None
    if not is_known and args.config is None and not args.set:
        if fleet or "timing" in engine:
            name = f"--{next(iter(fleet), 'timing')}"
            raise ConfigError(
                f"{name}: the blocks of a worker are not known; give --gpu, or --num-gpu-blocks"
            )
        return None
    if flags.get("gpu") or is_fitted:
        flags |= {
            name: getattr(args, name) for name in ("model", "kv_dtype") if getattr(args, name) is not None
        }
    if args.users is not None:
        flags["users"] = args.users
    settings = ReplaySettings.read(args.config, {**flags, **fleet, "engine": engine}, args.set)
    parts = {
        "pools": settings.pools,
        "disaggregation": settings.disaggregation,
        "tiers": settings.tiers.tiers,
    }
    if field := next((name for name, value in parts.items() if value), None):
        raise ConfigError(
            f"{field}: a cache study has equal workers without tiers; remove {field} from the settings"
        )
    if settings.engine.kv_cache_groups:
        raise ConfigError(f"kv_cache_groups: a curve has one group; leave them out, or {_GROUPS_REMEDY}")
    if not kind_of(settings.engine).has_cache_curves:
        raise ConfigError("engine: a cache study replays vLLM's engine; remove engine.kind from the settings")
    if args.block_size not in (None, settings.engine.block_size):
        raise ConfigError(
            f"engine.block_size {settings.engine.block_size} differs from --block-size {args.block_size}; give one"
        )
    return settings
