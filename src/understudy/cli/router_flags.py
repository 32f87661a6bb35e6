"""Flags of KV-aware routing, for every verb that routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from understudy.router.kv import KvRouting
    from understudy.router.router import Router

EXAMPLES = """\
  understudy replay trace.jsonl --workers 16 --routing kv --event-delay-ms 50 --event-loss 0.01
  understudy replay trace.jsonl --workers 16 --routing kv --event-delay-ms 500 --predict-ttl-ms 2000
  understudy replay trace.jsonl --workers 4 --routing kv --router-queue-threshold 2 --router-queue-policy wspt
"""

CHANCE = ("random", "power_of_two", "kv")
"""Policies that draw."""
_SETTINGS = {
    "event_delay_ms": "event_delay_ms",
    "event_period_ms": "event_period_ms",
    "event_loss": "event_loss",
    "predict_ttl_ms": "predict_ttl_ms",
    "router_temperature": "temperature",
    "router_queue_threshold": "queue_threshold",
    "router_queue_policy": "queue_policy",
}


def add_router_flags(verb: argparse.ArgumentParser) -> None:
    """Describe the flags."""
    group = verb.add_argument_group("KV-aware routing (--routing kv; any setting: --set router.NAME=VALUE)")
    group.add_argument(
        "--event-delay-ms", type=float, metavar="MS", help="KV events reach the router so late (default: 0)"
    )
    group.add_argument(
        "--event-period-ms",
        type=float,
        metavar="MS",
        help="and in bundles, this far apart (default: at once)",
    )
    group.add_argument(
        "--event-loss",
        type=float,
        metavar="P",
        help="share of a step's events that never arrive (default: 0)",
    )
    group.add_argument(
        "--predict-ttl-ms",
        type=float,
        metavar="MS",
        help="what was sent to a worker counts as cached there for so long (default: not)",
    )
    group.add_argument(
        "--no-kv-events",
        action="store_const",
        const=True,
        help="route without events: only what was sent where counts, for 120 s",
    )
    group.add_argument(
        "--router-temperature",
        type=float,
        metavar="T",
        help="0 (default): the lowest cost; above: others too",
    )
    group.add_argument(
        "--router-queue-threshold",
        type=float,
        metavar="X",
        help="requests wait in the router while every worker has over X steps of prompt tokens before it "
        "(default: nobody waits)",
    )
    group.add_argument(
        "--router-queue-policy",
        choices=("fcfs", "lcfs", "wspt"),
        help="who of them goes first: the first, the last, or the one with the least to compute (default: fcfs)",
    )
    group.add_argument(
        "--route-rejected",
        action="store_const",
        const=True,
        help="ask the router about requests that can never fit, too, as Dynamo's replay does",
    )


def router_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given as flags, nested as in a configuration file."""
    given = {name: getattr(args, flag) for flag, name in _SETTINGS.items() if getattr(args, flag) is not None}
    if args.no_kv_events:
        given["use_events"] = False
    flags: dict[str, Any] = {"router": given} if given else {}
    if args.route_rejected:
        flags["route_rejected"] = True
    return flags


def seed_of(given: int | None, policy: str | KvRouting | Router, *, fails: bool = False) -> int:
    """What --seed says. ConfigError where nothing is drawn: neither by the policy, nor whether a load `fails`."""
    from understudy.checks import whole_number
    from understudy.errors import ConfigError
    from understudy.router.kv import KvRouting

    if given is None:
        return 0
    whole_number("--seed", given, 0, 2**64 - 1)
    if not isinstance(policy, KvRouting) and policy not in CHANCE and not fails:
        name = policy if isinstance(policy, str) else type(policy).__qualname__
        raise ConfigError(
            f"--seed changes nothing: routing {name} draws nothing; leave it out, or route by {', '.join(CHANCE)}"
        )
    return given


def live_policy(name: Any, settings: Any) -> str | KvRouting | Router:
    """A policy for a live fleet: a name, kv with these settings, or `FILE.py:CLASS`. ConfigError says what is wrong."""
    from understudy.checks import read_as
    from understudy.errors import ConfigError
    from understudy.router.kv import KvRouting
    from understudy.router.load import is_place, load_router

    if not isinstance(name, str):
        raise ConfigError(f"routing must be the name of a policy or FILE.py:CLASS, got {name!r}")
    if not isinstance(settings, dict):
        raise ConfigError(f'router must be settings by name, as {{"temperature": 0.5}}, got {settings!r}')
    if settings and name != "kv":
        verb = "is" if len(settings) == 1 else "are"
        raise ConfigError(f"{', '.join(map(str, settings))} {verb} for --routing kv, not {name}")
    if name == "kv":
        return read_as(KvRouting, settings, "router")
    return load_router(name) if is_place(name) else name
