"""Each missed prompt token has one cause: recomputed here from the published events, the slow way."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import understudy as us
from replay.building import ONE_MS, conversations
from understudy.cli import main
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import InvalidArgument
from understudy.explain.describe_misses import describe_misses, list_misses
from understudy.explain.misses import CAUSES, MissColumns
from understudy.explain.saved_run import SavedRun, read_run
from understudy.run.options import Outputs
from understudy.tiers import TiersConfig
from understudy.workload import Normal, write_mooncake
from understudy.workload.identities import row_identities

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.workload import Workload

BLOCK = 16
WORKLOAD = conversations(30, output_tokens=Normal(mean=60, std=20))
NAMES = list(CAUSES)
TIERS = TiersConfig.from_dict(
    {
        "kv_bytes_per_token": 4096,
        "tiers": [{"tier": "g2", "blocks": 150, "link": {"down_gbps": 0.5, "up_gbps": 1}}],
        "offload": {"mode": "evict", "onboard_failure_rate": 0.3},
    }
)


def save(folder: Path, workload: Workload = WORKLOAD, blocks: int = 80, **how: Any) -> SavedRun:
    engine = VllmConfig(block_size=BLOCK, num_gpu_blocks=blocks, timing=ONE_MS, **how.pop("engine", {}))
    path = folder / "run.npz"
    outputs = Outputs(save_run=path, events=folder / "events.jsonl")
    us.replay(workload, engine, outputs=outputs, **{"workers": 2, **how})
    return read_run(path)


def tokens_by_cause(run: SavedRun) -> dict[tuple[int, str], int]:
    assert run.misses is not None
    found: Counter[tuple[int, str]] = Counter()
    for row, cause, tokens in zip(run.misses.request, run.misses.cause, run.misses.tokens, strict=True):
        found[int(row), NAMES[cause]] += int(tokens)
    return dict(found)


def events_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("how", [{}, {"blocks": 300}, {"routing": "session_affinity"}, {"tiers": TIERS}])
def test_causes_add_up_to_the_misses_of_every_request(how: dict[str, Any], tmp_path: Path) -> None:
    run = save(tmp_path, **how)
    assert run.misses is not None
    missed = Counter[int]()
    for (row, _), tokens in tokens_by_cause(run).items():
        missed[row] += tokens
    prompts, cached = run.requests["prompt_tokens"], run.requests["cached_tokens_first"]
    for row in range(len(run)):
        assert missed[row] == prompts[row] - cached[row]
        runs = list_misses(run, row)
        assert [one["first_token"] for one in runs] == [
            int(cached[row]) + sum(other["tokens"] for other in runs[:at]) for at in range(len(runs))
        ]
    about = describe_misses(run)
    assert about["missed_tokens"] == about["prompt_tokens"] - about["cached_tokens"] > 0
    assert sum(about["causes"].values()) == about["missed_tokens"]
    assert about["prompt_tokens"] == int(WORKLOAD.prompt_tokens.sum())


def test_causes_are_those_of_the_published_events(tmp_path: Path) -> None:
    """Histories of blocks from the events file; the engine's own admissions, but none of its causes."""
    run = save(tmp_path)
    history: dict[tuple[int, int], list[tuple[int, bool]]] = {}
    for event in events_of(tmp_path):
        for block in event["blocks"]:
            history.setdefault((event["worker"], block["sequence_hash"]), []).append(
                (event["time_ns"], event["type"] == "stored")
            )
    steps = run.steps
    admitted: dict[int, tuple[int, int]] = {}
    for ns, worker, kind, request in zip(
        steps.event_ns, steps.event_worker, steps.event_kind, steps.event_request, strict=True
    ):
        if kind == 1:
            admitted[int(request)] = (int(worker), int(ns))
    checked = Counter[str]()
    for row, (worker, now_ns) in admitted.items():
        whole = int(run.requests["prompt_tokens"][row]) // BLOCK
        names = row_identities(WORKLOAD, row, BLOCK, whole).sequence_hashes.tolist()
        cause_of = {
            block: one["cause"]
            for one in list_misses(run, row)
            for block in range(one["first_token"] // BLOCK, (one["first_token"] + one["tokens"]) // BLOCK)
        }
        for number, name in enumerate(names):
            if (cause := cause_of.get(number)) is None:
                continue
            own = [stored for ns, stored in history.get((worker, name), []) if ns <= now_ns]
            others = [
                [stored for ns, stored in history.get((other, name), []) if ns <= now_ns]
                for other in range(2)
            ]
            checked[cause] += 1
            if cause == "never_computed":
                assert not any(others)
            elif cause == "evicted":
                assert own
                assert not own[-1] or any(  # taken by a step in progress
                    not stored for ns, stored in history[worker, name] if ns > now_ns
                )
            elif cause == "other_worker":
                assert not own
                assert any(seen and seen[-1] for seen in others)
            elif cause == "evicted_elsewhere":
                assert not own
                assert any(others)
                assert not any(seen and seen[-1] for seen in others)
            else:
                assert cause in ("behind_gap", "recomputed")
                assert own[-1]
                assert cause == "behind_gap" or number == whole - 1
    assert {"never_computed", "evicted", "other_worker"} <= set(checked)
    assert sum(checked.values()) > 200


def test_an_evicted_block_names_the_request_that_needed_the_room(tmp_path: Path) -> None:
    """Three prompts, a cache for two of them, then the first again."""
    trace = tmp_path / "trace.jsonl"
    rows = [(0, 0), (1000, 20), (2000, 40), (3000, 0)]
    trace.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": at,
                    "input_length": 160,
                    "output_length": 2,
                    "hash_ids": list(range(first, first + 10)),
                }
            )
            + "\n"
            for at, first in rows
        )
    )
    engine = VllmConfig(block_size=BLOCK, num_gpu_blocks=23, timing=ONE_MS)
    path = tmp_path / "run.npz"
    us.replay(
        trace,
        engine,
        outputs=Outputs(save_run=path),
        trace_options={"trace_block_size": BLOCK},
    )
    run = read_run(path)
    (only,) = list_misses(run, 3)
    assert (only["first_token"], only["tokens"], only["cause"]) == (32, 128, "evicted")
    assert only["evicted_for"] == "2"
    assert run.requests["first_admit_ns"][2] <= only["evicted_ns"] <= run.requests["first_admit_ns"][3]
    assert describe_misses(run)["evicted_for"] == [{"request": "2", "tokens": 128}]
    assert describe_misses(run)["causes"] == {"never_computed": 480, "evicted": 128}


def test_blocks_below_the_gpu_that_were_not_loaded_are_a_cause_of_their_own(tmp_path: Path) -> None:
    causes = describe_misses(save(tmp_path, tiers=TIERS))["causes"]
    assert causes["lower_tier"] > 0


def test_tokens_behind_the_last_whole_block_are_partial(tmp_path: Path) -> None:
    run = save(tmp_path, blocks=2000, workers=1)
    for row in range(len(run)):
        rest = int(run.requests["prompt_tokens"][row]) % BLOCK
        assert tokens_by_cause(run).get((row, "partial_block"), 0) == rest


def test_the_digest_of_a_run_is_the_same_with_and_without_causes(tmp_path: Path) -> None:
    engine = VllmConfig(block_size=BLOCK, num_gpu_blocks=80, timing=ONE_MS)
    plain = us.replay(WORKLOAD, engine, workers=2)
    saved = us.replay(WORKLOAD, engine, workers=2, outputs=Outputs(save_run=tmp_path / "run.npz"))
    assert saved.run.digest == plain.run.digest
    assert saved.run.digests == plain.run.digests


def test_the_command_prints_causes_of_the_run_and_of_a_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, run = tmp_path / "trace.jsonl", tmp_path / "run.npz"
    write_mooncake(WORKLOAD, trace)
    flags = ["--workers", "2", "--num-gpu-blocks", "80", "--block-size", "16", "--routing", "kv", "--quiet"]
    assert main(["replay", str(trace), *flags, "--save-run", str(run)]) == 0
    capsys.readouterr()
    assert main(["explain", str(run), "--misses"]) == 0
    printed = capsys.readouterr().out
    assert "why prompt tokens of the run missed the cache" in printed
    assert "no worker had computed it" in printed
    row = max(range(len(WORKLOAD)), key=lambda row: int(WORKLOAD.turn[row]))
    assert main(["explain", str(run), "--request", str(row), "--misses"]) == 0
    printed = capsys.readouterr().out
    assert "tokens " in printed
    assert "router: cost " in printed
    assert "(prefill " in printed
    assert main(["explain", str(run), "--misses", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["misses"]["missed_tokens"] > 0


def test_a_run_without_causes_says_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = save(tmp_path, engine={"enable_prefix_caching": False})
    assert run.misses is None
    with pytest.raises(InvalidArgument, match="--misses: the run has no causes of misses"):
        describe_misses(run)
    assert main(["explain", str(tmp_path / "run.npz"), "--misses"]) == 2
    assert "save it again" in capsys.readouterr().err


def test_damaged_columns_are_refused() -> None:
    one = np.zeros(1, np.int64)
    names = ("request", "cause", "first", "tokens", "at_ns", "by")
    whole = dict.fromkeys(names, one)
    assert MissColumns.from_arrays({}, 1) is None
    assert MissColumns.from_arrays(whole, 1) is not None
    for wrong in (
        {name: column for name, column in whole.items() if name != "by"},
        {**whole, "cause": one + len(CAUSES)},
        {**whole, "request": one + 1},
        {**whole, "tokens": np.zeros(2, np.int64)},
        {**whole, "first": np.zeros(1)},
    ):
        with pytest.raises(InvalidArgument, match=r"miss_"):
            MissColumns.from_arrays(wrong, 1)
