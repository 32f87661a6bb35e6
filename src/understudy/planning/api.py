"""`understudy.plan`: from a log to the cheapest fleet."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from understudy.errors import ConfigError
from understudy.planning.files import make_folder, write_files
from understudy.planning.find import MOST_CPU_S, find_plan
from understudy.planning.price_list import PriceList
from understudy.planning.question import LINK_GBPS, MOST_GPUS, NODE_GPUS, Question, read_gpus
from understudy.report.goodput import Slo
from understudy.workload import Workload, read_trace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from understudy.planning.replays import Progress
    from understudy.planning.result import Plan


def plan(
    workload: Workload | str | os.PathLike[str],
    *,
    model: str,
    gpu: str | Sequence[str],
    slo: Slo | Mapping[str, float],
    goal: float | None = None,
    users: float = 1.0,
    prices: Mapping[str, float] | str | os.PathLike[str] | None = None,
    goal_window_s: float | None = None,
    kv_dtype: str | None = None,
    most_gpus: int = MOST_GPUS,
    node_gpus: int = NODE_GPUS,
    host_gib: int | None = None,
    splits: bool = True,
    link_gbps: float = LINK_GBPS,
    settings: Sequence[str] = (),
    store: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    ray: str | None = None,
    most_cpu_s: float | None = MOST_CPU_S,
    progress: Progress | None = None,
) -> Plan:
    """Find the cheapest fleet for a log, choosing engines, parallel sizes, roles, chunks and tiers itself.

    Parameters:
        workload: a log with times, or its path in any known format.
        model: known model name, or path of a config.json.
        gpu: names of GPUs to choose from, in a list or with commas between them.
        slo: objectives, as `Slo` or as a mapping such as `{"ttft_ms": 2000, "tpot_ms": 50}`.
        goal: share of requests that must meet them (default: 0.99).
        users: users relative to those of the log.
        prices: $ per hour of a GPU by name, or the path of a YAML file with them; None: assumed, and said so.
        goal_window_s: the goal must hold in every window of this length; default: one hour if the log spans two.
        kv_dtype: type of the KV cache; default: the model's own.
        most_gpus: GPUs of the largest fleet.
        node_gpus: GPUs of the largest engine.
        host_gib: host memory per GPU that fleets may use for KV blocks; None: no host tier is tried.
        splits: whether prefill and decode workers are tried.
        link_gbps: link of each of these workers, in 10^9 bytes per second.
        settings: settings of all fleets, each `A.B=V` as for `--set`.
        store: file of finished replays; the same plan again continues.
        out: folder of files as of `--out`, a store among them.
        jobs: processes; default: all cores.
        ray: address of a Ray cluster instead.
        most_cpu_s: CPU time after which no more fleets and changes are tried; None: no limit.
        progress: called with the task, and the numbers of ended and of all searches.

    Errors: ConfigError for a wrong setting; InvalidArgument for a log that cannot be read or has no times.

    Example:
        plan = us.plan("trace.jsonl", model="Qwen3-32B", gpu="H100,H200", slo={"ttft_ms": 2000, "tpot_ms": 50})
        print(plan)
    """
    rows = workload if isinstance(workload, Workload) else read_trace(workload)
    names = read_gpus(gpu)
    question = Question(
        model=model,
        gpus=names,
        slo=slo if isinstance(slo, Slo) else read_slo(slo),
        prices=_read_prices(names, prices),
        goal_window_s=goal_window_s,
        kv_dtype=kv_dtype,
        most_gpus=most_gpus,
        node_gpus=node_gpus,
        host_gib=host_gib,
        splits=splits,
        link_gbps=link_gbps,
        assignments=tuple(settings),
    )
    if goal is not None:
        question = replace(question, goal=goal)
    found = find_plan(
        rows,
        question,
        name="workload" if isinstance(workload, Workload) else Path(workload).name,
        users=users,
        store=Path(store) if store is not None else None if out is None else make_folder(Path(out)),
        jobs=jobs,
        ray=ray,
        most_cpu_s=most_cpu_s,
        progress=progress,
    )
    if out is not None:
        write_files(found, Path(out))
    return found


def read_slo(limits: Mapping[str, float]) -> Slo:
    """Read objectives by name; `tpot_ms` is another name of `itl_ms`. ConfigError names an unknown one."""
    names = {"tpot_ms": "itl_ms"}
    given = {names.get(name, name): limit for name, limit in limits.items()}
    for name in given:
        if name not in ("ttft_ms", "itl_ms", "e2e_ms"):
            raise ConfigError(
                f"slo: {name!r} is not an objective; known are ttft_ms, itl_ms (or tpot_ms), e2e_ms"
            )
    return Slo(**given)


def _read_prices(
    gpus: Sequence[str], prices: Mapping[str, float] | str | os.PathLike[str] | None
) -> PriceList:
    if prices is None:
        return PriceList.read(gpus, None, ())
    if isinstance(prices, str | os.PathLike):
        return PriceList.read(gpus, Path(prices), ())
    return PriceList.read(gpus, None, [f"{name}={price}" for name, price in prices.items()])
