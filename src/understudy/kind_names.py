"""Kinds of engines by the names that settings and flags give them, and the module that describes each."""

from __future__ import annotations

KIND_MODULES = {
    "vllm": "understudy.engines.kinds.vllm",
    "sglang": "understudy.engines.kinds.sglang",
    "trtllm": "understudy.engines.kinds.trtllm",
}
"""Modules whose `KIND` is an `EngineKind`; the first kind is the default. They are imported when they are needed."""
