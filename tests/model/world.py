"""A small world of blocks: trees with branches, and hashes whose lineage fragments collide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.tokens import Identities

if TYPE_CHECKING:
    from collections.abc import Sequence


def chain(*local_hashes: int, parent: Identities | None = None) -> Identities:
    return Identities.from_local_hashes(local_hashes, parent=parent)


def world(scale: int = 1) -> list[Identities]:
    """Chains from their roots. The same blocks occur in several of them."""
    chains = []
    for tree in range(scale):
        base = 1000 * (tree + 1)
        trunk = chain(*range(base + 1, base + 6))
        branch = trunk[:2] + chain(base + 11, base + 12, base + 13, parent=trunk[:2])
        root = int(trunk[0].sequence_hash)
        second = int(trunk[1].sequence_hash)
        # The 54 low bits of the trunk's second block, and its full hash behind another root.
        collision = trunk[:1] + Identities.from_sequence_hashes(
            [second ^ (1 << 60), base + 21], parent_hash=root, start_position=1
        )
        other_root = chain(base + 31)
        impostor = other_root + Identities.from_sequence_hashes(
            [second, base + 32], parent_hash=int(other_root[0].sequence_hash), start_position=1
        )
        chains += [trunk, branch, collision, impostor]
    return chains


def join(parts: Sequence[Identities]) -> Identities:
    out = Identities()
    for part in parts:
        out = out + part
    return out


def distinct(chains: Sequence[Identities]) -> Identities:
    """Every block of the chains, once."""
    seen: set[int] = set()
    parts = []
    for whole in chains:
        for i, identity in enumerate(whole):
            if identity.lineage_hash not in seen:
                seen.add(identity.lineage_hash)
                parts.append(whole[i : i + 1])
    return join(parts)
