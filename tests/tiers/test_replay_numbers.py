"""Small replays with a host tier, with the numbers that users of Dynamo's mocker know.

Where this engine decides otherwise: how many events a run yields, and in how many batches, depends on how copies are
batched, which has a setting of its own here; the requests, their reuse and the balance of the tiers are compared.
"""

from __future__ import annotations

import pytest

from replay.building import single_turns
from tiers.building import tiers
from tiers.fleets import drained, play


@pytest.mark.parametrize("routing", ["round_robin", "least_loaded"])
@pytest.mark.parametrize("device_blocks", [4, 2])
def test_a_prompt_that_returns_is_found_again(routing: str, device_blocks: int) -> None:
    """With two blocks it has left the device meanwhile, and comes from the host."""
    workload = single_turns([8, 8, 8], 1, [0, 100, 200], [[1, 2], [3, 4], [1, 2]], trace_block_size=4)
    config = tiers(g2_blocks=8, offload_batch_size=1, bytes_per_block=4)
    result = play(workload, config, num_gpu_blocks=device_blocks, routing=routing)
    assert result.cached_tokens_first.tolist() == [0, 0, 4]
    assert result.below_tokens_first[0].tolist() == [0, 0, 0 if device_blocks == 4 else 4]
    drained(result)


def test_a_longer_replay_completes_and_its_tiers_balance() -> None:
    content = [[1, 2], [3, 4], [1, 2]] + [[10 + 2 * i, 11 + 2 * i] for i in range(20)]
    arrivals = [0, 100, 200] + [300 + 20 * i for i in range(20)]
    workload = single_turns([8] * 23, 1, arrivals, content, trace_block_size=4)
    config = tiers(g2_blocks=8, offload_batch_size=1, bytes_per_block=4)
    result = play(workload, config, num_gpu_blocks=4)
    drained(result)
    assert result.output_tokens.tolist() == [1] * 23
    (host,) = [tier for tier in result.tiers if int(tier.tier) == 2]
    assert host.resident_blocks == host.capacity_blocks == 8
    assert host.stored_blocks - host.evicted_blocks == 8
    assert result.tier_totals.offloaded_blocks == host.stored_blocks
