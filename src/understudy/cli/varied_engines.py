"""Check the engines that a sweep varies: their times must not be those of one of them."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from understudy.cli import run_flags
from understudy.engines.kinds.registry import kind_of
from understudy.errors import ConfigError
from understudy.report.measured import REMEDY, find_unmeasured

if TYPE_CHECKING:
    import argparse

    from understudy.cli.vary import VariedFlags
    from understudy.sweep.space import Space

_FLAGS = ("engine", "model", "gpu", "timing", "tensor-parallel-size")
"""Flags that choose engines and their step times."""


def check_engines(args: argparse.Namespace, flags: VariedFlags, space: Space) -> list[str]:
    """Return a note on varied engines of which one was not measured; ConfigError unless that is accepted."""
    varied = {each.flag: each.texts for each in space.dimensions if each.flag in _FLAGS}
    if "engine" not in varied:
        return []
    fleets: list[list[tuple[str, str]]] = []
    for texts in product(*varied.values()):
        try:
            settings = run_flags.read_settings(flags.apply(args, dict(zip(varied, texts, strict=True))))
        except ConfigError:  # its combinations are invalid, and their reasons are listed
            continue
        engines = [pool.engine for pool in settings.pools] or [settings.engine]
        fleets.append([(kind_of(one).name, one.timing.describe_origin()) for one in engines])
    problem = find_unmeasured(fleets)
    if problem is None:
        return []
    if not args.accept_unmeasured:
        remedy = REMEDY.partition(" (in Python")[0]
        raise ConfigError(f"--vary engine: {problem}, so the answer says nothing about engines; {remedy}")
    return [f"engines are not comparable: {problem}"]
