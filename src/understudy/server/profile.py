"""Record the steps of a live worker for a window, and write them as a Perfetto trace."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy._core import Engine, StepTable
from understudy.errors import WrongState
from understudy.explain.saved_run import REQUEST_COLUMNS, SavedRun
from understudy.run.step_columns import StepColumns

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from understudy.server.core import EngineCore
    from understudy.server.live_request import LiveRequest

log = logging.getLogger("understudy.server")

MAX_STEPS = 1_000_000
"""Steps that a window keeps; later ones are left out, and a warning is logged."""


class Profile:
    """The steps of a worker's engines between `/start_profile` and `/stop_profile`."""

    def __init__(self, cores: list[EngineCore], folder: Path, name: str) -> None:
        self._cores = cores
        self._folder = folder
        self._name = name
        self._number = 0
        self._table: StepTable | None = None
        self._names: dict[tuple[int, int], str] = {}
        self._times: dict[tuple[int, int], tuple[int, int]] = {}

    @property
    def is_running(self) -> bool:
        """True between start and stop."""
        return self._table is not None

    def start(self) -> None:
        """Begin to record. WrongState while a window is open, or for an engine that reports no steps."""
        if self._table is not None:
            raise WrongState("a profile is running; POST /stop_profile first")
        for core in self._cores:
            self.watch(core, on=True)
        self._table = StepTable()
        self._names, self._times = {}, {}
        for rank, core in enumerate(self._cores):
            core.recorder = _RankRecorder(self, rank)
            for request in core.live.values():
                self.add_request(rank, request, -1)

    def stop(self) -> Path:
        """Write the trace and return its path. WrongState without a window; InvalidArgument if writing fails."""
        from understudy.explain.perfetto import write_trace

        table, self._table = self._table, None
        if table is None:
            raise WrongState("no profile is running; POST /start_profile first")
        for core in self._cores:
            core.recorder = None
            self.watch(core, on=False)
        path = self._folder / f"{self._name}-{self._number}.pftrace"
        self._number += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        write_trace(self._build_run(StepColumns.take(table)), path)
        log.info("profile written: %s", path)
        return path

    def watch(self, core: EngineCore, *, on: bool) -> None:
        """Let the engine prepare its steps for recording. WrongState for an engine that reports none."""
        if not isinstance(core.engine, Engine):
            raise WrongState(f"{core.name}: a real engine reports no steps; profile a simulated one")
        core.engine.watch_steps(on)

    # ── Called by the engines ──

    def add_request(self, rank: int, request: LiveRequest, now_ns: int) -> None:
        """Note a request that is here, or (from `now_ns` on) was submitted."""
        key = (rank, request.engine_id)
        self._names[key] = request.name
        self._times[key] = (now_ns, -1)
        if self._table is not None and now_ns >= 0:
            self._table.place(request.engine_id, rank, now_ns)

    def end_requests(self, rank: int, requests: Iterable[LiveRequest], now_ns: int) -> None:
        """Note requests that have ended."""
        for request in requests:
            key = (rank, request.engine_id)
            if key in self._times:
                self._times[key] = (self._times[key][0], now_ns)
            if self._table is not None:
                self._table.split(rank)

    def record(self, rank: int, engine: Engine, now_ns: int, *, ended: bool) -> None:
        """Record a step that has begun or ended."""
        table = self._table
        if table is None or table.num_steps >= MAX_STEPS:
            return
        table.record(rank, engine, ended, now_ns)
        if table.num_steps == MAX_STEPS:
            log.warning("profile: %d steps are recorded; later ones are left out", MAX_STEPS)

    def _build_run(self, steps: StepColumns) -> SavedRun:
        """Number the requests of all ranks, whose engines count from 0 each."""
        arrays = steps.arrays()
        keys = list(self._names)
        rows: dict[tuple[int, int], int] = {key: row for row, key in enumerate(keys)}
        first = np.searchsorted(steps.step_batch, steps.entry_batch)
        ranks = {
            "step_head": steps.step_worker,
            "entry_request": steps.step_worker[first],
            "loading_request": steps.step_worker[steps.loading_step],
            "event_request": steps.event_worker,
            "event_other": steps.event_worker,
        }
        for column, of_rank in ranks.items():
            pairs = zip(of_rank.tolist(), arrays[column].tolist(), strict=True)
            arrays[column] = np.array([rows.get(pair, -1) for pair in pairs], np.int64)
        requests: dict[str, NDArray[Any]] = {
            name: np.full(len(keys), -1, np.int64) for name in REQUEST_COLUMNS
        }
        times = [self._times[key] for key in keys]
        requests["arrival_ns"] = np.array([begin for begin, _ in times], np.int64)
        requests["finish_ns"] = np.array([end for _, end in times], np.int64)
        blocks = tuple(core.num_blocks for core in self._cores)
        return SavedRun(
            run={},
            steps=StepColumns.from_arrays(arrays),
            requests=requests,
            request_ids=[self._names[key] for key in keys],
            block_size=self._cores[0].block_size,
            worker_blocks=blocks,
        )


class _RankRecorder:
    """The recorder of one rank, as its core calls it."""

    def __init__(self, profile: Profile, rank: int) -> None:
        self._profile = profile
        self._rank = rank

    def on_submit(self, request: LiveRequest, now_ns: int) -> None:
        """Note a submitted request."""
        self._profile.add_request(self._rank, request, now_ns)

    def on_step(self, engine: Any, now_ns: int, *, ended: bool) -> None:
        """Record one half of a step."""
        self._profile.record(self._rank, engine, now_ns, ended=ended)

    def on_restart(self, core: EngineCore) -> None:
        """Record the engine that replaces the one before."""
        self._profile.watch(core, on=True)

    def on_end(self, requests: Iterable[LiveRequest], now_ns: int) -> None:
        """Note requests that have ended."""
        self._profile.end_requests(self._rank, requests, now_ns)
