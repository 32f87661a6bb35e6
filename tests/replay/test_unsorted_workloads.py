"""A workload that is not sorted by arrival: every output speaks of its own rows, by its own names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from model.replay_gen import REQUEST_COLUMNS
from replay.building import conversations, crowd, single_turns
from understudy.cli import main
from understudy.engines.vllm_config import VllmConfig
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.run.schema import list_columns
from understudy.run.tier_columns import TierColumns
from understudy.tiers import TiersConfig
from workload.building import row, trace_file

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.workload import Workload

SMALL = VllmConfig(block_size=16, num_gpu_blocks=64)
TIERS = TiersConfig.from_dict(
    {"kv_bytes_per_token": 1024, "tiers": [{"tier": "g2", "blocks": 400}], "offload": {"mode": "evict"}}
)


def shuffled(workload: Workload) -> tuple[Workload, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Its sessions in another order, and the rows as they came."""
    sessions = np.random.default_rng(7).permutation(workload.sessions)
    rows = np.argsort(sessions[workload.session], kind="stable")
    return workload.take(rows), rows


@pytest.mark.parametrize("tiers", [None, TIERS])
@pytest.mark.parametrize("many_turns", [False, True])
def test_row_i_is_request_i_of_the_workload_as_it_was_given(
    many_turns: bool, tiers: TiersConfig | None
) -> None:
    in_order = (conversations if many_turns else crowd)(40).sorted_by_arrival()
    assert len(np.unique(in_order.arrival_ns)) == in_order.sessions  # so that the order of play is the same
    mixed, rows = shuffled(in_order)
    assert mixed.arrival_order() is not None
    before = run_offline(RunPlan(in_order, SMALL, workers=2, tiers=tiers)).timeline
    after = run_offline(RunPlan(mixed, SMALL, workers=2, tiers=tiers)).timeline
    for name in (*REQUEST_COLUMNS, "prompt_tokens", "requested_output_tokens", "turn"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name)[rows], err_msg=name)
    np.testing.assert_array_equal(after.session, mixed.session)
    if tiers is not None:
        assert before.tiers is not None
        assert after.tiers is not None
        declared = [column for column in list_columns(TierColumns) if column.about.per == "request"]
        for column in declared:
            for ours, theirs in zip(column.arrays(after.tiers), column.arrays(before.tiers), strict=True):
                np.testing.assert_array_equal(ours, theirs[rows], err_msg=column.name)
        assert any(array.any() for column in declared for array in column.arrays(after.tiers))


def test_rejections_name_the_row_that_was_rejected() -> None:
    workload = single_turns([16, 5000, 16], arrival_ms=[9, 5, 1])
    timeline = run_offline(RunPlan(workload, VllmConfig(block_size=16, num_gpu_blocks=8))).timeline
    assert timeline.status.tolist() == [0, 1, 0]
    assert list(timeline.reject_reasons) == [1]


def test_a_recorded_step_names_requests_by_their_own_rows(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    run_offline(RunPlan(single_turns([16, 16], arrival_ms=[50, 0]), record_steps=path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    first = next(line for line in lines if line.get("scheduled"))
    assert "'1'" in str(first["scheduled"])
    assert "'0'" not in str(first["scheduled"])


def test_the_command_line_keeps_the_order_and_the_names_of_the_file(tmp_path: Path) -> None:
    rows = [row(timestamp=t, request_id=name, output_length=n) for t, name, n in ((9, "b", 2), (3, "a", 1))]
    out = tmp_path / "requests.jsonl"
    argv = ["replay", str(trace_file(tmp_path, *rows)), "--quiet", "--requests-jsonl", str(out)]
    assert main(argv) == 0
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["request"], r["request_id"], r["output_tokens"], r["arrival_ms"]) for r in written] == [
        (0, "b", 2, 6.0),
        (1, "a", 1, 0.0),
    ]
