"""Settings of tiers in layers (a file, flags, assignments), each of which overrides the previous one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError
from understudy.tiers.model_shape import ModelShape

if TYPE_CHECKING:
    from understudy.tiers.settings import TiersConfig

TIER_FIELDS = ("tiers", "offload", "kv_bytes_per_token", "model", "kv_dtype")
_KV_SIZES = (("kv_bytes_per_token",), ("model", "kv_dtype"))


def index_tiers_by_name(layer: dict[str, Any]) -> dict[str, Any]:
    """Convert a layer's list of tiers to settings by name, so that a later layer can replace single settings."""
    tiers = layer.get("tiers")
    if tiers is None:
        return {name: value for name, value in layer.items() if name != "tiers"}
    if isinstance(tiers, list):
        named: dict[str, Any] = {}
        for at, tier in enumerate(tiers):
            if not isinstance(tier, dict) or not isinstance(tier.get("tier"), str):
                raise ConfigError(f"tiers[{at}] must be settings with tier (g2, g3 or g4); got {tier!r}")
            name = tier["tier"]
            if name in named:
                raise ConfigError(f"tiers: {name} is given more than once")
            named[name] = tier
        return {**layer, "tiers": named}
    if not isinstance(tiers, dict):
        raise ConfigError(f"tiers must be a list of tiers, got {tiers!r}")
    for name, tier in tiers.items():
        if not isinstance(tier, dict) or tier.get("tier", name) != name:
            raise ConfigError(f"tiers.{name} must be settings of {name}, got {tier!r}")
    return {**layer, "tiers": {name: {"tier": name, **tier} for name, tier in tiers.items()}}


def drop_superseded(base: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    """Remove settings from `base` that `layer` replaces: all tiers, a capacity, KV bytes per token."""
    base = dict(base)
    if layer.get("tiers", ()) is None or isinstance(layer.get("tiers"), list):
        base.pop("tiers", None)
    elif isinstance(base.get("tiers"), dict) and isinstance(layer.get("tiers"), dict):
        base["tiers"] = {
            name: _drop_capacity(tier, layer["tiers"].get(name)) for name, tier in base["tiers"].items()
        }
    for ours, others in (_KV_SIZES, _KV_SIZES[::-1]):
        if any(layer.get(name) is not None for name in ours):
            for other in others:
                base.pop(other, None)
    return base


def reject_unused_kv_size(
    tiers: TiersConfig, engine: dict[str, Any], *, removed_on_purpose: bool, or_gpu: bool = True
) -> None:
    """Raise ConfigError for a KV size (bytes per token, model) that a run without tiers or GPU does not use.

    Exception: the tiers were removed on purpose (`tiers: []`, the mocker's `num_g2_blocks: 0`); then only an unknown
    model is an error. `engine` has the engine's settings as given.
    """
    if removed_on_purpose or engine.keys() & {"num_g2_blocks", "native_host_offload"}:
        if tiers.model is not None:
            ModelShape.find(tiers.model).bytes_per_token(kv_dtype=tiers.kv_dtype)
        return
    given = [name for names in _KV_SIZES for name in names if getattr(tiers, name) is not None]
    if not given:
        return
    theirs = engine.get("kv_cache_bytes_per_token") is not None
    name = "kv_cache_bytes_per_token" if theirs else given[0]
    if not or_gpu:
        raise ConfigError(f"{name} needs a tier: give tiers")
    if tiers.model is None:  # a GPU needs a model, not KV bytes per token
        raise ConfigError(f"{name} needs a tier: give tiers (--g2 or --g2-bytes)")
    raise ConfigError(
        f"{name} needs a GPU or a tier: give gpu (--gpu, or --gpu-memory) or tiers (--g2 or --g2-bytes)"
    )


def _drop_capacity(tier: dict[str, Any], over: Any) -> dict[str, Any]:
    if not isinstance(over, dict) or not {"blocks", "bytes"} & over.keys():
        return tier
    return {name: value for name, value in tier.items() if name not in ("blocks", "bytes")}
