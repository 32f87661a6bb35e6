"""Timing models: their numbers, as they come out of a replay, and what they refuse."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from replay.building import MS, single_turns
from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.timing import Constant, Interpolated
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, InvalidArgument
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan

if TYPE_CHECKING:
    from pathlib import Path

    from understudy import _core
    from understudy.run.timeline import Timeline


SIZES: dict[str, Any] = {"block_size": 64, "max_num_batched_tokens": 8192}
"""Sizes of the engine whose times the numbers below are."""


def timeline(
    prompts: list[int], outputs: int | list[int], engine: VllmConfig | None = None, **how: Any
) -> Timeline:
    return run_offline(RunPlan(single_turns(prompts, outputs), engine or VllmConfig(**SIZES), **how)).timeline


def ns(*times_ms: float) -> Any:
    """Within a nanosecond, which is the last digit of a time in ms with six decimals."""
    return pytest.approx([time_ms * MS for time_ms in times_ms], abs=1)


# ── Polynomial ──


@pytest.mark.parametrize(
    ("tokens", "prefill_ms"),
    [
        (1, 16.516604),
        (8, 16.622914),
        (64, 17.474885),
        (512, 24.385704),
        (1024, 32.490712),
        (4096, 85.755980),
        (8192, 169.136918),
    ],
)
def test_prefill_is_quadratic_in_new_tokens(tokens: int, prefill_ms: float) -> None:
    assert timeline([tokens], 0).finish_ns == ns(prefill_ms)


@pytest.mark.parametrize(
    ("utilisation", "decode_ms"),
    [
        (0.01, 6.277526),
        (0.1, 10.8836),
        (0.25, 17.63375),
        (0.5, 26.31),
        (0.75, 31.76875),
        (1.0, 34.01),
    ],
)
def test_decode_is_quadratic_in_kv_utilisation(utilisation: float, decode_ms: float) -> None:
    context = round(utilisation * 10_000)  # of the second step, with the first token in it
    engine = VllmConfig(block_size=10, num_gpu_blocks=1000, max_num_batched_tokens=10_000)
    assert timeline([context - 1], 2, engine).itl_ns == ns(decode_ms)


def test_utilisation_counts_shared_blocks_for_each_request_and_stops_at_one() -> None:
    workload = single_turns([6400, 6400], 2, content=[range(400), range(400)])
    engine = VllmConfig(block_size=16, num_gpu_blocks=800, max_num_batched_tokens=12_800)
    run = run_offline(RunPlan(workload, engine))
    assert run.timeline.cached_tokens_first.tolist() == [0, 6384]
    assert run.timeline.itl_ns == ns(34.01)


def test_one_request_with_three_tokens() -> None:
    columns = timeline([128], 3)
    assert columns.first_token_ns == ns(24.198391)
    assert columns.second_token_ns == ns(29.945035)
    assert columns.last_token_ns == ns(35.691730)


def test_two_prompts_of_one_step_are_timed_by_their_mean() -> None:
    # 2 × 200 tokens: 22.642156 ms, then 400 tokens of context: 5.760599 ms.
    assert timeline([100, 300], 1).first_token_ns == ns(28.402755, 28.402755)


def test_a_prompt_in_chunks_is_timed_chunk_by_chunk() -> None:
    # 8192 and 1808 tokens: 169.136918 + 45.329268 ms; then 6.252738 ms for the token.
    assert timeline([10_000], 1).first_token_ns == ns(220.718925)


def test_a_small_pool_is_well_used_at_once() -> None:
    columns = timeline([8], 2, VllmConfig(block_size=4, num_gpu_blocks=16))
    assert columns.first_token_ns == ns(28.711977)
    assert columns.last_token_ns == ns(41.538115)


def test_cached_tokens_cost_nothing() -> None:
    workload = single_turns([128, 128], 0, arrival_ms=[0, 100], content=[range(8), range(8)])
    columns = run_offline(RunPlan(workload, VllmConfig(block_size=16))).timeline
    assert columns.cached_tokens_first.tolist() == [0, 112]
    prefill_16_ms = 4.209989e-7 * 16**2 + 1.518344e-2 * 16 + 16.50142
    assert columns.finish_ns == ns(18.451798, 100 + prefill_16_ms)


# ── Speed-ups ──


def test_a_speedup_divides_every_time_and_a_decode_speedup_those_of_decode() -> None:
    plain = timeline([128], 3)
    fast = timeline([128], 3, VllmConfig(**SIZES, mocker=MockerSettings(speedup_ratio=4.0)))
    assert fast.first_token_ns == ns(24.198391 / 4)
    assert fast.itl_ns * 4 == pytest.approx(plain.itl_ns, abs=4)
    decode = timeline([128], 3, VllmConfig(**SIZES, mocker=MockerSettings(decode_speedup_ratio=2.0)))
    assert decode.first_token_ns == ns(18.451798 + (24.198391 - 18.451798) / 2)
    both = timeline(
        [128], 3, VllmConfig(**SIZES, mocker=MockerSettings(speedup_ratio=0.5, decode_speedup_ratio=2.0))
    )
    assert both.first_token_ns == ns(18.451798 * 2 + (24.198391 - 18.451798))


@pytest.mark.parametrize("field", ["speedup_ratio", "decode_speedup_ratio"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_speedup_that_is_no_ratio_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        VllmConfig.from_dict({field: value})


# ── Constant ──


def test_constant_times_are_added_for_steps_with_prefill_and_decode() -> None:
    columns = timeline([10, 20], [2, 4], VllmConfig(timing=Constant(prefill_ms=7.0, decode_ms=2.0)))
    assert columns.first_token_ns.tolist() == [9 * MS, 9 * MS]
    assert columns.last_token_ns.tolist() == [11 * MS, 15 * MS]


def test_a_constant_of_zero_takes_no_time() -> None:
    workload = single_turns([10, 20], [2, 4], arrival_ms=[0, 5])
    run = run_offline(RunPlan(workload, VllmConfig(timing=Constant(prefill_ms=0.0, decode_ms=0.0))))
    assert run.timeline.last_token_ns.tolist() == [0, 5 * MS]
    assert run.timeline.output_tokens.tolist() == [2, 4]


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize("field", ["prefill_ms", "decode_ms"])
def test_a_constant_that_is_no_time_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        Constant(**{"prefill_ms": 1.0, "decode_ms": 1.0, field: value})


def test_times_are_rounded_to_nanoseconds_once_a_step() -> None:
    engine = VllmConfig(
        timing=Constant(prefill_ms=0.0, decode_ms=1.0), mocker=MockerSettings(decode_speedup_ratio=3.0)
    )
    assert timeline([10], 4, engine).last_token_ns.tolist() == [4 * 333_333]


def test_an_absurd_duration_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="timing model returned"):
        timeline([10], 1, VllmConfig(timing=Constant(prefill_ms=1e300, decode_ms=1.0)))


# ── Interpolated ──

PROFILE: dict[str, Any] = {
    "prefill_isl": [100.0, 200.0, 400.0],
    "prefill_ttft_ms": [10.0, 30.0, 50.0],
    "decode_active_kv_tokens": [0.0, 1000.0],
    "decode_context_length": [0.0, 100.0, 300.0],
    "decode_itl": [[2.0, 4.0, 8.0], [12.0, 14.0, 18.0]],
}


def profile(directory: Path, **changes: Any) -> VllmConfig:
    path = directory / "profile.npz"
    arrays = {name: value for name, value in {**PROFILE, **changes}.items() if value is not None}
    np.savez(path, **arrays)
    return VllmConfig(timing=Interpolated(str(path)))


@pytest.mark.parametrize(
    ("tokens", "prefill_ms"),
    [(100, 10.0), (150, 20.0), (200, 30.0), (300, 40.0), (400, 50.0), (600, 70.0), (60, 2.0), (10, 0.0)],
)
def test_prefill_times_lie_on_the_line_between_measurements_and_beyond_them(
    tmp_path: Path, tokens: int, prefill_ms: float
) -> None:
    assert timeline([tokens], 0, profile(tmp_path)).finish_ns == ns(prefill_ms)


@pytest.mark.parametrize(
    ("prompts", "decode_ms"),
    [
        ([99], 4.0 + 1.0),  # 100 tokens of context: a tenth of the way between the rows
        ([199], 6.0 + 2.0),
        ([99, 99, 99, 99, 99], 4.0 + 5.0),  # 500 together, 100 each
        ([399], 10.0 + 4.0),  # past the longest context
    ],
)
def test_decode_times_lie_on_the_surface_of_total_and_mean_context(
    tmp_path: Path, prompts: list[int], decode_ms: float
) -> None:
    assert timeline(prompts, 2, profile(tmp_path)).itl_ns == ns(decode_ms)


def test_interpolated_decode_takes_at_least_a_millisecond(tmp_path: Path) -> None:
    flat = profile(tmp_path, decode_itl=np.full((2, 3), 0.25))
    assert timeline([99], 2, flat).itl_ns == ns(1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decode_itl": None}, "decode_itl"),
        ({"decode_itl": np.zeros((3, 2))}, r"decode_itl must have shape \(2, 3\)"),
        ({"prefill_ttft_ms": [1.0, 2.0]}, "prefill_ttft_ms needs 3 values"),
        ({"prefill_isl": [100.0, 100.0, 200.0]}, "prefill_isl must be finite and rise"),
        ({"decode_context_length": [0.0, math.nan, 300.0]}, "decode_context_length must be finite"),
        ({"decode_itl": np.full((2, 3), math.inf)}, "decode_itl must be finite"),
        ({"prefill_isl": [1.0], "prefill_ttft_ms": [1.0]}, "prefill_isl needs at least 2 points"),
        ({"prefill_isl": ["a", "b", "c"]}, "could not convert"),
        ({"decode_active_kv_tokens": 5.0}, "decode_active_kv_tokens"),
        ({"prefill_isl": [[1.0, 2.0, 3.0]]}, "prefill_isl"),
    ],
)
def test_a_profile_that_does_not_fit_is_an_error_that_names_file_and_array(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    engine = profile(tmp_path, **changes)
    with pytest.raises(ConfigError, match=rf"profile\.npz.*{message}"):
        timeline([10], 1, engine)


@pytest.mark.parametrize("content", [None, b"", b"nonsense", b"PK\x03\x04nonsense"])
def test_a_profile_that_does_not_load_is_an_error_and_never_a_fallback(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "broken.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.npz"):
        timeline([10], 1, VllmConfig(timing=Interpolated(str(path))))


def test_a_single_array_is_no_profile(tmp_path: Path) -> None:
    path = tmp_path / "one.npy"
    np.save(path, np.zeros(3))
    with pytest.raises(ConfigError, match=r"one\.npy"):
        timeline([10], 1, VllmConfig(timing=Interpolated(str(path))))


# ── Written in Python ──


class Model:
    """Answers with what it is told, and keeps what it was asked."""

    def __init__(self, prefill: Any = 1.0, decode: Any = 1.0) -> None:
        self.prefill, self.decode = prefill, decode
        self.prefills: list[tuple[int, ...]] = []
        self.decodes: list[tuple[int, ...]] = []

    def prefill_ms(self, *asked: int) -> Any:
        self.prefills.append(asked)
        return self.prefill(*asked) if callable(self.prefill) else self.prefill

    def decode_ms(self, *asked: int) -> Any:
        self.decodes.append(asked)
        return self.decode(*asked) if callable(self.decode) else self.decode


def test_a_model_that_echoes_the_batch_is_believed() -> None:
    echo = Model(lambda requests, *_: float(requests), lambda requests, *_: float(requests))
    columns = timeline([10] * 7, [2] * 7, timing=echo, fast_forward=False)
    assert columns.first_token_ns.tolist() == [14 * MS] * 7
    assert columns.last_token_ns.tolist() == [21 * MS] * 7


def test_a_model_is_asked_in_means_of_the_batch_and_told_the_capacity() -> None:
    model = Model()
    engine = VllmConfig(async_scheduling=False, block_size=16, num_gpu_blocks=100)
    workload = single_turns(
        [100, 301], 2, arrival_ms=[0, 1.5], content=[range(7), [*range(6), *range(100, 113)]]
    )
    run_offline(RunPlan(workload, engine, timing=model, fast_forward=False))
    assert model.prefills == [(1, 100, 0), (1, 301, 96)]
    assert model.decodes == [(1, 100, 100, 1600), (2, 402, 201, 1600), (1, 302, 302, 1600)]


def test_the_speedups_apply_to_a_model_in_python() -> None:
    engine = VllmConfig(**SIZES, mocker=MockerSettings(speedup_ratio=2.0, decode_speedup_ratio=4.0))
    assert timeline([10], 2, engine, timing=Model(8.0, 16.0)).last_token_ns.tolist() == [8 * MS]


def test_an_error_in_the_model_comes_out_of_the_run() -> None:
    def fail(*_: int) -> float:
        raise KeyError("no such batch")

    with pytest.raises(KeyError, match="no such batch"):
        timeline([10], 2, timing=Model(fail))
    with pytest.raises(KeyError, match="no such batch"):
        timeline([10] * 4, 2, timing=Model(1.0, fail), workers=4)


@pytest.mark.parametrize("answer", [-1.0, math.nan, math.inf])
def test_an_answer_that_is_no_time_is_an_error(answer: float) -> None:
    with pytest.raises(InvalidArgument, match="timing model returned"):
        timeline([10], 2, timing=Model(answer))


@pytest.mark.parametrize("answer", [None, "fast"])
def test_an_answer_that_is_no_number_is_an_error(answer: Any) -> None:
    with pytest.raises((InvalidArgument, TypeError)):
        timeline([10], 2, timing=Model(answer))


def test_an_object_without_the_methods_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a method prefill_ms"):
        run_offline(RunPlan(single_turns([10]), timing=object()))  # type: ignore[arg-type]


class Slower:
    """Goes by how often it was asked, whoever asked."""

    def __init__(self) -> None:
        self.asked = 0

    def step_ms(self, _step: _core.StepLoad) -> float:
        self.asked += 1
        return 1.0 + self.asked / 100


def test_a_model_in_python_is_asked_by_one_thread() -> None:
    workload, model = single_turns([50] * 8, 5, arrival_ms=list(range(8))), Slower()
    with pytest.raises(ConfigError, match=r"threads > 1 .* timing Slower, .* leave threads out"):
        run_offline(RunPlan(workload, workers=2, timing=model, threads=2))
    assert model.asked == 0
    digests = {
        run_offline(RunPlan(workload, timing=Slower(), threads=threads)).facts.digest for threads in (1, 2)
    }
    assert len(digests) == 1  # one worker is one thread's
