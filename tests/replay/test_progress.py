"""A run reports how many requests have ended, and can be stopped, however it is played."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from replay.building import ONE_MS, single_turns
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import WrongState
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan

if TYPE_CHECKING:
    from understudy.workload import Workload

WAYS = pytest.mark.parametrize(
    "how",
    [
        {},
        {"workers": 2, "threads": 2},
        {"routing": "least_loaded"},
    ],
    ids=["alone", "threads", "together"],
)


def stream(requests: int = 2000) -> Workload:
    return single_turns([16] * requests, arrival_ms=[row / 10 for row in range(requests)])


@WAYS
def test_progress_rises_to_the_number_of_requests_on_the_calling_thread(how: dict[str, Any]) -> None:
    counts: list[int] = []
    threads: set[int] = set()

    def progress(ended: int) -> None:
        counts.append(ended)
        threads.add(threading.get_ident())

    run_offline(RunPlan(stream(), VllmConfig(timing=ONE_MS), **how, progress=progress))
    assert counts == sorted(counts)
    assert counts[-1] == 2000
    assert threads == {threading.get_ident()}
    if "threads" not in how:  # there it depends on the clock
        assert len(counts) > 3


def test_progress_counts_requests_that_have_ended_not_those_that_have_come() -> None:
    counts: list[int] = []
    # All are there at once, and all end at once.
    engine = VllmConfig(
        num_gpu_blocks=20_000, timing=ONE_MS, max_num_seqs=1000, max_num_batched_tokens=16_000
    )
    run_offline(RunPlan(single_turns([16] * 1000, 300), engine, progress=counts.append))
    assert set(counts) <= {0, 1000}
    assert counts[-1] == 1000


@WAYS
def test_an_error_in_the_progress_hook_stops_the_run(how: dict[str, Any]) -> None:
    class Enough(Exception):
        pass

    calls = 0

    def stop(_: int) -> None:
        nonlocal calls
        calls += 1
        raise Enough

    with pytest.raises(Enough):
        run_offline(RunPlan(stream(), VllmConfig(timing=ONE_MS), **how, progress=stop))
    assert calls == 1


ENDLESS = """
import os, signal, sys, threading
import numpy as np
from understudy.engines.vllm_config import VllmConfig
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload import Workload

rows = 64
workload = Workload(
    arrival_ns=np.zeros(rows, np.int64),
    prompt_tokens=[16] * rows,
    output_tokens=[2_000_000] * rows,
    hash_offsets=np.arange(rows + 1),
    hash_ids=np.arange(rows, dtype=np.uint32),
    trace_block_size=16,
)
how = {how}
config = VllmConfig(block_size=16384, num_gpu_blocks=10_000)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner may ignore it
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    run_offline(RunPlan(workload, config, fast_forward=False, **how))
except KeyboardInterrupt:
    sys.exit(42)
"""


@WAYS
def test_ctrl_c_stops_a_run_without_a_progress_hook(how: dict[str, Any]) -> None:
    # Hours of steps: it ends because it is told to, or the test times out.
    done = subprocess.run(
        [sys.executable, "-c", ENDLESS.replace("{how}", repr(how))],
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 42, done.stderr


def test_the_first_worker_s_error_counts_however_many_threads_play() -> None:
    # Without chunked prefill a preempted request returns whole, into a budget that is too small. Worker 0 (even rows)
    # gets that far after a thousand others, worker 1 at once.
    requests = 2000
    workload = single_turns(
        [16] * requests, [30 if row in (1, 3, 1996, 1998) else 1 for row in range(requests)]
    )
    engine = VllmConfig(
        block_size=4,
        num_gpu_blocks=12,
        max_num_batched_tokens=20,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
    )
    for threads in (1, 2):
        with pytest.raises(WrongState, match=r"no progress: 1 requests wait .*first row 1998 "):
            run_offline(RunPlan(workload, engine, workers=2, threads=threads))
