"""Embeddable KV block manager: blocks, guards, eviction policies, and the KV of one request."""

from understudy._core import (
    BlockGuard,
    BlockManager,
    BlockStore,
    MutableBlocks,
    PoolConfig,
    PoolMetrics,
    RegisteredBlocks,
    StagedBlocks,
    StepOutcome,
    Tier,
    WeakBlocks,
    lifetime_blocks,
)
from understudy.kv.cache_manager import KvCacheManager
from understudy.kv.layout import KvLayout
from understudy.kv.policy import BUILT_IN_POLICIES, EvictionPolicy
from understudy.kv.request import RequestKv
from understudy.kv.view import KvView, KvViewDesc

__all__ = [
    "BUILT_IN_POLICIES",
    "BlockGuard",
    "BlockManager",
    "BlockStore",
    "EvictionPolicy",
    "KvCacheManager",
    "KvLayout",
    "KvView",
    "KvViewDesc",
    "MutableBlocks",
    "PoolConfig",
    "PoolMetrics",
    "RegisteredBlocks",
    "RequestKv",
    "StagedBlocks",
    "StepOutcome",
    "Tier",
    "WeakBlocks",
    "lifetime_blocks",
]
