"""One bound for unlimited caches: recomputed with a set of seen prefixes, and no run beats it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import understudy
from answers.session_traces import BLOCK, Row, held_blocks, random_sessions, readable, write_rows
from model.replay_gen import random_case
from understudy import VllmConfig, read_trace
from understudy.cache.curves import CacheCurves
from understudy.engines.sglang_config import SglangConfig
from understudy.engines.speculation import SpeculativeConfig
from understudy.engines.timing import Constant, Polynomial
from understudy.errors import ConfigError, InvariantViolated, WrongState
from understudy.run.admissions import HitBounds, LastTokens, require_possible_hits
from understudy.run.disaggregation import Disaggregation
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers import TiersConfig
from understudy.workload import ClosedLoop, OpenLoop, Workload

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.run.timeline import Timeline

SEEDS = st.integers(0, 2**32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


# --- the bound, from the definition -----------------------------------------------------------------------


def tokens_held(workload: Workload, row: int) -> list[Any]:
    """Name the tokens whose KV a request computes: its prompt and its output but for the last token."""
    size = workload.trace_block_size
    tokens: list[Any] = np.repeat(workload.prompt_hash_ids(row), size)[: workload.prompt_tokens[row]].tolist()
    known = workload.known_output_tokens(row)
    output = int(workload.output_tokens[row])
    limit = -1 if workload.max_tokens is None else int(workload.max_tokens[row])
    answers = [(row, place) for place in range(output)] if known is None else known.tolist()
    return tokens + answers[: (output if limit < 0 else min(output, limit)) - 1 if output else 0]


def unlimited_hits(workload: Workload, order: list[int], caches: dict[int, int], block: int) -> int:
    """Serve the rows in order, each from the set of all prefixes that its cache has seen."""
    seen: set[tuple[Any, ...]] = set()
    hits = 0
    for row in order:
        tokens = tokens_held(workload, row)
        adapter = -1 if workload.adapter is None else int(workload.adapter[row])
        prompt = int(workload.prompt_tokens[row])
        names = [(caches[row], adapter, *tokens[:end]) for end in range(block, len(tokens) + 1, block)]
        found = 0
        while found < (prompt - 1) // block and names[found] in seen:
            found += 1
        hits += found * block
        seen.update(names)
    return hits


def admitted(run: Timeline) -> list[int]:
    """Rows in order of admission; of one step, the shorter prompt first."""
    rows = [row for row in range(len(run)) if run.first_admit_ns[row] >= 0]
    return sorted(rows, key=lambda row: (run.first_admit_ns[row], run.prompt_tokens[row], row))


def require_bounds(workload: Workload, run: Timeline, *, shared_tier: bool = False) -> None:
    order, block = admitted(run), run.block_size
    found = int(run.cached_tokens_first[order].sum())
    one = unlimited_hits(workload, order, dict.fromkeys(order, 0), block)
    assert found <= one + run.phantom_hit_blocks * block
    if run.handoff is None and not shared_tier:
        routed = unlimited_hits(workload, order, {row: int(run.worker[row]) for row in order}, block)
        assert found <= routed + run.phantom_hit_blocks * block


def small(workload: Workload) -> bool:
    return int(workload.prompt_tokens.sum()) < 20_000


# --- no run beats it --------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_no_run_of_vllm_beats_unlimited_caches(seed: int) -> None:
    case = random_case(seed)
    try:
        run = run_offline(RunPlan(case.workload, case.config, check=True, **case.how)).timeline
    except WrongState:  # requests that preempt each other without end
        return
    if small(case.workload):
        require_bounds(case.workload, run)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS)
def test_no_fleet_of_sessions_beats_unlimited_caches(seed: int, folder: Path) -> None:
    require_fleet(seed, folder)


@pytest.mark.soak
def test_thousands_of_fleets_do_not_beat_unlimited_caches(folder: Path) -> None:
    for seed in range(5000):
        require_fleet(seed, folder)


def require_fleet(seed: int, folder: Path) -> None:
    """Run a random fleet with checks, and compare it with the recomputed bound."""
    rng = Random(seed)
    rows = random_sessions(rng, times=rng.choice(["all", "first"]), sessions=12)
    workload = read_trace(write_rows(rows, folder / "rows.jsonl"), trace_block_size=BLOCK)
    if rng.random() < 0.4:
        aborts = [rng.choice([-1, -1, rng.randint(0, 10**8)]) for _ in rows]
        workload = Workload(**{**vars_of(workload), "abort_after_ns": np.array(aborts)})
    if rng.random() < 0.3:
        priority = np.array([rng.randint(0, 2) for _ in rows], np.int32)
        workload = Workload(**{**vars_of(workload), "priority": priority})
    load = rng.choice([OpenLoop(), OpenLoop(arrival_rate_scale=30.0), ClosedLoop(concurrency=3)])
    engine = random_sglang(rng) if rng.random() < 0.35 else random_vllm(rng)
    how: dict[str, Any] = {"load": load}
    tiers = random_tiers(rng, engine) if rng.random() < 0.45 else None
    if tiers is not None:
        how["tiers"] = TiersConfig.from_dict(tiers)
    elif rng.random() < 0.3 and isinstance(engine, VllmConfig) and engine.kv_manager == "native":
        how["disaggregation"] = Disaggregation(
            prefill_workers=rng.randint(1, 2),
            decode_workers=rng.randint(1, 2),
            kv_bytes_per_token=131072,
            rule=rng.choice(["always", "uncached:12"]),
            transfer_failure_rate=rng.choice([0.0, 0.3]),
            kv_load_failure_policy=rng.choice(["fail", "recompute"]),
        )
    if "disaggregation" not in how:
        how["workers"] = rng.randint(1, 3)
        how["routing"] = rng.choice(["round_robin", "random", "least_loaded", "session_affinity", "kv"])
    try:
        run = run_offline(RunPlan(workload, engine, check=True, **how)).timeline
    except (
        ConfigError,
        WrongState,
    ):  # settings that do not go together, or a defect of a version that stops it
        return
    shared = tiers is not None and any(one["tier"] == "g3" for one in tiers["tiers"])
    require_bounds(workload, run, shared_tier=shared)


def random_sglang(rng: Random) -> SglangConfig:
    return SglangConfig(
        block_size=rng.choice([1, 2, 4]),
        num_gpu_blocks=rng.choice([200, 400, 4000]),
        timing=Constant(5.0, 2.0),
        disable_overlap_schedule=rng.random() < 0.5,
        schedule_policy=rng.choice(["fcfs", "lpm"]),
        enable_mixed_chunk=rng.random() < 0.3,
        chunked_prefill_size=rng.choice([16, 8192]),
    )


def random_vllm(rng: Random) -> VllmConfig:
    settings: dict[str, Any] = {}
    if rng.random() < 0.2:
        settings["kv_manager"] = "kvbm"
        settings["async_scheduling"] = False
    elif rng.random() < 0.3:
        method: Any = rng.choice(["mtp", "ngram"])
        settings["speculative_config"] = SpeculativeConfig(
            method=method, num_speculative_tokens=rng.randint(1, 3)
        )
    if rng.random() < 0.3:
        settings["scheduling_policy"] = "priority"
    if rng.random() < 0.3:
        settings["vllm_version"] = rng.choice(["recorded", "0.28", "0.29", "0.32", "0.33"])
    return VllmConfig(
        block_size=rng.choice([1, 2, 4, 8]),
        num_gpu_blocks=rng.choice([20, 30, 60, 400]) * 4,
        max_num_batched_tokens=rng.choice([16, 64, 2048]),
        max_num_seqs=rng.choice([2, 8, 16]),
        timing=Polynomial() if rng.random() < 0.5 else Constant(5.0, 2.0),
        **settings,
    )


def random_tiers(rng: Random, engine: VllmConfig | SglangConfig) -> dict[str, Any]:
    tiers: list[dict[str, Any]] = [{"tier": "g2", "blocks": rng.choice([20, 200])}]
    settings: dict[str, Any] = {"tiers": tiers, "kv_bytes_per_token": 131072}
    if isinstance(engine, VllmConfig):
        modes = ["write_through", "evict", *(["vllm"] if engine.kv_manager == "native" else [])]
        settings["offload"] = {"mode": (mode := rng.choice(modes))}
        if rng.random() < 0.6 and mode != "vllm":
            tiers.append({"tier": "g3", "blocks": rng.choice([20, 200])})
    return settings


def vars_of(workload: Workload) -> dict[str, Any]:
    return {each.name: getattr(workload, each.name) for each in fields(workload)}


def test_a_run_that_hit_more_than_was_ever_computed_violates_the_bound(folder: Path) -> None:
    rows = random_sessions(Random(1), times="all")
    workload = read_trace(write_rows(rows, folder / "rows.jsonl"), trace_block_size=BLOCK)
    run = run_offline(
        RunPlan(workload, VllmConfig(block_size=BLOCK, num_gpu_blocks=400), check=True)
    ).timeline
    require_possible_hits(workload, run, shares_tiers=False, last=LastTokens())
    wrong = replace(
        run,
        cached_tokens_first=run.prompt_tokens - 1,
        cached_tokens_total=run.looked_up_tokens,
    )
    with pytest.raises(InvariantViolated, match="unlimited caches could hit"):
        require_possible_hits(workload, wrong, shares_tiers=False, last=LastTokens())


# --- one number everywhere --------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(seed=SEEDS, workers=st.integers(1, 3))
def test_report_curves_and_page_have_the_recomputed_bound(seed: int, workers: int, folder: Path) -> None:
    rows = random_sessions(Random(seed), times="all", sessions=12)
    workload = read_trace(write_rows(rows, folder / "rows.jsonl"), trace_block_size=BLOCK)
    engine = VllmConfig(block_size=BLOCK, num_gpu_blocks=20, timing=Constant(5.0, 2.0))
    report = understudy.replay(workload, engine, workers=workers)
    run, order = report.columns, admitted(report.columns)
    tokens = int(run.prompt_tokens[order].sum())
    one = unlimited_hits(workload, order, dict.fromkeys(order, 0), BLOCK) / tokens
    routed = unlimited_hits(workload, order, {row: int(run.worker[row]) for row in order}, BLOCK) / tokens
    curves = CacheCurves(workload, BLOCK, run=run)
    assert curves.unlimited_hit_ratio == pytest.approx(one)
    assert curves.routed_hit_ratio == pytest.approx(routed)
    assert curves.hit_ratio("lru", [10**6])[0] == pytest.approx(routed)
    assert report.hit_curve is not None
    assert report.hit_curve.unlimited_hit_ratio == pytest.approx(routed)
    if not report.kv.evictions:
        assert report.unlimited_hit_ratio is None
        return
    facts = report.to_dict()["run"]
    assert facts["unlimited_hit_ratio"] == pytest.approx(one)
    assert facts.get("routed_hit_ratio", routed) == pytest.approx(routed)
    assert report.prefix_hit_ratio.first_admission <= facts.get("routed_hit_ratio", one)
    shown = re.search(r"unlimited ([\d.]+) ?%", report.to_html().replace("\u202f", " "))
    if routed > 0:
        assert shown is not None
        assert math.isclose(float(shown[1]), 100 * routed, abs_tol=0.051 if "." in shown[1] else 0.51)


def test_answers_that_the_next_turn_quotes_count(folder: Path) -> None:
    rows: list[Row] = []
    for number in range(30):
        ids = [number * 20 + place for place in range(8)]
        first: Row = {"timestamp": number, "input_length": 15, "output_length": 9, "hash_ids": ids[:4]}
        later: Row = {"delay": 100, "input_length": 31, "output_length": 2, "hash_ids": ids}
        for turn, row in enumerate((first, later)):
            rows.append(row | {"session_id": f"s{number}", "output_in_next_turn": turn == 0, "turn": turn})
    workload = read_trace(write_rows(rows, folder / "quoted.jsonl"), trace_block_size=BLOCK)
    engine = VllmConfig(block_size=BLOCK, num_gpu_blocks=120, timing=Constant(5.0, 2.0))
    report = understudy.replay(workload, engine, load=ClosedLoop(concurrency=2))
    assert report.kv.evictions
    hit = len(held_blocks(rows, 0)) * BLOCK  # 15 + 9 − 1 tokens: five whole blocks
    assert (hit, readable(rows[1]) * BLOCK) == (20, 28)
    assert report.unlimited_hit_ratio == pytest.approx(hit / 46)
    assert (
        report.prefix_hit_ratio.first_admission == report.unlimited_hit_ratio
    )  # few sessions at a time: none is lost


def test_the_last_block_of_a_prompt_that_an_offload_loads_is_in_the_bound(folder: Path) -> None:
    """Two requests by hand: the second prompt is the first block of the first, and one token of it is computed."""
    path = folder / "last.jsonl"
    rows = [
        {"timestamp": 0, "input_length": BLOCK + 2, "output_length": 20, "hash_ids": [0, 1]},
        {"timestamp": 5000, "input_length": BLOCK, "output_length": 12, "hash_ids": [0]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = understudy.replay(
        path,
        VllmConfig(block_size=BLOCK, num_gpu_blocks=100),
        trace_options={"trace_block_size": BLOCK},
        tiers=TiersConfig.from_dict(
            {
                "tiers": [{"tier": "g2", "blocks": 300}],
                "offload": {"mode": "vllm"},
                "kv_bytes_per_token": 131072,
            }
        ),
        execution=understudy.Execution(check=True),
    )
    assert report.columns.cached_tokens_first.tolist() == [0, BLOCK - 1]
    bounds = HitBounds(read_trace(path, trace_block_size=BLOCK), report.columns, LastTokens(loads_last=True))
    assert bounds.hit_tokens().tolist() == [0, BLOCK - 1]
    without = HitBounds(read_trace(path, trace_block_size=BLOCK), report.columns, LastTokens())
    assert without.hit_tokens().tolist() == [0, 0]


@pytest.mark.parametrize("page", [1, 16])
def test_the_last_token_that_an_overlapped_loop_computes_is_in_the_bound(folder: Path, page: int) -> None:
    """A second turn quotes an answer that ended by itself at the end of a page: all of it is cached."""
    path = folder / f"quoted{page}.jsonl"
    turns = [
        {"timestamp": 0, "session_id": "s", "input_length": 32, "output_length": 16, "max_tokens": 64}
        | {"hash_ids": [1, 2], "output_in_next_turn": True},
        {"session_id": "s", "delay": 100, "input_length": 64, "output_length": 16, "max_tokens": 64}
        | {"hash_ids": [1, 2, 3, 4]},
    ]
    path.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    report = understudy.replay(
        path,
        SglangConfig(block_size=page, num_gpu_blocks=20_000 // page),
        trace_options={"trace_block_size": 16},
        execution=understudy.Execution(check=True),
    )
    assert report.columns.cached_tokens_first.tolist() == [0, 48]
    bounds = HitBounds(read_trace(path, trace_block_size=16), report.columns, LastTokens.of(report.run))
    assert bounds.hit_tokens().tolist() == [0, 48]
