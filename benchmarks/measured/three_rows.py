"""Calibrated from three summaries of a deployment."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import track

from measured.errors import Errors
from measured.fit_set import STRATA
from understudy.calibrate.benchmark import Benchmark
from understudy.calibrate.engine_flags import EngineFlags
from understudy.calibrate.fit import fit

if TYPE_CHECKING:
    from rich.table import Table as Grid

    from understudy.calibrate.experiment import Experiment
    from understudy.calibrate.tables import Table
    from understudy.timing.efficiencies import Efficiencies


def three_rows(table: Table, only: str | None = None) -> Grid:
    """Each deployment fitted to three of its rows; the others scored."""
    deployments: dict[tuple[object, ...], list[Experiment]] = defaultdict(list)
    for index, row in enumerate(table.rows):
        one = table.experiment(index)
        what = one.deployment
        if only not in (None, STRATA[what.model.name]):
            continue
        who = (what.model.name, what.gpu.name, what.weights, what.parallel, row["backend_version"])
        deployments[who].append(one)
    errors, seconds = Errors(), []
    for members in track(list(deployments.values()), "fitting", console=Console(file=sys.stderr)):
        chosen = _three(members)
        if chosen is None:
            continue
        group = STRATA[members[0].deployment.model.name]
        began = time.process_time()
        found = _fit_to(chosen)
        seconds.append(time.process_time() - began)
        for one in members:
            if all(one is not seen for seen in chosen):
                ours = one.predict(found)
                for name, key in (("TPOT", "tpot_ms"), ("TTFT", "ttft_ms")):
                    errors.add(group, "all", name, ours[key], one.measurement(key))
    took = f"{np.median(seconds):.1f} s of CPU a fit, at most {max(seconds):.1f}"
    return errors.table(
        f"calibrated from three rows of each of {len(seconds)} deployments: the other rows; {took}"
    )


def _three(members: list[Experiment]) -> list[Experiment] | None:
    """1k/1k at low and high concurrency, 8k/1k in the middle; None where there is nothing to score."""
    ordered = sorted(members, key=lambda one: one.loads[0].concurrency)
    lengths = [one.loads[0].workload for one in ordered]
    short = [
        one
        for one, w in zip(ordered, lengths, strict=True)
        if w.prompt_tokens.mean() < 2000 and w.output_tokens.mean() < 2000
    ]
    long = [one for one, w in zip(ordered, lengths, strict=True) if w.prompt_tokens.mean() >= 2000]
    if len(short) < 2 or not long or len(members) < 5:
        return None
    return [short[0], short[-1], long[len(long) // 2]]


def _fit_to(chosen: list[Experiment]) -> Efficiencies:
    benchmarks = [
        Benchmark(
            file=one.name,
            format="row",
            sha256="",
            load=one.loads[0],
            other_draws=one.loads[1:],
            means={name: one.measurement(name) for name in one.measured},
            engine={
                "max_num_seqs": one.engine.max_num_seqs or 1,
                "max_num_batched_tokens": one.engine.max_num_batched_tokens or 1,
            },
        )
        for one in chosen
    ]
    start = chosen[0].preset().efficiencies
    return fit(benchmarks, chosen[0].deployment, start, EngineFlags()).file.efficiencies
