"""Results of live engines for a workload, in the columns of a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy._core import Engine, RunColumns
from understudy.run.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy._core import FleetResult, TierRun
    from understudy.server.core import EngineCore
    from understudy.server.live_request import LiveRequest
    from understudy.workload import Workload


class LiveColumns:
    """Keeps the requests of a run; in the end the engines say the rest. Rows are those of the workload.

    The engines keep what a report needs from when this is made, which is before the first request.
    """

    def __init__(
        self, workload: Workload, cores: Sequence[EngineCore], shared: Sequence[TierRun] = ()
    ) -> None:
        """Prepare the columns; `cores` are the workers' engines, in order, and `shared` their shared tiers."""
        self._workload = workload
        self._cores = cores
        self._shared = shared
        self._requests: dict[int, tuple[int, LiveRequest]] = {}
        self._refused: dict[int, tuple[int, str]] = {}
        self._engines = [core.engine for core in cores if isinstance(core.engine, Engine)]
        for engine in self._engines:
            engine.keep_times()

    def on_end(self, row: int, worker: int, request: LiveRequest) -> None:
        """Record the end of a row's request."""
        self._requests[row] = worker, request

    def on_refused(self, row: int, now_ns: int, why: str) -> None:
        """Record the rejection of a row's request."""
        self._refused[row] = now_ns, why

    def has_ended(self, row: int) -> bool:
        """Return whether an engine has recorded the end of a row's request."""
        return row in self._requests

    def request(self, row: int) -> LiveRequest:
        """Return the ended request of a row."""
        return self._requests[row][1]

    def gathered(self) -> tuple[Timeline, FleetResult]:
        """Return timeline and core result, once; call after the engines have stopped."""
        for engine in self._engines:
            engine.finish_transfers()
        columns = RunColumns(len(self._workload), tiers=any(core.has_tiers for core in self._cores))
        for row, (worker, request) in self._requests.items():
            assert request.record is not None  # the engine wrote it at the end
            columns.keep(row, request.record, worker, request.arrival_ns)
        for row, (now_ns, why) in sorted(self._refused.items()):
            columns.reject(row, now_ns, why)
        for worker, engine in enumerate(self._engines):
            columns.add_engine(worker, engine)
        for run in self._shared:
            columns.add_run(run)
        result = columns.take()
        timeline = Timeline.from_result(
            result,
            self._workload,
            None,
            worker_blocks=[core.num_blocks for core in self._cores],
            block_size=self._cores[0].block_size,
        )
        return timeline, result
