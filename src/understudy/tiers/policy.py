"""Interface of offload policies written in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt


@runtime_checkable
class OffloadPolicy(Protocol):
    """Selects the blocks to copy from the GPU to the host.

    A run creates one object for all workers and calls it once per batch: the evicted blocks, or the blocks that a step
    completed under write-through, without those that the host has or is receiving and those below `min_reuse`. With
    threads, calls may overlap and their order varies, so use a policy with state on one thread. An exception ends the
    run and propagates.
    """

    def select(self, lineages: list[int], reuse: npt.NDArray[np.uint32]) -> Sequence[bool]:
        """Return for each block whether to copy it, one bool per entry of `lineages`, else PolicyError.

        `lineages` are the lineage hashes (128 bits) of the batch; `reuse` counts the hits of each block on the GPU
        since it was stored there.
        """
