"""vLLM's offload at its edges: batches that only transfer, who was passed over, and what its flags cannot read."""

from __future__ import annotations

from typing import Any

import pytest

from replay.building import single_turns
from understudy._core import VllmEngine, VllmOffload, constant_timing
from understudy.cli import main
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, InvalidArgument
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers.settings import TiersConfig
from understudy.tiers.vllm_flags import offload_settings
from understudy.workload import ClosedLoop

PREFIX = [1, 2, 3, 4]


def offloading(kv_bytes_per_token: int, blocks: int = 64) -> TiersConfig:
    return TiersConfig.from_dict(
        {
            "kv_bytes_per_token": kv_bytes_per_token,
            "tiers": [{"tier": "g2", "blocks": blocks}],
            "offload": {"mode": "vllm"},
        }
    )


def engine(blocks: int, asynchronous: bool) -> VllmConfig:
    return VllmConfig(
        block_size=16,
        num_gpu_blocks=blocks,
        max_num_seqs=8,
        async_scheduling=asynchronous,
        timing=Constant(prefill_ms=1.0, decode_ms=1.0),
    )


@pytest.mark.parametrize("late_ms", range(0, 14, 1))
def test_a_batch_that_computes_nothing_begins_its_transfers(late_ms: int) -> None:
    # The last request finds its prefix on the host while the one before it decodes its last token.
    load = single_turns(
        [64, 176, 16, 80],
        [1, 1, 8, 4],
        [0, 100, 200, 200.5 + late_ms],
        [PREFIX, list(range(10, 21)), [30], [*PREFIX, 5]],
        16,
    )
    timeline = run_offline(RunPlan(load, engine(12, True), tiers=offloading(1 << 10))).timeline
    assert timeline.completed.all()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_closed_loop_sees_the_end_of_a_request_that_was_loading(asynchronous: bool) -> None:
    load = single_turns(
        [64, 176, 64, 16, 80, 16],
        [1, 1, 1, 100, 1, 1],
        None,
        [PREFIX, list(range(10, 21)), list(range(40, 44)), [30], [*PREFIX, 5], [31]],
        16,
    )
    runs = [
        run_offline(
            RunPlan(
                load,
                engine(14, asynchronous),
                tiers=offloading(1 << 18),
                load=ClosedLoop(concurrency=2),
                fast_forward=fast_forward,
            )
        )
        for fast_forward in (True, False)
    ]
    assert runs[0].facts.digests == runs[1].facts.digests
    assert runs[0].timeline.arrival_ns.max() < 20_000_000


def test_who_ends_in_a_fast_forward_renews_its_chunks_before_the_next_stores() -> None:
    load = single_turns(
        [64, 64, 80, 64, 176, 80],
        [20] * 6,
        [0, 100, 200, 300, 400, 500],
        [PREFIX, [11, 12, 13, 14], [*PREFIX, 5], [21, 22, 23, 24], list(range(40, 51)), [*PREFIX, 6]],
        16,
    )
    runs = [
        run_offline(
            RunPlan(
                load, engine(12, False), tiers=offloading(1 << 10, 8), fast_forward=fast_forward, events=True
            )
        )
        for fast_forward in (True, False)
    ]
    assert runs[0].facts.digests == runs[1].facts.digests


def test_a_request_without_identities_is_refused() -> None:
    config = VllmConfig(enable_prefix_caching=False).native(offload=VllmOffload(host_chunks=8))
    with pytest.raises(InvalidArgument, match="vLLM's offload needs identities"):
        VllmEngine(config, constant_timing(1.0, 1.0)).submit("a", 20, 4)


def test_chunks_beyond_all_measure_are_refused() -> None:
    config = VllmConfig(block_size=64).native(offload=VllmOffload(host_chunks=8, blocks_per_chunk=1 << 26))
    with pytest.raises(InvalidArgument, match="blocks_per_chunk"):
        VllmEngine(config, constant_timing(1.0, 1.0))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"cpu_bytes_to_use": "abc"}, "cpu_bytes_to_use must be a whole number"),
        ({"cpu_bytes_to_use": float("nan")}, "cpu_bytes_to_use must be a whole number"),
        ({"cpu_bytes_to_use": 1 << 20, "blocks_per_chunk": 1.5}, "blocks_per_chunk must be a whole number"),
        ({"cpu_bytes_to_use": 1 << 20, "store_threshold": "x"}, "store_threshold must be a whole number"),
        ([1], "kv_connector_extra_config must be a JSON object"),
    ],
)
def test_values_that_are_no_numbers_are_named(extra: Any, message: str) -> None:
    asked = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    with pytest.raises(ConfigError, match=message):
        offload_settings(None, None, asked)


def test_a_key_that_nobody_knows_is_named() -> None:
    with pytest.raises(ConfigError, match="junk is not known"):
        offload_settings(1, None, {"kv_connector": "OffloadingConnector", "junk": 3})


def test_chunks_in_tokens_are_of_the_engines_own_block_size(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 10, "output_length": 2, "hash_ids": [1]}\n')
    asked = (
        '{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": '
        '{"cpu_bytes_to_use": 1048576, "block_size": 128}}'
    )
    flags = ["--kv-bytes-per-token", "1", "--kv-transfer-config", asked]
    assert main(["replay", str(trace), "--quiet", *flags]) == 0
    assert capsys.readouterr().err == ""
