"""Find the architecture of a model by its name or its `config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from understudy.timing.config_reader import read_architecture
from understudy.timing.known_models import known_model

if TYPE_CHECKING:
    from understudy.timing.architecture import Architecture


def find_architecture(model: str) -> Architecture:
    """Find a model by name, or read the `config.json` at a path or in a folder.

    ConfigError names an unknown model, a missing key, or an unsupported architecture.
    """
    path = Path(model)
    if path.is_dir():
        return read_architecture(path / "config.json")
    return read_architecture(path) if path.suffix == ".json" else known_model(model)
