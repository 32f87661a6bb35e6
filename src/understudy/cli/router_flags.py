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

RANDOM_POLICIES = ("random", "power_of_two", "kv")
"""Routing policies that use the seed."""
_SETTINGS = {
    "event_delay_ms": "event_delay_ms",
    "event_period_ms": "event_period_ms",
    "event_loss": "event_loss",
    "predict_ttl_ms": "predict_ttl_ms",
    "index_groups": "index_groups",
    "router_temperature": "temperature",
    "router_queue_threshold": "queue_threshold",
    "router_queue_policy": "queue_policy",
}


def add_router_flags(verb: argparse.ArgumentParser) -> None:
    """Add the flags of KV-aware routing to a verb, in one group."""
    group = verb.add_argument_group("KV-aware routing (--routing kv; any setting: --set router.NAME=VALUE)")
    group.add_argument(
        "--event-delay-ms",
        type=float,
        metavar="MS",
        help="delay before the router sees a KV event (default: 0)",
    )
    group.add_argument(
        "--event-period-ms",
        type=float,
        metavar="MS",
        help="batch events into windows of this length (default: no batching)",
    )
    group.add_argument(
        "--event-loss",
        type=float,
        metavar="P",
        help="probability that the events of a step are lost (default: 0)",
    )
    group.add_argument(
        "--predict-ttl-ms",
        type=float,
        metavar="MS",
        help="treat the blocks of a routed prompt as cached on its worker for this long (default: never)",
    )
    group.add_argument(
        "--no-kv-events",
        action="store_const",
        const=True,
        help="ignore KV events; treat the blocks of routed prompts as cached for 120 s",
    )
    group.add_argument(
        "--index-groups",
        choices=("all", "first"),
        help="KV cache groups that the router indexes (default: all; first: ignore the others)",
    )
    group.add_argument(
        "--router-temperature",
        type=float,
        metavar="T",
        help="0 (default): choose the lowest cost; above 0: sample, favouring low costs",
    )
    group.add_argument(
        "--router-queue-threshold",
        type=float,
        metavar="X",
        help="queue requests in the router while every worker has more than X steps of prompt tokens pending "
        "(default: no queue)",
    )
    group.add_argument(
        "--router-queue-policy",
        choices=("fcfs", "lcfs", "wspt"),
        help="order of that queue: first come, last come, or least prompt tokens to compute (default: fcfs)",
    )


def router_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given as flags, nested as in a configuration file."""
    given = {name: getattr(args, flag) for flag, name in _SETTINGS.items() if getattr(args, flag) is not None}
    if args.no_kv_events:
        given["use_events"] = False
    flags: dict[str, Any] = {"router": given} if given else {}
    if args.route_rejected:
        flags["route_rejected"] = True
    return flags


def read_seed(given: int | None, policy: str | KvRouting | Router, *, is_used: bool = False) -> int:
    """Check --seed and return it; ConfigError if neither the policy nor another random choice (`is_used`) uses it."""
    from understudy.checks import whole_number
    from understudy.errors import ConfigError
    from understudy.router.kv import KvRouting

    if given is None:
        return 0
    whole_number("--seed", given, 0, 2**64 - 1)
    if not isinstance(policy, KvRouting) and policy not in RANDOM_POLICIES and not is_used:
        name = policy if isinstance(policy, str) else type(policy).__qualname__
        raise ConfigError(
            f"--seed has no effect: routing {name} is not random; leave it out, or route by "
            f"{', '.join(RANDOM_POLICIES)}"
        )
    return given


def build_live_policy(name: Any, settings: Any) -> str | KvRouting | Router:
    """Build the routing policy of a live fleet: a name, kv with `settings`, or `FILE.py:CLASS`.

    ConfigError names the invalid setting.
    """
    from understudy.checks import read_as
    from understudy.errors import ConfigError
    from understudy.router.kv import KvRouting
    from understudy.router.load import load_router
    from understudy.user_code import names_file_and_class

    if not isinstance(name, str):
        raise ConfigError(f"routing must be the name of a policy or FILE.py:CLASS, got {name!r}")
    if not isinstance(settings, dict):
        raise ConfigError(f'router must be a mapping such as {{"temperature": 0.5}}, got {settings!r}')
    if settings and name != "kv":
        verb = "is" if len(settings) == 1 else "are"
        raise ConfigError(f"{', '.join(map(str, settings))} {verb} for --routing kv, not {name}")
    if name == "kv":
        return read_as(KvRouting, settings, "router")
    return load_router(name) if names_file_and_class(name) else name
