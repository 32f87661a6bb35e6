"""Curves of sessions: a plain LRU over the rows in the order of time says the same."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from answers.session_traces import (
    BLOCK,
    Row,
    held_blocks,
    lru_hit_blocks,
    random_sessions,
    readable,
    sent_ms,
    write_rows,
)
from understudy import VllmConfig, read_trace, replay
from understudy.cache.curves import CacheCurves
from understudy.cache.lab import StudyRequest, study_cache
from understudy.cache.study import Scale, add_tiers, measure_sessions
from understudy.cli import main
from understudy.engines.timing import Constant
from understudy.workload import ClosedLoop
from understudy.workload.reuse import hit_curve
from understudy.workload.time_order import time_order
from understudy.workload.write import write_mooncake

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.workload import Workload

ANSWER_MS = 20
"""Milliseconds per output token that docs/cache.md states."""
SEEDS = st.integers(0, 2**32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


def in_time(rows: list[Row]) -> list[int]:
    times = sent_ms(rows, ANSWER_MS)
    return sorted(range(len(rows)), key=times.__getitem__)  # stable: rows of one time stay in order


def require_curve(curves: CacheCurves, rows: list[Row], order: list[int]) -> None:
    tokens = sum(row["input_length"] for row in rows)
    held = len({block for number in order for block in held_blocks(rows, number)})
    sizes = [0, 1, 2, 5, 9, 14, 20, 30, 50, held]
    expected = [lru_hit_blocks(rows, order, size) * BLOCK / tokens for size in sizes]
    assert curves.hit_ratio("lru", sizes).tolist() == pytest.approx(expected)
    optimal = curves.hit_ratio("optimal", sizes)
    assert np.all(optimal >= np.array(expected) - 1e-12)
    assert curves.unlimited_hit_ratio == pytest.approx(expected[-1])
    assert optimal[-1] == pytest.approx(expected[-1])


@settings(max_examples=8, deadline=None)
@given(seed=SEEDS, times=st.sampled_from(["all", "first"]))
def test_the_curve_of_sessions_is_a_plain_lru_over_the_rows_in_time_order(
    seed: int, times: str, folder: Path
) -> None:
    rows = random_sessions(Random(seed), times=times)
    workload = read_trace(write_rows(rows, folder / "rows.jsonl"), trace_block_size=BLOCK)
    order = in_time(rows)
    assert time_order(workload).tolist() == order
    curves = CacheCurves(workload, BLOCK)
    require_curve(curves, rows, order)
    plotted = hit_curve(workload, BLOCK)
    assert plotted.unlimited_hit_ratio == pytest.approx(curves.unlimited_hit_ratio)
    assert plotted.hit_ratio(9) == pytest.approx(curves.hit_ratio("lru", [9])[0])


@settings(max_examples=8, deadline=None)
@given(seed=SEEDS, times=st.sampled_from(["all", "first"]))
def test_the_order_of_time_survives_writing_shifting_and_scaling(seed: int, times: str, folder: Path) -> None:
    rows = random_sessions(Random(seed), times=times)
    workload = read_trace(write_rows(rows, folder / "rows.jsonl"), trace_block_size=BLOCK)
    write_mooncake(workload, folder / "again.jsonl")
    again = read_trace(folder / "again.jsonl", trace_block_size=BLOCK)
    assert time_order(again).tolist() == in_time(rows)
    if times == "all":
        assert time_order(workload.scale_arrival_rate(2.0)).tolist() == in_time(rows)
    shuffled = workload.sorted_by_arrival()
    shifted = shuffled.normalised()
    assert time_order(shifted).tolist() == time_order(shuffled).tolist()


def write_log(rows: list[Row], path: Path) -> Path:
    """Write an OpenAI log: a message per new block of a prompt, so that later turns extend earlier ones."""
    lines = []
    for row in rows:
        answer = "".join(
            f"answer of {row['session_id']} turn {row['turn']} " for _ in range(row["output_length"])
        )
        line: dict[str, Any] = {
            "timestamp": 1_700_000_000 + row["at"] / 1000,
            "end_time": 1_700_000_000 + row["at"] / 1000 + row["output_length"] * 0.05,
            "session_id": row["session_id"],
            "messages": [{"role": "user", "content": f"message {one} " * 9} for one in row["hash_ids"]],
            "choices": [{"message": {"role": "assistant", "content": answer}}],
        }
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines) + "\n")
    return path


@settings(max_examples=8, deadline=None)
@given(seed=SEEDS)
def test_a_converted_log_keeps_the_times_at_which_its_turns_were_sent(seed: int, folder: Path) -> None:
    rows = random_sessions(Random(seed), times="all")
    log = write_log(rows, folder / "log.jsonl")
    workload = read_trace(log, format="openai")
    expected = sorted(range(len(rows)), key=lambda number: rows[number]["at"])
    assert time_order(workload).tolist() == expected
    converted = folder / "converted.jsonl"
    assert main(["convert", str(log), str(converted), "--format", "openai"]) == 0
    again = read_trace(converted, trace_block_size=16)
    assert time_order(again).tolist() == expected
    for size in (3, 30, 300):
        ours = CacheCurves(again, 16).hit_ratio("lru", [size])[0]
        assert ours == pytest.approx(plain_lru(again, expected, size))


def plain_lru(workload: Workload, order: list[int], size: int) -> float:
    """Serve whole blocks of the ids of a workload whose hash ids have the size of a cache's blocks."""
    cache: dict[tuple[Any, ...], None] = {}
    hits = 0
    for row in order:
        prompt, output = int(workload.prompt_tokens[row]), int(workload.output_tokens[row])
        ids: list[Any] = workload.prompt_hash_ids(row).tolist()
        if workload.output_in_next is not None and workload.output_in_next[row]:
            ids = workload.prompt_hash_ids(int(workload.next_turn[row])).tolist()
        else:
            ids = ids[: prompt // 16]
        ids = (ids + [(row, place) for place in range(output)])[: (prompt + output - 1) // 16]
        blocks = [tuple(ids[: end + 1]) for end in range(len(ids))]
        found = 0
        while found < (prompt - 1) // 16 and blocks[found] in cache:
            found += 1
        hits += found
        for block in reversed(blocks):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > size:
            del cache[next(iter(cache))]
    return hits * 16 / int(workload.prompt_tokens.sum())


@settings(max_examples=12, deadline=None)
@given(seed=SEEDS, times=st.sampled_from(["all", "first"]))
def test_open_sessions_need_the_blocks_that_they_visited_until_their_last_turn_ends(
    seed: int, times: str, folder: Path
) -> None:
    rows = random_sessions(Random(seed), times=times)
    workload = read_trace(write_rows(rows, folder / "rows.jsonl"), trace_block_size=BLOCK)
    order = in_time(rows)
    most = 0
    for place in range(len(order)):
        still = {rows[number]["session_id"] for number in order[place:]}
        needed = {
            block
            for number in order[: place + 1]
            if rows[number]["session_id"] in still
            for block in held_blocks(rows, number)
        }
        most = max(most, len(needed))
    found = measure_sessions(workload, CacheCurves(workload, BLOCK))
    assert found.open_blocks_max == most
    # A cache with room for them loses nothing of an open session.
    curves = CacheCurves(workload, BLOCK)
    assert (
        curves.hit_ratio("lru", [len({b for n in order for b in held_blocks(rows, n)})])[0]
        >= (curves.hit_ratio("lru", [most])[0])
    )


def run_fleet(workload: Workload, *, workers: int, blocks: int, **how: Any) -> Any:
    engine = VllmConfig(block_size=BLOCK, num_gpu_blocks=blocks, timing=Constant(5.0, 2.0))
    return replay(workload, engine, workers=workers, **how)


@settings(max_examples=10, deadline=None)
@given(seed=SEEDS, workers=st.integers(1, 3))
def test_with_a_fleet_the_curve_has_its_order_and_a_cache_per_worker(
    seed: int, workers: int, folder: Path
) -> None:
    rng = Random(seed)
    rows = random_sessions(rng, times=rng.choice(["all", "first"]))
    workload = read_trace(write_rows(rows, folder / "rows.jsonl"), trace_block_size=BLOCK)
    report = run_fleet(workload, workers=workers, blocks=40)
    run = report.columns
    order = sorted(
        range(len(rows)), key=lambda row: (run.first_admit_ns[row], rows[row]["input_length"], row)
    )
    tokens = sum(row["input_length"] for row in rows)
    curves = CacheCurves(workload, BLOCK, run=run)
    for size in (1, 4, 10, 25, 1000):
        hits = sum(
            lru_hit_blocks(rows, [row for row in order if run.worker[row] == worker], size)
            for worker in range(workers)
        )
        assert curves.hit_ratio("lru", [size])[0] == pytest.approx(hits * BLOCK / tokens)
        assert report.hit_curve.hit_ratio(size) == pytest.approx(hits * BLOCK / tokens)
    assert curves.routed_hit_ratio == pytest.approx(hits * BLOCK / tokens)
    assert curves.unlimited_hit_ratio == pytest.approx(lru_hit_blocks(rows, order, 10**6) * BLOCK / tokens)


def shared_disk_hits(
    rows: list[Row], order: list[int], worker: list[int], own: int, below: int, *, copies: bool
) -> int:
    """An LRU list per worker above one for all, as plain lists with the latest block last."""
    above: dict[int, list[Any]] = {number: [] for number in worker}
    disk: list[Any] = []

    def use(blocks: list[Any], block: Any, size: int) -> Any:
        if block in blocks:
            blocks.remove(block)
        blocks.append(block)
        return blocks.pop(0) if len(blocks) > size else None

    hits = 0
    for number in order:
        mine, blocks, found = above[worker[number]], held_blocks(rows, number), 0
        while found < readable(rows[number]) and (blocks[found] in mine or blocks[found] in disk):
            found += 1
        hits += found
        for block in reversed(blocks):
            if block in disk and not copies:
                disk.remove(block)
            evicted = use(mine, block, own)
            if copies:
                use(disk, block, below)
            elif evicted is not None:
                use(disk, evicted, below)
    return hits


@settings(max_examples=10, deadline=None)
@given(seed=SEEDS, workers=st.integers(1, 3), below=st.integers(1, 40))
def test_the_disk_of_the_curve_is_shared_by_the_workers(
    seed: int, workers: int, below: int, folder: Path
) -> None:
    rows = random_sessions(Random(seed), times="all")
    workload = read_trace(write_rows(rows, folder / "rows.jsonl"), trace_block_size=BLOCK)
    run = run_fleet(workload, workers=workers, blocks=40).columns
    order = sorted(
        range(len(rows)), key=lambda row: (run.first_admit_ns[row], rows[row]["input_length"], row)
    )
    tokens = sum(row["input_length"] for row in rows)
    curves = CacheCurves(workload, BLOCK, run=run)
    scale = Scale(BLOCK, 2**30 // BLOCK)  # a block has 1 GiB
    (gain,) = add_tiers(curves, scale, 5, [("disk", float(below))])
    moved, kept = (
        shared_disk_hits(rows, order, run.worker.tolist(), 5, below, copies=copies) * BLOCK / tokens
        for copies in (False, True)
    )
    assert gain.hit_ratio == pytest.approx(moved)
    assert curves.hit_ratio("lru", [5])[0] + gain.added_if_copies == pytest.approx(kept)
    host, disk = add_tiers(curves, scale, 5, [("host", 8.0), ("disk", float(below))])
    moved, kept = (
        shared_disk_hits(rows, order, run.worker.tolist(), own, below, copies=copies) * BLOCK / tokens
        for own, copies in ((13, False), (8, True))  # a host that keeps copies hides the device's 5 blocks
    )
    assert (disk.hit_ratio, disk.hit_ratio_if_copies) == pytest.approx((moved, kept))
    assert host.hit_ratio + disk.added == pytest.approx(moved)
    assert host.hit_ratio_if_copies + disk.added_if_copies == pytest.approx(kept)
    (all_of_it,) = add_tiers(curves, scale, 5, [("disk", 1000.0)])
    whole = curves.hit_ratio("lru", [5])[0] + all_of_it.added_if_copies
    assert whole == pytest.approx(curves.unlimited_hit_ratio)


def test_a_replay_beside_the_curve_says_by_how_much_it_differs_and_why(folder: Path) -> None:
    from understudy.run.settings import ReplaySettings

    rows = random_sessions(Random(5), times="all", sessions=40)
    workload = read_trace(write_rows(rows, folder / "rows.jsonl"), trace_block_size=BLOCK)
    settings = ReplaySettings.read(
        None, {"engine": {"block_size": BLOCK, "num_gpu_blocks": 60}, "workers": 2}, []
    )
    request = StudyRequest(
        block_size=BLOCK,
        policies=("lru", "lineage", "multi_lru"),
        sizes=((30.0, "blocks"), (60.0, "blocks"), (4000.0, "blocks")),
    )
    study = study_cache(workload, "rows", request, settings)
    assert len(study.replays) == 9
    points = {point.blocks: point.hit_ratio for point in study.sizes}
    for one in study.replays:
        assert one.gap is not None
        assert one.gap.curve_hit_ratio == points[one.blocks][one.policy]
        parts = one.gap.order + one.gap.running + one.gap.steps
        assert one.gap.curve_hit_ratio + parts == pytest.approx(one.hit_ratio)
        if one.blocks == 60 and one.policy == "lru":  # the fleet itself
            assert one.gap.order == 0
        if one.blocks == 4000:  # nothing is evicted
            assert one.gap.running == pytest.approx(0)
            assert one.gap.steps <= 0
    assert any("lru and lineage are one policy" in note for note in study.notes)


def test_a_replay_that_admits_no_request_has_no_difference_from_the_curve(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = random_sessions(Random(5), times="all")
    trace, found = write_rows(rows, folder / "rows.jsonl"), folder / "study.json"
    flags = ["--trace-block-size", "4", "--block-size", "4", "--num-gpu-blocks", "200", "--policies", "lru"]
    assert main(["cache", str(trace), *flags, "--sizes", "1blocks,200blocks", "--json", str(found)]) == 0
    study = json.loads(found.read_text())
    assert [one["rejected"] == len(rows) for one in study["replays"]] == [True, False]
    assert study["replays"][0]["hit_ratio"] is None
    assert study["replays"][0]["gap"] is None
    assert study["replays"][1]["gap"]["steps"] is not None
    page = folder / "none.html"
    none_fits = [*flags, "--num-gpu-blocks", "1", "--policies", "lru,lineage", "--html", str(page)]
    assert main(["cache", str(trace), *none_fits]) == 0
    said = capsys.readouterr().out
    assert "nan" not in said
    assert "one policy" not in said, "no request shows how they evict"
    assert "this fleet: – replayed" in page.read_text()


@pytest.mark.parametrize("policy", ["vllm", "lineage", "multi_lru", "fifo"])
@pytest.mark.parametrize("seed", range(4))
def test_a_curve_in_the_order_of_a_replay_is_within_points_of_it(
    seed: int, policy: Any, folder: Path
) -> None:
    rows = random_sessions(Random(seed), times="all", sessions=60)
    workload = read_trace(write_rows(rows, folder / "rows.jsonl"), trace_block_size=BLOCK)
    for blocks in (40, 80, 150):
        engine = VllmConfig(
            block_size=BLOCK, num_gpu_blocks=blocks, eviction_policy=policy, timing=Constant(0.01, 0.01)
        )
        report = replay(workload, engine, load=ClosedLoop(concurrency=4))
        curves = CacheCurves(workload, BLOCK, run=report.columns)
        found = report.prefix_hit_ratio.first_admission
        assert found == pytest.approx(curves.pinned_hit_ratio(policy, blocks), abs=0.025)


def test_multi_lru_keeps_what_a_replay_hit_often(folder: Path) -> None:
    def row(number: int, ids: list[int]) -> Row:
        return {"timestamp": 100 * number, "input_length": 11, "output_length": 2, "hash_ids": ids}

    hot = [row(number, [1, 2, 100 + number]) for number in range(12)]
    once = [row(20 + number, [1000 + 3 * number + place for place in range(3)]) for number in range(20)]
    rows = [*hot, *once, row(50, [1, 2, 999])]
    for each in rows:
        each |= {"output_in_next_turn": False}
    workload = read_trace(write_rows(rows, folder / "hot.jsonl"), trace_block_size=BLOCK)
    hits = {}
    for policy in ("lru", "multi_lru"):
        engine = VllmConfig(
            block_size=BLOCK, num_gpu_blocks=12, eviction_policy=policy, timing=Constant(0.1, 0.1)
        )
        hits[policy] = int(replay(workload, engine).columns.cached_tokens_first[-1])
    assert hits == {"lru": 0, "multi_lru": 8}


@pytest.mark.parametrize("fleet", [[], ["--num-gpu-blocks", "40", "--workers", "2"]])
def test_the_page_of_a_study_draws_its_bound(fleet: list[str], folder: Path) -> None:
    rows = random_sessions(Random(3), times="all", sessions=20)
    trace = write_rows(rows, folder / "rows.jsonl")
    page, found = folder / "cache.html", folder / "cache.json"
    flags = ["--trace-block-size", "4", "--block-size", "4", "--policies", "lru", "--quiet", *fleet]
    assert main(["cache", str(trace), *flags, "--html", str(page), "--json", str(found)]) == 0
    study = json.loads(found.read_text())
    limit, name = study["unlimited_hit_ratio"], "unlimited"
    if fleet:
        limit, name = study["routed_hit_ratio"], "unlimited, a cache per worker"
    assert f"{name} {100 * limit:.1f} %" in page.read_text()
    assert study["lru_curve"][-1]["hit_ratio"]["lru"] == pytest.approx(limit)


def test_sessions_without_times_overlap_and_a_note_says_what_was_assumed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Row] = []
    for session in range(3):
        for turn in range(2):
            ids = [10 * session + place for place in range(2 + turn)]
            row: Row = {"input_length": 4 * len(ids) - 1, "output_length": 2 + session, "hash_ids": ids}
            rows.append(row | {"session_id": f"s{session}", "output_in_next_turn": False})
    trace = write_rows(rows, folder / "untimed.jsonl")
    assert time_order(read_trace(trace, trace_block_size=BLOCK)).tolist() == [0, 2, 4, 1, 3, 5]
    flags = ["--trace-block-size", "4", "--block-size", "4", "--policies", "lru"]
    assert main(["cache", str(trace), *flags]) == 0
    out = capsys.readouterr().out
    assert "the trace has no timestamps: all sessions are taken to begin together" in out
    assert "3 of 3 later turns have no recorded time" in out
    assert "at 20 ms per output token" in out
