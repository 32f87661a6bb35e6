"""An LLM-serving fleet without its GPUs: engines simulated down to the KV-cache block."""

from __future__ import annotations

__version__ = "0.1.0"
