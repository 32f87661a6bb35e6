"""SGLang's scheduler against recordings: steps, limits, both event loops on a clock, HiCache, published events."""

from __future__ import annotations

import gzip
from pathlib import Path
from random import Random
from typing import Any

import pytest

from understudy._core import SglangIterations
from understudy.conformance.sglang import SglangRecording, compare_sglang, find_sglang_recordings
from understudy.conformance.sglang_recording import (
    SglangRequest,
    SglangScenario,
    SglangScenarioConfig,
    run_sglang_scenario,
)
from understudy.errors import InvalidArgument

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = {
    "sglang": 108,
    "sglang-more": 54,
    "sglang-clock": 30,
    "sglang-hicache": 43,
    "sglang-events": 14,
    "sglang-drill": 5,
    "sglang-hybrid": 135,
    "sglang-pd": 109,
}
RECORDINGS = [one for folder in FOLDERS for one in find_sglang_recordings(GOLDEN / folder)]


def name_of(recording: SglangRecording) -> str:
    return f"{recording.folder.name}/{recording.name}"


def test_all_recordings_are_found() -> None:
    counts = {name: sum(one.folder.name == name for one in RECORDINGS) for name in FOLDERS}
    assert counts == FOLDERS


@pytest.mark.parametrize("recording", RECORDINGS, ids=name_of)
def test_every_iteration_is_the_recorded_one(recording: SglangRecording) -> None:
    outcome = compare_sglang(recording, check=True)
    assert outcome.difference is None, str(outcome.difference)


def random_scenario(seed: int) -> SglangScenario:
    """Shared prefixes, small pools and random settings."""
    rng = Random(f"sglang {seed}")
    page = rng.choice([1, 1, 4, 16])
    config: dict[str, Any] = {
        "page_size": page,
        "max_total_num_tokens": page * rng.choice([60, 200, 1000]),
        "max_running_requests": rng.choice([2, 8, 64]),
        "chunked_prefill_size": rng.choice([-1, page * 4, page * 32]),
        "schedule_policy": rng.choice(["fcfs", "lpm", "dfs-weight", "lof"]),
        "radix_eviction_policy": rng.choice(["lru", "lfu", "slru", "fifo", "filo", "mru"]),
        "overlap": rng.random() < 0.5,
        "disable_radix_cache": rng.random() < 0.2,
        "ignore_eos": rng.random() < 0.2,
        "schedule_conservativeness": rng.choice([0.3, 1.0]),
    }
    if not config["disable_radix_cache"] and rng.random() < 0.5:
        config |= {
            "hicache_write_policy": rng.choice(["write_through", "write_through_selective", "write_back"]),
            "hicache_ratio": rng.choice([0.5, 1.0, 3.0]),
            "load_back_threshold": rng.choice([1, 10]),
            "write_steps": rng.choice([1, 4]),
            "load_steps": rng.choice([1, 3]),
        }
    requests = []
    for index in range(rng.randint(5, 40)):
        shared = (rng.choice([100, 5000]), rng.randint(1, 6 * page))
        own = (10_000 + 1000 * index, rng.randint(1, 4 * page))
        requests.append(
            SglangRequest(
                id=f"r{index:02}",
                prompt=[shared, own],
                max_tokens=rng.randint(0, 30),
                arrival_step=rng.randint(0, 40),
                eos_at=rng.choice([None, None, rng.randint(1, 10)]),
            )
        )
    return SglangScenario(SglangScenarioConfig(**config), requests, f"random {seed}", 3000)


@pytest.mark.parametrize("seed", range(120))
def test_memory_is_conserved_and_every_request_ends(seed: int) -> None:
    *_, last = run_sglang_scenario(random_scenario(seed), check=True)
    end = last["end"]
    assert end["reason"] in ("done", "out of memory")
    if end["reason"] == "done":
        assert end["finished"] == len(random_scenario(seed).requests)


def test_a_tree_node_holds_runs_however_many_tokens_there_are() -> None:
    config = SglangScenarioConfig(
        max_total_num_tokens=2**21, max_prefill_tokens=2**21, context_len=2**21, overlap=False
    )
    loop = SglangIterations(config.settings())
    blocks = 1000
    loop.submit(0, [(1000 * block, 512) for block in range(blocks)], 1, 2**40)
    while loop.schedule() is not None:
        loop.process()
    assert loop.state["evictable"] == 512 * blocks
    assert loop.state["nodes"] < 200


def test_a_folder_without_recordings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"no scenarios/\*\.json"):
        find_sglang_recordings(tmp_path)


def copy_recording(folder: Path, name: str = "chunked_load") -> Path:
    """A folder with one recording; returns its golden."""
    source = GOLDEN / "sglang-hicache"
    for part, file in (("scenarios", f"{name}.json"), ("golden", f"{name}.jsonl.gz")):
        (folder / part).mkdir()
        (folder / part / file).write_bytes((source / part / file).read_bytes())
    return folder / "golden" / f"{name}.jsonl.gz"


def test_a_scenario_without_a_recording_is_refused(tmp_path: Path) -> None:
    copy_recording(tmp_path).unlink()
    with pytest.raises(InvalidArgument, match=r"chunked_load\.json: has no recording; add "):
        find_sglang_recordings(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the first line must be the header"),
        (b"[]\n", "line 1 must be an object"),
        (b"{}\n", "the first line must be the header"),
        (b'{"header": {}}\n', "has no header with a config"),
        (b'{"header": {"config": {"page": 4}}}\n', "unknown field `page`"),
        (b"{", "Input data was truncated"),
    ],
)
def test_a_malformed_recording_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    copy_recording(tmp_path).write_bytes(gzip.compress(content))
    (recording,) = find_sglang_recordings(tmp_path)
    with pytest.raises(InvalidArgument, match=rf"chunked_load\.jsonl\.gz: .*{message}"):
        compare_sglang(recording)


@pytest.mark.parametrize(
    "content", [b"[]", b'{"recorded": {}}', b'{"scenario": {}, "recorded": {"config": {}}}']
)
def test_a_malformed_recording_on_a_clock_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "one.json.gz").write_bytes(gzip.compress(content))
    (recording,) = find_sglang_recordings(tmp_path)
    with pytest.raises(InvalidArgument, match=r"one\.json\.gz: "):
        compare_sglang(recording)
