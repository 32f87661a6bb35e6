"""Flags of a live fleet whose workers fail, join and leave."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError
from understudy.run.autoscale import Autoscale
from understudy.run.chaos import draw_faults, list_kinds
from understudy.run.faults import KINDS, FaultPlan, parse_fault, read_fault_file
from understudy.server.faults import has_limited_link
from understudy.server.flags import Flag

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from understudy.run.faults import Fault, Kind
    from understudy.server.settings import ServerSettings

FLAGS = (
    Flag(["--faults"], "str"),
    Flag(["--fault"], "str", many=True),
    Flag(["--chaos"], "int"),
    Flag(["--chaos-rate"], "float"),
    Flag(["--chaos-kinds"], "str"),
    Flag(["--on-loss"], "str", choices=["fail", "retry", "migrate"]),
    Flag(["--retry-delay-ms"], "float"),
    Flag(["--max-attempts"], "int"),
    Flag(["--drain-limit-s"], "float"),
    Flag(["--autoscale"], "str"),
    Flag(["--min-workers"], "int"),
    Flag(["--max-workers"], "int"),
    Flag(["--startup-s"], "float"),
    Flag(["--gpus-per-worker"], "int"),
)
CHAOS_S = 86_400.0
"""Time of the fleet's clock for which `--chaos` draws faults."""
_POLICY = ("on-loss", "retry-delay-ms", "max-attempts", "drain-limit-s")
_SCALER = ("min-workers", "max-workers", "startup-s", "gpus-per-worker")


def join_faults(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with all `--fault` in one place, so that the flag may be repeated."""
    faults: list[str] = []
    rest: list[str] = []
    takes = False
    for word in arguments:
        if word == "--fault" or word.startswith("--fault="):
            takes = word == "--fault"
            faults += () if takes else (word.partition("=")[2],)
        elif takes and not word.startswith("-"):
            faults.append(word)
        else:
            takes = False
            rest.append(word)
    return [*rest, "--fault", *faults] if faults else rest


def read_autoscale(values: Mapping[str, Any]) -> Autoscale | None:
    """Return the scaler that the flags give, if any. ConfigError names a flag without effect."""
    given = {name: values[name] for name in _SCALER if values.get(name) is not None}
    if values.get("autoscale") is None:
        if given:
            raise ConfigError(f"--{next(iter(given))} has no effect without --autoscale; name a scaler")
        return None
    return Autoscale(
        scaler=values["autoscale"], **{name.replace("-", "_"): value for name, value in given.items()}
    )


def read_plan(
    values: Mapping[str, Any], pools: Sequence[tuple[int, ServerSettings]], *, reads_events: bool
) -> FaultPlan | None:
    """Return the faults and the policy that the flags give, if any. ConfigError names a flag that is wrong."""
    policy = {name.replace("-", "_"): values[name] for name in _POLICY if values.get(name) is not None}
    faults: tuple[Fault, ...] = ()
    if values.get("faults") is not None:
        path = Path(values["faults"])
        try:
            faults += read_fault_file(path)
        except OSError as error:
            raise ConfigError(f"--faults {path}: {error.strerror}") from None
    faults += tuple(parse_fault(text, field="--fault") for text in values.get("fault") or ())
    seed = values.get("chaos")
    if seed is not None:
        faults += _draw(seed, values, pools, reads_events=reads_events)
    for name in ("chaos-rate", "chaos-kinds"):
        if values.get(name) is not None and seed is None:
            raise ConfigError(f"--{name} has no effect without --chaos; give a seed")
    if not faults and not policy and seed is None:
        return None
    return FaultPlan(faults=faults, seed=seed or 0, **policy)


def _draw(
    seed: int,
    values: Mapping[str, Any],
    pools: Sequence[tuple[int, ServerSettings]],
    *,
    reads_events: bool,
) -> tuple[Fault, ...]:
    kinds: tuple[Kind, ...] = list_kinds(
        reads_events=reads_events,
        has_host_tier=all(any(tier.tier == "g2" for tier in pool.tiers.tiers) for _, pool in pools),
        has_limited_host_link=all(has_limited_link(pool, "g2") for _, pool in pools),
        loses_requests=True,
    )
    if values.get("chaos-kinds") is not None:
        named = values["chaos-kinds"].split(",")
        if unknown := [name for name in named if name not in KINDS]:
            raise ConfigError(f"--chaos-kinds: {unknown[0]} is not a fault; choose {', '.join(KINDS)}")
        kinds = tuple(kind for kind in KINDS if kind in named)
    rate = values.get("chaos-rate")
    return draw_faults(
        seed,
        per_hour=60.0 if rate is None else rate,
        end_s=CHAOS_S,
        workers=sum(count for count, _ in pools),
        kinds=kinds,
    )
