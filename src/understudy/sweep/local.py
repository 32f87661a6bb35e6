"""Run candidates in processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Protocol

from understudy.sweep.candidate import Candidate, Outcome, evaluate
from understudy.sweep.shared import share_workload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from multiprocessing.connection import Connection

    from understudy.workload import Workload

Task = tuple[Candidate, str]
"""A candidate and the key of its outcome."""

MAX_ATTEMPTS = 3


class Runner(Protocol):
    """Runs candidates somewhere; yields outcomes as they finish, in any order."""

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Yield the outcome of every task."""

    def close(self) -> None:
        """End its processes."""


class InProcess:
    """Runs one candidate after another in this process."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Yield the outcome of every task."""
        for candidate, key in tasks:
            yield evaluate(self._workload, candidate, key)

    def close(self) -> None:
        """Do nothing."""


class _Process:
    """A worker process and the task that it runs."""

    def __init__(self, memory: int, shared: object) -> None:
        self.connection: Connection
        self.connection, theirs = Pipe()
        self.task: Task | None = None
        # -P: the current folder's modules must not hide installed ones.
        command = [sys.executable, "-P", "-m", "understudy.sweep.worker", str(theirs.fileno()), str(memory)]
        self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(), memory), stdin=subprocess.DEVNULL)
        theirs.close()
        self.connection.send(shared)

    def start(self, task: Task) -> None:
        """Send a task to the process."""
        self.task = task
        self.connection.send(task)

    def stop(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.terminate()
        self.process.wait()


class Processes:
    """Runs candidates in `jobs` processes, which map one copy of the workload; a process that dies is replaced."""

    def __init__(self, workload: Workload, jobs: int) -> None:
        self._jobs = jobs
        self._memory, self._shared = share_workload(workload)
        self._processes: list[_Process] = []

    @property
    def process_ids(self) -> list[int]:
        """Ids of the running processes."""
        return [each.process.pid for each in self._processes]

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Yield outcomes as they finish. A task whose process died three times has an error as its outcome."""
        waiting = deque(tasks)
        attempts: dict[str, int] = {}
        while len(self._processes) < min(self._jobs, len(waiting)):
            self._processes.append(_Process(self._memory, self._shared))
        while waiting or any(each.task for each in self._processes):
            for each in self._processes:
                if each.task is None and waiting:
                    self._start(each, waiting.popleft())
            busy = {each.connection: each for each in self._processes if each.task is not None}
            for ready in wait(list(busy)):
                process = busy[ready]  # type: ignore[index]
                task = process.task
                assert task is not None
                try:
                    outcome: Outcome | None = process.connection.recv()
                    process.task = None
                except (EOFError, ConnectionError):
                    self._replace(process)
                    candidate, key = task
                    attempts[key] = attempts.get(key, 0) + 1
                    outcome = None
                    if attempts[key] < MAX_ATTEMPTS:
                        waiting.appendleft(task)
                    else:
                        outcome = _describe_lost(candidate, key)
                if outcome is not None:
                    yield outcome

    def _start(self, process: _Process, task: Task) -> None:
        try:
            process.start(task)
        except (BrokenPipeError, ConnectionError):  # it died idle; `wait` reports the end of its connection
            process.task = task

    def _replace(self, dead: _Process) -> None:
        dead.stop()
        self._processes[self._processes.index(dead)] = _Process(self._memory, self._shared)

    def close(self) -> None:
        """End all processes and release the shared workload."""
        for each in self._processes:
            each.stop()
        self._processes.clear()
        os.close(self._memory)


def _describe_lost(candidate: Candidate, key: str) -> Outcome:
    return Outcome(
        key=key,
        flags=candidate.flags,
        requests=candidate.requests,
        lost=True,
        error=f"its process ended {MAX_ATTEMPTS} times without a result; this machine may have too little memory",
    )
