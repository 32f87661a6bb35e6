"""SGLang's scheduler against a slow, literal model of its rules: recordings, and random scenarios of each kind."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from model.sglang_gen import KINDS, random_scenario
from model.sglang_runs import run_model
from understudy.conformance.compare import first_difference
from understudy.conformance.sglang_recording import run_sglang_scenario
from understudy.conformance.sglang_sides import run_sglang_side

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from understudy.conformance.sglang_recording import SglangScenario

COUNT = int(os.environ.get("SGLANG_MODEL_COUNT", "15"))


def steps_of(scenario: SglangScenario) -> Iterator[dict[str, Any]]:
    run = run_sglang_scenario if scenario.config.role is None else run_sglang_side
    return (line for line in run(scenario, check=True) if "step" in line)


@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_the_models(kind: str, seed: int) -> None:
    scenario = random_scenario(kind, seed)
    _, difference = first_difference(steps_of(scenario), run_model(scenario))
    assert difference is None, str(difference)
