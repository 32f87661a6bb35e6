"""A sweep on a local Ray cluster of two nodes (extra [ray])."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from understudy.cli import main
from understudy.errors import ConfigError
from understudy.report import Slo
from understudy.run.settings import ReplaySettings
from understudy.sweep.candidate import Candidate, evaluate
from understudy.sweep.on_ray import RayTasks
from understudy.workload import read_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

TRACE = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"
WORKLOAD = read_trace(TRACE)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Address of a cluster of two nodes with one CPU each, in this machine."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20, include_dashboard=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def candidate(workers: int) -> Candidate:
    settings = ReplaySettings.read(None, {"workers": workers}, [])
    return Candidate(flags={"workers": workers}, settings=settings, slo=Slo(ttft_ms=100))


@pytest.mark.filterwarnings("ignore")
def test_two_nodes_give_the_results_of_this_process_though_workers_die(cluster: Any, tmp_path: Path) -> None:
    def evaluate_and_die_once(workload: Any, one: Candidate, key: str) -> Any:
        """Kill the process of the first attempt at every third candidate."""
        mark = Path(key)
        if one.settings.workers % 3 == 0 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return evaluate(workload, one, key)

    tasks = [(candidate(workers), str(tmp_path / str(workers))) for workers in range(1, 10)]
    with closing(RayTasks(WORKLOAD, cluster.address)) as runner:
        runner._evaluate = runner._ray.remote(max_retries=5)(evaluate_and_die_once)
        outcomes = {outcome.key: outcome.summary for outcome in runner.run(tasks)}
        assert len(runner._ray.nodes()) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "6", "9"]
    assert outcomes == {key: evaluate(WORKLOAD, each, key).summary for each, key in tasks}


@pytest.mark.filterwarnings("ignore")
def test_a_sweep_on_ray_has_the_store_and_the_answer_of_a_local_one(cluster: Any, tmp_path: Path) -> None:
    def sweep(*flags: str) -> dict[str, Any]:
        path, store = tmp_path / "sweep.json", tmp_path / "store.jsonl"
        goal = ["--slo-ttft-ms", "100", "--vary", "workers=1..6", "routing=round_robin,kv", "--quiet"]
        assert main(["sweep", str(TRACE), *goal, *flags, "--store", str(store), "--json", str(path)]) == 0
        result: dict[str, Any] = json.loads(path.read_text())
        return result

    there = sweep("--ray", cluster.address)
    here = sweep("--jobs", "1")
    assert (there["ran"], here["ran"], here["found"]) == (12, 0, 12)
    assert there["answers"] == here["answers"]


def test_without_ray_or_a_cluster_it_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--slo-ttft-ms", "100", "--vary", "workers=1..6"]
    assert main(["sweep", str(TRACE), *flags, "--ray", "local", "--jobs", "2"]) == 2
    assert "--jobs: contradicts --ray" in capsys.readouterr().err
    try:
        import ray  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"pip install 'understudy\[ray\]'"):
            RayTasks(WORKLOAD, "auto")
