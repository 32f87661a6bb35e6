"""Perfetto traces: parsed with Perfetto's own protobuf classes, and as JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from explain.random_runs import record
from replay.building import conversations, crowd
from understudy.cli import main
from understudy.engines.sglang_config import SglangConfig
from understudy.engines.vllm_config import VllmConfig
from understudy.explain.perfetto import write_trace
from understudy.run.disaggregation import Disaggregation
from understudy.tiers import TiersConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from understudy.explain import SavedRun

TIERS = TiersConfig.from_dict(
    {
        "tiers": [{"tier": "g2", "blocks": 300, "link": {"down_gbps": 1, "up_gbps": 1}}],
        "kv_bytes_per_token": 1024,
    }
)
TIGHT = VllmConfig(block_size=16, num_gpu_blocks=60)
RUNS: dict[str, dict[str, Any]] = {
    "vllm": {"engine": TIGHT, "workers": 2},
    "tiers": {"engine": TIGHT, "tiers": TIERS},
    "disaggregation": {
        "engine": TIGHT,
        "disaggregation": Disaggregation(prefill_workers=1, decode_workers=1, kv_bytes_per_token=1000),
    },
    "sglang": {"engine": SglangConfig(block_size=16, num_gpu_blocks=60), "workers": 2},
}


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> SavedRun:
    return record(conversations(12), **RUNS[request.param])


def unknown_fields(message: Any) -> Iterator[str]:
    """Yield fields of a message, and of those in it, whose number or type Perfetto's schema does not have."""
    unknown = pytest.importorskip("google.protobuf.unknown_fields")
    name = message.DESCRIPTOR.name
    yield from (f"{name}: field {field.field_number}" for field in unknown.UnknownFieldSet(message))
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.is_repeated else [value]:
                yield from unknown_fields(inner)


def test_a_protobuf_trace_is_one_that_perfetto_reads(run: SavedRun, tmp_path: Path) -> None:
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    write_trace(run, tmp_path / "trace.pftrace")
    trace = protos.Trace()
    assert trace.ParseFromString((tmp_path / "trace.pftrace").read_bytes()) > 0
    assert not list(unknown_fields(trace))
    event = protos.TrackEvent
    parents: dict[int, int] = {}
    counters, processes, names = set(), set(), set()
    open_slices: dict[int, int] = defaultdict(int)
    latest: dict[int, int] = defaultdict(int)
    flows: dict[int, list[int]] = defaultdict(list)
    ended: set[int] = set()
    slices = 0
    for packet in trace.packet:
        if packet.HasField("interned_data"):
            names = {name.iid for name in packet.interned_data.event_names}
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            assert track.uuid not in parents
            assert track.parent_uuid in {0, *parents}
            parents[track.uuid] = track.parent_uuid
            if track.HasField("process"):
                processes.add(track.uuid)
            elif track.HasField("counter"):
                counters.add(track.uuid)
        if not packet.HasField("track_event"):
            continue
        found = packet.track_event
        uuid = found.track_uuid
        assert parents[uuid] in processes
        assert packet.timestamp >= latest[uuid]
        latest[uuid] = packet.timestamp
        if found.type == event.TYPE_COUNTER:
            assert uuid in counters
            continue
        assert uuid not in counters
        if found.type == event.TYPE_SLICE_BEGIN:
            assert found.name_iid in names
            assert open_slices[uuid] == 0
            open_slices[uuid] += 1
            slices += 1
            for flow in (*found.flow_ids, *found.terminating_flow_ids):
                flows[flow].append(packet.timestamp)
            assert not ended & set(found.terminating_flow_ids)
            ended |= set(found.terminating_flow_ids)
        else:
            assert found.type == event.TYPE_SLICE_END
            open_slices[uuid] -= 1
    assert not any(open_slices.values())
    assert slices >= len(run.steps.step_begin_ns) + len(run)
    assert set(flows) == ended == {row + 1 for row in range(len(run))}
    assert min(map(len, flows.values())) >= 2  # the request, and at least one step
    assert len(processes) == len(run.worker_blocks) + bool(run.links)


def test_the_time_in_a_trace_is_that_of_the_steps(run: SavedRun, tmp_path: Path) -> None:
    write_trace(run, tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    assert set(document) == {
        "traceEvents"
    }  # a displayTimeUnit would change the unit of all times in Perfetto
    events = document["traceEvents"]
    threads = {
        (one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"
    }
    slices = [one for one in events if one["ph"] == "X"]
    steps = [one for one in slices if threads[one["pid"], one["tid"]] == "steps"]
    assert [round(one["ts"] * 1000) for one in steps] == run.steps.step_begin_ns.tolist()
    lengths = run.steps.step_end_ns - run.steps.step_begin_ns
    assert sum(round(one["dur"] * 1000) for one in steps) == int(lengths.sum())
    assert sum(one["args"]["tokens"] for one in steps) > 0
    flows = [one for one in events if one["ph"] in "stf"]
    assert {one["id"] for one in flows if one["ph"] == "s"} == set(range(1, len(run) + 1))
    assert {one["id"] for one in flows if one["ph"] == "f"} == set(range(1, len(run) + 1))
    counted = {one["name"] for one in events if one["ph"] == "C"}
    assert {"running requests", "waiting requests", "KV blocks used"} <= counted
    assert bool(run.links) == any("bytes/s" in name for name in counted)


def test_slots_of_running_requests_do_not_overlap(tmp_path: Path) -> None:
    run = record(crowd(30), engine=TIGHT)
    assert run.requests["preemptions"].sum() > 0
    write_trace(run, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    by_track = defaultdict(list)
    for one in events:
        if one["ph"] == "X":
            by_track[one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
    for spans in by_track.values():
        ends = np.array(spans)
        assert (ends[1:, 0] >= ends[:-1, 1] - 1e-3).all()


def test_the_command_line_writes_both_forms(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 40, "output_length": 3, "hash_ids": [1]}\n')
    for name in ("out.pftrace", "out.json"):
        assert main(["replay", str(trace), "--perfetto", str(tmp_path / name), "--quiet"]) == 0
        assert (tmp_path / name).stat().st_size > 100
