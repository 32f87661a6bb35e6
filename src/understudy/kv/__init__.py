"""The block manager for people who embed it: blocks, guards, policies, and the KV of one request."""

from understudy._core import (
    BlockGuard,
    BlockManager,
    BlockStore,
    MutableBlocks,
    PoolConfig,
    PoolMetrics,
    RegisteredBlocks,
    StagedBlocks,
    Tier,
    WeakBlocks,
)
from understudy.kv.policy import EvictionPolicy

__all__ = [
    "BlockGuard",
    "BlockManager",
    "BlockStore",
    "EvictionPolicy",
    "MutableBlocks",
    "PoolConfig",
    "PoolMetrics",
    "RegisteredBlocks",
    "StagedBlocks",
    "Tier",
    "WeakBlocks",
]
