"""Define an offload policy that copies a block to the host only when the GPU evicts it for the second time.

Prompts that occur once use no bandwidth. Run it: `python examples/offload_policy.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import understudy
from understudy.engines.vllm_config import VllmConfig
from understudy.tiers import OffloadPolicy, TiersConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

TRACE = Path(__file__).parent / "demo_trace.jsonl"


class SecondTime(OffloadPolicy):
    """Copy blocks that were hit on the GPU or evicted before.

    One object serves all workers of a run. A production policy would also expire old entries.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def select(self, lineages: list[int], reuse: npt.NDArray[np.uint32]) -> Sequence[bool]:
        """Return which blocks to copy, and remember all of them."""
        chosen = [
            hits > 0 or lineage in self._seen for lineage, hits in zip(lineages, reuse.tolist(), strict=True)
        ]
        self._seen.update(lineages)
        return chosen


def main() -> None:
    """Replay the demo workload on a small GPU with a host tier, with and without the policy."""
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
