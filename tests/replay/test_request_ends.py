"""How requests end in a replay: by themselves, or by a limit that is not their length."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from engines.test_fast_forward import assert_same_run
from model.replay_gen import Case, random_case
from replay.building import ONE_MS, play, single_turns
from understudy.cli import main
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, InvalidArgument
from understudy.run.timeline import FinishReason
from understudy.workload import concat, read_mooncake, write_mooncake

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.workload import Workload

MILLISECOND_STEPS = VllmConfig(timing=ONE_MS)
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def limited(limits: list[int]) -> Workload:
    """Requests that would say five tokens each."""
    return single_turns([20] * len(limits), 5, max_tokens=limits)


def test_a_limit_cuts_what_the_model_would_say_and_eos_ends_the_rest() -> None:
    timeline = play(limited([3, 5, 9, -1]), MILLISECOND_STEPS).timeline
    assert timeline.output_tokens.tolist() == [3, 5, 5, 5]
    assert timeline.finish_reason.tolist() == [LENGTH, STOP, STOP, LENGTH]
    assert timeline.requested_output_tokens.tolist() == [3, 5, 5, 5]


def test_without_limits_the_length_is_the_limit() -> None:
    plain = play(single_turns([20, 30], [4, 0]), MILLISECOND_STEPS).timeline
    assert plain.finish_reason.tolist() == [LENGTH, LENGTH]
    assert plain.output_tokens.tolist() == [4, 0]


def test_a_request_without_output_has_none_whatever_its_limit() -> None:
    timeline = play(single_turns([20], 0, max_tokens=[7]), MILLISECOND_STEPS).timeline
    assert timeline.output_tokens.tolist() == [0]


def test_the_context_window_cuts_with_reason_length() -> None:
    config = VllmConfig(timing=ONE_MS, max_model_len=23)
    timeline = play(limited([9]), config).timeline
    assert timeline.output_tokens.tolist() == [3]
    assert timeline.finish_reason.tolist() == [LENGTH]


def test_a_limit_far_beyond_the_pool_does_not_reject_a_request_that_ends_before() -> None:
    config = VllmConfig(timing=ONE_MS, block_size=16, num_gpu_blocks=2)
    assert play(limited([10_000]), config).timeline.finish_reason.tolist() == [STOP]


def test_asynchronously_the_end_is_known_a_step_late_and_a_token_is_wasted() -> None:
    def steps(limits: list[int]) -> int:
        config = VllmConfig(timing=ONE_MS, async_scheduling=True)
        return play(limited(limits), config).timeline.steps

    assert steps([9]) == steps([5]) + 1
    assert steps([5]) == steps([-1])  # the limit is known


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_fast_forward_and_stepping_agree_on_every_end(asynchronous: bool) -> None:
    stopped = 0
    for seed in range(60):
        case = random_case(seed, single_turns=seed % 3 > 0)
        if asynchronous:
            if case.config.mocker.aic_nextn is not None:
                continue
            case = random_case(seed, single_turns=seed % 3 > 0, async_scheduling=True)
        rng = Random(f"limits {seed}")
        limits = [rng.choice([-1, rng.randint(1, 150)]) for _ in range(len(case.workload))]
        run = assert_same_run(
            Case(replace(case.workload, max_tokens=np.array(limits, np.int32)), case.config, case.how)
        )
        stopped += run is not None and int((run.timeline.finish_reason == STOP).sum())
    assert stopped > 50


# ── Where limits come from ──


def trace(path: Path, *limits: int | None) -> Path:
    rows = [
        {"timestamp": 0, "input_length": 20, "output_length": 5, "hash_ids": [row]}
        | ({} if limit is None else {"max_tokens": limit})
        for row, limit in enumerate(limits)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_a_trace_has_limits_in_a_column_and_keeps_them(tmp_path: Path) -> None:
    workload = read_mooncake(trace(tmp_path / "a.jsonl", 3, None, 9))
    assert workload.max_tokens is not None
    assert workload.max_tokens.tolist() == [3, -1, 9]
    write_mooncake(workload, tmp_path / "b.jsonl")
    again = read_mooncake(tmp_path / "b.jsonl")
    np.testing.assert_array_equal(again.max_tokens, workload.max_tokens)
    assert read_mooncake(trace(tmp_path / "c.jsonl", None)).max_tokens is None


def test_limits_stay_with_their_rows_when_workloads_are_cut_and_joined() -> None:
    both = concat([limited([3, 4]), single_turns([20])])
    assert both.max_tokens is not None
    assert both.max_tokens.tolist() == [3, 4, -1]
    taken = both.take([1, 2]).max_tokens
    assert taken is not None
    assert taken.tolist() == [4, -1]


def test_a_limit_below_one_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"a\.jsonl:2: max_tokens must be at least 1, got 0"):
        read_mooncake(trace(tmp_path / "a.jsonl", 3, 0))
    with pytest.raises(InvalidArgument, match=r"max_tokens.*at least 1.*got -5"):
        limited([-5])
    with pytest.raises(ConfigError, match="max_tokens must be at least 1, got 0"):
        limited([3]).limited(0)


def test_a_flag_limits_requests_that_have_no_limit_of_their_own(tmp_path: Path) -> None:
    path = trace(tmp_path / "a.jsonl", 4, None, 9)
    rows, report = tmp_path / "rows.jsonl", tmp_path / "report.json"
    argv = ["replay", str(path), "--max-tokens", "2", "--quiet"]
    assert main([*argv, "--requests-jsonl", str(rows), "--json", str(report)]) == 0
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [(line["output_tokens"], line["finish_reason"]) for line in lines] == [
        (4, "length"),
        (2, "length"),
        (5, "stop"),
    ]
    told = json.loads(report.read_text())
    assert told["run"]["max_tokens"] == 2
    assert (told["requests"]["stopped"], told["requests"]["length_capped"]) == (1, 2)
