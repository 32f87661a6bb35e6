"""A file of columns holds what the lines of JSON hold."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from replay.building import crowd
from understudy.api import replay
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import InvalidArgument
from understudy.events import Stored
from understudy.events.file import read_columns
from understudy.run.options import Outputs

if TYPE_CHECKING:
    from pathlib import Path

TIERS: dict[str, Any] = {
    "num_g2_blocks": 50,
    "num_g3_blocks": 80,
    "kv_bytes_per_token": 1000,
    "g1_backend": "kvbm",
}


@pytest.mark.parametrize("stream", ["events", "raw_events"])
@pytest.mark.parametrize("tiers", [{}, TIERS], ids=["device", "tiers"])
def test_columns_and_lines_tell_the_same(tmp_path: Path, stream: str, tiers: dict[str, Any]) -> None:
    lines, columns = tmp_path / "events.jsonl", tmp_path / "events.npz"
    engine = VllmConfig.from_dict({"block_size": 16, "num_gpu_blocks": 100, **tiers})
    for path in (lines, columns):
        output: dict[str, Any] = {stream: path}
        replay(crowd(), engine, workers=2, outputs=Outputs(**output))
    told = read_columns(columns)
    assert told.stream == ("raw" if stream == "raw_events" else "consolidated")
    assert told.block_size == 16
    assert list(told.publishers) == ["worker 0", "worker 1", *(["G3"] if tiers else [])]
    said = [json.loads(line) for line in lines.read_text().splitlines()]
    for name, publisher in told.publishers.items():
        mine = [
            line for line in said if f"worker {line.get('worker')}" == name or line.get("publisher") == name
        ]
        assert len(mine) == len(publisher) > 0
        for line, (time_ns, event) in zip(mine, publisher, strict=True):
            assert (line["time_ns"], line["event_id"], line["tier"]) == (
                time_ns,
                event.event_id,
                event.tier.name,
            )
            assert line["type"] == ("stored" if isinstance(event, Stored) else "removed")
            blocks = [msgspec.to_builtins(block) for block in event.blocks]
            assert line["blocks"] == [
                {key: value for key, value in block.items() if key != "token_ids"} for block in blocks
            ]
            if isinstance(event, Stored):
                assert line["parent_hash"] == event.parent_hash
    assert columns.stat().st_size < lines.stat().st_size / 2


def test_a_run_without_events_is_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "events.npz"
    replay(crowd(), VllmConfig.from_dict({"enable_prefix_caching": False}), outputs=Outputs(events=path))
    assert [len(publisher) for publisher in read_columns(path).publishers.values()] == [0]


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.npz"
    for content in (b"", b"PK", b"{}"):
        path.write_bytes(content)
        with pytest.raises(InvalidArgument, match="not a file of KV events"):
            read_columns(path)
    np.savez(path, format=np.array(1))
    with pytest.raises(InvalidArgument, match="format 1 is not supported; write it again in format 2"):
        read_columns(path)
    np.savez(path, format=np.array(2))
    with pytest.raises(InvalidArgument, match="not a file of KV events"):
        read_columns(path)
    replay(crowd(), VllmConfig(), outputs=Outputs(events=path))
    with np.load(path) as found:
        arrays = dict(found)
    arrays["0/offsets"] = arrays["0/offsets"] * 1000
    np.savez(path, **arrays)
    with pytest.raises(InvalidArgument):
        read_columns(path)
