"""Errors of runs with speculation: EAGLE3 heads on gpt-oss-120b, one H200, with the acceptance that was measured."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from rich.table import Table as Grid

from understudy.calibrate.simulate import mean_of_known, simulate
from understudy.engines.speculation import SpeculativeConfig
from understudy.engines.vllm_config import VllmConfig
from understudy.timing.coefficients import CAPTURES
from understudy.timing.physical import Basis, Physical

if TYPE_CHECKING:
    from understudy.calibrate.experiment import Experiment
    from understudy.calibrate.tables import Table

BLOCKS = {0: 103_690, 1: 93_687, 3: 93_173, 7: 92_148}
"""KV blocks by drafts, from the engine's log; those of 3 drafts lie between."""
GRAPHS = (*CAPTURES, *range(528, 2049, 16))
"""The runs captured graphs of up to 2,048 tokens."""


class Scored(NamedTuple):
    """Measured and simulated TPOT of one run, in ms; `free` without the drafter's time."""

    drafts: int
    streams: int
    measured: float
    simulated: float
    free: float


def score(table: Table, head: str | None = None) -> list[Scored]:
    """Replay every row of a table with its measured acceptance; `head` is the config.json of the EAGLE3 head."""
    return [_score(table.experiment(index), row, head) for index, row in enumerate(table.rows)]


def _score(one: Experiment, row: dict[str, str], head: str | None) -> Scored:
    named = re.search(r"num_speculative_tokens=(\d+)", row["speculation"])
    drafts = int(named[1]) if named else 0
    speculation = None
    if drafts:
        shares = tuple(map(float, row["acceptance_per_position"].split()))
        speculation = SpeculativeConfig(
            method="eagle3", num_speculative_tokens=drafts, acceptance_per_position=shares, model=head
        )
    found = [_tpot(one, drafts, speculation, drafter=drafter) for drafter in (True, False)]
    return Scored(drafts, int(row["conc"]), float(row["tpot_ms"]), *found)


def _tpot(one: Experiment, drafts: int, speculation: SpeculativeConfig | None, *, drafter: bool) -> float:
    efficiencies = one.preset().efficiencies
    coefficients = msgspec.structs.replace(one.deployment.coefficients(efficiencies), captures=GRAPHS)
    basis = Basis(deployment=one.deployment, efficiencies=efficiencies) if drafter else None
    assert isinstance(one.engine, VllmConfig)
    engine = msgspec.structs.replace(
        one.engine,
        timing=Physical(coefficients=coefficients, basis=basis),
        num_gpu_blocks=BLOCKS[drafts],
        speculative_config=speculation,
        vllm_version="0.22",
    )
    outcomes = [simulate(load, engine, front_end_ms=efficiencies.front_end_ms) for load in one.loads]
    return mean_of_known(np.array([each.mean("tpot_ms") for each in outcomes]))


def speculated(table: Table, head: str | None = None) -> Grid:
    """Score all rows, and summarise the errors by number of drafts."""
    rows = score(table, head)
    grid = Grid(title="TPOT with EAGLE3, gpt-oss-120b on one H200, measured acceptance")
    for name in ("drafts", "streams", "measured ms", "simulated ms", "error", "without the drafter's time"):
        grid.add_column(name, justify="right")
    for row in sorted(rows):
        free = f"{row.free / row.measured - 1:+.1%}"
        error = f"{row.simulated / row.measured - 1:+.1%}"
        grid.add_row(
            f"{row.drafts}", f"{row.streams}", f"{row.measured:.2f}", f"{row.simulated:.2f}", error, free
        )
    for drafts in sorted({row.drafts for row in rows}):
        own = [row for row in rows if row.drafts == drafts]
        medians = [
            float(np.median([abs(value / row.measured - 1) for row, value in zip(own, values, strict=True)]))
            for values in ([row.simulated for row in own], [row.free for row in own])
        ]
        grid.add_row(f"{drafts}", "median", "", "", f"{medians[0]:.1%}", f"{medians[1]:.1%}", style="bold")
    return grid
