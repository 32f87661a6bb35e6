"""Engines and requests for the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from model.vllm_config import RECORDED, Profile
from model.vllm_format import RequestSpec, Scenario, expand_prompt
from understudy import _core
from understudy.conformance.submit import blocks_of
from understudy.engines.profiles import VersionProfile
from understudy.workload.scenario import ScenarioConfig, ScenarioRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

MS = 1_000_000


def constant(prefill_ms: float = 1.0, decode_ms: float = 1.0) -> _core.StepTiming:
    """Every prefill and every decode takes its time."""
    return _core.constant_timing(prefill_ms, decode_ms)


def engine_profile(profile: Profile) -> VersionProfile:
    """The engine's form of the model's profile."""
    return VersionProfile(
        name=profile.name,
        free_order=profile.free_order,
        has_watermark=profile.has_watermark,
        has_reserve_full_isl=profile.has_reserve_full_isl,
        caps_lone_prefill=profile.caps_lone_prefill,
        has_active_seqs=not profile.caps_lone_prefill,
        phantom_hits=profile.phantom_hit,
        preempted_first=profile.preempted_first,
    )


def engine_for(
    config: Mapping[str, Any],
    profile: Profile = RECORDED,
    timing: _core.StepTiming | None = None,
    *,
    check: bool = False,
) -> _core.VllmEngine:
    """An engine with a scenario's settings; with `check` it verifies itself and its events at every step."""
    settings = msgspec.convert(dict(config), ScenarioConfig)
    return _core.VllmEngine(
        settings.engine_config(engine_profile(profile), check=check), timing or constant()
    )


def request_spec(name: str, prompt: list[int | list[int]], max_tokens: int, priority: int = 0) -> RequestSpec:
    """A request that is there from the beginning."""
    return {"id": name, "prompt": prompt, "max_tokens": max_tokens, "arrival_step": 0, "priority": priority}


def submit_spec(
    engine: _core.VllmEngine, spec: RequestSpec, index: int, block_size: int, max_model_len: int = 131072
) -> int:
    """Queue the request that stands at `index` of its scenario."""
    request = msgspec.convert(spec, ScenarioRequest)
    identities, _ = blocks_of(request.tokens(index, max_model_len), block_size)
    return engine.submit(
        request.id,
        len(expand_prompt(spec["prompt"])),
        request.max_tokens,
        identities,
        priority=request.priority,
        arrival_time=index if request.arrival_time is None else request.arrival_time,
        eos_at=request.eos_at,
    )


def submit_scenario_request(engine: _core.VllmEngine, scenario: Scenario, index: int) -> int:
    """Queue request `index` of the scenario."""
    settings = msgspec.convert(scenario["config"], ScenarioConfig)
    return submit_spec(
        engine, scenario["requests"][index], index, settings.block_size, settings.max_model_len
    )
