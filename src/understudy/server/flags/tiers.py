"""What stands below the device of `understudy serve`: `--tiers`, and vLLM's flags of its offload."""

from __future__ import annotations

import re
from typing import Any

from understudy.errors import ConfigError
from understudy.tiers.plan import TierPlan
from understudy.tiers.settings import TiersConfig


def read_tiers(value: Any) -> TiersConfig:
    """What --tiers says. ConfigError names the key at fault."""
    if not isinstance(value, dict):
        raise ConfigError(
            '--tiers must be a JSON object, such as {"tiers": [{"tier": "g2", "blocks": 4096}], …}'
        )
    try:
        return TiersConfig.from_dict(value)
    except ConfigError as error:
        raise _of_json(error) from None


def check_tiers(tiers: TiersConfig, given: dict[str, Any], block_size: int) -> None:
    """What can be known of them before a server starts, in the words of --tiers."""
    from understudy.run.layers import reject_unused_kv_size

    try:
        if not tiers.tiers:
            reject_unused_kv_size(tiers, {}, removed_on_purpose="tiers" in given, or_gpu=False)
        TierPlan.of(tiers, block_size)
    except ConfigError as error:
        raise _of_json(error) from None


def _of_json(error: ConfigError) -> ConfigError:
    """The error with the keys of the JSON alone: the flags beside them are those of a replay."""
    message = re.sub(r" \(--[^)]*\)", "", str(error)).removeprefix("tiers: ")
    return ConfigError(f"--tiers: {message}")


def offload_below(below: dict[str, Any], given: TiersConfig | None, model: str) -> TiersConfig:
    """What stands below by vLLM's flags, or by a setting of the engine. What a token weighs stands in --tiers, or the
    model says so.
    """
    if given is not None and given.tiers:
        raise ConfigError("--kv-offloading-size and --tiers both say what is below the device; give one")
    if below.get("kv_bytes_per_token") is not None:
        return TiersConfig.from_dict(below)
    weight = {"model": model}
    if given is not None:
        weight = {
            name: value
            for name in ("kv_bytes_per_token", "model", "kv_dtype")
            if (value := getattr(given, name)) is not None
        }
    return TiersConfig.from_dict({**below, **weight})
