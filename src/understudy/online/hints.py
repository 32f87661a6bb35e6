"""What a client of a trace tells a server about its sessions, in the headers of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from understudy.server.api.session_headers import END, NEXT, PARENT, SESSION
from understudy.workload.graph import COMPLETION

if TYPE_CHECKING:
    from understudy.workload import Workload


class SessionTeller:
    """Knows which requests were sent and answered, and names the headers of the next one."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._parents = (
            None if workload.graph is None else workload.graph.parent_sessions(workload.session).tolist()
        )
        self._sent = np.zeros(len(workload), bool)
        self._answered = np.zeros(len(workload), bool)

    def on_answer(self, row: int) -> None:
        """Note that a request was answered."""
        self._answered[row] = True

    def send(self, row: int) -> dict[str, str]:
        """Note that a request is sent now, and return its headers."""
        self._sent[row] = True
        session = int(self._workload.session[row])
        headers = {SESSION: self._name(session)}
        if self._parents is not None and self._parents[session] >= 0:
            headers[PARENT] = self._name(self._parents[session])
        if int(self._workload.next_turn[row]) < 0:
            headers[END] = "true"
        elif (gap_ns := self.told_ns(row)) is not None:
            headers[NEXT] = f"{gap_ns // 10**9}.{gap_ns % 10**9:09d}"
        return headers

    def told_ns(self, row: int) -> int | None:
        """Return the time from the end of a request to the session's next one; None where that waits for others."""
        following = int(self._workload.next_turn[row])
        graph = self._workload.graph
        if graph is None:
            return int(self._workload.delay_ns[following])
        gap_ns = None
        for at in range(
            int(graph.dependency_offsets[following]), int(graph.dependency_offsets[following + 1])
        ):
            other = int(graph.dependency_rows[at])
            completes = graph.dependency_triggers[at] == COMPLETION
            if other == row and completes:
                gap_ns = int(graph.dependency_delay_ns[at])
            elif not self._sent[other] or (completes and not self._answered[other]):
                return None
        return gap_ns

    def _name(self, session: int) -> str:
        names = self._workload.session_ids
        return str(session) if names is None else names[session]
