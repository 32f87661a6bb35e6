"""Calls of a simulated SGLang engine that a driver may make wrongly, or at a bad time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from understudy import _core
from understudy.engines.sglang_config import SglangConfig
from understudy.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from understudy._core import StepLoad

MS = 1_000_000


class Failing:
    """One millisecond a step, except where it raises."""

    def __init__(self) -> None:
        self.raises = False

    def step_ms(self, step: StepLoad, /) -> float:
        if self.raises:
            raise ArithmeticError(f"no time for {step.tokens} tokens")
        return 1.0


def engine(
    model: Failing | None = None, *, page: int = 4, events: bool = True, **settings: object
) -> _core.Engine:
    config = SglangConfig.from_dict(
        {"block_size": page, "num_gpu_blocks": 400, "chunked_prefill_size": -1, **settings}
    )
    return config.core_config(None, 0, events=events).make_engine(_core.python_timing(model or Failing()))


def spec(number: int, prompt: int = 10, outputs: int = 4, hashes: range | None = None) -> _core.RequestSpec:
    pages = hashes or range(1000 * (number + 1), 1000 * (number + 1) + 10)
    return _core.RequestSpec(number, f"r{number}", prompt, outputs, _core.Identities.from_local_hashes(pages))


def due(effects: _core.Effects) -> int:
    assert effects.wake_ns is not None
    return effects.wake_ns


def run_to_end(one: _core.Engine, now_ns: int = 0) -> tuple[int, list[int]]:
    finished: list[int] = []
    effects = one.begin_step(now_ns)
    while True:
        finished += [record.id for record in effects.finished]
        if effects.phase == _core.Phase.IN_STEP:
            now_ns = due(effects)
            effects = one.end_step(now_ns)
        elif effects.phase == _core.Phase.READY:
            effects = one.begin_step(now_ns)
        else:
            return now_ns, finished


@pytest.mark.parametrize("overlap", [True, False])
def test_a_repeated_id_is_refused_and_nothing_changes(overlap: bool) -> None:
    one = engine(disable_overlap_schedule=not overlap)
    one.submit(spec(7), 0)
    with pytest.raises(InvalidArgument, match="request 7 is here already"):
        one.submit(spec(7), 0)
    assert run_to_end(one)[1] == [7]


def test_an_empty_prompt_and_too_few_names_are_refused() -> None:
    one = engine()
    with pytest.raises(InvalidArgument, match="prompt_tokens must be at least 1"):
        one.submit(spec(1, prompt=0), 0)
    with pytest.raises(InvalidArgument, match="identities name 1 pages; the request has 25"):
        one.submit(spec(1, prompt=90, outputs=10, hashes=range(5, 6)), 0)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_that_a_timing_model_stopped_can_be_begun_again(overlap: bool) -> None:
    model = Failing()
    one = engine(model, disable_overlap_schedule=not overlap)
    one.submit(spec(1), 0)
    model.raises = True
    with pytest.raises(ArithmeticError, match="no time for"):
        one.begin_step(0)
    model.raises = False
    assert run_to_end(one) == (4 * MS, [1])


def test_a_page_with_the_end_of_a_prompt_and_the_first_outputs_is_found_again() -> None:
    one = engine()
    one.submit(spec(1, prompt=10, outputs=7, hashes=range(50, 60)), 0)
    now_ns, _ = run_to_end(one)
    one.submit(spec(2, prompt=30, outputs=2, hashes=range(50, 60)), now_ns + 1)
    effects = one.begin_step(now_ns + 1)
    while not effects.finished:
        effects = (
            one.end_step(due(effects))
            if effects.phase == _core.Phase.IN_STEP
            else one.begin_step(due(effects))
        )
    assert effects.finished[0].cached_first == 16


@pytest.mark.parametrize("overlap", [True, False])
def test_a_cancelled_request_is_reported_at_once_and_once(overlap: bool) -> None:
    one = engine(disable_overlap_schedule=not overlap)
    one.submit(spec(1, outputs=20), 0)
    effects = one.begin_step(0)
    effects = one.end_step(due(effects))
    assert [record.id for record in one.cancel(1, due(effects)).finished] == [1]
    assert run_to_end(one, MS)[1] == []


def test_settings_without_effect_or_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens is vLLM's name"):
        SglangConfig.from_dict({"max_num_batched_tokens": 100})
    with pytest.raises(ConfigError, match="schedule_conservativeness must be a finite number above 0"):
        SglangConfig.from_dict({"schedule_conservativeness": -1.0})
    with pytest.raises(ConfigError, match="max_prefill_tokens"):
        SglangConfig.from_dict({"max_prefill_tokens": 0})


def test_a_request_without_a_priority_has_the_worst_one() -> None:
    one = engine(enable_priority_scheduling=True, max_num_seqs=1)
    for number, priority in enumerate([None, -5, 3, None]):
        pages = _core.Identities.from_local_hashes(range(1000 * number + 1, 1000 * number + 11))
        one.submit(_core.RequestSpec(number, f"r{number}", 10, 4, pages, priority=priority), 0)
    assert run_to_end(one)[1] == [2, 1, 0, 3]


@pytest.mark.parametrize("events", [True, False])
def test_the_cached_prefix_is_known_with_events_and_without(events: bool) -> None:
    one = engine(events=events)
    pages = _core.Identities.from_local_hashes(range(50, 60))
    assert one.cached_prefix(pages) == 0
    one.submit(spec(1, prompt=22, outputs=4, hashes=range(50, 60)), 0)
    run_to_end(one)
    assert one.cached_prefix(pages) == 6
    assert one.cached_prefix(pages[:3]) == 3
    assert one.cached_prefix(_core.Identities.from_local_hashes(range(60, 70))) == 0


def test_events_are_visible_when_sglang_publishes_them() -> None:
    one = engine(disable_overlap_schedule=True)
    one.submit(spec(1, prompt=8, outputs=6), 0)
    one.submit(spec(2, prompt=8, outputs=60, hashes=range(5000, 5020)), 0)
    times: list[int] = []
    effects = one.begin_step(0)
    while effects.phase != _core.Phase.IDLE:
        step = one.end_step if effects.phase == _core.Phase.IN_STEP else one.begin_step
        effects = step(due(effects))
        times += one.take_events()[1].tolist()
    # After the prefill, after the 40th decode (the end of request 1 was the 5th), and when the engine is idle.
    assert sorted(set(times)) == [1 * MS, 41 * MS, 60 * MS]


def test_a_prompt_that_never_fits_is_refused_with_a_remedy() -> None:
    text = engine(num_gpu_blocks=10).never_fits(40, 1)
    assert text == (
        "prompt_tokens: 40 exceed the 33 that the context and the KV pool allow; shorten the prompt, or raise "
        "max_model_len and num_gpu_blocks"
    )
    assert engine(num_gpu_blocks=10).never_fits(33, 1) is None


def test_settings_of_dynamos_mocker_are_honoured_or_refused() -> None:
    with pytest.raises(ConfigError, match="aic_nextn contradicts engine sglang"):
        SglangConfig.from_dict({"aic_nextn": 2})
    assert SglangConfig.from_dict({"route_rejected": True}).mocker.route_rejected
    assert SglangConfig.from_dict({"speedup_ratio": 2.0}).mocker.speedup_ratio == 2.0


def test_sglangs_names_and_defaults() -> None:
    config = SglangConfig.from_dict({})
    assert (config.block_size, config.num_gpu_blocks, config.max_num_seqs) == (1, 2**20, None)
    named = SglangConfig.from_dict(
        {"page_size": 64, "max_total_tokens": 6400, "max_running_requests": 7, "context_length": 4096}
    )
    assert (named.block_size, named.num_gpu_blocks, named.max_num_seqs, named.max_model_len) == (
        64,
        100,
        7,
        4096,
    )
    with pytest.raises(ConfigError, match="page_size: block_size names the same setting"):
        SglangConfig.from_dict({"page_size": 64, "block_size": 64})
    with pytest.raises(ConfigError, match="max_total_tokens=100 is not a multiple of page_size=64"):
        SglangConfig.from_dict({"page_size": 64, "max_total_tokens": 100})


@pytest.mark.parametrize("overlap", [True, False])
def test_while_admission_is_off_only_requests_that_hold_memory_go_on(overlap: bool) -> None:
    one = engine(disable_overlap_schedule=not overlap)
    one.submit(spec(1, outputs=6), 0)
    one.begin_step(0)
    one.set_admitting(False)
    one.submit(spec(2), 0)
    assert not one.drained
    now_ns, finished = 0, []
    effects = one.end_step(MS)
    while effects.phase != _core.Phase.STALLED:
        now_ns = due(effects)
        effects = (one.end_step if effects.phase == _core.Phase.IN_STEP else one.begin_step)(now_ns)
        finished += [record.id for record in effects.finished]
    assert (finished, one.drained, one.snapshot().waiting) == ([1], True, 1)
    one.set_admitting(True)
    assert run_to_end(one, now_ns)[1] == [2]


def test_a_forgotten_cache_has_no_page_that_no_request_holds() -> None:
    one = engine()
    pages = _core.Identities.from_local_hashes(range(50, 60))
    one.submit(spec(1, prompt=22, outputs=4, hashes=range(50, 60)), 0)
    now_ns, _ = run_to_end(one)
    assert one.cached_prefix(pages) == 6
    one.submit(spec(2, outputs=20), now_ns)
    one.begin_step(now_ns)
    one.forget_cache(now_ns)
    one.check()
    assert one.cached_prefix(pages) == 0
    assert isinstance(one, _core.SglangEngine)
    assert (one.tokens.evictable, one.tokens.evicted) == (0, 24)
    effects = one.end_step(now_ns + MS)
    assert run_to_end(one, due(effects))[1] == [2]


def test_links_of_a_tier_that_is_not_there_are_not_slowed() -> None:
    one = engine()
    assert isinstance(one, _core.SglangEngine)
    with pytest.raises(
        InvalidArgument, match="tier: the engine has no link to this tier; HiCache has g2 only"
    ):
        one.set_link_share(0, _core.Tier.G2, 0.5)


@pytest.mark.parametrize(
    "second", [{"swa_window": 8}, {"max_mamba_cache_size": 48}], ids=["windows", "states"]
)
def test_an_engine_at_rest_has_its_second_pool_free_or_evictable(second: dict[str, Any]) -> None:
    one = engine(page=1, **second)
    assert isinstance(one, _core.SglangEngine)
    assert one.tokens.part_total == one.tokens.part_available > 0
    one.submit(spec(1, hashes=range(1, 20)), 0)
    assert run_to_end(one)[1] == [1]
    assert one.tokens.part_available + one.tokens.part_evictable == one.tokens.part_total
