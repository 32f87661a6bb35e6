"""The front end's `/metrics`: the engines' families merged, and the dashboard that queries them."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from server.client import QUICK, Client
from server.fleet_scene import C, fleet_of
from server.test_prometheus import check_page
from understudy.cli.fleet import read_fleet
from understudy.fleets.fleet import Fleet, FleetSettings
from understudy.fleets.spread import SpreadFleet
from understudy.server.metrics import Registry
from understudy.server.metrics.merged import from_rows, merge, to_rows
from understudy.server.quantiles import FINE_S, quantile
from understudy.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterable

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "understudy-fleet.json"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def samples_at(port: int) -> Samples:
    page = (await Client(port).get("/metrics")).body.decode()
    return {
        (one.name, frozenset(one.labels.items())): one.value
        for family in parse(page)
        for one in family.samples
    }


def engine_samples(samples: Samples) -> Samples:
    kept = {key: value for key, value in samples.items() if key[0].startswith("vllm:")}
    return {key: value for key, value in kept.items() if not key[0].endswith("_created")}


def check_merged(front: Samples, workers: Iterable[Samples]) -> None:
    """Every series of a worker is on the front end's page, as the sum, or as the mean of a share."""
    pages = [engine_samples(page) for page in workers]
    merged = engine_samples(front)
    assert set(merged) == set().union(*pages)
    for (name, labels), value in merged.items():
        values = [page[name, labels] for page in pages if (name, labels) in page]
        expected = sum(values)
        if name.endswith("_perc"):
            expected /= len(values)
        elif name.endswith("_info"):
            expected = max(values)
        assert value == pytest.approx(expected), name


def test_the_front_end_sums_counters_and_histograms_and_averages_shares() -> None:
    async def main() -> None:
        async with fleet_of(3) as (client, fleet):
            for length in (2, 3, 40, 7):
                await client.post(C, {"prompt": [length] * 40, "max_tokens": length})
            front = await samples_at(client.port)
            check_merged(front, [await samples_at(port) for port in fleet.ports])
            labels = frozenset({"model_name": "stub", "engine": "0"}.items())
            assert front["vllm:generation_tokens_total", labels] == 52
            assert front["vllm:time_to_first_token_seconds_count", labels] == 4
            assert front["understudy:fleet_workers", frozenset({("state", "ready")})] == 3
            assert await check_page(client) > 300

    asyncio.run(main())


def test_pools_with_different_buckets_share_those_that_both_have() -> None:
    small = ServerSettings(model="stub", engine=QUICK, max_model_len=1024)
    large = msgspec.structs.replace(small, max_model_len=8192)

    async def main() -> None:
        fleet = Fleet(FleetSettings(pools=((1, small), (1, large)), base_port=0, port=0))
        await fleet.start()
        try:
            client = Client(fleet.port)
            for _ in range(2):
                assert (await client.post(C, {"prompt": [1] * 700, "max_tokens": 2})).status == 200
            assert await check_page(client) > 300
            front = await samples_at(fleet.port)
            name = "vllm:request_prompt_tokens_bucket"
            buckets = {dict(labels)["le"]: value for (one, labels), value in front.items() if one == name}
            assert max(float(edge) for edge in buckets if edge != "+Inf") == 1000
            assert (buckets["500.0"], buckets["1000.0"], buckets["+Inf"]) == (0, 2, 2)
        finally:
            await fleet.stop()
            fleet.runtime.driver.stop()

    asyncio.run(main())


def test_a_fleet_over_processes_merges_the_metrics_of_all_of_them() -> None:
    line = ["stub", "--workers", "3", "--processes", "2", "--base-port", "0", "--port", "0"]
    settings, processes = read_fleet([*line, "--time-to-first-token", "1", "--inter-token-latency", "1"])

    async def main() -> None:
        fleet = SpreadFleet(settings, processes)
        await fleet.start()
        try:
            client = Client(fleet.port)
            for length in (2, 3, 40):
                await client.post(C, {"prompt": "x", "max_tokens": length})
            check_merged(await samples_at(client.port), [await samples_at(port) for port in fleet.ports])
            assert await check_page(client) > 300
        finally:
            await fleet.stop()

    asyncio.run(main())


def test_a_merged_registry_survives_the_way_to_another_process() -> None:
    registry = Registry()
    registry.counter("vllm:a", "A.", engine="0").add(3)
    registry.gauge("vllm:b_perc", "B.", lambda: 0.25)
    registry.histogram("vllm:c", "C.", (1, 2), (1.5,)).observe(1.2, 4)
    registry.summary("vllm:d", "D.").observe(5)
    registry.counter("python_e", "Not of an engine.")
    merged = merge([registry, registry])
    sent = msgspec.json.decode(msgspec.json.encode(to_rows(merged)))
    assert from_rows(sent).render() == merged.render()
    page = merge([from_rows(sent), merge([registry])]).render().decode()
    assert 'vllm:a_total{engine="0"} 9.0' in page
    assert "vllm:b_perc 0.25" in page
    assert 'vllm:c_bucket{le="2.0"} 12.0' in page
    assert "python_e" not in page


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_quantiles_from_buckets_are_close_to_those_of_the_values(share: float) -> None:
    registry = Registry()
    histogram = registry.histogram("x", "X.", (0.01, 1.0), FINE_S)
    values = [0.001 * 1.003**step for step in range(2000)]
    for value in values:
        histogram.observe(value)
    found = quantile(histogram.bounds, histogram.counts, share)
    assert found == pytest.approx(values[int(share * len(values))], rel=0.1)
    assert registry.render().count(b"x_bucket") == 3  # finer bounds are not on the page
    assert quantile(histogram.bounds, [0] * len(histogram.counts), share) is None


# ── The dashboard ──


def queries_of(value: Any) -> Iterable[str]:
    """All expressions of a dashboard."""
    if isinstance(value, dict):
        yield from (value[name] for name in ("expr", "query") if isinstance(value.get(name), str))
        for one in value.values():
            yield from queries_of(one)
    elif isinstance(value, list):
        for one in value:
            yield from queries_of(one)


def test_every_metric_and_label_that_the_dashboard_queries_is_on_the_page() -> None:
    queries = [query for query in queries_of(json.loads(DASHBOARD.read_text())) if query != "prometheus"]
    assert len(queries) > 20
    queried = {name for query in queries for name in re.findall(r"\b(?:vllm|understudy|http)[:_]\w+", query)}

    async def main() -> Samples:
        async with fleet_of(1) as (client, fleet):
            await client.post(C, {"prompt": "x", "max_tokens": 2})
            return {**await samples_at(fleet.ports[0]), **await samples_at(client.port)}

    samples = asyncio.run(main())
    assert queried - {name for name, _ in samples} == set()
    for query in queries:
        for name, labels in re.findall(r"\b([a-z]+[:_]\w+)\{([^}]*)\}", query):
            wanted = set(re.findall(r"(\w+)(?:=~|!=|=)", labels))
            known = set().union(*(dict(found) for one, found in samples if one == name))
            assert wanted <= known, query


def test_the_dashboard_has_unique_panels_that_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        area = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not area & places
        places |= area
