"""Splits of a number of GPUs into prefill and decode workers: `--splits GPUS` of `understudy sweep`."""

from __future__ import annotations

import re
from copy import copy
from typing import TYPE_CHECKING

from understudy.cli.disaggregation_flags import FLAGS
from understudy.cli.run_flags import read_settings
from understudy.errors import ConfigError
from understudy.run.fleet_size import list_sizes
from understudy.sweep.space import SPLIT, Dimension, Space

if TYPE_CHECKING:
    import argparse

_TIER = re.compile(r"(num_)?g[234]")
_SIZES = ("workers", "prefill_workers", "decode_workers")


def read_space(args: argparse.Namespace) -> Space:
    """Return the space of `--splits` and `--vary`. ConfigError if both set the workers, or neither is given."""
    if not args.vary and args.splits is None:
        raise ConfigError("--vary: missing; name a flag and its values, such as workers=1..8")
    space = Space.parse(args.vary)
    varied = {each.flag for each in space.dimensions}
    if SPLIT in varied:
        raise ConfigError(f"--vary {SPLIT}: not a flag that a sweep can vary; give --splits GPUS")
    if args.splits is None:
        return space
    for name in _SIZES:
        flag = name.replace("_", "-")
        if flag in varied or getattr(args, name) is not None:
            raise ConfigError(f"--{flag}: contradicts --splits, which sets the workers; give one")
    if "tensor-parallel-size" in varied:
        raise ConfigError("--vary tensor-parallel-size: contradicts --splits; sweep each size by itself")
    return Space((_list_splits(args), *space.dimensions))


def set_split(args: argparse.Namespace, text: str) -> None:
    """Set the workers of a split; without roles, leave out all flags of prefill and decode workers."""
    prefill, _, decode = text.partition("+")
    if decode:
        args.prefill_workers, args.decode_workers = int(prefill), int(decode)
        return
    args.workers = int(text)
    for flag in FLAGS:
        setattr(args, flag, None)
    has_tiers = any(value is not None for name, value in vars(args).items() if _TIER.match(name))
    if not has_tiers:  # only hand-offs need the size of their blocks
        args.kv_bytes_per_token = None


def _list_splits(args: argparse.Namespace) -> Dimension:
    whole = copy(args)
    set_split(whole, "1")
    (worker,) = list_sizes(read_settings(whole))
    size = worker.engine_gpus
    splits: list[str] = []
    for text in Dimension.parse(f"splits={args.splits}").texts:
        if not text.isdecimal() or int(text) < 2 * size or int(text) % size:
            raise ConfigError(
                f"--splits: {text!r} is no number of GPUs for 2 or more workers of {size}; write it as 8 or 4,6,8"
            )
        workers = int(text) // size
        splits += [str(workers), *(f"{prefill}+{workers - prefill}" for prefill in range(1, workers))]
    return Dimension(SPLIT, tuple(splits))
