"""One declaration of each column: the core, the timeline, the digest and the lines of requests follow it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import GenericAlias, SimpleNamespace
from typing import Annotated, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from replay.building import conversations, crowd
from understudy._core import FleetResult, TierTotals
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import InvalidArgument
from understudy.report import Report
from understudy.report.requests import key_of
from understudy.run.digest import digests
from understudy.run.handoff_columns import HandOffColumns
from understudy.run.losses import RequestLosses
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.run.schema import About, check_columns, list_columns, list_totals, take_columns
from understudy.run.tier_columns import TierColumns
from understudy.run.timeline import Timeline
from understudy.run.worker_lives import WorkerLives
from understudy.tiers import TiersConfig
from understudy.workload.columns import Int32Column, Int64Column  # noqa: TC001  (read as annotations)

ROOT = Path(__file__).parents[2]
ENGINE = VllmConfig(block_size=16, num_gpu_blocks=120)
TIERS = TiersConfig.from_dict(
    {
        "kv_bytes_per_token": 1 << 14,
        "tiers": [
            {"tier": "g2", "blocks": 200, "link": {"down_gbps": 5, "up_gbps": 5}},
            {"tier": "g3", "blocks": 300},
        ],
        "offload": {"mode": "evict"},
    }
)


@dataclass(frozen=True)
class Little:
    """Two columns, one under another name in the core, and one of two parts."""

    a_ns: Annotated[Int64Column, About("request", "ns", "A span.", core_name="alpha")]
    b: Annotated[Int32Column, About("request", "tokens", "From the workload.", "workload")]
    c: Annotated[tuple[Int64Column, Int64Column], About("sample", "blocks", "Two parts.")]
    count: int = 0


def test_a_declaration_has_name_type_unit_and_meaning() -> None:
    a, b, c = list_columns(Little)
    assert (a.name, a.dtype, a.about.unit, a.parts) == ("a_ns", np.int64, "ns", 1)
    assert (b.name, b.dtype, b.about.source) == ("b", np.int32, "workload")
    assert (c.parts, c.about.per) == (2, "sample")
    assert list_totals(Little) == ("count",)


def test_columns_come_from_the_core_and_the_workload_in_the_workloads_order() -> None:
    core = SimpleNamespace(alpha=np.array([10, 20, 30]), c=(np.array([1]), np.array([2])))
    taken = take_columns(Little, core, SimpleNamespace(b=np.array([7, 8, 9])), np.array([2, 0, 1]))
    assert taken["a_ns"].tolist() == [20, 30, 10]
    assert taken["b"].tolist() == [7, 8, 9]
    assert [part.tolist() for part in taken["c"]] == [[1], [2]]


def test_columns_of_one_kind_are_as_long() -> None:
    none = np.zeros(0, np.int64)
    with pytest.raises(InvalidArgument, match="b must have 2 entries, got 1"):
        check_columns(Little(np.zeros(2, np.int64), np.zeros(1, np.int32), (none, none)))
    with pytest.raises(InvalidArgument, match="c needs 2 columns, got 1"):
        check_columns(Little(np.zeros(1, np.int64), np.zeros(1, np.int32), (none,)))  # type: ignore[arg-type]


def test_every_array_and_number_of_the_core_is_declared() -> None:
    """What the core counts and nobody declares would be in no output."""
    records = (Timeline, TierColumns, HandOffColumns, WorkerLives, RequestLosses)
    declared = {c.about.core_name or c.name for record in records for c in list_columns(record)}
    told = (
        declared
        | set(list_totals(Timeline))
        | {"tiers", "tier_totals", "links", "handoff", "groups", "events", "kv_trace"}
    )
    told |= {"play_begin_ns", "prefixes", "idle_lanes"}  # of plays, for the report
    told |= {"step_ns", "uncovered_ns"}  # of the timing model, for the report: no part of what happened
    core = {name for name in dir(FleetResult) if not name.startswith("_")}
    assert core - told == {"rejections"}


def test_a_column_of_the_core_is_declared_in_one_file_of_it() -> None:
    """Filling and binding follow the tables there. (A column of the workload, or a setting, may have the same name.)"""
    room = sorted((ROOT / "core" / "replay").iterdir())
    sources = {path.name: path.read_text() for path in (*room, ROOT / "core" / "bindings" / "replay.cpp")}
    sources["replay.cpp"] = re.sub(r'from\.read(_if_there)?\("\w+"', "", sources["replay.cpp"])
    totals = set(list_totals(Timeline)) - {"num_workers", "blocks_per_worker", "block_size"}
    columns = (*list_columns(Timeline), *list_columns(TierColumns))
    names = totals | {c.about.core_name or c.name for c in columns if c.about.source == "core"}
    names -= {
        "evictions",
        "stored_blocks",
        "late_notifications",
    }  # of the store, and of the hand-offs' network
    for name in names:
        declared = re.compile(rf'(?<!add\()"{name}"(?!_a)')
        found = {file: len(declared.findall(text)) for file, text in sources.items() if declared.search(text)}
        assert found == {"fleet_result.hpp": 1}, name


def test_lines_of_requests_have_every_column_with_a_row_a_request(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    Report.build(run_offline(RunPlan(crowd(5), ENGINE, tiers=TIERS)).timeline).requests_jsonl(path)
    keys = set(json.loads(path.read_text().splitlines()[0]))
    for declared in (*list_columns(Timeline), *list_columns(TierColumns)):
        if declared.about.per == "request":
            for part in range(declared.parts):
                assert key_of(declared, part) in keys


# ── The digest ──


def record() -> tuple[Timeline, TierColumns]:
    timeline = run_offline(RunPlan(conversations(20), ENGINE, workers=2, tiers=TIERS)).timeline
    assert timeline.tiers is not None
    return timeline, timeline.tiers


def unchecked(timeline: Timeline, **changes: Any) -> Any:
    """The timeline with columns that need not make sense."""
    copy = object.__new__(Timeline)
    for field in fields(Timeline):
        object.__setattr__(copy, field.name, changes.get(field.name, getattr(timeline, field.name)))
    return copy


def test_no_column_can_change_without_the_digest_but_one_that_came_later_and_says_so() -> None:
    timeline, tiers = record()
    before = digests(timeline)["digest"]
    assert [declared.name for declared in list_columns(Timeline) if not declared.about.digested] == [
        "queued_ns"
    ]
    for declared in list_columns(Timeline):
        if not declared.about.digested:
            continue
        (array,) = declared.arrays(timeline)
        assert len(array), declared.name
        changed = array.copy()
        changed[-1] += 1
        assert digests(unchecked(timeline, **{declared.name: changed}))["digest"] != before, declared.name
    for name in list_totals(Timeline):
        other = unchecked(timeline, **{name: getattr(timeline, name) + 1})
        assert digests(other)["digest"] != before, name
    for declared in list_columns(TierColumns):
        for part, array in enumerate(declared.arrays(tiers)):
            changed = array.copy()
            changed[-1] += 1
            arrays = list(declared.arrays(tiers))
            arrays[part] = changed
            change: dict[str, Any] = {declared.name: tuple(arrays) if declared.parts > 1 else changed}
            other_tiers = replace(tiers, **change)
            assert digests(unchecked(timeline, tiers=other_tiers))["digest"] != before, declared.name


def test_what_the_page_says_is_left_out_changes_no_digest() -> None:
    timeline, _ = record()
    others = {
        "queued_ns": timeline.queued_ns + 1,
        "request_ids": [f"{row}" for row in range(len(timeline))],
        "reject_reasons": {0: "too long"},
        "own_blocks": [1, 2],
    }
    section = (ROOT / "docs" / "metrics.md").read_text().partition("\n## The digest\n")[2]
    _, _, left_out = section.partition("\nNot covered")
    assert re.findall(r"^- `(\w+)`:", left_out, re.MULTILINE) == [*others, "offered_ns"]
    assert [c.name for c in list_columns(HandOffColumns) if not c.about.digested] == ["offered_ns"]
    for name, value in others.items():
        assert digests(unchecked(timeline, **{name: value})) == digests(timeline), name


def test_what_tiers_held_and_links_carried_is_in_the_digest() -> None:
    timeline, tiers = record()
    parts = digests(timeline)["digests"]
    other = digests(unchecked(timeline, tiers=replace(tiers, links=tiers.links[:-1])))["digests"]
    assert {name for name in parts if parts[name] != other[name]} == {"links"}
    other = digests(unchecked(timeline, tiers=replace(tiers, tiers=tiers.tiers[:-1])))["digests"]
    assert {name for name in parts if parts[name] != other[name]} == {"tiers"}
    more: Any = _Totals(tiers.totals)
    other = digests(unchecked(timeline, tiers=replace(tiers, totals=more)))["digests"]
    assert {name for name in parts if parts[name] != other[name]} == {"tiers"}


class _Totals:
    """Totals with one more wait for room."""

    def __init__(self, totals: TierTotals) -> None:
        self.__dict__ = {name: getattr(totals, name) for name in dir(TierTotals) if not name.startswith("_")}
        self.room_waits += 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("tiers", [None, TIERS])
def test_runs_that_are_played_otherwise_have_the_same_digests(tiers: TiersConfig | None) -> None:
    load = crowd(60)
    ways: tuple[dict[str, Any], ...] = ({}, {"fast_forward": False}, {"check": True})
    runs = [
        run_offline(RunPlan(load, ENGINE, workers=3, tiers=tiers, events=True, **how)).facts.digests
        for how in ways
    ]
    assert runs[0] == runs[1] == runs[2]
    assert "events" in runs[0]
    if tiers is None:
        threaded = run_offline(RunPlan(load, ENGINE, workers=3, threads=2)).facts.digests
        assert threaded == {name: value for name, value in runs[0].items() if name != "events"}


def test_a_run_that_keeps_its_events_has_the_digest_of_one_that_does_not() -> None:
    with_events = run_offline(RunPlan(crowd(20), ENGINE, events=True)).facts
    without = run_offline(RunPlan(crowd(20), ENGINE)).facts
    assert with_events.digest == without.digest
    other = run_offline(RunPlan(crowd(20), ENGINE, events=True, seed=1)).facts
    assert other.digests["events"] == with_events.digests["events"]
    fewer = run_offline(RunPlan(crowd(20), VllmConfig(block_size=16, num_gpu_blocks=40), events=True)).facts
    assert fewer.digests["events"] != with_events.digests["events"]


@pytest.mark.parametrize(
    "array",
    [
        NDArray[np.int32],
        np.ndarray[tuple[int, ...], np.dtype[np.int32]],
        GenericAlias(
            list, (np.int32,)
        ),  # as numpy 2.5's own alias on Python 3.12: the type, and nothing around it
    ],
)
def test_the_type_of_a_column_is_read_however_numpy_spells_an_array(array: Any) -> None:
    record = type("R", (), {"__annotations__": {"sizes": Annotated[array, About("request", "tokens", "x")]}})
    (column,) = list_columns(record)
    assert column.dtype is np.int32


def test_a_column_without_a_type_is_refused_by_name() -> None:
    record = type(
        "R", (), {"__annotations__": {"sizes": Annotated[list[Any], About("request", "tokens", "x")]}}
    )
    with pytest.raises(InvalidArgument, match=r"R\.sizes"):
        list_columns(record)
