"""Flags of a live fleet with prefill and decode workers."""

from __future__ import annotations

import json
from typing import Any

from understudy.checks import whole_number
from understudy.cli.router_flags import build_live_policy
from understudy.engines.kinds.registry import find_kind
from understudy.errors import ConfigError
from understudy.kind_names import KIND_MODULES
from understudy.run.disaggregation import Disaggregation
from understudy.server.flags import Flag
from understudy.server.flags.grammar import read_command_line
from understudy.server.flags.ours import all_flags, find_flags_version
from understudy.server.flags.serving import find_engine_name
from understudy.server.handoff.settings import CONNECTOR

FLAGS = (
    Flag(["--disaggregate", "--no-disaggregate"], "bool"),
    Flag(["--prefill-workers"], "int"),
    Flag(["--decode-workers"], "int"),
    Flag(["--disaggregation"], "str"),
    Flag(["--disaggregation-order"], "str", choices=["prefill_first", "decode_first"]),
    Flag(["--decode-routing"], "str"),
    Flag(["--kv-lease-duration"], "int"),
    Flag(["--kv-load-failure-policy"], "str", choices=["fail", "recompute"]),
)
_ASKS = ("--disaggregate", "--prefill-workers", "--decode-workers")
_NEEDS = tuple(flag.name for flag in FLAGS[3:])


def has_stages(arguments: list[str], more: tuple[Flag, ...]) -> bool:
    """Return True if a command line asks for prefill and decode workers. ConfigError names what contradicts that."""
    name = find_engine_name(arguments)
    if name in KIND_MODULES and not (kind := find_kind(name)).pulls_blocks:
        words = {word.partition("=")[0] for word in arguments}
        if not words.isdisjoint(_ASKS):
            raise ConfigError(
                f"--disaggregate: live fleets do not have hand-offs of {kind.title}'s workers; use vLLM's engine"
            )
        return False
    named = {name: flag for flag in more for name in flag.names}
    values = read_command_line(arguments, {**all_flags(find_flags_version(arguments, named)), **named}).values
    numbers = [name for name in ("prefill-workers", "decode-workers") if values.get(name) is not None]
    if values.get("disaggregate") is False and numbers:
        raise ConfigError(f"--no-disaggregate contradicts --{numbers[0]}; leave one of them out")
    if not (values.get("disaggregate") or numbers):
        return False
    if values.get("kv-transfer-config") is not None:
        raise ConfigError(
            "--kv-transfer-config and --disaggregate both give workers a role; use --kv-lease-duration and "
            "--kv-load-failure-policy instead"
        )
    if values.get("tiers") is not None or values.get("kv-offloading-size") is not None:
        raise ConfigError(
            "--disaggregate: live prefill and decode workers have neither tiers nor an offload yet; leave out --tiers "
            "and --kv-offloading-size"
        )
    return True


def transfer_flag(role: str, values: dict[str, Any]) -> list[str]:
    """Return the flag that gives workers a role, kv_producer or kv_consumer."""
    config = {
        "kv_connector": CONNECTOR,
        "kv_role": role,
        "kv_load_failure_policy": values.get("kv-load-failure-policy") or "fail",
        "kv_connector_extra_config": {"kv_lease_duration": values.get("kv-lease-duration", 30)},
    }
    return ["--kv-transfer-config", json.dumps(config)]


def read_stages(values: dict[str, Any]) -> Disaggregation:
    """Read the numbers of workers, the rule and the routing. ConfigError names an invalid flag."""
    if values.get("processes", 1) != 1:
        raise ConfigError("--processes does not work with prefill and decode workers yet; leave it out")
    prefill, decode = values.get("prefill-workers"), values.get("decode-workers")
    if prefill is None and decode is None:
        workers = whole_number("--workers", values.get("workers", 4), 2)
        prefill, decode = workers // 2, workers - workers // 2
    elif values.get("workers") is not None:
        raise ConfigError("--workers and --prefill-workers both set the number of workers; give one")
    return Disaggregation(
        prefill_workers=prefill,
        decode_workers=decode,
        rule=values.get("disaggregation") or "always",
        order=values.get("disaggregation-order") or "prefill_first",
        decode_routing=build_live_policy(values.get("decode-routing") or Disaggregation().decode_routing, {}),
    )


def refuse_without_stages(values: dict[str, Any]) -> None:
    """Raise ConfigError for a flag that needs prefill and decode workers."""
    for name in _NEEDS:
        if values.get(name) is not None:
            raise ConfigError(f"--{name} is for prefill and decode workers; give --disaggregate too")
