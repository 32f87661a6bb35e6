"""Find the deployment and the engine that step times were fitted to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from understudy.engines.engine_config import EngineConfig
    from understudy.timing.deployment import Deployment
    from understudy.timing.fitted_engine import FittedEngine


def fitted_deployment(engine: EngineConfig) -> Deployment | None:
    """Return the deployment that the engine's step times were fitted to, if they were."""
    found: Deployment | None = getattr(engine.timing, "fitted_for", None)
    return found


def find_engine(engine: EngineConfig) -> FittedEngine | None:
    """Return the engine that the step times were fitted to; None for other times and for older files."""
    found: FittedEngine | None = getattr(engine.timing, "fitted_engine", None)
    return found
