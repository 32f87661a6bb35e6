"""What lies below the GPU: tiers of KV blocks, and the links over which blocks move."""

from understudy._core import Links, LinkUsage

__all__ = ["LinkUsage", "Links"]
