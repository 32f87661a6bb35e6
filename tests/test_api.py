"""`understudy.replay`: a plain function, whatever else was imported, that calls mistakes what they are."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import understudy
from replay.building import single_turns
from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.kv import EvictionPolicy
from understudy.router import KvRouting
from understudy.run.options import Execution, Outputs
from understudy.run.run_plan import RunPlan
from understudy.tiers import TiersConfig
from understudy.workload import ClosedLoop, read_trace, register_format, synthesise
from understudy.workload.families import FanOut, QuickTurns

if TYPE_CHECKING:
    from collections.abc import Callable

TRACE = Path(__file__).parents[1] / "examples" / "demo_trace.jsonl"

AFTER_ROOMS = """
import understudy.run.offline, understudy.report.report, understudy.cli
import understudy
from types import FunctionType
assert type(understudy.replay) is FunctionType
from understudy import replay
assert replay is understudy.replay
"""


def test_replay_is_a_plain_function_with_a_signature() -> None:
    assert type(understudy.replay) is FunctionType
    parameters = inspect.signature(understudy.replay).parameters
    assert list(parameters)[:2] == ["workload", "engine"]
    assert {"workers", "routing", "tiers", "slo", "outputs", "execution"} <= set(parameters)


def test_a_plan_and_replay_agree_on_types() -> None:
    ours, core = (inspect.signature(one).parameters for one in (understudy.replay, RunPlan))
    shared = [name for name in core if name in ours and name != "workload"]
    assert len(shared) > 8
    for name in shared:
        assert (ours[name].annotation, ours[name].default) == (core[name].annotation, core[name].default), (
            name
        )
    for one in fields(Execution):
        assert (one.type, one.default) == (core[one.name].annotation, core[one.name].default), one.name
    assert not [name for name, one in ours.items() if "Any" in one.annotation]


def test_it_stays_one_after_its_rooms_were_imported() -> None:
    subprocess.run([sys.executable, "-c", AFTER_ROOMS], check=True)


def test_a_model_that_changes_capacity_and_not_speed_is_said_so() -> None:
    tiers = TiersConfig.from_dict({"model": "Llama-3.1-8B", "tiers": [{"tier": "g2", "blocks": 9}]})
    (note,) = understudy.replay(single_turns([16]), tiers=tiers).run.notes
    assert note.startswith(
        "Llama-3.1-8B sets the KV bytes per token only; step times are those of the generic"
    )
    measured = VllmConfig(timing=Constant(prefill_ms=1.0, decode_ms=1.0))
    assert understudy.replay(single_turns([16]), measured, tiers=tiers).run.notes == ()
    assert understudy.replay(single_turns([16])).run.notes == ()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"worker": 4}, "worker is not a parameter of replay; did you mean workers?"),
        ({"tier": None}, "tier is not a parameter of replay; did you mean tiers?"),
        ({"concurrency": True}, r"concurrency is not a parameter of replay; give load=ClosedLoop\(N\)"),
        (
            {"arrival_rate_scale": 2.0},
            r"arrival_rate_scale is not a parameter of replay; give load=OpenLoop\(arrival_rate_scale=X\)",
        ),
        ({"tiers": {"g2": 5}}, "tiers must be a TiersConfig"),
        ({"timing": "fast"}, "timing must be a TimingModel"),
        ({"slo": 5}, "slo must be an Slo"),
        ({"load": 5}, "load must be an OpenLoop"),
        ({"engine": {"block_size": 3}}, "engine must be an EngineConfig, such as VllmConfig"),
        ({"workers": "4"}, "workers must be a whole number"),
        ({"execution": Execution(threads=1.5)}, "threads must be a whole number"),  # type: ignore[arg-type]
        ({"routing": None}, "routing must be round_robin, random, .* or a Router with choose"),
        ({"routing": KvRouting}, "routing must be .* not a class; got <class"),
        ({"execution": Execution(fast_forward="yes")}, "fast_forward must be True or False, got 'yes'"),  # type: ignore[arg-type]
        ({"speed_up": 2.0}, r"speed_up is not a parameter of replay; give load=OpenLoop"),
        (
            {"leaping": False},
            r"leaping is not a parameter of replay; give execution=Execution\(fast_forward=False\)",
        ),
        ({"execution": Execution(check=None)}, "check must be True, False or 'deep', got None"),  # type: ignore[arg-type]
        ({"execution": Execution(progress=3)}, "progress must be a function"),  # type: ignore[arg-type]
        ({"pools": 3}, "pools must be a list of WorkerPools, got 3"),
        ({"events": "a"}, r"events is not a parameter of replay; give outputs=Outputs\(events=…\)"),
        ({"threads": 2}, r"threads is not a parameter of replay; give execution=Execution\(threads=…\)"),
        ({"trace_block_size": 64}, 'give trace_options={"trace_block_size": …}'),
        ({"outputs": {"events": "a"}}, "outputs must be Outputs, got"),
        ({"execution": 2}, "execution must be an Execution, got 2"),
        ({"trace_options": 2}, "trace_options must be options by name, got 2"),
        ({"zzz": 1}, "zzz is not a parameter of replay; known are workload, engine, model, gpu"),
        ({"max_tokens": "a"}, "max_tokens must be a whole number, got 'a'"),
        (
            {"model": 3, "gpu": "H100"},
            "model must be the name of a model or the path of its config.json, got 3",
        ),
        ({"compare_without_tiers": "yes"}, "compare_without_tiers must be True or False, got 'yes'"),
        (
            {"trace_options": {"trace_block_size": 3}},
            "trace_block_size is for reading a trace file, but a Workload was given",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(how: dict[str, Any], message: str) -> None:
    with pytest.raises(
        ConfigError, match=message.replace("workers?", r"workers\?").replace("tiers?", r"tiers\?")
    ):
        understudy.replay(single_turns([16]), **how)


def test_an_output_that_is_not_a_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="events must be the path of a file to write, got 3"):
        Outputs(events=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("workload", [None, 3, ["t.jsonl"]])
def test_what_is_no_workload_is_refused(workload: Any) -> None:
    with pytest.raises(ConfigError, match="workload must be a Workload or the path of a trace, got"):
        understudy.replay(workload)


@pytest.mark.parametrize(
    ("make", "how", "message"),
    [
        (VllmConfig, {"timing": "fast"}, "timing must be one of Polynomial, Constant, .*, got 'fast'"),
        (VllmConfig, {"timing": {"kind": "constant"}}, "timing must be one of Polynomial"),
        (VllmConfig, {"kv_manager": "x"}, "kv_manager must be one of kvbm, native; got 'x'"),
        (VllmConfig, {"vllm_version": 0.24}, "vllm_version must be text, as '0.26.0', got 0.24"),
        (VllmConfig, {"enable_prefix_caching": "no"}, "enable_prefix_caching must be True or False"),
        (VllmConfig, {"async_scheduling": "no"}, "async_scheduling must be True or False, got 'no'"),
        (VllmConfig, {"enable_lora": None}, "enable_lora must be True or False, got None"),
        (MockerSettings, {"speedup_ratio": "2"}, "speedup_ratio must be a number, got '2'"),
        (VllmConfig, {"watermark": np.True_}, "watermark must be a number, got"),
        (VllmConfig, {"long_prefill_token_threshold": "x"}, "long_prefill_token_threshold must be a whole"),
        (
            VllmConfig,
            {"eviction_policy": EvictionPolicy},
            "must be a user-defined subclass of EvictionPolicy",
        ),
        (KvRouting, {"temperature": -1}, "temperature must be a finite number from 0, got -1"),
        (KvRouting, {"temperature": True}, "temperature must be a number, got True"),
        (KvRouting, {"overlap_score_credit": "a"}, "overlap_score_credit must be a number, got 'a'"),
        (KvRouting, {"event_loss": None}, "event_loss must be a number, got None"),
        (KvRouting, {"use_events": "no"}, "use_events must be True or False, got 'no'"),
        (KvRouting, {"approximate_blocks": 1.5}, "approximate_blocks must be a whole number, got 1.5"),
        (
            Outputs,
            {"events": "a", "synthesize_tokens": "yes"},
            "synthesize_tokens must be True or False, got 'yes'",
        ),
        (TiersConfig, {"kv_bytes_per_token": "x"}, "kv_bytes_per_token must be a whole number, got 'x'"),
        (TiersConfig, {"model": 3}, "model must be text, got 3"),
        (understudy.predict, {"inputs": 3}, "inputs must be the path of a table or of a recorded run, got 3"),
        (
            understudy.predict,
            {"inputs": "a.jsonl", "model": 3, "gpu": "H100"},
            "model must be the name of a model or the path of its config.json, got 3",
        ),
        (KvRouting, {"queue_policy": "x"}, "queue_policy must be one of fcfs, lcfs, wspt; got 'x'"),
        (TiersConfig, {"tiers": 3}, "tiers must be a list of TierSettings"),
        (TiersConfig, {"tiers": [3]}, "tiers must be a list of TierSettings"),
        (synthesise, {"spec": {"sessions": 3}}, "spec must be a SyntheticSpec"),
        (read_trace, {"path": 3}, "path must be the path of a trace, got 3"),
        (register_format, {"name": "x", "reader": None}, "the reader must be a function from a path"),
        (FanOut, {"seed": -1}, "seed must be at least 0"),
        (FanOut, {"question_tokens": 3}, r"question_tokens must be \(least, most\), got 3"),
        (
            FanOut,
            {"context_interval_ms": float("inf")},
            "context_interval_ms must be a finite number above 0",
        ),
        (QuickTurns, {"session_interval_ms": "5"}, "session_interval_ms must be a number, got '5'"),
        (QuickTurns, {"think_ms": (5, 1)}, "the most of think_ms must be at least 5, got 1"),
    ],
)
def test_wrong_values_are_refused_where_they_are_given(
    make: Callable[..., Any], how: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**how).build()  # of workloads: the others raise before


def test_numpys_numbers_are_numbers_wherever_one_is_asked_for(tmp_path: Path) -> None:
    load = ClosedLoop(np.int64(2))  # type: ignore[arg-type]
    report = understudy.replay(
        single_turns([16, 16]),
        VllmConfig(
            num_gpu_blocks=np.int32(64),  # type: ignore[arg-type]
            long_prefill_token_threshold=np.int64(8),  # type: ignore[arg-type]
            mocker=MockerSettings(
                speedup_ratio=np.float64(2),
                decode_speedup_ratio=np.float32(1.5),  # type: ignore[arg-type]
            ),
            watermark=np.int8(0),  # type: ignore[arg-type]
            enable_chunked_prefill=np.True_,  # type: ignore[arg-type]
        ),
        workers=np.int64(2),  # type: ignore[arg-type]
        seed=np.uint8(3),  # type: ignore[arg-type]
        load=load,
        max_tokens=np.int16(5),  # type: ignore[arg-type]
    )
    report.to_json(tmp_path / "report.json")
    assert '"workers": 2' in (tmp_path / "report.json").read_text()
    assert '"speedup_ratio": 2.0' in (tmp_path / "report.json").read_text()
    assert type(KvRouting(temperature=np.float32(0.5)).temperature) is float  # type: ignore[arg-type]
    contexts = FanOut(contexts=np.int64(2), context_interval_ms=np.int64(5))  # type: ignore[arg-type]
    assert len(contexts.build()) == 16
    assert read_trace(TRACE, trace_block_size=np.int64(512)).trace_block_size == 512  # type: ignore[arg-type]
