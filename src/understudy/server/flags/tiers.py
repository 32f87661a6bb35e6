"""Tier flags of `understudy serve`: `--tiers`, and vLLM's offload flags."""

from __future__ import annotations

import re
from typing import Any

from understudy.errors import ConfigError
from understudy.tiers.plan import TierPlan
from understudy.tiers.settings import TiersConfig


def read_tiers(value: Any) -> TiersConfig:
    """Read --tiers. ConfigError names the invalid key."""
    if not isinstance(value, dict):
        raise ConfigError(
            '--tiers must be a JSON object, such as {"tiers": [{"tier": "g2", "blocks": 4096}], …}'
        )
    try:
        return TiersConfig.from_dict(value)
    except ConfigError as error:
        raise _of_json(error) from None


def check_tiers(tiers: TiersConfig, given: dict[str, Any], block_size: int) -> None:
    """Check tiers before a server starts. ConfigError names the keys of --tiers."""
    from understudy.run.layers import reject_unused_kv_size

    try:
        if not tiers.tiers:
            reject_unused_kv_size(tiers, {}, removed_on_purpose="tiers" in given, or_gpu=False)
        TierPlan.of(tiers, block_size)
    except ConfigError as error:
        raise _of_json(error) from None


def _of_json(error: ConfigError) -> ConfigError:
    """Rewrite an error to name JSON keys only, without the flags of a replay."""
    message = re.sub(r" \(--[^)]*\)", "", str(error)).removeprefix("tiers: ")
    return ConfigError(f"--tiers: {message}")


def offload_below(below: dict[str, Any], given: TiersConfig | None, model: str) -> TiersConfig:
    """Build the tiers of vLLM's offload flags. KV bytes per token come from --tiers or from the model."""
    if given is not None and given.tiers:
        raise ConfigError("--kv-offloading-size and --tiers both say what is below the device; give one")
    if below.get("kv_bytes_per_token") is not None:
        return TiersConfig.from_dict(below)
    kv_size = {"model": model}
    if given is not None:
        kv_size = {
            name: value
            for name in ("kv_bytes_per_token", "model", "kv_dtype")
            if (value := getattr(given, name)) is not None
        }
    return TiersConfig.from_dict({**below, **kv_size})
