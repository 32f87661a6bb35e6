"""Run plays for a duration, after a warm-up, and keep the requests that were sent in it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from understudy.errors import ConfigError, InvalidArgument
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.schema import list_columns
from understudy.run.timeline import Status
from understudy.workload import Plays
from understudy.workload.agents.profile import make_profile

if TYPE_CHECKING:
    from understudy.run.run_plan import RunPlan
    from understudy.run.tier_columns import TierColumns
    from understudy.run.timeline import Timeline
    from understudy.workload import Workload
    from understudy.workload.agents.profile import Profile
    from understudy.workload.columns import Int64Column

MOST_COPIES = 4096
"""Copies of all plays of a trace, from which a duration is taken for a mistake."""


def run_profile(plan: RunPlan) -> tuple[OfflineRun, Workload]:
    """Run a plan whose plays warm up or end at a time; return the run and its workload, without the warm-up.

    Requests that were never sent are left out. Errors: ConfigError for a plan that cannot be run so.
    """
    load = plan.pace
    assert isinstance(load, Plays)
    _check(plan, load)
    copies = 1
    while True:
        profile = make_profile(
            plan.workload,
            lanes=load.lanes,
            warm_up=load.warm_up,
            client_clock=load.clock == "client",
            copies=copies,
            seed=plan.seed,
        )
        run = run_offline(
            replace(
                plan,
                workload=profile.workload,
                load=msgspec.structs.replace(load, clock="recorded"),
                preparing_plays=profile.preparing_plays,
            )
        )
        if not load.duration_s or not run.idle_lanes:
            break
        if copies == MOST_COPIES:
            raise ConfigError(
                f"duration: {copies:,} copies of the plays end before {load.duration_s:g} s; give a shorter one"
            )
        copies *= 2
    rows = np.flatnonzero(run.timeline.arrival_ns >= 0)
    rows = rows[rows >= profile.prepared_rows]
    workload = _take(profile.workload, rows)
    timeline = keep_rows(run.timeline, rows, workload)
    note = _describe(load, profile, run, timeline)
    facts = replace(run.facts, load=load)
    return msgspec.structs.replace(run, timeline=timeline, facts=facts, notes=(*run.notes, note)), workload


def _check(plan: RunPlan, load: Plays) -> None:
    graph = plan.workload.graph
    if graph is not None and load.lanes > graph.plays:
        raise ConfigError(
            f"lanes: {load.lanes} lanes, but the trace has {graph.plays} plays; give at most {graph.plays}"
        )
    for name, given in (
        ("disaggregation", plan.disaggregation is not None),
        ("autoscale", plan.autoscale is not None),
        ("record_steps", plan.record_steps is not None),
        ("save_run, perfetto", plan.keep_steps),
        ("decisions", plan.keep_candidates),
        ("check='deep'", plan.is_deep),
    ):
        if given:
            raise ConfigError(f"{name} does not work with a duration or a warm-up yet; leave one of them out")


def _take(workload: Workload, rows: Int64Column) -> Workload:
    try:
        return workload.take(rows)
    except InvalidArgument as error:
        raise ConfigError(
            f"duration: a session sent a later request without an earlier one, which is not supported yet ({error})"
        ) from error


def keep_rows(timeline: Timeline, rows: Int64Column, workload: Workload) -> Timeline:
    """Return the timeline of only these rows, which are those of `workload`; the others completed no second token."""
    place = {int(row): at for at, row in enumerate(rows)}
    tiers = timeline.tiers
    return replace(
        timeline,
        **{**_columns_of(timeline, rows), "session": workload.session, "turn": workload.turn},
        request_ids=workload.request_ids,
        reject_reasons={place[row]: why for row, why in timeline.reject_reasons.items() if row in place},
        tiers=None if tiers is None else replace(tiers, **_columns_of(tiers, rows)),
    )


def _columns_of(record: Timeline | TierColumns, rows: Int64Column) -> dict[str, Any]:
    taken: dict[str, Any] = {}
    for declared in list_columns(type(record)):
        if declared.about.per != "request":
            continue
        arrays = tuple(array[rows] for array in declared.arrays(record))
        taken[declared.name] = arrays if declared.parts > 1 else arrays[0]
    return taken


def _describe(load: Plays, profile: Profile, run: OfflineRun, timeline: Timeline) -> str:
    parts = []
    if load.warm_up:
        parts.append(
            f"warm-up: {profile.prepared_rows:,} requests of one token, until {run.play_begin_ns / 1e9:,.3f} s"
        )
    if load.duration_s:
        late = int((timeline.status == Status.CANCELLED).sum())
        parts.append(
            f"duration {load.duration_s:g} s: {len(timeline):,} requests were sent, and {late:,} cancelled "
            f"{load.grace_s:g} s later"
        )
    return "; ".join(parts)
