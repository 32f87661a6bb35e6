"""The engine of a fitted deployment, for its timing file: release, KV pool and limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.timing.fitted_engine import FittedEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.calibrate.engine_flags import EngineFlags
    from understudy.calibrate.measured_run import Run
    from understudy.timing.deployment import Deployment


def describe_engine(
    runs: Sequence[Run], deployment: Deployment, flags: EngineFlags, model: str | None
) -> FittedEngine:
    """Return the engine of the benchmarks that ran on `deployment`.

    Its blocks are known if all of them, or the flags, give the same number; else they are the estimate. A limit that
    differs between benchmarks is left out.
    """
    own = [run for run in runs if run.deployment.parallel == deployment.parallel] or list(runs)
    given = {run.benchmark.engine.get("num_gpu_blocks", flags.num_gpu_blocks) for run in own}
    known = given.pop() if len(given) == 1 else None
    limits = {
        name: {getattr(run.engine, name) for run in own}
        for name in ("max_num_seqs", "max_num_batched_tokens")
    }
    return FittedEngine(
        name=flags.engine,
        version=flags.version,
        model=deployment.model.name if model is None else model,
        block_size=own[0].engine.block_size,
        num_gpu_blocks=own[0].engine.num_gpu_blocks if known is None else known,
        blocks_estimated=known is None,
        gpu_memory_utilization=flags.memory_share,
        **{name: values.pop() for name, values in limits.items() if len(values) == 1},
    )
