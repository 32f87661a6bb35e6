"""A file with every step of a replay, in the format of a recording of the real scheduler."""

from __future__ import annotations

import json
from typing import IO, TYPE_CHECKING, Any

from understudy.run.step_line import StepRecorder, end_line
from understudy.version import __version__
from understudy.workload.identities import row_identities

if TYPE_CHECKING:
    from understudy._core import VllmEngine
    from understudy.engines.engine_config import EngineConfig
    from understudy.workload import Workload


class StepFile:
    """Write a header, one line per step in order of their ends, and the totals.

    `understudy conformance` compares these lines. Workers on a clock also have `end_ns`, and several workers `worker`.
    `names` are those of the workload's rows. `first_tokens` are the trace's ids; null for outputs without ids.
    """

    def __init__(
        self,
        file: IO[bytes],
        workload: Workload,
        names: list[str],
        engine: EngineConfig,
        *,
        workers: int,
        timed: bool,
        keep_events: bool = False,
    ) -> None:
        self._rows = {name: row for row, name in enumerate(names)}
        self._file = file
        self._workload = workload
        self._block_size = engine.block_size
        self._first: dict[
            int, int | None
        ] = {}  # shared by all workers: one may load blocks that another computed
        self._recorders = [
            StepRecorder(
                engine.block_size, engine.asynchronous, keep_events=keep_events, first_tokens=self._first
            )
            for _ in range(workers)
        ]
        self._timed = timed
        header = {"format": 1, "understudy": __version__, "workers": workers, "requests": len(workload)}
        self._write({"header": header})

    def on_step(self, worker: int, engine: VllmEngine, ended: bool) -> None:
        """Record a half of a step; a fleet calls this when a step begins and when it ends."""
        recorder = self._recorders[worker]
        if not ended:
            for request, resumed, _ in engine.admitted:
                if not resumed:
                    self._first.update(self._first_tokens(self._rows[engine.name(request)]))
            return
        line = recorder.ended(engine)
        if self._timed:
            line = {"end_ns": engine.now_ns, **line}
        if len(self._recorders) > 1:
            line = {"worker": worker, **line}
        self._write(line)

    def finish(self) -> None:
        """Write the totals."""
        self._write(end_line("done", self._recorders))

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def _first_tokens(self, row: int) -> dict[int, int | None]:
        """Return the first token of each full block of prompt and output by sequence hash."""
        w = self._workload
        size = self._block_size
        prompt, output = int(w.prompt_tokens[row]), int(w.output_tokens[row])
        known = w.known_output_tokens(row)
        identities = row_identities(w, row, size, (prompt + output) // size)
        firsts: list[int | None] = []
        for token in range(0, len(identities) * size, size):
            if token < prompt:
                firsts.append(int(w.prompt_hash_ids(row)[token // w.trace_block_size]))
            else:
                firsts.append(None if known is None else int(known[token - prompt]))
        return dict(zip(identities.sequence_hashes.tolist(), firsts, strict=True))
