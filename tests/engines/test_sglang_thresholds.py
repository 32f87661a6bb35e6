"""Thresholds of SGLang's search for equal prefixes among waiting requests, and settings out of range."""

from __future__ import annotations

import pytest

from understudy.conformance.sglang_recording import (
    SglangRequest,
    SglangScenario,
    SglangScenarioConfig,
    run_sglang_scenario,
)
from understudy.errors import ConfigError


def queue_behind_the_first(**settings: int) -> list[str]:
    """Order of the queue after a step of four requests for one place: two pairs with equal prompts."""
    config = SglangScenarioConfig(schedule_policy="lpm", max_running_requests=1, **settings)  # type: ignore[arg-type]
    prompts = {"a": (100, 40), "b": (100, 40), "c": (500, 60), "d": (500, 60)}
    requests = [SglangRequest(id=name, prompt=[run], max_tokens=1) for name, run in prompts.items()]
    first = next(run_sglang_scenario(SglangScenario(config=config, requests=requests, max_steps=40)))
    return list(first["waiting_head"])


@pytest.mark.parametrize(
    ("settings", "queue"),
    [
        ({}, ["c", "b", "d"]),  # b and d wait for a prefix that a and c compute
        ({"in_batch_check_threshold": -1}, ["b", "c", "d"]),  # off
        (
            {"in_batch_deprioritize_threshold": 50},
            ["b", "c", "d"],
        ),  # b shares 40 tokens, d shares 60 and is last
        ({"in_batch_deprioritize_threshold": 0}, ["b", "c", "d"]),  # all wait, in the order of the queue
        ({"in_batch_deprioritize_threshold": -1}, ["b", "c", "d"]),
    ],
    ids=str,
)
def test_thresholds_decide_who_waits_for_an_equal_prefix(settings: dict[str, int], queue: list[str]) -> None:
    assert queue_behind_the_first(**settings) == queue


@pytest.mark.parametrize("field", ["page_size", "max_running_requests", "decode_log_interval"])
@pytest.mark.parametrize("value", [-1, 1 << 70])
def test_a_value_out_of_range_is_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{field}: {value} is out of range"):
        SglangScenarioConfig(**{field: value}).settings()  # type: ignore[arg-type]
