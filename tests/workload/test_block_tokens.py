"""Synthesised tokens: equal content has equal tokens, and every block of a run has its own."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from replay.building import crowd, single_turns
from understudy.api import replay
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.events import Stored
from understudy.run.offline import run_offline
from understudy.run.options import Outputs
from understudy.run.run_plan import RunPlan
from understudy.tokens import TokenBlocks
from understudy.workload.block_tokens import TokenSource

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("size", [4, 8, 16, 32])
def test_a_prompts_blocks_have_the_tokens_that_its_ids_stand_for(size: int) -> None:
    content = [[7, 8, 9], [7, 8, 5], [7, 7, 7]]
    workload = single_turns([48, 47, 48], 1, content=content, trace_block_size=16)
    run = run_offline(RunPlan(workload, VllmConfig(block_size=size, num_gpu_blocks=100), events=True))
    assert run.kv is not None
    told: dict[int, Any] = {}
    for _, event in TokenSource(workload, size).add_tokens(run.kv.events(0, "consolidated")):
        if isinstance(event, Stored):
            told |= {block.sequence_hash: (block, event) for block in event.blocks}
    plain = [event for _, event in run.kv.events(0, "consolidated") if isinstance(event, Stored)]
    prompts = [
        np.repeat(ids, 16)[:length].tolist() for ids, length in zip(content, (48, 47, 48), strict=True)
    ]
    expected = {
        tuple(prompt[at : at + size]) for prompt in prompts for at in range(0, len(prompt) - size + 1, size)
    }
    assert {block.token_ids for block, _ in told.values()} >= expected
    assert len(told) == sum(len(event.blocks) for event in plain)
    for block, _ in told.values():
        assert block.local_hash == TokenBlocks(block.token_ids, size).identities.local_hashes[0]


def test_a_trace_of_tokens_is_told_with_its_own() -> None:
    """A trace block of one token carries it: real tokens, and the local hashes that any router computes from them."""
    source = np.random.default_rng(4)
    prompts = [source.integers(0, 150_000, length).tolist() for length in (40, 33)]
    answers = [source.integers(0, 150_000, 25).tolist() for _ in prompts]
    workload = single_turns(
        [40, 33],
        25,
        content=prompts,
        trace_block_size=1,
        output_token_offsets=np.array([0, 25, 50]),
        output_token_ids=np.array(answers, np.uint32).ravel(),
    )
    run = run_offline(RunPlan(workload, VllmConfig(block_size=8, num_gpu_blocks=100), events=True))
    assert run.kv is not None
    told = {
        (block.token_ids, block.local_hash)
        for _, event in TokenSource(workload, 8).add_tokens(run.kv.events(0, "consolidated"))
        if isinstance(event, Stored)
        for block in event.blocks
    }
    expected = set()
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = [*prompt, *answer][: len(prompt) + 24]  # the last token is never computed
        local = TokenBlocks(tokens, 8).identities.local_hashes.tolist()
        expected |= {(tuple(tokens[8 * i : 8 * i + 8]), each) for i, each in enumerate(local)}
    assert told == expected


def test_blocks_of_outputs_have_tokens_of_their_own() -> None:
    run = run_offline(RunPlan(crowd(), VllmConfig(block_size=16, num_gpu_blocks=100), events=True))
    assert run.kv is not None
    events = list(TokenSource(crowd(), 16).add_tokens(run.kv.events(0, "raw")))
    blocks = {
        block.sequence_hash: block
        for _, event in events
        if isinstance(event, Stored)
        for block in event.blocks
    }
    assert all(block.token_ids is not None and len(block.token_ids) == 16 for block in blocks.values())
    again = list(TokenSource(crowd(), 16).add_tokens(run.kv.events(0, "raw")))
    assert events == again
    assert [time_ns for time_ns, _ in events] == sorted(time_ns for time_ns, _ in events)
    assert all(a <= b for a, b in pairwise(time_ns for time_ns, _ in events))


def test_a_replay_writes_them_into_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    engine = VllmConfig(block_size=16, num_gpu_blocks=100)
    replay(crowd(), engine, outputs=Outputs(raw_events=file, synthesize_tokens=True))
    stored = [line for line in map(json.loads, file.read_text().splitlines()) if line["type"] == "stored"]
    assert stored
    for line in stored:
        for block in line["blocks"]:
            assert block["local_hash"] == TokenBlocks(block["token_ids"], 16).identities.local_hashes[0]
    replay(crowd(), engine, outputs=Outputs(raw_events=file))
    assert "token_ids" not in file.read_text()
    with pytest.raises(ConfigError, match="jsonl"):
        replay(crowd(), engine, outputs=Outputs(events=tmp_path / "events.npz", synthesize_tokens=True))
    with pytest.raises(ConfigError, match="jsonl"):
        replay(crowd(), engine, outputs=Outputs(synthesize_tokens=True))
