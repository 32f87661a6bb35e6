"""KV events of several cache groups: group, kind and window, offline and on the wire."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import pytest

import understudy as us
from replay.building import conversations
from understudy.errors import ConfigError
from understudy.events import Removed, Stored
from understudy.events.dialects import dialect
from understudy.events.file import read_columns
from understudy.events.translate import to_wire
from understudy.events.wire import BlockRemoved, BlockStored
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan

if TYPE_CHECKING:
    from pathlib import Path

WINDOW = us.KvCacheGroup(kind="sliding_window", block_size=16, window=64)
FULL = us.KvCacheGroup(kind="full", block_size=16)
ENGINE = us.VllmConfig(kv_cache_groups=(WINDOW, FULL), num_gpu_blocks=300)


def test_events_name_the_group_its_kind_and_its_window() -> None:
    log = run_offline(RunPlan(conversations(8), ENGINE, events=True, check=True)).kv
    assert log is not None
    events = [event for _, event in log.events(0, "consolidated")]
    stored = [event for event in events if isinstance(event, Stored)]
    assert {(event.group, event.attention, event.window) for event in stored} == {
        (0, "sliding_window", 64),
        (1, "full_attention", None),
    }
    held: Counter[tuple[int, int]] = Counter()
    for event in events:
        for block in event.blocks:
            held[event.group, block.sequence_hash] += 1 if isinstance(event, Stored) else -1
    assert set(held.values()) <= {0, 1}
    assert any(isinstance(event, Removed) and event.group == 0 for event in events)


def test_of_a_window_only_ends_of_prompts_are_stored_unless_every_block_is_retained() -> None:
    load = conversations(4)

    def stored(interval: int | None) -> Counter[int]:
        engine = us.VllmConfig(
            kv_cache_groups=(WINDOW, FULL), num_gpu_blocks=3000, prefix_cache_retention_interval=interval
        )
        log = run_offline(RunPlan(load, engine, events=True)).kv
        assert log is not None
        found: Counter[int] = Counter()
        for _, event in log.events(0, "consolidated"):
            if isinstance(event, Stored):
                found[event.group] += len(event.blocks)
        return found

    sparse, dense = stored(0), stored(None)
    assert sparse[1] == dense[1]
    assert 0 < sparse[0] < dense[0]


def test_wire_events_have_the_fields_of_vllm() -> None:
    log = run_offline(RunPlan(conversations(3), ENGINE, events=True)).kv
    assert log is not None
    sent = to_wire((event for _, event in log.events(0, "raw")), dialect("vllm-0.33.0"), block_size=16)
    stored = [event for event in sent if isinstance(event, BlockStored)]
    assert {(e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window) for e in stored} == {
        (0, "sliding_window", 64),
        (1, "full_attention", None),
    }
    assert {e.group_idx for e in sent if isinstance(e, BlockRemoved)} <= {0, 1}


def test_files_keep_the_groups(tmp_path: Path) -> None:
    log = run_offline(RunPlan(conversations(3), ENGINE, events=True)).kv
    assert log is not None
    log.write(events=tmp_path / "events.npz", raw_events=tmp_path / "events.jsonl")
    kept = [event.group for _, event in read_columns(tmp_path / "events.npz").publishers["worker 0"]]
    assert kept == [event.group for _, event in log.events(0, "consolidated")]
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert {(line["group"], line.get("window")) for line in lines if line["type"] == "stored"} == {
        (0, 64),
        (1, None),
    }


def test_one_group_has_no_group_in_files(tmp_path: Path) -> None:
    log = run_offline(RunPlan(conversations(3), us.VllmConfig(num_gpu_blocks=300), events=True)).kv
    assert log is not None
    log.write(events=tmp_path / "events.jsonl")
    assert "group" not in (tmp_path / "events.jsonl").read_text()


def test_recorded_steps_refuse_groups(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="several groups do not work with recorded steps"):
        run_offline(RunPlan(conversations(2), ENGINE, record_steps=tmp_path / "steps.jsonl"))
