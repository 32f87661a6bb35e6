"""Verdicts on plays: tools that decide how long they take, and sessions that return to evicted KV."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from replay.test_plays import FixedPasses, make
from replay.test_session_kv import CROWD
from replay.test_session_kv import make as make_sessions
from report.verdict_building import found
from understudy.engines.vllm_config import VllmConfig
from understudy.report import Report, agent_verdicts
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload import RequestGraph

if TYPE_CHECKING:
    from understudy.workload import Workload


def report_of(workload: Workload, **engine: Any) -> Report:
    config = VllmConfig(block_size=16, **engine)
    run = run_offline(RunPlan(workload, config, timing=FixedPasses(10, 1)))
    return replace(Report.build(run.timeline, run.facts), workload=workload)


def as_chains(workload: Workload) -> Workload:
    """Return sessions as plays: each turn waits for the one before."""
    rows = np.arange(len(workload))
    later = np.flatnonzero(workload.turn > 0)
    return replace(
        workload,
        delay_ns=np.zeros(len(rows), np.int64),
        graph=RequestGraph(
            play=workload.session,
            not_before_ns=np.zeros(len(rows), np.int64),
            dependency_offsets=np.concatenate([[0], np.cumsum(workload.turn > 0)]),
            dependency_rows=later - 1,
            dependency_triggers=np.ones(len(later), np.uint8),
            dependency_delay_ns=workload.delay_ns[later],
            dependency_relations=np.zeros(len(later), np.uint8),
        ),
    )


def test_plays_that_wait_for_tools_are_named_with_their_share() -> None:
    slow = report_of(make([(1, 0, 1, 900)], [0, 0]))
    assert "a fleet without delay would shorten them by" in found(agent_verdicts.tools_dominate(slow))
    assert agent_verdicts.tools_dominate(report_of(make([(1, 0, 1, 10)], [0, 0]))) is None
    assert agent_verdicts.tools_dominate(report_of(make_sessions(CROWD))) is None


def test_sessions_that_return_to_evicted_kv_are_named_with_their_tokens() -> None:
    many = as_chains(make_sessions([[(100 * one, 2), (5000, 2)] for one in range(24)]))
    cold = report_of(many, num_gpu_blocks=40)
    text = found(agent_verdicts.sessions_return_cold(cold))
    assert "computed again" in text
    assert "the devices hold 640" in text
    assert agent_verdicts.sessions_return_cold(report_of(many, num_gpu_blocks=400)) is None
