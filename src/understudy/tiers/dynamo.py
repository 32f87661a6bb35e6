"""Read tier settings under the names of Dynamo's mocker."""

from __future__ import annotations

from typing import Any

from understudy.errors import ConfigError
from understudy.tiers.settings import TiersConfig, check_gbps

_LINKS = {
    "bandwidth_g1_to_g2_gbps": ("g2", "down_gbps"),
    "bandwidth_g2_to_g1_gbps": ("g2", "up_gbps"),
    "bandwidth_g2_to_g3_gbps": ("g3", "backend_down_gbps"),
    "bandwidth_g3_to_g2_gbps": ("g3", "backend_up_gbps"),
    "bandwidth_g2_to_g4_gbps": ("g4", "backend_down_gbps"),
    "bandwidth_g4_to_g2_gbps": ("g4", "backend_up_gbps"),
}
_SWITCHES = {"g2": "num_g2_blocks", "g3": "num_g3_blocks", "g4": "enable_g4_storage"}
_KV_SIZES = ("kv_bytes_per_token", "kv_cache_bytes_per_token")
_HOST = ("num_host_blocks", "d2h_bandwidth_gbps", "h2d_bandwidth_gbps")
DYNAMO_NAMES = (*_SWITCHES.values(), *_LINKS, *_KV_SIZES, "offload_batch_size", "native_host_offload")


def take_dynamo_names(settings: dict[str, Any]) -> tuple[dict[str, Any], TiersConfig]:
    """Split engine settings into the other settings and the tiers under Dynamo's names.

    Dynamo's rules apply: 0 or null blocks mean no tier, null means the default, g4 is unlimited, and all workers share
    the bandwidths of g3 and g4. `native_host_offload` is a write-through g2 with LRU eviction. A bandwidth of 0, and a
    setting of a missing tier, raise ConfigError.
    """
    rest = {name: value for name, value in settings.items() if name not in DYNAMO_NAMES}
    given = {name: settings[name] for name in DYNAMO_NAMES if settings.get(name) is not None}
    sizes = {name: given[name] for name in _KV_SIZES if name in given}
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"{' and '.join(sizes)} are two names of one setting and differ; give one")
    tiers = _read_host_tier(given) if "native_host_offload" in given else _read_tiers(given)
    config: dict[str, Any] = {"tiers": tiers, "offload": {}}
    if sizes:
        config["kv_bytes_per_token"] = next(iter(sizes.values()))
    if "offload_batch_size" in given:
        if not tiers:
            raise ConfigError("offload_batch_size needs a tier to offload to; set num_g2_blocks")
        config["offload"]["offload_batch_size"] = given["offload_batch_size"]
    if tiers:  # the mocker offloads on eviction, except with native_host_offload
        config["offload"]["mode"] = "write_through" if "native_host_offload" in given else "evict"
    return rest, TiersConfig.from_dict(config)


def _read_tiers(given: dict[str, Any]) -> list[dict[str, Any]]:
    tiers: dict[str, dict[str, Any]] = {}
    for tier, switch in _SWITCHES.items():
        value = given.get(switch)
        if not value:
            continue
        if tier != "g2" and "g2" not in tiers:
            raise ConfigError(f"{switch} needs num_g2_blocks, because blocks pass through host memory")
        tiers[tier] = {"tier": tier, "blocks": "unlimited" if tier == "g4" else value, "link": {}}
    for name, (tier, field) in _LINKS.items():
        if name not in given:
            continue
        if tier not in tiers:
            raise ConfigError(f"{name} needs {_SWITCHES[tier]}; set it, or leave {name} out")
        tiers[tier]["link"][field] = _check_bandwidth(name, given[name])
    return list(tiers.values())


def _read_host_tier(given: dict[str, Any]) -> list[dict[str, Any]]:
    host = given["native_host_offload"]
    others = [name for name in (*_SWITCHES.values(), *_LINKS) if name in given]
    if others:
        raise ConfigError(f"native_host_offload and {others[0]} both define tiers; give one")
    if not isinstance(host, dict):
        raise ConfigError(f"native_host_offload must be a mapping, got {host!r}")
    for name in host:
        if name not in _HOST:
            raise ConfigError(f"native_host_offload.{name} is not known; known are {', '.join(_HOST)}")
    link = {
        field: _check_bandwidth(f"native_host_offload.{name}", host[name])
        for name, field in (("d2h_bandwidth_gbps", "down_gbps"), ("h2d_bandwidth_gbps", "up_gbps"))
        if host.get(name) is not None
    }
    if host.get("num_host_blocks") is None:
        raise ConfigError(
            "native_host_offload.num_host_blocks is missing; give the capacity of the host in blocks"
        )
    return [{"tier": "g2", "blocks": host["num_host_blocks"], "eviction": "lru", "link": link}]


def _check_bandwidth(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    return check_gbps(name, value)
