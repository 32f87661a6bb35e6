"""Run candidates as tasks of a Ray cluster (extra [ray])."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError
from understudy.sweep.candidate import Outcome, evaluate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from understudy.sweep.local import Task
    from understudy.workload import Workload

MAX_RETRIES = 5
"""Times that Ray runs a task again whose process or node died."""
QUEUED_PER_CPU = 2


class RayTasks:
    """Runs candidates on a Ray cluster; the workload is put into its object store once.

    `address` is that of a cluster (`auto`, `HOST:PORT`, `ray://HOST:PORT`) or `local`. ConfigError if Ray is not
    installed or does not answer. Every node needs this version of Understudy.
    """

    def __init__(self, workload: Workload, address: str) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError(
                "--ray: the package ray is not installed; pip install 'understudy[ray]'"
            ) from error
        self._ray: Any = ray
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            try:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(
                    f"--ray {address}: no cluster answers ({error}); start one with `ray start`"
                ) from None
        self._workload = ray.put(workload)
        self._evaluate = ray.remote(num_cpus=1, max_retries=MAX_RETRIES)(evaluate)

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Yield outcomes as they finish. A task that Ray gives up on has an error as its outcome."""
        ray = self._ray
        waiting = iter(tasks)
        running: dict[Any, Task] = {}
        limit = QUEUED_PER_CPU * max(1, int(ray.cluster_resources().get("CPU", 1)))
        while True:
            while len(running) < limit and (task := next(waiting, None)) is not None:
                running[self._evaluate.remote(self._workload, *task)] = task
            if not running:
                return
            finished, _ = ray.wait(list(running), num_returns=1)
            for reference in finished:
                candidate, key = running.pop(reference)
                try:
                    yield ray.get(reference)
                except ray.exceptions.RayError as error:
                    text = " ".join(str(error).split())[:300]
                    reason = f"Ray gave it up: {type(error).__name__}: {text}"
                    yield Outcome(
                        key=key, flags=candidate.flags, requests=candidate.requests, error=reason, lost=True
                    )

    def close(self) -> None:
        """Disconnect from the cluster, if this object connected to it."""
        if self._is_ours:
            self._ray.shutdown()
