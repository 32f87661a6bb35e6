"""Transfers of more bytes than one can have: refused by name where they are configured, or told with what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import understudy
from tiers.building import BLOCK, INF, Worker, chain, shared, tiers, way
from understudy import _core
from understudy.errors import CapacityExhausted, ConfigError
from understudy.tiers import TiersConfig

if TYPE_CHECKING:
    from pathlib import Path

QUARTER = 2**36  # bytes of a block of which four are as much as a transfer may have
ROWS = '{"timestamp": 0, "input_length": 100, "output_length": 2, "hash_ids": [1]}\n'
ADVICE = r"kv_bytes_per_token"


def test_a_batch_that_no_transfer_can_carry_is_refused_by_name() -> None:
    Worker(40, tiers(bytes_per_block=QUARTER, offload_batch_size=4))
    refused = r"^offload_batch_size of 5 .*343597383680 bytes.* at most 2\^38.*give at most 4"
    with pytest.raises(ConfigError, match=refused):
        Worker(40, tiers(bytes_per_block=QUARTER, offload_batch_size=5))


def test_a_batch_is_no_larger_than_host_and_device() -> None:
    Worker(4, tiers(bytes_per_block=QUARTER))
    Worker(40, tiers(4, bytes_per_block=QUARTER))
    with pytest.raises(ConfigError, match=r"^offload_batch_size of 32 "):
        Worker(5, tiers(bytes_per_block=QUARTER))


def test_a_chunk_of_vllms_offload_that_no_transfer_can_carry_is_refused_by_name() -> None:
    def with_chunks_of(blocks: int) -> Worker:
        below = tiers(40, bytes_per_block=QUARTER, write_through=True)
        offload = _core.VllmOffload(host_chunks=40 // blocks, blocks_per_chunk=blocks)
        return Worker(40, below, offload=offload)

    with_chunks_of(4)
    with pytest.raises(
        ConfigError, match=r"^offload: blocks_per_chunk of 5 .* at most 2\^38.*give at most 4"
    ):
        with_chunks_of(5)


def test_the_settings_of_a_run_are_refused_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(ROWS)
    config = TiersConfig.from_dict({"kv_bytes_per_token": 2**30, "tiers": [{"tier": "g2", "blocks": 1000}]})
    with pytest.raises(ConfigError, match=r"^offload_batch_size of 32 .*kv_bytes_per_token"):
        understudy.replay(tmp_path / "trace.jsonl", tiers=config)


# A load is as long as what a request asks for and the tiers have, which nobody knows before.


@pytest.mark.parametrize("fast_forward", [True, False], ids=["fast_forward", "stepping"])
def test_a_load_that_is_too_large_tells_what_to_change(fast_forward: bool) -> None:
    worker = Worker(8, tiers(100, INF, bytes_per_block=QUARTER, offload_batch_size=1))
    worker.engine.set_fast_forward(fast_forward)
    for tag in (1, 2):
        worker.cache(tag, 7)
    worker.submit(1, 7 * BLOCK, 2)
    for _ in range(2):
        with pytest.raises(
            CapacityExhausted, match=rf"^link worker g2_to_g1: .* 2\^38 bytes, got \d+.*{ADVICE}"
        ):
            worker.engine.advance(10**15)


def test_a_load_from_a_tier_below_the_host_tells_it_too() -> None:
    below: dict[str, Any] = {
        "bytes_per_block": QUARTER,
        "offload_batch_size": 1,
        "host": way(INF),
        "g3": shared(worker=INF),
    }
    config = tiers(100, write_through=True, **below)
    run = _core.TierRun(config, BLOCK)
    writer = Worker(8, config, run=run, name="writer")
    writer.cache(1, 6)
    reader = Worker(8, config, run=run, name="reader")
    reader.now_ns = writer.now_ns
    reader.submit(1, 6 * BLOCK, 2)
    with pytest.raises(CapacityExhausted, match=rf"^link reader g3_to_g2: .*{ADVICE}"):
        reader.play()


def test_a_store_of_vllms_offload_that_is_too_large_tells_it_too() -> None:
    below = tiers(100, INF, bytes_per_block=QUARTER, write_through=True)
    worker = Worker(8, below, offload=_core.VllmOffload(host_chunks=100))
    worker.submit(chain(1), 6 * BLOCK, 2)
    with pytest.raises(CapacityExhausted, match=rf"^link worker g1_to_g2: .*{ADVICE}"):
        worker.engine.advance(10**15)
