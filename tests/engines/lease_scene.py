"""Leases of the native KV manager, with blocks of four tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engines.kv_building import manager as any_manager
from model.kv_manager import Told, told
from understudy.tokens import Identities

if TYPE_CHECKING:
    from understudy._core import BlockLease
    from understudy.kv.kv_manager import KvManager


BLOCK = 4


def manager(num_gpu_blocks: int = 8, **settings: Any) -> KvManager:
    return any_manager(num_gpu_blocks, BLOCK, backend="native", **settings)


def prompt(blocks: int, seed: int = 1) -> Identities:
    return Identities.from_local_hashes([1000 * seed + i for i in range(blocks)])


def hashes(identities: Identities) -> list[int]:
    return [block.sequence_hash for block in identities]


def serve(kv: KvManager, identities: Identities, reuse: int = 0) -> BlockLease:
    """Allocate and compute a whole prompt, of which the first `reuse` blocks are cached."""
    lease = kv.lease()
    tokens = len(identities) * BLOCK
    lease.allocate(tokens, prefix=identities[:reuse])
    lease.finalize(tokens, identities)
    return lease


def cache(kv: KvManager, identities: Identities, reuse: int = 0) -> list[int]:
    """Serve and release; where the blocks are."""
    lease = serve(kv, identities, reuse)
    blocks: list[int] = lease.block_ids.tolist()
    lease.release()
    return blocks


def both(kv: KvManager) -> tuple[list[Told], list[Told]]:
    """(raw, consolidated)."""
    events = kv.drain_events()
    return told(events.raw), told(events.consolidated)


def stored(identities: Identities, parent: int | None = None) -> Told:
    return ("stored", parent, hashes(identities))


def removed(*numbers: int) -> Told:
    return ("removed", None, list(numbers))
