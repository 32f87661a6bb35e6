"""Token blocks and their hashes.

A request's tokens are split into blocks of `block_size`. Every complete block has

- a **local hash**: XXH3-64 of its tokens (little-endian u32), seeded with the request's salt hash;
- a **sequence hash**: of itself and every block before it, so that equal hashes mean equal prefixes;
- a **lineage hash** (PLH): 128 bits of position, sequence hash and a fragment of the parent's sequence hash,
  as a Python int. The block manager identifies blocks by it.

`TokenBlocks` computes these hashes while tokens are appended and removed. `Identities` is an immutable sequence of
them for the block manager; it can also be built without tokens, from hashes of a trace or another process.
Hash 0 means "unknown" and is rejected as the hash of a block.

Invalid arguments raise `understudy.errors.InvalidArgument`, which names the argument, and change nothing.
"""

from __future__ import annotations

from understudy._core import (
    Identities,
    Identity,
    TokenBlocks,
    lineage_bytes,
    lineage_extend,
    lineage_from_bytes,
    lineage_hash,
    lineage_parts,
    lineage_sort_key,
    lineage_text,
    positional_sequence_hash,
    salt_hash,
    xxh3_64,
)

__all__ = [
    "Identities",
    "Identity",
    "TokenBlocks",
    "lineage_bytes",
    "lineage_extend",
    "lineage_from_bytes",
    "lineage_hash",
    "lineage_parts",
    "lineage_sort_key",
    "lineage_text",
    "positional_sequence_hash",
    "salt_hash",
    "xxh3_64",
]
