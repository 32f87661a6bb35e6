"""Groups of layers, compared with what vLLM 0.33's planner computes for the same layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from understudy.checks import read_as
from understudy.groups.layer import Layer
from understudy.groups.plan import plan_groups

DERIVATIONS = json.loads(
    (Path(__file__).parents[1] / "golden" / "vllm-hybrid" / "derivations.json").read_text()
)
INPUTS = (
    "memory_bytes",
    "max_model_len",
    "max_num_batched_tokens",
    "async_scheduling",
    "prefix_caching",
    "layout",
    "disable_hybrid",
)


def layers_of(entry: dict[str, Any]) -> list[Layer]:
    return [read_as(Layer, spec) for number, spec in entry["layers"] for _ in range(number)]


@pytest.mark.parametrize("entry", DERIVATIONS, ids=lambda entry: entry["model"])
def test_layers_give_the_groups_and_the_capacity_of_vllm(entry: dict[str, Any]) -> None:
    plan = plan_groups(layers_of(entry), **{name: entry[name] for name in INPUTS})
    derived = {key: value for key, value in entry.items() if key not in (*INPUTS, "layers", "model")}
    assert plan.to_dict() == derived
