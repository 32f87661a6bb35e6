"""Find the kind of an engine: by its name, its settings, or settings that were saved."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.kind_names import KIND_MODULES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from understudy.engines.engine_config import EngineConfig
    from understudy.engines.kinds.kind import EngineKind

DEFAULT_ENGINE: EngineConfig = VllmConfig()


def list_kinds() -> list[EngineKind]:
    """Return all kinds."""
    return [find_kind(name) for name in KIND_MODULES]


def default_kind() -> EngineKind:
    """Return the kind of engines that name none."""
    return kind_of(DEFAULT_ENGINE)


def find_kind(name: str) -> EngineKind:
    """Return the kind of a name. ConfigError for an unknown one."""
    if name not in KIND_MODULES:
        raise ConfigError(f"engine must be {' or '.join(KIND_MODULES)}, got {name!r}")
    kind: EngineKind = import_module(KIND_MODULES[name]).KIND
    return kind


def kind_of(engine: EngineConfig) -> EngineKind:
    """Return the kind of an engine. ConfigError for a class of settings that no kind has."""
    for kind in list_kinds():
        if isinstance(engine, kind.config_class):
            return kind
    raise ConfigError(
        f"engine: {type(engine).__name__} belongs to no kind of engine; add its kind to understudy.kind_names"
    )


def kind_of_saved(settings: Mapping[str, Any]) -> EngineKind:
    """Return the kind of an engine from its settings as JSON values; the default kind for settings of none."""
    return next((kind for kind in list_kinds() if kind.version_setting in settings), default_kind())


def read_engine(settings: dict[str, Any]) -> EngineConfig:
    """Read the settings of an engine by name; `engine_type` names its kind (default: vllm)."""
    kind = settings.get("engine_type")
    name = kind.lower() if isinstance(kind, str) else ""
    found = find_kind(name) if name in KIND_MODULES else default_kind()  # which refuses other names
    return found.config_class.from_dict(settings)
