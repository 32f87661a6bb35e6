"""Worker processes of a sweep."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

from understudy.report import Slo
from understudy.run.settings import ReplaySettings
from understudy.sweep.candidate import Candidate, evaluate
from understudy.sweep.local import Processes
from understudy.sweep.shared import share_workload
from understudy.workload import read_trace

ROOT = Path(__file__).parents[2]
WORKLOAD = read_trace(ROOT / "examples" / "demo_trace.jsonl")


def candidate(workers: int, **more: object) -> Candidate:
    settings = ReplaySettings.read(None, {"workers": workers, **more}, [])
    return Candidate(flags={"workers": workers}, settings=settings, slo=Slo(ttft_ms=60))


def test_processes_give_the_outcomes_of_this_process() -> None:
    tasks = [(candidate(workers), str(workers)) for workers in range(1, 5)]
    with closing(Processes(WORKLOAD, 2)) as processes:
        outcomes = {outcome.key: outcome.summary for outcome in processes.run(tasks)}
    assert outcomes == {key: evaluate(WORKLOAD, each, key).summary for each, key in tasks}


def test_a_shared_workload_is_equal_and_not_copied() -> None:
    memory, shared = share_workload(WORKLOAD)
    try:
        loaded = shared.load(memory)
    finally:
        os.close(memory)
    assert loaded.digest == WORKLOAD.digest
    assert len(shared.pickled) < WORKLOAD.hash_ids.nbytes
    assert not loaded.hash_ids.flags.owndata
    assert not loaded.hash_ids.flags.writeable


def test_a_killed_process_is_replaced_and_its_candidate_runs_again() -> None:
    tasks = [(candidate(1 + number % 4), str(number)) for number in range(12)]
    with closing(Processes(WORKLOAD, 2)) as processes:
        outcomes = processes.run(tasks)
        done = [next(outcomes)]
        before = processes.process_ids
        os.kill(before[0], signal.SIGKILL)
        done += outcomes
        assert before[0] not in processes.process_ids
    assert {outcome.key for outcome in done} == {key for _, key in tasks}
    assert all(outcome.summary for outcome in done)


@pytest.mark.parametrize("body", ["import os; os._exit(1)", "raise ValueError('no')"])
def test_a_router_that_fails_fails_only_its_candidate(tmp_path: Path, body: str) -> None:
    code = f"""
from understudy.router import Router

class Bad(Router):
    def choose(self, request, view):
        {body}
"""
    (tmp_path / "bad.py").write_text(code)
    tasks = [(candidate(2, routing=f"{tmp_path}/bad.py:Bad"), "bad"), (candidate(2), "good")]
    with closing(Processes(WORKLOAD, 1)) as processes:
        outcomes = {outcome.key: outcome for outcome in processes.run(tasks)}
    assert outcomes["good"].summary is not None
    error = outcomes["bad"].error
    assert error is not None
    assert outcomes["bad"].lost == ("_exit" in body)
    assert ("ended 3 times" if outcomes["bad"].lost else "ValueError: no") in error


def test_a_key_depends_on_settings_workload_goal_and_named_files(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("1")
    one = candidate(2, routing=f"{tmp_path}/own.py:Own")
    keys = {one.key("w"), one.key("v"), candidate(2).key("w"), candidate(3).key("w")}
    (tmp_path / "own.py").write_text("2")
    keys.add(one.key("w"))
    assert len(keys) == 5
    assert candidate(3).key("w") == candidate(3).key("w")
