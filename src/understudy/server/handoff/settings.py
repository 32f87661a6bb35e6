"""Settings of a live server that hands KV blocks to others, or reads those of others."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Literal

from understudy._core import VllmTransfer
from understudy.checks import port_number, whole_number
from understudy.engines.kinds.registry import kind_of
from understudy.errors import ConfigError
from understudy.server.handoff.links import LINK_FLAGS, PeerLinks, read_links

if TYPE_CHECKING:
    from understudy.engines.engine_config import EngineConfig
    from understudy.tiers.settings import TiersConfig

CONNECTOR = "NixlConnector"
_ROLES = ("kv_producer", "kv_consumer", "kv_both")
_FIELDS = (
    *("kv_connector", "kv_role", "engine_id", "kv_load_failure_policy", "kv_buffer_device"),
    "kv_connector_extra_config",
)
_EXTRA = ("kv_lease_duration", "backends")
FLAGS = (*LINK_FLAGS, "kv-side-channel-host", "kv-side-channel-port")
"""Our flags, which need the connector."""


class HandOffSettings(PeerLinks, frozen=True, kw_only=True):
    """How a server takes part in hand-offs."""

    role: Literal["kv_producer", "kv_consumer", "kv_both"]
    engine_id: str | None = None
    """None: one is drawn at start."""
    recomputes: bool = False
    """A prompt whose read failed is computed here; else its request fails."""
    lease_s: int = 30
    """How long blocks are kept that no decode worker reads."""
    host: str = "127.0.0.1"
    """Address of the side channel, on which decode servers reach a prefill server."""
    port: int = 5600

    @property
    def stage(self) -> str:
        """Part of a request that the server serves: prefill, decode or both."""
        return {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}[self.role]

    @property
    def produces(self) -> bool:
        """True when the server keeps blocks for others."""
        return self.role != "kv_consumer"

    @property
    def consumes(self) -> bool:
        """True when the server reads blocks of others."""
        return self.role != "kv_producer"

    def transfer(self) -> VllmTransfer:
        """Return the engine's form of these settings."""
        return VllmTransfer(
            produces=self.produces, consumes=self.consumes, recomputes=self.recomputes, lease_s=self.lease_s
        )


def names_connector(transfer: object) -> bool:
    """Return True if a `--kv-transfer-config` chooses the NixlConnector."""
    return isinstance(transfer, dict | str) and _read(transfer).get("kv_connector") == CONNECTOR


def read_handoff(values: dict[str, Any], model: str) -> HandOffSettings | None:
    """Read the flags of hand-offs; None without the connector. ConfigError names an invalid one."""
    transfer = values.get("kv-transfer-config")
    if not names_connector(transfer):
        for name in FLAGS:
            if values.get(name) is not None:
                raise ConfigError(
                    f"--{name} is for hand-offs; give --kv-transfer-config with kv_connector {CONNECTOR} too"
                )
        return None
    given = _read(transfer)
    _check_names("--kv-transfer-config", given, _FIELDS)
    role = given.get("kv_role")
    if role not in _ROLES:
        raise ConfigError(f"--kv-transfer-config: kv_role must be {', '.join(_ROLES)}, got {role!r}")
    policy = given.get("kv_load_failure_policy", "fail")
    if policy not in ("fail", "recompute"):
        raise ConfigError(
            f"--kv-transfer-config: kv_load_failure_policy must be fail or recompute, got {policy!r}"
        )
    if given.get("kv_buffer_device", "cuda") != "cuda":
        raise ConfigError(
            "--kv-transfer-config: kv_buffer_device must be cuda; host buffers are not supported"
        )
    extra = given.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        raise ConfigError("--kv-transfer-config: kv_connector_extra_config must be a JSON object")
    _check_names("--kv-transfer-config: kv_connector_extra_config", extra, _EXTRA)
    lease_s = extra.get("kv_lease_duration", 30)
    lease_s = whole_number("--kv-transfer-config: kv_lease_duration", lease_s, 1, 1_000_000)
    engine_id = given.get("engine_id")
    if engine_id is not None and not (isinstance(engine_id, str) and 0 < len(engine_id) <= 1024):
        raise ConfigError(f"--kv-transfer-config: engine_id must be a text, got {engine_id!r}")
    return HandOffSettings(
        role=role,
        engine_id=engine_id,
        recomputes=policy == "recompute",
        lease_s=lease_s,
        host=_side_channel_host(values),
        port=port_number("--kv-side-channel-port", _side_channel_port(values)),
        **read_links(values, model),
    )


def check_handoff(engine: EngineConfig, tiers: TiersConfig | None, data_parallel_size: int) -> None:
    """Raise ConfigError for an engine that cannot take part in hand-offs."""
    if not kind_of(engine).pulls_blocks or engine.profile.name != "v0.33":
        raise ConfigError(
            f"--kv-transfer-config: {CONNECTOR} is known of vLLM 0.33 only; use --vllm-version 0.33"
        )
    unknown = {
        "tiers or an offload": tiers is not None and bool(tiers.tiers),
        "several KV cache groups": bool(engine.kv_cache_groups),
        "--data-parallel-size": data_parallel_size > 1,
    }
    for name, given in unknown.items():
        if given:
            raise ConfigError(
                f"--kv-transfer-config: {CONNECTOR} does not work with {name} yet; leave it out"
            )


def _side_channel_host(values: dict[str, Any]) -> str:
    host = values.get("kv-side-channel-host") or os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    return str(host)


def _side_channel_port(values: dict[str, Any]) -> int:
    port = values.get("kv-side-channel-port")
    if port is None:
        named = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
        if not named.isdigit():
            raise ConfigError(f"VLLM_NIXL_SIDE_CHANNEL_PORT must be a port, got {named!r}")
        port = int(named)
    return int(port)


def _check_names(where: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{where}: {name} is not supported with {CONNECTOR}; known are {', '.join(known)}"
            )


def _read(transfer: object) -> dict[str, Any]:
    if isinstance(transfer, str):
        try:
            transfer = json.loads(transfer)
        except (ValueError, RecursionError):
            return {}  # the reader of the offload reports it
    return transfer if isinstance(transfer, dict) else {}
