"""The specification of `workload synthetic`, from its flags or a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError
from understudy.workload.synthetic import SyntheticSpec

if TYPE_CHECKING:
    import argparse

_SPREAD = 0.5
_SESSIONS = 100
_BLOCK = 16
_LENGTHS = ("rate", "isl", "osl", "spread", "turns", "followup", "think_time_ms", "system_prompts")


def read_spec(args: argparse.Namespace, count: int | None, seed: int) -> SyntheticSpec:
    """Return the specification. ConfigError names a missing or a wrong flag, or a field of the file."""
    if args.spec is not None:
        given = [name for name in _LENGTHS if getattr(args, name) is not None]
        if given or count is not None:
            flag = f"--{given[0].replace('_', '-')}" if given else "--count"
            raise ConfigError(f"{flag}: --spec describes the whole workload; leave it out")
        return _read_file(args, seed)
    for flag, value in (("--isl", args.isl), ("--osl", args.osl)):
        if value is None:
            raise ConfigError(
                f"{flag}: missing; give mean lengths, such as --isl 2000 --osl 200, or --spec FILE"
            )
        if not 1 <= value <= 10_000_000:
            raise ConfigError(f"{flag} must be from 1 to 10000000, got {value}")
    spread = _SPREAD if args.spread is None else args.spread
    if not 0 <= spread <= 10:
        raise ConfigError(f"--spread must be from 0 to 10, got {spread:g}")
    turns = 1 if args.turns is None else args.turns
    if turns < 1:
        raise ConfigError(f"--turns must be at least 1, got {turns}")
    if turns == 1 and (args.followup is not None or args.think_time_ms is not None):
        flag = "--followup" if args.followup is not None else "--think-time-ms"
        raise ConfigError(f"{flag} is for several turns; give --turns too")
    config: dict[str, Any] = {
        "sessions": _SESSIONS if count is None else count,
        "prompt_tokens": _spread(args.isl, spread),
        "output_tokens": _spread(args.osl, spread),
        "turns": {"kind": "fixed", "value": turns},
        "trace_block_size": _BLOCK,
        "arrival_seed": seed,
        "content_seed": seed,
    }
    if turns > 1:
        config["followup_tokens"] = _spread(
            max(args.isl // 4, 1) if args.followup is None else args.followup, spread
        )
        config["think_time_ms"] = _spread(0.0 if args.think_time_ms is None else args.think_time_ms, spread)
    if args.rate is not None:
        config["arrivals"] = {"kind": "poisson", "qps": args.rate}
    if args.system_prompts is not None:
        config["prefixes"] = _read_system_prompts(args.system_prompts)
    return SyntheticSpec.from_config(config)


def _spread(mean: float, spread: float) -> dict[str, Any]:
    """Return a log-normal distribution, or a fixed value without spread."""
    if not mean or not spread:
        return {"kind": "fixed", "value": mean}
    return {"kind": "lognormal", "mean": mean, "std": mean * spread}


def _read_system_prompts(text: str) -> dict[str, Any]:
    groups, _, tokens = text.partition("x")
    if not (groups.isdecimal() and tokens.isdecimal()):
        raise ConfigError(f"--system-prompts: {text!r} is not GROUPSxTOKENS; write such as 3x1024")
    return {"kind": "system_prompts", "groups": int(groups), "tokens": int(tokens)}


def _read_file(args: argparse.Namespace, seed: int) -> SyntheticSpec:
    from understudy.yaml_text import read_yaml

    content = read_yaml(args.spec)
    if not isinstance(content, dict):
        raise ConfigError(f"--spec: {args.spec} must be a mapping with the fields of SyntheticSpec")
    return SyntheticSpec.from_config({"arrival_seed": seed, "content_seed": seed, **content})
