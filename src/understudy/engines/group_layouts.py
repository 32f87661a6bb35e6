"""Sizes that follow from KV cache groups, for the routers of engines that have several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy._core import GroupLayout
from understudy.checks import read_as
from understudy.engines.kv_groups import KvCacheGroup
from understudy.engines.vllm_config import VllmConfig
from understudy.events.group_reader import LEARNABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.engines.engine_config import EngineConfig
    from understudy.events.group_reader import GroupLabel


def layout_of_engine(config: EngineConfig) -> GroupLayout | None:
    """Return the sizes of an engine's KV cache groups; None: it has one."""
    if not isinstance(config, VllmConfig) or not config.kv_cache_groups:
        return None
    return GroupLayout(config.native())


def layout_of_settings(groups: list[Any], prefix_match_unit: int | None) -> GroupLayout:
    """Return the sizes of groups given as in a configuration file. ConfigError names the wrong field."""
    given = {"kv_cache_groups": groups, "prefix_match_unit": prefix_match_unit}
    return GroupLayout(read_as(VllmConfig, given, "engine").native())


def layout_of_labels(labels: Sequence[GroupLabel]) -> GroupLayout:
    """Return the sizes of groups as their KV events describe them."""
    groups = tuple(
        KvCacheGroup(kind=LEARNABLE[label.kind], block_size=label.block_size, window=label.window)  # type: ignore[arg-type]
        for label in labels
    )
    return GroupLayout(VllmConfig(kv_cache_groups=groups).native())
