"""Checks of engine settings with and without KV cache groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.engines.kv_groups import KvCacheGroup
from understudy.engines.profiles import NEWEST, find_profile
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.engines.vllm_settings import VllmSettings


def check_groups(config: VllmSettings) -> None:
    """Raise ConfigError for groups that the release does not have."""
    if not all(isinstance(group, KvCacheGroup) for group in config.kv_cache_groups):
        raise ConfigError(f"kv_cache_groups must be KvCacheGroup objects, got {config.kv_cache_groups!r}")
    if config.profile is not find_profile(NEWEST):
        raise ConfigError(
            f"kv_cache_groups needs vLLM {NEWEST}, whose rules were recorded; got {config.vllm_version}"
        )
    parts = {
        "speculative_config": config.speculative_config is not None,
        "aic_nextn": config.mocker.aic_nextn is not None,
        "kv_manager=kvbm": config.kv_manager == "kvbm",
        "eviction_policy": config.eviction_policy is not None,
    }
    for part, is_given in parts.items():
        if is_given:
            raise ConfigError(
                f"{part} does not work with several KV cache groups yet; leave it out, or leave out kv_cache_groups; "
                "a model's windows are in one group with --disable-hybrid-kv-cache-manager"
            )


def refuse_without_groups(config: VllmSettings) -> None:
    """Raise ConfigError for settings of groups on an engine that has none."""
    if config.kv_cache_groups:
        return
    given = {
        "prefix_cache_retention_interval": config.prefix_cache_retention_interval != 0,
        "prefix_match_unit": config.prefix_match_unit is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise ConfigError(
                f"{name} needs KV cache groups (--kv-cache-groups, or a model that has several and its --gpu); leave "
                "it out"
            )


def refuse_with_groups(**given: bool) -> None:
    """Raise ConfigError that names the first part of a run that several groups do not support yet."""
    names = {
        "kv_trace": ("a KV trace", "leave out --kv-trace"),
        "record_steps": ("recorded steps", "leave out --record-steps"),
    }
    for part, is_given in given.items():
        if is_given:
            name, remedy = names[part]
            raise ConfigError(f"kv_cache_groups: several groups do not work with {name} yet; {remedy}")
