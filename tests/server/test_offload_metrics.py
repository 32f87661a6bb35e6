"""A server that offloads as vLLM does has the metrics of its connector."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from server.client import QUICK, serving
from server.test_metrics import read_page
from understudy.server.metrics.vllm_offload import TRANSFER_BYTES
from understudy.tiers.settings import TiersConfig

BLOCK_BYTES = 16 << 20
LABELS = (("engine", "0"), ("model_name", "stub"))
COUNTERS = {
    "load_bytes",
    "load_time",
    "store_bytes",
    "store_time",
    "total_bytes",
    "total_time",
    "allocation_failure",
}
HISTOGRAMS = {
    *("load_size", "store_size", "size", "cpu_allocation_size"),
    *("lookup_sync_delay_seconds", "lookup_async_delay_seconds"),
}
GAUGES = {"cpu_cache_usage_perc", "cpu_cache_write_usage_perc", "cpu_cache_read_usage_perc"}


def offloading(blocks: int) -> TiersConfig:
    return TiersConfig.from_dict(
        {
            "kv_bytes_per_token": 1 << 20,
            "tiers": [{"tier": "g2", "blocks": blocks, "link": {"down_gbps": 16.0, "up_gbps": 32.0}}],
            "offload": {"mode": "vllm"},
        }
    )


class Page:
    """A page of metrics, and what `vllm:kv_offload_…` says."""

    def __init__(self, text: str) -> None:
        self.types, self.samples = read_page(text)

    def __call__(self, name: str, *labels: tuple[str, str]) -> float:
        return self.samples[f"vllm:kv_offload_{name}", tuple(sorted((*LABELS, *labels)))]


async def after(prompts: list[list[int]], gpu_blocks: int, host_blocks: int, version: str = "0.33") -> Page:
    """The page when these prompts were answered one by one, and all that they left is on the host."""
    engine = msgspec.structs.replace(QUICK, num_gpu_blocks=gpu_blocks, max_model_len=96, vllm_version=version)
    given: dict[str, Any] = {"engine": engine, "max_model_len": 96, "tiers": offloading(host_blocks)}
    async with serving(**given) as (client, server):
        for prompt in prompts:
            await client.post("/v1/completions", {"prompt": prompt, "max_tokens": 2})
        while not server.runtime.driver.idle:
            await asyncio.sleep(0.001)
        return Page((await client.get("/metrics")).body.decode())


def test_every_family_is_there_with_its_kind_and_buckets_and_only_then() -> None:
    page = asyncio.run(after([], 8, 64))
    families = {
        name.removeprefix("vllm:kv_offload_"): kind
        for name, kind in page.types.items()
        if name.startswith("vllm:kv_offload_") and not name.endswith("_created")
    }
    assert families == (
        {f"{name}_total": "counter" for name in COUNTERS}
        | dict.fromkeys(HISTOGRAMS, "histogram")
        | dict.fromkeys(GAUGES, "gauge")
    )
    for bound in (*TRANSFER_BYTES, float("inf")):
        edge = "+Inf" if bound == float("inf") else f"{bound:.0f}"
        found = [
            dict(labels)["le"] for name, labels in page.samples if name == "vllm:kv_offload_load_size_bucket"
        ]
        assert any(float(value) == bound for value in found), edge

    async def plain() -> str:
        async with serving() as (client, _):
            return (await client.get("/metrics")).body.decode()

    assert "kv_offload_" not in asyncio.run(plain()).replace("kv_offloading", "")


def test_what_one_request_stored_is_told_without_another() -> None:
    page = asyncio.run(after([[1] * 40], 8, 64))
    assert page("store_bytes_total") == page("store_size_sum") == 2 * BLOCK_BYTES
    assert page("store_size_count") == 1
    assert page("store_time_total") == 2 * BLOCK_BYTES / 16e9
    assert page("store_size_bucket", ("le", "2e+07")) == 0
    assert page("store_size_bucket", ("le", "4e+07")) == 1
    down = ("transfer_type", "GPU_to_CPU")
    assert page("total_bytes_total", down) == 2 * BLOCK_BYTES
    assert page("size_count", down) == 1
    assert page("total_bytes_total", ("transfer_type", "CPU_to_GPU")) == 0
    assert page("cpu_allocation_size_sum") == 2
    assert page("cpu_allocation_size_count") == 1
    assert page("lookup_sync_delay_seconds_count") == 1
    assert page("cpu_cache_usage_perc") == page("cpu_cache_write_usage_perc") == 0


def test_what_comes_back_is_told_with_its_size_and_time() -> None:
    prompts = [[number] * 64 for number in (1, 2, 3, 1)]
    page = asyncio.run(after(prompts, 8, 64))
    assert page("load_bytes_total") == page("load_size_sum") == 4 * BLOCK_BYTES
    assert page("load_size_count") == 1
    assert page("load_time_total") == 4 * BLOCK_BYTES / 32e9
    assert page("store_size_count") == 3
    assert page("lookup_sync_delay_seconds_count") >= 4
    assert page("allocation_failure_total") == 0


def test_stores_that_find_no_room_are_told() -> None:
    page = asyncio.run(after([[1] * 64, [2] * 64], 8, 2))
    assert page("allocation_failure_total") > 0
    assert page("cpu_allocation_size_count") >= page("allocation_failure_total")
    assert page("store_bytes_total") == 0


def test_the_settings_of_the_offload_are_there_from_the_first_step_since_0_33() -> None:
    def labels(version: str, prompts: list[list[int]]) -> list[dict[str, str]]:
        page = asyncio.run(after(prompts, 8, 64, version))
        return [dict(found) for name, found in page.samples if name == "vllm:kv_offload_config_info"]

    prompt = list(range(40))
    assert labels("0.33", [prompt]) == [
        {
            **dict(LABELS),
            "cpu_num_chunks": "64",
            "cpu_blocks_per_chunk": "1",
            "cpu_kv_cache_size_bytes": str(64 * BLOCK_BYTES),
            "cpu_kv_cache_size_tokens": str(64 * 16),
        }
    ]
    assert labels("0.33", []) == labels("0.32", [prompt]) == []
