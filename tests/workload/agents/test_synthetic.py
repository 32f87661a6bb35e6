"""Synthetic agents: seeded, valid graphs, with the shape that the preset names."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from understudy.errors import ConfigError
from understudy.workload.agents.synthetic import AGENT_PRESETS, AgentSpec, synthesise_agents

SMALL = AgentSpec(plays=20, turns=8, fan_out=0.2, system_tokens=1000, growth_tokens=300)


def test_equal_seeds_give_equal_workloads() -> None:
    assert synthesise_agents(SMALL, seed=4).digest == synthesise_agents(SMALL, seed=4).digest
    assert synthesise_agents(SMALL, seed=5).digest != synthesise_agents(SMALL, seed=4).digest


def test_a_turn_waits_for_the_one_before_and_for_its_sub_agent() -> None:
    workload = synthesise_agents(SMALL)
    graph = workload.graph
    assert graph is not None
    assert graph.plays == 20
    relations = [{relation for *_, relation in graph.dependencies(row)} for row in range(len(workload))]
    names = workload.session_ids or []
    for row, found in enumerate(relations):
        first, main = workload.turn[row] == 0, names[workload.session[row]].endswith(":root")
        assert found - {"join"} == (set() if first and main else {"spawn"} if first else {"sequence"})
    assert any("join" in found for found in relations)


def test_main_sessions_share_their_system_prompt_and_no_other_block() -> None:
    workload = synthesise_agents(AgentSpec(plays=5, turns=8, fan_out=0, system_tokens=1000))
    graph = workload.graph
    assert graph is not None
    own = [set[int]() for _ in range(5)]
    for row in range(len(workload)):
        own[graph.play[row]] |= set(workload.prompt_hash_ids(row).tolist())
    assert len(set.intersection(*own)) == 1000 // 64
    assert len(set.intersection(own[0], own[1])) == 1000 // 64


def test_the_preset_has_the_shape_of_public_traces() -> None:
    workload = synthesise_agents(msgspec.structs.replace(AGENT_PRESETS["agents-2026"], plays=150), seed=1)
    assert workload.graph is not None
    turns = np.bincount(workload.graph.play)
    assert 35 <= np.median(turns) <= 60
    assert turns.max() <= 800
    assert 80_000 <= workload.prompt_tokens.mean() <= 150_000
    assert 300 <= workload.output_tokens.mean() <= 600
    shared = workload.hash_ids[np.unique(workload.hash_ids, return_index=True)[1]]
    assert 1 - len(shared) / len(workload.hash_ids) > 0.93


def test_shapes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="context_limits: must exceed the system prompts"):
        AgentSpec(system_tokens=800_000)
    with pytest.raises(ConfigError, match="fan_out must lie in 0"):
        AgentSpec(fan_out=2)
