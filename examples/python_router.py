"""Define a router that prefers the worker with the longest cached prefix, unless others have much less work.

Run it: `python examples/python_router.py`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from understudy.engines.vllm_config import VllmConfig
from understudy.router import EventKind, Router
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload import Constant, Fixed, SyntheticSpec, SystemPrompts, synthesise

if TYPE_CHECKING:
    from understudy.router import FleetView, KvEventBatch, RouteRequest


class PrefixAffinity(Router):
    """Choose the worker with the fewest tokens to compute: its outstanding ones plus the uncached prompt."""

    def __init__(self) -> None:
        self._blocks: dict[int, set[int]] = defaultdict(set)  # sequence hashes, by worker

    def observe(self, batch: KvEventBatch) -> None:
        """Track the blocks in each worker's cache."""
        if batch.worker is None:
            return
        known = self._blocks[batch.worker]
        events = batch.events
        for kind, sole, name in zip(events.kinds, events.sole, events.sequence_hashes.tolist(), strict=True):
            if not sole:  # the worker had another copy before, or still has one
                continue
            if kind == EventKind.STORED:
                known.add(name)
            else:
                known.discard(name)

    def choose(self, request: RouteRequest, view: FleetView) -> int:
        """Return the ready worker with the lowest cost; ties go to the first."""
        costs = view.outstanding_tokens.copy()
        for worker in view.ready.tolist():
            costs[worker] -= self._hits(request, worker) * request.block_size
        return int(view.ready[costs[view.ready].argmin()])

    def _hits(self, request: RouteRequest, worker: int) -> int:
        known = self._blocks[worker]
        hits = 0
        for name in request.prompt_blocks.sequence_hashes.tolist():
            if name not in known:
                break
            hits += 1
        return hits


def main() -> None:
    """Compare the router with round robin on requests that share one of eight long prefixes."""
    workload = synthesise(
        SyntheticSpec(
            sessions=400,
            prompt_tokens=Fixed(512),
            output_tokens=Fixed(64),
            prefixes=SystemPrompts(groups=8, tokens=3584),
            arrivals=Constant(qps=20),
        )
    )
    for routing in ("round_robin", PrefixAffinity()):
        run = run_offline(RunPlan(workload, VllmConfig(num_gpu_blocks=512), workers=4, routing=routing))
        timeline = run.timeline
        hit = timeline.cached_tokens_first.sum() / timeline.prompt_tokens.sum()
        print(f"{run.facts.routing:16} {hit:6.1%} of the prompts' tokens were cached")


if __name__ == "__main__":
    main()
