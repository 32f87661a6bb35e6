"""The page of metrics has every family, label and bucket of vLLM's own."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from server.client import QUICK, Client, serving
from understudy.engines.speculation import SpeculativeConfig
from understudy.lateness import Lateness
from understudy.server.flags.serving import read_serve
from understudy.server.metrics import Registry
from understudy.server.metrics.cache_info import add_cache_info
from understudy.server.metrics.families import number_text
from understudy.server.metrics.features import FETCH_STAGES, STAY_S
from understudy.server.metrics.vllm import decade_bounds
from understudy.server.settings import LoraModule
from understudy.tiers.settings import TiersConfig

LORAS = {"enable_lora": True, "lora_modules": (LoraModule("adapter", "x"),)}
GOLDEN = Path(__file__).parents[1] / "golden" / "live" / "vllm-0.32.0-metrics.jsonl"
_SAMPLE = re.compile(r"^([^ {]+)(\{.*\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_page(text: str) -> tuple[dict[str, str], dict[tuple[str, tuple[tuple[str, str], ...]], float]]:
    """Families with their types, and samples by name and labels."""
    types: dict[str, str] = {}
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types, f"{name} is described twice"
            types[name] = kind
        elif not line.startswith("#"):
            match = _SAMPLE.match(line)
            assert match, line
            key = (match[1], tuple(sorted(_LABEL.findall(match[2] or ""))))
            assert key not in samples, f"{line} is there twice"
            samples[key] = float(match[3])
    return types, samples


async def page_after_some_requests(**settings: Any) -> tuple[dict[str, str], dict[Any, float]]:
    async with serving(model="stub-model", **settings) as (client, _):
        await client.post("/v1/completions", {"prompt": [1] * 40, "max_tokens": 3})
        await client.post("/v1/completions", {"prompt": [1] * 40, "max_tokens": 3})
        await client.get("/nope")
        await client.get("/health")
        await client.post("/v1/completions", {"prompt": []})
        return read_page((await client.get("/metrics")).body.decode())


def test_every_family_label_and_bucket_of_the_recorded_page_is_there() -> None:
    types, samples = asyncio.run(page_after_some_requests())
    rows = [msgspec.json.decode(line) for line in GOLDEN.read_bytes().splitlines()]
    wanted_types = {row["family"]: row["type"] for row in rows if "family" in row}
    assert wanted_types.items() <= types.items()
    have: dict[str, set[tuple[tuple[str, str], ...]]] = {}
    for name, labels in samples:
        have.setdefault(name, set()).add(labels)
    for row in rows:
        if "sample" not in row or row["sample"] == "python_info":
            continue
        if row["sample"] == "vllm:cache_config_info":
            ours = {name for labels in have["vllm:cache_config_info"] for name, _ in labels}
            assert set(row["labels"]) <= ours
            continue
        labels = tuple(sorted(row["labels"].items()))
        assert labels in have[row["sample"]], row


def test_speculation_is_counted_by_rounds_drafts_and_places() -> None:
    engine = msgspec.structs.replace(
        QUICK,
        speculative_config=SpeculativeConfig(
            method="eagle", num_speculative_tokens=3, accept_rates=(1.0, 1.0, 0.0)
        ),
    )

    async def go() -> dict[Any, float]:
        async with serving(model="stub-model", engine=engine) as (client, _):
            await client.post("/v1/completions", {"prompt": [1] * 40, "max_tokens": 30})
            return read_page((await client.get("/metrics")).body.decode())[1]

    samples = asyncio.run(go())
    both = (("engine", "0"), ("model_name", "stub-model"))
    rounds = samples["vllm:spec_decode_num_drafts_total", both]
    assert rounds >= 9
    assert samples["vllm:spec_decode_num_draft_tokens_total", both] == 3 * rounds
    assert samples["vllm:spec_decode_num_accepted_tokens_total", both] == 2 * rounds
    places = [
        samples["vllm:spec_decode_num_accepted_tokens_per_pos_total", (*both, ("position", place))]
        for place in "012"
    ]
    assert places == [rounds, rounds, 0]
    plain, _ = asyncio.run(page_after_some_requests())
    assert not any("spec_decode" in name for name in plain)


def test_the_stay_of_blocks_is_measured_where_it_is_asked_for() -> None:
    engine = msgspec.structs.replace(QUICK, num_gpu_blocks=8, max_model_len=128)

    async def go() -> dict[Any, float]:
        async with serving(
            model="stub-model",
            engine=engine,
            max_model_len=128,
            kv_cache_metrics=True,
            kv_cache_metrics_sample=1.0,
        ) as (client, _):
            for _ in range(3):  # found twice: one gap
                await client.post("/v1/completions", {"prompt": [1] * 33, "max_tokens": 1})
            await client.post("/v1/completions", {"prompt": [2] * 127, "max_tokens": 1})  # takes every block
            return read_page((await client.get("/metrics")).body.decode())[1]

    samples = asyncio.run(go())
    both = (("engine", "0"), ("model_name", "stub-model"))
    taken_over = samples["vllm:kv_block_lifetime_seconds_count", both]
    # Two full blocks of the first prompt, and its tails: each was handed to somebody else.
    assert taken_over >= 3
    assert samples["vllm:kv_block_idle_before_evict_seconds_count", both] == taken_over
    assert samples["vllm:kv_block_reuse_gap_seconds_count", both] == 2
    assert (
        samples["vllm:kv_block_idle_before_evict_seconds_sum", both]
        < samples["vllm:kv_block_lifetime_seconds_sum", both]
    )
    bounds = {
        dict(labels)["le"] for name, labels in samples if name == "vllm:kv_block_reuse_gap_seconds_bucket"
    }
    assert bounds == {number_text(bound) for bound in STAY_S} | {"+Inf"}
    plain, _ = asyncio.run(page_after_some_requests())
    assert not any("kv_block" in name for name in plain)


def test_loads_from_below_are_counted_by_stage_where_there_are_tiers() -> None:
    tiers = TiersConfig.from_dict(
        {"kv_bytes_per_token": 1024, "tiers": [{"tier": "g2", "blocks": 64}], "offload": {"mode": "vllm"}}
    )
    types, samples = asyncio.run(page_after_some_requests(tiers=tiers))
    assert types["vllm:num_requests_kv_fetch_by_stage"] == "gauge"
    stages = {dict(labels)["stage"]: value for (name, labels), value in samples.items() if "by_stage" in name}
    assert stages == dict.fromkeys(FETCH_STAGES, 0)
    plain, _ = asyncio.run(page_after_some_requests())
    assert "vllm:num_requests_kv_fetch_by_stage" not in plain


def test_sleeping_and_waking_are_timed_once_somebody_did() -> None:
    async def go() -> tuple[dict[Any, float], dict[Any, float]]:
        async with serving(model="stub-model", dev_mode=True) as (client, _):
            before = read_page((await client.get("/metrics")).body.decode())[1]
            await client.post("/sleep?level=2", {})
            await client.post("/wake_up", {})
            return before, read_page((await client.get("/metrics")).body.decode())[1]

    before, after = asyncio.run(go())
    assert not any("sleep_mode" in name for name, _ in before)
    for operation in ("sleep", "wake"):
        label = (("operation", operation),)
        assert after["vllm:sleep_mode_operation_duration_seconds_count", label] == 1
        assert after["vllm:sleep_mode_operations_in_flight", label] == 0


def test_the_numbers_are_those_of_the_requests() -> None:
    _, samples = asyncio.run(page_after_some_requests())
    both = (("engine", "0"), ("model_name", "stub-model"))

    def value(name: str, *more: tuple[str, str]) -> float:
        return samples[name, tuple(sorted((*both, *more)))]

    assert value("vllm:prompt_tokens_total") == 80
    assert value("vllm:generation_tokens_total") == 6
    assert value("vllm:request_success_total", ("finished_reason", "length")) == 2
    assert value("vllm:prefix_cache_queries_total") == 80
    assert value("vllm:prefix_cache_hits_total") == 32
    assert value("vllm:prompt_tokens_by_source_total", ("source", "local_compute")) == 48
    assert value("vllm:time_to_first_token_seconds_count") == 2
    assert value("vllm:inter_token_latency_seconds_count") == 4
    assert value("vllm:request_prompt_tokens_bucket", ("le", "50.0")) == 2
    assert value("vllm:kv_cache_usage_perc") == 0


def test_ranks_have_numbers_of_their_own() -> None:
    _, samples = asyncio.run(page_after_some_requests(data_parallel_size=2))
    engines = {dict(labels)["engine"] for name, labels in samples if name == "vllm:num_requests_running"}
    assert engines == {"0", "1"}


@pytest.mark.parametrize(
    ("value", "text"),
    [(252, "252.0"), (0.23, "0.23"), (2616340480, "2.61634048e+09"), (1e22, "1e+22"), (float("inf"), "+Inf")],
)
def test_numbers_read_as_other_clients_write_them(value: float, text: str) -> None:
    assert number_text(value) == text
    assert float(text) == value


def test_a_value_on_a_bound_belongs_to_its_bucket() -> None:
    registry = Registry()
    shown = registry.histogram("h", "help", (1, 2))
    for value in (1, 1.5, 2, 3):
        shown.observe(value)
    lines = registry.render().decode()
    for line in ('h_bucket{le="1.0"} 1.0', 'h_bucket{le="2.0"} 3.0', 'h_bucket{le="+Inf"} 4.0', "h_sum 7.5"):
        assert line in lines


def test_lengths_are_counted_in_steps_of_one_two_five() -> None:
    assert decade_bounds(4096) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]


def test_lateness_knows_its_quantiles_to_a_bucket() -> None:
    late = Lateness()
    for micros in range(1000):
        late.record(micros / 1e6)
    assert 0.0005 <= late.quantile(0.5) <= 0.0007
    assert 0.00099 <= late.quantile(0.99) <= 0.001
    assert late.quantile(1.0) <= 0.001


def test_sglangs_names_stand_in_place_of_vllms() -> None:
    types, samples = asyncio.run(page_after_some_requests(metrics="sglang"))
    assert not any(name.startswith("vllm:num_requests") for name in types)
    values = {name: value for (name, labels), value in samples.items() if "_bucket" not in name}
    assert values["sglang:generation_tokens_total"] == 6
    assert values["sglang:page_size"] == 16
    assert values["sglang:time_to_first_token_seconds_count"] == 2


def test_old_names_and_adapters_appear_when_they_are_wanted() -> None:
    types, samples = asyncio.run(page_after_some_requests(old_metric_names=True, runtime_lora=True))
    assert samples["vllm:gpu_prefix_cache_hits_total", (("model_name", "stub-model"),)] == 32
    assert types["vllm:gpu_cache_usage_perc"] == "gauge"
    (info,) = (dict(labels) for name, labels in samples if name == "vllm:lora_requests_info")
    assert info == {"max_lora": "1", "running_lora_adapters": "", "waiting_lora_adapters": ""}


async def _scrape(client: Client) -> bytes:
    return (await client.get("/metrics/")).body


def test_the_page_is_also_at_its_other_name() -> None:
    async def go() -> bytes:
        async with serving() as (client, _):
            return await _scrape(client)

    assert asyncio.run(go()).startswith(b"# HELP")


def test_methods_without_a_route_are_one_series_and_made_up_ones_are_refused() -> None:
    async def go() -> None:
        async with serving() as (client, _):
            for method in ("PROPFIND", "MKCOL", "LOCK", "M-SEARCH", "PURGE", "LINK"):
                assert (await client.ask(method, "/health")).status == 405
            assert (await client.ask("METHOD1", "/health")).status == 400
            told = (await client.get("/metrics")).body.decode()
            counted = [line for line in told.splitlines() if line.startswith("http_requests_total{")]
            assert [line for line in counted if "METHOD" in line] == []
            assert len([line for line in counted if 'method="other"' in line]) == 1

    asyncio.run(go())


@pytest.mark.parametrize(
    ("flags", "label", "value"),
    [
        ([], "gpu_memory_utilization", "0.92"),
        (["--gpu-memory-utilization", "0.8"], "gpu_memory_utilization", "0.8"),
        (["--gpu", "H100"], "gpu_memory_utilization", "0.92"),
        (["--vllm-version", "0.19.0"], "gpu_memory_utilization", "0.9"),
        (["--gpu", "H100", "--gpu-memory-utilization", "0.7"], "gpu_memory_utilization", "0.7"),
        (["--kv-cache-dtype", "fp8"], "cache_dtype", "fp8"),
    ],
)
def test_labels_of_the_cache_are_those_of_the_flags(flags: list[str], label: str, value: str) -> None:
    settings = read_serve(["Llama-3.1-8B", "--max-model-len", "4096", *flags]).settings
    registry = Registry()
    add_cache_info(registry, settings, 1)
    [(_, labels)] = read_page(registry.render().decode())[1]
    assert dict(labels)[label] == value


def test_the_page_is_read_while_a_long_request_to_an_adapter_is_planned() -> None:
    async def read() -> tuple[int, str]:
        async with serving(**LORAS) as (client, server):
            body = {"model": "adapter", "prompt": "x", "n": 8000, "max_tokens": 100, "stop": ["zzqq"]}
            answer = asyncio.ensure_future(client.post("/v1/completions", body))
            while not server.app.endpoints.in_flight:
                await asyncio.sleep(0)
            (generation,) = server.app.endpoints.in_flight
            planned = len(generation.choices)
            waiting = server.app._adapters()
            generation.connection.drop()
            while server.app.endpoints.in_flight:
                await asyncio.sleep(0)
            await asyncio.gather(answer, return_exceptions=True)
            return planned, str(waiting)

    assert asyncio.run(read()) == (0, "([], ['adapter'])")
