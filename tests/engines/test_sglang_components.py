"""SGLang's scheduler with sliding windows or states: what a match needs, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from understudy.conformance.sglang_recording import (
    SglangRequest,
    SglangScenario,
    SglangScenarioConfig,
    run_sglang_scenario,
)
from understudy.errors import ConfigError


def test_a_match_ends_where_a_whole_window_is_cached() -> None:
    """The window KV in the middle of a prompt is evicted, and so the prompt matches up to its start only."""
    long = [SglangRequest(id="r0", prompt=[(1, 300)], max_tokens=4)]
    again = SglangRequest(id="r1", prompt=[(1, 150), (9000, 10)], max_tokens=4, arrival_step=20)
    config = SglangScenarioConfig(max_total_num_tokens=2000, swa_window=50, swa_tokens=1000)
    lines = [
        line for line in run_sglang_scenario(SglangScenario(config, [*long, again], "", 50)) if "step" in line
    ]
    cached = [line["cached"]["r1"] for line in lines if "r1" in line["cached"]]
    assert cached == [0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"swa_window": 8, "swa_tokens": 64, "mamba_slots": 8}, "mamba_slots: .* leave out swa_window"),
        ({"swa_window": 8, "swa_tokens": 64, "hicache_write_policy": "write_back"}, "swa_window: HiCache"),
        ({"mamba_slots": 8, "hicache_write_policy": "write_back"}, "mamba_slots: HiCache"),
        ({"swa_window": 8, "swa_tokens": 64, "tree": "radix"}, "swa_window: SGLang's older tree"),
        ({"swa_window": 8}, "swa_tokens: "),
        ({"page_size": 16, "swa_window": 8, "swa_tokens": 40}, "swa_tokens: "),
        ({"mamba_slots": 8, "mamba_lazy": True}, "mamba_lazy: needs mamba_extra_buffer"),
        ({"mamba_slots": 8, "mamba_track_interval": 0}, "mamba_track_interval: 0"),
        ({"mamba_slots": 8, "page_size": 16}, "mamba_extra_buffer: pages of 16"),
    ],
)
def test_a_combination_without_rules_is_refused(settings: dict[str, Any], message: str) -> None:
    scenario = SglangScenario(SglangScenarioConfig(**settings), [], "refused", 10)
    with pytest.raises(ConfigError, match=message):
        list(run_sglang_scenario(scenario))
