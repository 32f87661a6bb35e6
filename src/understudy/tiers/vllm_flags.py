"""Convert vLLM's flags of its native host offload to tier settings."""

from __future__ import annotations

import json
import math
from typing import Any

from understudy.errors import ConfigError
from understudy.plain_numbers import refuse_number

CONNECTOR = "OffloadingConnector"
VLLM_NAMES = ("kv_offloading_size", "kv_offloading_backend", "kv_transfer_config")
"""Names as engine settings; the flags have dashes."""
_SPEC = "CPUOffloadingSpec"
_TRANSFER = ("kv_connector", "kv_role", "kv_connector_extra_config", "engine_id", "kv_buffer_device")
_EXTRA = ("cpu_bytes_to_use", "blocks_per_chunk", "block_size", "eviction_policy", "offload_prompt_only")


def take_vllm_names(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Split engine settings into the other settings and the offload under vLLM's names (None without any)."""
    rest = {name: value for name, value in settings.items() if name not in VLLM_NAMES}
    return rest, offload_settings(*(settings.get(name) for name in VLLM_NAMES))


def offload_settings(
    size_gib: object, backend: object, transfer: object, *, live: bool = False
) -> dict[str, Any] | None:
    """Convert `--kv-offloading-size` (GiB), `--kv-offloading-backend` and `--kv-transfer-config` to settings.

    The result has `tiers` (settings of g2) and `offload`; None if no offload is requested. ConfigError names an
    unknown connector or setting, and the connectors of a `live` server or of a replay.
    """
    given = _read_transfer_config(transfer)
    extra = _read_extra_config(given, live=live)
    if size_gib is None and given.get("kv_connector") is None:
        if extra:
            raise ConfigError(f"--kv-transfer-config: {next(iter(extra))} needs kv_connector: {CONNECTOR}")
        return None  # as in vLLM, which ignores the backend then
    if backend not in (None, "native"):
        raise ConfigError(f"--kv-offloading-backend {backend} is not supported; use native")
    if size_gib is not None:
        if "cpu_bytes_to_use" in extra:
            raise ConfigError(
                "--kv-offloading-size and cpu_bytes_to_use both set the host capacity; give one"
            )
        extra["cpu_bytes_to_use"] = _parse_gib(size_gib)
    if "cpu_bytes_to_use" not in extra:
        raise ConfigError(
            "--kv-transfer-config: kv_connector_extra_config needs cpu_bytes_to_use; give it or --kv-offloading-size"
        )
    tier: dict[str, Any] = {"tier": "g2", "bytes": _whole(extra, "cpu_bytes_to_use")}
    if "eviction_policy" in extra:
        tier["eviction"] = extra["eviction_policy"]
    offload = {"mode": "vllm", **_read_chunk_size(extra)}
    if "offload_prompt_only" in extra:
        if not isinstance(extra["offload_prompt_only"], bool):
            raise ConfigError(
                "--kv-transfer-config: offload_prompt_only must be true or false, got "
                f"{extra['offload_prompt_only']!r}"
            )
        offload["offload_prompt_only"] = extra["offload_prompt_only"]
    return {"tiers": [tier], "offload": offload}


def _parse_gib(size_gib: object) -> int:
    try:
        size = math.nan if isinstance(size_gib, bool) else float(size_gib)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ConfigError(f"--kv-offloading-size {refuse_number(str(size_gib), unit='GIB')}") from None
    if not (math.isfinite(size) and size > 0):
        raise ConfigError(
            f"--kv-offloading-size must be above 0, got {size_gib}; give GiB, such as 64, or leave it out for none"
        )
    return int(size * (1 << 30))


def _read_transfer_config(transfer: object) -> dict[str, Any]:
    if transfer is None:
        return {}
    if isinstance(transfer, str):
        try:
            transfer = json.loads(transfer)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--kv-transfer-config is not JSON: {error}") from error
    if not isinstance(transfer, dict):
        raise ConfigError("--kv-transfer-config must be a JSON object")
    return transfer


def _read_extra_config(transfer: dict[str, Any], *, live: bool) -> dict[str, Any]:
    """Return the settings of vLLM's OffloadingConnector; ConfigError for another connector."""
    connector = transfer.get("kv_connector") or CONNECTOR
    if connector == "NixlConnector":
        raise ConfigError(
            "--kv-transfer-config: NixlConnector joins two servers; replay such a fleet with --prefill-workers and "
            "--decode-workers"
        )
    if connector != CONNECTOR:
        raise ConfigError(
            f"--kv-transfer-config: kv_connector {connector!r} is not supported; use {CONNECTOR}"
            f"{' or NixlConnector' if live else ''}"
        )
    if transfer.get("kv_role", "kv_both") != "kv_both":
        raise ConfigError(
            f"--kv-transfer-config: kv_role must be kv_both for {CONNECTOR}, got {transfer['kv_role']!r}"
        )
    for name in transfer:
        if name not in _TRANSFER:
            raise ConfigError(f"--kv-transfer-config: {name} is not known; known are {', '.join(_TRANSFER)}")
    given = transfer.get("kv_connector_extra_config") or {}
    if not isinstance(given, dict):
        raise ConfigError("--kv-transfer-config: kv_connector_extra_config must be a JSON object")
    extra = dict(given)
    if extra.pop("spec_name", _SPEC) != _SPEC:
        raise ConfigError(f"--kv-transfer-config: spec_name must be {_SPEC}; only host memory is supported")
    if extra.get("store_threshold") is not None and _whole(extra, "store_threshold", least=0) > 1:
        raise ConfigError("--kv-transfer-config: store_threshold is not supported; leave it out")
    extra.pop("store_threshold", None)
    for name in extra:
        if name not in _EXTRA:
            raise ConfigError(
                f"--kv-transfer-config: {name} is not a supported setting of {CONNECTOR}; known are "
                f"{', '.join(_EXTRA)}"
            )
    return extra


def _whole(extra: dict[str, Any], name: str, least: int = 1) -> int:
    value = extra[name]
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and number == int(number) and number >= least):
        raise ConfigError(
            f"--kv-transfer-config: {name} must be a whole number of at least {least}, got {value!r}"
        )
    return int(value)


def _read_chunk_size(extra: dict[str, Any]) -> dict[str, Any]:
    """Return the chunk size in blocks, or in tokens if the connector's `block_size` is given."""
    if "block_size" not in extra:
        return {"blocks_per_chunk": _whole(extra, "blocks_per_chunk") if "blocks_per_chunk" in extra else 1}
    if "blocks_per_chunk" in extra:
        raise ConfigError(
            "--kv-transfer-config: blocks_per_chunk and block_size both set the chunk size; give one"
        )
    return {"chunk_tokens": _whole(extra, "block_size")}
