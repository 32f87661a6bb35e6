"""Flags of a fleet whose workers join and leave during a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from understudy.run.autoscale import Autoscale
    from understudy.run.settings import ReplaySettings

EXAMPLES = """\
  understudy replay trace.jsonl --autoscale backlog --max-workers 16 --startup-s 40
  understudy replay trace.jsonl --autoscale hpa,metric=kv_use,target=0.7 --workers 2 --max-workers 8
"""
FLAGS = {
    "autoscale": "scaler",
    "min_workers": "min_workers",
    "max_workers": "max_workers",
    "startup_s": "startup_s",
    "weights_gbps": "weights_gbps",
    "gpus_per_worker": "gpus_per_worker",
    "gpu_hour_price": "price_per_gpu_hour",
}
"""Settings of `Autoscale` by flag."""


def add_autoscale_flags(verb: argparse.ArgumentParser) -> None:
    """Add the flags of a scaler."""
    group = verb.add_argument_group("scaling (--workers, or the pools, give the workers at the start)")
    group.add_argument(
        "--autoscale",
        metavar="NAME[,SETTING=VALUE…]",
        help="backlog, dynamo-load, dynamo-sla, hpa, schedule,file=PLAN.jsonl, wva, or FILE.py:CLASS",
    )
    group.add_argument("--min-workers", type=int, metavar="N", help="least workers of each role (default: 1)")
    group.add_argument(
        "--max-workers",
        type=int,
        metavar="N",
        help="most workers of each role (default: 8, or as many as at the start)",
    )
    group.add_argument(
        "--startup-s",
        type=float,
        metavar="S",
        help="time from the order of a worker until it is ready (default: 0)",
    )
    group.add_argument(
        "--weights-gbps",
        type=float,
        metavar="X",
        help="a worker also loads its weights, over a link of 10^9 bytes per second times X (needs --model and --gpu)",
    )
    group.add_argument(
        "--gpus-per-worker", type=int, metavar="N", help="GPUs that a scaler counts for a worker (default: 1)"
    )
    group.add_argument(
        "--gpu-hour-price", type=float, metavar="X", help="price of a GPU-hour, for the cost in the report"
    )


def read_autoscale(args: argparse.Namespace, settings: ReplaySettings) -> Autoscale | None:
    """Return the scaler that the flags give, if any. ConfigError names a flag without effect."""
    from understudy.errors import ConfigError
    from understudy.run.autoscale import Autoscale

    given = {name: getattr(args, flag) for flag, name in FLAGS.items() if getattr(args, flag) is not None}
    if not given:
        return None
    if args.autoscale is None:
        flag = next(flag for flag, name in FLAGS.items() if name in given)
        raise ConfigError(f"--{flag.replace('_', '-')} has no effect without --autoscale; name a scaler")
    if args.online or args.engine == "qwen3":
        raise ConfigError(
            f"--autoscale does not work with {'--online' if args.online else '--engine qwen3'}; leave one out"
        )
    if args.weights_gbps is not None:
        given["weight_bytes"] = _find_weight_bytes(settings)
    return Autoscale(**given)


def _find_weight_bytes(settings: ReplaySettings) -> int:
    """Return the bytes that a worker loads: the weights on all of its GPUs."""
    from understudy.errors import ConfigError
    from understudy.run.on_gpu import find_weight_bytes

    found = (
        None if settings.gpu is None else find_weight_bytes(settings.gpu, settings.model, settings.kv_dtype)
    )
    if found is None:
        raise ConfigError(
            "--weights-gbps: the size of the weights is not known; give --model and --gpu, or --startup-s instead"
        )
    return found
