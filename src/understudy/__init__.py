"""An LLM-serving fleet without its GPUs: engines simulated down to the KV-cache block."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from understudy.api import replay as replay

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Importing the package costs next to nothing; what a script uses is loaded when it is used.
    if name == "replay":
        from understudy.api import replay

        return replay
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
