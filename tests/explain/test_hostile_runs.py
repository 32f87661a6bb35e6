"""Contradictory saved runs are refused, and ids that look like markup are printed as they are."""

from __future__ import annotations

import json
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from explain.random_runs import record
from replay.building import crowd
from understudy.cli import main
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import InvalidArgument, UnderstudyError
from understudy.explain import Waterfalls, read_run
from understudy.explain.describe import explain_requests
from understudy.explain.diff import compare_runs
from understudy.explain.perfetto import write_trace
from understudy.router.kv import KvRouting
from understudy.run.disaggregation import Disaggregation

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

ENGINE = VllmConfig(block_size=16, num_gpu_blocks=200)
HOSTILE_ID = "[/bold][link=x]"


def mutations(column: NDArray[Any]) -> list[NDArray[Any]]:
    """Columns of the same name with values, types or lengths that no run has."""
    odd = [np.full_like(column, 2**31 - 1 if column.dtype.itemsize > 1 else 250), column[:-1], column[:0]]
    odd += [np.full_like(column, -7 if column.dtype.kind == "i" else 9), column[::-1].copy()]
    odd += [column.astype(np.float64) * np.nan, column.astype("U8"), column.reshape(1, -1)]
    return odd


def read_everything(path: Path, out: Path) -> None:
    """Do all that users do with a saved run."""
    run = read_run(path)
    slowest = Waterfalls(run).slowest(5)
    explain_requests(run, [*slowest, *range(min(5, len(run)))])
    compare_runs(run, run)
    write_trace(run, out)


def test_no_mutated_column_of_a_saved_run_ends_in_a_raw_error(tmp_path: Path) -> None:
    record(crowd(12), engine=ENGINE, workers=2, routing=KvRouting()).save(tmp_path / "run.npz")
    with np.load(tmp_path / "run.npz") as archive:
        columns = {name: archive[name] for name in archive.files}
    refused = 0
    for name, column in columns.items():
        if name == "header":
            continue
        for odd in mutations(column):
            np.savez(tmp_path / "odd.npz", allow_pickle=False, **{**columns, name: odd})
            try:
                read_everything(tmp_path / "odd.npz", tmp_path / "trace.pftrace")
            except UnderstudyError:
                refused += 1
    assert refused > 4 * len(columns)


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 0},
        {"block_size": "16"},
        {"request_ids": ["a"]},
        {"request_ids": 3},
        {"worker_blocks": [None]},
        {"links": [{"name": "g2"}]},
        {"links": [{"name": "g2", "bucket_ns": 0, "bytes": []}]},
        {"run": []},
        {"front_end_ns": -1},
    ],
)
def test_a_header_of_another_shape_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    record(crowd(5), engine=ENGINE).save(tmp_path / "run.npz")
    with np.load(tmp_path / "run.npz") as archive:
        columns = {name: archive[name] for name in archive.files}
    header = json.loads(columns["header"].tobytes()) | change
    columns["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(tmp_path / "odd.npz", allow_pickle=False, **columns)
    with pytest.raises(InvalidArgument, match="save the run again"):
        read_run(tmp_path / "odd.npz")


def test_a_file_that_unpacks_to_far_more_than_a_run_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("header.npy", "w") as member,
    ):
        for _ in range(120):
            member.write(bytes(1_000_000))
    with pytest.raises(InvalidArgument, match=r"unpacks from 0\.1 MB to 120 MB"):
        read_run(path)


def test_request_ids_that_look_like_markup_are_printed_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {
            "timestamp": at,
            "input_length": 64,
            "output_length": 9,
            "hash_ids": [at],
            "request_id": f"{HOSTILE_ID}{at}",
        }
        for at in range(4)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    saved = str(tmp_path / "run.npz")
    assert main(["replay", str(trace), "--trace-block-size", "64", "--save-run", saved, "--quiet"]) == 0
    assert main(["explain", saved, "--slowest", "3"]) == 0
    assert f"{HOSTILE_ID}3" in capsys.readouterr().out
    assert main(["explain", saved, "--request", f"{HOSTILE_ID}2"]) == 0
    assert f"request {HOSTILE_ID}2 on worker 0" in capsys.readouterr().out
    assert main(["diff", saved, saved]) == 0


def test_a_decode_worker_that_ran_no_step_is_explained(tmp_path: Path) -> None:
    hand_offs = Disaggregation(
        prefill_workers=1, decode_workers=2, kv_bytes_per_token=1000, link_gbps=1.0, transfer_failure_rate=1.0
    )
    run = record(crowd(6), engine=ENGINE, disaggregation=hand_offs)
    waterfalls = Waterfalls(run)
    found = [waterfalls.of(row) for row in range(len(run))]
    for one in found:
        assert one is None or sum(one.parts.values()) == one.latency_ns
