"""Reports of the candidates on the front, to which the page of a sweep links."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from understudy.errors import InvalidArgument
from understudy.outputs import is_stdout
from understudy.sweep.candidate import format_flags, replay_candidate

if TYPE_CHECKING:
    from understudy.sweep.result import Sweep
    from understudy.sweep.space import Point
    from understudy.workload import Workload


def write_reports(sweep: Sweep, workload: Workload, folder: Path, page: Path | None) -> dict[Point, str]:
    """Replay the points of every front again, write their reports and return their links from `page`.

    Errors: InvalidArgument if the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"cannot write {folder}: {error.strerror}") from error
    start = Path() if page is None or is_stdout(page) else page.parent
    links: dict[Point, str] = {}
    for answer in sweep.answers:
        near = [trial for trial in (answer.best, answer.smaller) if trial is not None]
        for trial in (*answer.front, *near):
            if trial.point in links:
                continue
            report = replay_candidate(workload, trial.candidate)
            named = f"{sweep.workload}, {format_flags(trial.flags)}"
            report = replace(report, run=replace(report.run, workload=named))
            path = folder / f"{'-'.join(map(str, trial.point))}.html"
            report.to_html(path)
            links[trial.point] = os.path.relpath(path, start)
    return links
