"""An offload policy in Python: a block goes to the host only if it is the second time that the GPU evicts it.

Prompts that come once never spend a byte of the link. Run it: `python examples/offload_policy.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import understudy
from understudy.engines.config import VllmConfig
from understudy.tiers import OffloadPolicy, TiersConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

TRACE = Path(__file__).parent / "demo_trace.jsonl"


class SecondTime(OffloadPolicy):
    """Copies blocks that were hit on the GPU, or that it has evicted before.

    One object serves a run, so what it remembers covers all workers. A real one would forget in time.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def select(self, lineages: list[int], reuse: npt.NDArray[np.uint32]) -> Sequence[bool]:
        """Say yes to what is known, and know the rest from now on."""
        chosen = [
            hits > 0 or lineage in self._seen for lineage, hits in zip(lineages, reuse.tolist(), strict=True)
        ]
        self._seen.update(lineages)
        return chosen


def main() -> None:
    """Replay the demo's workload on a small GPU with a host tier, copying everything and copying what returns."""
    engine = VllmConfig(num_gpu_blocks=300)
    for name, policy in (("everything", None), ("second time", SecondTime)):
        tiers = TiersConfig.from_dict(
            {
                "kv_bytes_per_token": 131072,
                "tiers": [{"tier": "g2", "blocks": 1000, "link": {"down_gbps": 25, "up_gbps": 25}}],
                "offload": {"filter": policy},
            }
        )
        report = understudy.replay(TRACE, engine, workers=2, tiers=tiers)
        assert report.tiers is not None
        host = report.tiers.tiers[1]
        print(
            f"{name:>12}: {report.tiers.counts.offloaded_blocks:,} blocks copied, "
            f"{host.hit_ratio_first:.1%} of prompt tokens from the host"
        )


if __name__ == "__main__":
    main()
