"""LoRA in a replay: a batch holds so many adapters, and blocks of one are no other's."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from model.replay_gen import COLUMNS, random_case
from replay.building import MS, ONE_MS, play, single_turns
from understudy._core import BlockVisits
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, InvalidArgument, WrongState
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.server.flags.serving import read_serve
from understudy.workload import concat, read_mooncake, write_mooncake

if TYPE_CHECKING:
    from pathlib import Path

ENGINE = VllmConfig(
    block_size=16, num_gpu_blocks=100, enable_lora=True, timing=ONE_MS, async_scheduling=False
)


def adapted(prompts: list[int], outputs: list[int], adapter: list[int], **columns: Any) -> Any:
    return single_turns(prompts, outputs, adapter=adapter, adapters=("a", "b", "c"), **columns)


def test_who_would_bring_one_adapter_too_many_waits_and_others_pass() -> None:
    workload = adapted([16, 16, 16, 16], [5, 2, 2, 2], [0, 1, 0, -1])
    columns = play(workload, ENGINE).timeline
    assert columns.first_admit_ns.tolist() == [0, 5 * MS, 0, 0]
    two = msgspec.structs.replace(ENGINE, max_loras=2)
    assert play(workload, two).timeline.first_admit_ns.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("version", "admitted_ms"), [("0.32", 4), ("0.33", 5)])
def test_asynchronously_the_place_is_free_when_the_last_token_is_in_flight_or_since_0_33_there(
    version: str, admitted_ms: int
) -> None:
    workload = adapted([16, 16], [5, 2], [0, 1])
    engine = msgspec.structs.replace(ENGINE, async_scheduling=True, vllm_version=version)
    assert play(workload, engine).timeline.first_admit_ns.tolist() == [0, admitted_ms * MS]


def test_equal_prompts_share_blocks_under_one_adapter_only() -> None:
    content = [[1, 2], [1, 2], [1, 2], [1, 2]]
    workload = adapted([40, 40, 40, 40], [1] * 4, [0, 1, 0, -1], content=content, trace_block_size=20)
    columns = play(workload, msgspec.structs.replace(ENGINE, max_loras=3)).timeline
    assert columns.cached_tokens_first.tolist() == [0, 0, 32, 0]
    rows = np.arange(4, dtype=np.int64)
    assert BlockVisits(workload, 16).unlimited(rows).tolist() == [0, 0, 32, 0]


def test_fast_forward_and_stepping_agree() -> None:
    for seed in range(40):
        changes: dict[str, Any] = {"enable_lora": True, "max_loras": 1 + seed % 3}
        if seed % 2 and random_case(seed).config.mocker.aic_nextn is None:
            changes["async_scheduling"] = True
        case = random_case(seed, single_turns=True, **changes)
        rng = Random(seed)
        names = tuple("abcd")
        adapter = np.array([rng.randint(-1, 3) for _ in range(len(case.workload))], np.int32)
        played = replace(case.workload, adapter=adapter, adapters=names)
        runs: list[Any] = []
        for fast_forward in (True, False):
            try:
                runs.append(
                    run_offline(RunPlan(played, case.config, fast_forward=fast_forward, **case.how)).timeline
                )
            except WrongState as error:  # a run without progress: both say so
                runs.append(str(error))
        if isinstance(runs[0], str):
            assert runs[0] == runs[1]
            continue
        for name in COLUMNS:
            assert np.array_equal(getattr(runs[0], name), getattr(runs[1], name)), (seed, name)


def test_a_trace_names_adapters(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    row = '{"timestamp": 0, "hash_ids": [1], "input_length": 100, "output_length": 3'
    path.write_text(f'{row}, "lora": "fr"}}\n{row}}}\n{row}, "lora": "de"}}\n')
    workload = read_mooncake(path)
    assert workload.adapter is not None
    assert (workload.adapter.tolist(), workload.adapters) == ([0, -1, 1], ("fr", "de"))
    write_mooncake(workload, tmp_path / "again.jsonl")
    again = read_mooncake(tmp_path / "again.jsonl")
    assert again.digest == workload.digest
    both = concat([workload.take([2]), workload])
    assert both.adapter is not None
    assert [both.adapters[index] if index >= 0 else "" for index in both.adapter] == ["de", "fr", "", "de"]


def test_adapters_need_an_engine_that_takes_them() -> None:
    with pytest.raises(ConfigError, match=r"names LoRA adapters .*set enable_lora"):
        run_offline(RunPlan(adapted([16], [1], [0]), VllmConfig()))
    with pytest.raises(ConfigError, match="max_loras must be at least 1, got 0"):
        VllmConfig(enable_lora=True, max_loras=0)
    with pytest.raises(InvalidArgument, match="adapter and adapters need each other"):
        single_turns([16], adapter=[0])


def test_a_server_has_as_many_places_as_it_is_told() -> None:
    engine = read_serve(["m", "--enable-lora", "--max-loras", "3"]).settings.engine
    assert isinstance(engine, VllmConfig)
    assert (engine.enable_lora, engine.max_loras) == (True, 3)
