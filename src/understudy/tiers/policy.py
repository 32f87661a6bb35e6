"""Offload policies written in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt


@runtime_checkable
class OffloadPolicy(Protocol):
    """Says which blocks are worth a copy from the GPU to the host.

    A run makes one object and asks it once a batch: what an eviction takes, or what a step has completed under
    write-through, less what the host has (or is about to have) and what `min_reuse` rules out. All workers ask the same
    object. With threads their calls may overlap and come in no fixed order, so a policy that remembers what it was
    asked belongs on one thread. An exception ends the run and propagates.
    """

    def select(self, lineages: list[int], reuse: npt.NDArray[np.uint32]) -> Sequence[bool]:
        """For each block, whether to copy it: as many truth values as there are `lineages`, else PolicyError.

        `lineages` are lineage hashes (128 bits) in the order of the batch; `reuse` counts the hits that each block had
        on the GPU since it came there.
        """
