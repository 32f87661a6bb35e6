"""Find the plan of a question: prepare the log, run the replays, collect the answer."""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from understudy.checks import whole_number
from understudy.errors import ConfigError, InvalidArgument
from understudy.planning.planner import Planner
from understudy.planning.replays import Replays
from understudy.planning.shape import Size
from understudy.planning.text import ReadablePlan
from understudy.report.thresholds import MIN_REQUESTS
from understudy.report.worst_hour import HOUR_S
from understudy.sweep.local import InProcess, Processes
from understudy.sweep.on_ray import RayTasks
from understudy.sweep.store import Store
from understudy.workload.users import scale_users

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.planning.question import Question
    from understudy.planning.replays import Progress
    from understudy.planning.result import Plan
    from understudy.sweep.local import Runner
    from understudy.workload import Workload

MOST_CPU_S = 60.0
"""CPU time after which no more fleets and changes are tried."""


def find_plan(
    workload: Workload,
    question: Question,
    *,
    name: str,
    users: float = 1.0,
    store: Path | None = None,
    jobs: int | None = None,
    ray: str | None = None,
    most_cpu_s: float | None = MOST_CPU_S,
    progress: Progress | None = None,
) -> Plan:
    """Find the cheapest fleet for a log; `plan` describes the arguments and errors."""
    started = time.perf_counter()
    _check_log(workload, name)
    rows = scale_users(workload, users, seed=question.seed)
    if question.goal_window_s is None:
        question = replace(question, goal_window_s=choose_window(rows))
    if jobs is not None and ray is not None:
        raise ConfigError("--jobs: contradicts --ray, whose cluster has its own processes; give one")
    count = len(os.sched_getaffinity(0)) if jobs is None else whole_number("--jobs", jobs, 1, 4096)
    with Store(store) as finished, closing(_make_runner(rows, count, ray)) as runner:
        replays = Replays(runner, finished, rows.digest, len(rows), question.goal, count, progress)
        planner = Planner(question, rows, replays, most_cpu_s)
        planner.run()
    assumed = question.prices.describe_assumed()
    best = planner.best
    own = () if best is None else best.candidate.settings.notes
    return ReadablePlan(
        workload=name,
        workload_digest=rows.digest,
        requests=len(rows),
        users=users,
        question=question,
        best=best,
        nearest=planner.nearest,
        runner_up=planner.runner_up,
        sure=planner.sure,
        levers=tuple(planner.levers),
        tried=planner.tried,
        fleets=len(replays.fleets),
        stopped_at_cpu_s=most_cpu_s if planner.stopped else None,
        slow=planner.slow,
        rejected={
            shape.describe(Size(engines=1, prefill=int(shape.is_split))): reason
            for shape, reason in planner.finder.rejected.items()
        },
        ran=replays.ran,
        found=replays.found,
        cpu_s=replays.cpu_s,
        wall_s=time.perf_counter() - started,
        notes=tuple(dict.fromkeys([*([assumed] if assumed else []), *planner.notes, *rows.notes, *own])),
    )


def _check_log(workload: Workload, name: str) -> None:
    if not len(workload):
        raise InvalidArgument(f"{name} contains no requests; give another log")
    if not workload.has_arrivals:
        raise InvalidArgument(
            f"{name}: requests have no times, so the load is not known; convert the log with the key of its times "
            "(understudy convert --time KEY), or size a closed loop with sweep --concurrency"
        )


def choose_window(workload: Workload) -> float | None:
    """Return an hour if the log spans two and any hour has enough requests to judge it; else None."""
    arrivals = workload.arrival_ns[workload.arrival_ns >= 0]
    hours = (arrivals - arrivals.min()) // int(HOUR_S * 1e9)
    is_long = float(np.ptp(arrivals)) / 1e9 >= 2 * HOUR_S
    return HOUR_S if is_long and int(np.bincount(hours).max()) >= MIN_REQUESTS else None


def _make_runner(workload: Workload, jobs: int, ray: str | None) -> Runner:
    if ray is not None:
        return RayTasks(workload, ray)
    return InProcess(workload) if jobs == 1 else Processes(workload, jobs)
