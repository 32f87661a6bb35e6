"""Prometheus' own parser reads every page of metrics."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from server.client import Client, serving
from server.fleet_scene import fleet_of
from server.router_scene import C, Scene, play


async def check_page(client: Client) -> int:
    """Compare the samples that the parser reads with the lines of the page; return how many there are."""
    reply = await client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    page = reply.body.decode()
    families = list(parse(page))
    samples = [sample for family in families for sample in family.samples]
    assert len(samples) == sum(not line.startswith("#") for line in page.splitlines())
    assert len({(sample.name, *sorted(sample.labels.items())) for sample in samples}) == len(samples)
    for family in families:
        assert family.type in ("counter", "gauge", "histogram", "summary"), family
        assert family.documentation
        for sample in family.samples:
            assert sample.name.startswith(family.name)
        if family.type == "histogram":
            check_histogram([(one.name, one.labels, one.value) for one in family.samples])
    return len(samples)


def check_histogram(samples: list[tuple[str, dict[str, str], float]]) -> None:
    """Buckets grow, the last one is +Inf, and has the count."""
    series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    counts: dict[tuple[tuple[str, str], ...], float] = {}
    for name, labels, value in samples:
        own = tuple(sorted((key, text) for key, text in labels.items() if key != "le"))
        if name.endswith("_bucket"):
            series.setdefault(own, []).append((float(labels["le"]), value))
        elif name.endswith("_count"):
            counts[own] = value
    assert set(series) == set(counts)
    for own, buckets in series.items():
        assert buckets == sorted(buckets)
        assert [count for _, count in buckets] == sorted(count for _, count in buckets)
        assert buckets[-1] == (float("inf"), counts[own])


BODY = {"prompt": "hello", "max_tokens": 3}


@pytest.mark.parametrize("model", ["stub", 'a"b\\c\nd', "日本"])
def test_the_page_of_a_server_is_read(model: str) -> None:
    async def main() -> None:
        settings = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
        async with serving(model=model, kv_events_config=settings, kv_cache_metrics=True) as (client, _):
            await client.post(C, BODY)
            await client.post(C, {"prompt": []})
            assert await check_page(client) > 300

    asyncio.run(main())


def test_the_page_of_a_fleet_is_read() -> None:
    async def main() -> None:
        async with fleet_of(3) as (client, _):
            for _ in range(4):
                await client.post(C, BODY)
            assert await check_page(client) > 40

    asyncio.run(main())


def test_the_page_of_a_router_is_read() -> None:
    async def test(scene: Scene) -> None:
        for _ in range(4):
            await scene.client.post(C, BODY)
        assert await check_page(scene.client) > 30

    play(test, 2)
