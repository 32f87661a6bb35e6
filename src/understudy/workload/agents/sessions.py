"""Sessions as a graph: the special case in which each turn waits for the one before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from understudy.workload.columns import offsets_of
from understudy.workload.graph import COMPLETION, SEQUENCE, RequestGraph

if TYPE_CHECKING:
    from understudy.workload.workload import Workload


def graph_of(workload: Workload) -> RequestGraph:
    """Return the workload's graph; without one, that of its sessions, each of them a play.

    First turns arrive as long after the first arrival of all as the workload says.
    """
    if workload.graph is not None:
        return workload.graph
    later = workload.turn > 0
    before = np.full(len(workload), -1, np.int64)
    following = workload.next_turn
    rows = np.flatnonzero(following >= 0)
    before[following[rows]] = rows
    first_ns = workload.arrival_ns.min() if len(workload) else 0
    edges = int(later.sum())
    names = workload.session_ids
    return RequestGraph(
        play=workload.session,
        not_before_ns=np.where(later, 0, workload.arrival_ns - first_ns),
        dependency_offsets=offsets_of(later.astype(np.int64)),
        dependency_rows=before[later],
        dependency_triggers=np.full(edges, COMPLETION, np.uint8),
        dependency_delay_ns=workload.delay_ns[later],
        dependency_relations=np.full(edges, SEQUENCE, np.uint8),
        play_ids=None if names is None else list(names),
    )
