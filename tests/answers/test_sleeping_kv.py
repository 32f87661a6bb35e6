"""KV of sleeping sessions, recomputed from prompts and times alone: blocks that sessions share count once."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from replay.test_session_kv import BLOCK, ENGINE, make, run
from understudy.report.sleeping import measure_sleep

if TYPE_CHECKING:
    from understudy.run.timeline import Timeline
    from understudy.workload import Workload

ROOM = msgspec.structs.replace(ENGINE, num_gpu_blocks=4000)
BLOCKS, SHARED = 10, 4


def draw(seed: int) -> Workload:
    """Return sessions of one to four turns that begin with the same four blocks."""
    draws = random.Random(seed)
    return make(
        [
            [
                (draws.randint(0, 1500) if not turn else draws.randint(10, 1500), 2)
                for turn in range(draws.randint(1, 4))
            ]
            for _ in range(draws.randint(2, 7))
        ],
        blocks=BLOCKS,
        shared=SHARED,
    )


def sessions_of(workload: Workload, timeline: Timeline) -> list[list[tuple[int, int, set[int]]]]:
    """Return (arrival, end, ids of whole blocks) of the requests of each session, in order."""
    found: dict[int, list[tuple[int, int, set[int]]]] = {}
    for row in np.lexsort((workload.turn, workload.session)).tolist():
        first = int(workload.hash_offsets[row])
        ids = set(workload.hash_ids[first : first + BLOCKS].tolist())
        times = int(timeline.arrival_ns[row]), int(timeline.finish_ns[row])
        found.setdefault(int(workload.session[row]), []).append((*times, ids))
    return list(found.values())


def union_size(spans: list[tuple[int, int, set[int]]], time_ns: int) -> int:
    return len(set().union(*(ids for begin, end, ids in spans if begin <= time_ns < end)))


@pytest.mark.parametrize("seed", range(8))
def test_the_kv_of_sleeping_sessions_has_each_block_once(seed: int) -> None:
    workload = draw(seed)
    timeline = run(workload, engine=ROOM).timeline
    spans = [
        (before[1], after[0], before[2])
        for requests in sessions_of(workload, timeline)
        for before, after in pairwise(requests)
    ]
    sleep = measure_sleep(workload, timeline)
    assert sleep.time_ns.tolist() == sorted({edge for begin, end, _ in spans for edge in (begin, end)})
    for time_ns, tokens in zip(sleep.time_ns.tolist(), sleep.sleeping_tokens.tolist(), strict=True):
        asleep = sum(begin <= time_ns < end for begin, end, _ in spans)
        own = 1 + 2  # the prompt's last token, and the answer
        assert tokens == union_size(spans, time_ns) * BLOCK + asleep * own
