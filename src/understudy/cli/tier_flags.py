"""Tier flags of `understudy replay`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError
from understudy.plain_numbers import refuse_number

if TYPE_CHECKING:
    import argparse

EXAMPLES = """\
  understudy replay trace.jsonl --g2 65536 --model Llama-3.1-8B --compare-without-tiers
  understudy replay trace.jsonl --g2-bytes 512GiB --g2-bandwidth-gbps 25 --kv-bytes-per-token 131072
  understudy replay trace.jsonl --kv-offloading-size 64 --model Llama-3.1-8B       vLLM's own offload, 64 GiB
  understudy replay trace.jsonl --g2-bytes 64GB --g3-bytes 4TB --g3-bandwidth-gbps 7 --model ./config.json
"""

_PLACE = {
    "g2": "host memory of each worker",
    "g3": "disk shared by all workers",
    "g4": "object store shared by all workers",
}
_DEFAULT_GBPS = {"g2": 14, "g3": 7, "g4": 4}
_OFFLOAD = {"--offload-mode": ("mode", str), "--offload-batch-size": ("offload_batch_size", int)}
_HOST = ("--g2", "--g2-bytes", "--kv-offloading-size")
"""Flags of the host's capacity."""
_NOTHING = re.compile(r"none|0+(\.0*)?\s*[A-Za-z]*")
_KV_SIZE = {"--kv-bytes-per-token": int, "--model": str, "--kv-dtype": str}


def add_tier_flags(verb: argparse.ArgumentParser) -> None:
    """Add the tier flags to a verb, in one group."""
    group = verb.add_argument_group("KV tiers below the GPU (any setting: --set tiers.g2.NAME=VALUE)")
    for tier, place in _PLACE.items():
        blocks = "blocks, unlimited, or 0 for no tiers" if tier == "g2" else "blocks, or unlimited"
        group.add_argument(f"--{tier}", metavar="BLOCKS", help=f"capacity of {place}: {blocks}")
        group.add_argument(
            f"--{tier}-bytes", metavar="SIZE", help=f"capacity of {place} in bytes, such as 512GiB"
        )
        group.add_argument(
            f"--{tier}-bandwidth-gbps",
            metavar="X",
            help=f"bandwidth of {tier} in each direction, GB/s, or inf (default: {_DEFAULT_GBPS[tier]})",
        )
        if tier == "g2":
            group.add_argument("--g2-d2h-gbps", metavar="X", help="bandwidth from GPU to host only, GB/s")
            group.add_argument("--g2-h2d-gbps", metavar="X", help="bandwidth from host to GPU only, GB/s")
        group.add_argument(
            f"--{tier}-latency-ms", metavar="MS", help=f"latency added to each {tier} transfer (default: 0)"
        )
        group.add_argument(
            f"--{tier}-eviction", metavar="NAME", help=f"eviction policy of {tier} (default: lru)"
        )
    group.add_argument(
        "--offload-mode",
        metavar="NAME",
        help="when blocks are offloaded: write_through (default), evict, or vllm (vLLM's rules)",
    )
    group.add_argument(
        "--kv-offloading-size", metavar="GIB", help="vLLM's flag: host memory of its native offload"
    )
    group.add_argument("--kv-offloading-backend", metavar="NAME", help="vLLM's flag: native (default)")
    group.add_argument(
        "--kv-transfer-config", metavar="JSON", help="vLLM's flag, with its OffloadingConnector"
    )
    group.add_argument("--offload-batch-size", metavar="N", help="blocks per offload copy (default: 32)")
    group.add_argument("--kv-bytes-per-token", metavar="N", help="KV bytes per token")
    group.add_argument(
        "--compare-without-tiers",
        action="store_true",
        help="also replay without tiers, and show the difference",
    )


def tier_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given as flags. ConfigError names flags that contradict or lack a value."""
    _reject_both(args, "--kv-bytes-per-token", "--model", "both set the KV bytes per token")
    _reject_both(args, "--kv-bytes-per-token", "--kv-dtype", "both set the KV bytes per token")
    settings: dict[str, Any] = {}
    has_no_host = _has_no_host(args)
    tiers = {tier: found for tier in _PLACE if (found := _read_tier(args, tier))}
    native = _read_vllm_offload(args)
    if native is not None:
        (host,) = native["tiers"]
        tiers["g2"] = {
            **tiers.get("g2", {}),
            **{name: value for name, value in host.items() if name != "tier"},
        }
    if has_no_host:  # a list replaces all tiers of --config
        settings["tiers"] = [{"tier": tier, **given} for tier, given in tiers.items()]
    elif tiers:
        settings["tiers"] = tiers
    offload = {
        name: _parse_number(flag, value, kind)
        for flag, (name, kind) in _OFFLOAD.items()
        if (value := _value(args, flag)) is not None and not has_no_host
    }
    if native is not None:
        offload |= native["offload"]
    if offload:
        settings["offload"] = offload
    for flag, kind in _KV_SIZE.items():
        if (value := _value(args, flag)) is not None:
            settings[_field(flag)] = _parse_number(flag, value, kind)
    return settings


def _read_vllm_offload(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the settings that vLLM's own flags give; None without them."""
    from understudy.tiers.vllm_flags import offload_settings

    for flag in ("--kv-offloading-size", "--kv-transfer-config"):
        for other in ("--g2", "--g2-bytes"):
            _reject_both(args, flag, other, "both set the host capacity")
        _reject_both(args, flag, "--offload-mode", "both set the offload rules")
    if args.kv_offloading_backend is not None and args.kv_offloading_size is args.kv_transfer_config is None:
        raise ConfigError("--kv-offloading-backend needs --kv-offloading-size; give both")
    return offload_settings(
        None if _has_no_host(args) else args.kv_offloading_size,
        args.kv_offloading_backend,
        args.kv_transfer_config,
    )


def reject_unused_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for offload flags in a run without tiers."""
    for flag in ("--compare-without-tiers", *(() if _has_no_host(args) else _OFFLOAD)):
        if _value(args, flag):
            raise ConfigError(f"{flag} needs a tier; give --g2 or --g2-bytes")


def _has_no_host(args: argparse.Namespace) -> bool:
    """Whether a capacity of the host is 0 or none, so that its other flags have no effect."""
    return any(_NOTHING.fullmatch(_value(args, flag) or "") for flag in _HOST)


def _read_tier(args: argparse.Namespace, tier: str) -> dict[str, Any]:
    _reject_both(args, f"--{tier}", f"--{tier}-bytes", "both set the capacity")
    if tier == "g2" and _has_no_host(args):
        return {}
    settings: dict[str, Any] = {}
    if (blocks := _value(args, f"--{tier}")) is not None:
        settings["blocks"] = blocks if blocks == "unlimited" else _parse_number(f"--{tier}", blocks, int)
    if (size := _value(args, f"--{tier}-bytes")) is not None:
        settings["bytes"] = size
    if (latency := _value(args, f"--{tier}-latency-ms")) is not None:
        settings["latency_ms"] = _parse_number(f"--{tier}-latency-ms", latency, float)
    if (eviction := _value(args, f"--{tier}-eviction")) is not None:
        settings["eviction"] = eviction
    if link := _read_link(args, tier):
        settings["link"] = link
    return settings


def _read_link(args: argparse.Namespace, tier: str) -> dict[str, float]:
    both = f"--{tier}-bandwidth-gbps"
    down, up = ("down_gbps", "up_gbps") if tier == "g2" else ("backend_down_gbps", "backend_up_gbps")
    fields: dict[str, tuple[str, ...]] = {both: (down, up)}
    if tier == "g2":
        for flag, field in (("--g2-d2h-gbps", down), ("--g2-h2d-gbps", up)):
            _reject_both(args, both, flag, "both set a bandwidth")
            fields[flag] = (field,)
    return {
        field: _parse_gbps(flag, value)
        for flag, named in fields.items()
        if (value := _value(args, flag)) is not None
        for field in named
    }


def _field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _value(args: argparse.Namespace, flag: str) -> Any:
    return getattr(args, _field(flag))


def _reject_both(args: argparse.Namespace, one: str, other: str, why: str) -> None:
    if _value(args, one) is not None and _value(args, other) is not None:
        raise ConfigError(f"{one} and {other} {why}; give one")


def _parse_number(flag: str, value: str, kind: type) -> Any:
    try:
        return kind(value)
    except ValueError:
        unit = "MS" if flag.endswith("-ms") else None
        raise ConfigError(f"{flag} {refuse_number(value, whole=kind is int, unit=unit)}") from None


def _parse_gbps(flag: str, value: str) -> float:
    from understudy.tiers.settings import check_gbps

    return check_gbps(flag, _parse_number(flag, value, float))
