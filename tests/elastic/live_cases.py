"""Random small live fleets with random fault plans: each request ends once, with its whole answer under retry."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, NamedTuple

from server.client import Client
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.fleets.fleet import Fleet, FleetSettings
from understudy.run.chaos import draw_faults, list_kinds
from understudy.run.faults import FaultPlan
from understudy.server.settings import ServerSettings
from understudy.tiers.settings import TiersConfig

C = "/v1/completions"
LAST_S = 0.8
"""Time in which faults begin, in s of real time."""


class LiveCase(NamedTuple):
    """A live fleet, its faults, and the requests of its clients."""

    settings: FleetSettings
    requests: list[tuple[float, dict[str, Any]]]
    """When each is sent, in s, and its body."""


def random_live_case(seed: int, *, on_loss: Any = None) -> LiveCase:
    """Draw a case: one to four workers, with or without a host tier, and up to eight faults in a second."""
    random = Random(seed)
    workers = random.randint(1, 4)
    routing = random.choice(("round_robin", "least_loaded", "kv", "kv"))
    tiers = TiersConfig()
    if random.random() < 0.5:
        tiers = TiersConfig.from_dict(
            {
                "tiers": [
                    {"tier": "g2", "blocks": 200, "link": {"down_gbps": 1, "up_gbps": 1}},
                ],
                "kv_bytes_per_token": 1000,
            }
        )
    kinds = list_kinds(
        reads_events=routing == "kv",
        has_host_tier=bool(tiers.tiers),
        has_limited_host_link=bool(tiers.tiers),
        loses_requests=True,
    )
    faults = FaultPlan(
        faults=draw_faults(
            seed,
            per_hour=3600 * random.randint(1, 8) / LAST_S,
            end_s=LAST_S,
            workers=workers,
            kinds=kinds,
            mean_duration_s=0.1,
        ),
        on_loss=random.choice(("retry", "migrate")) if on_loss is None else on_loss,
        retry_delay_ms=random.choice((0.0, 0.0, 20.0)),
        seed=seed,
    )
    engine = VllmConfig(
        block_size=16,
        num_gpu_blocks=random.choice((60, 300)),
        max_num_seqs=random.choice((2, 8)),
        max_model_len=800,
        timing=Constant(prefill_ms=2.0, decode_ms=2.0),
        async_scheduling=random.random() < 0.5,
    )
    pool = ServerSettings(model="stub", engine=engine, max_model_len=800, tiers=tiers)
    settings = FleetSettings(pools=((workers, pool),), base_port=0, port=0, routing=routing, faults=faults)
    requests = [
        (
            random.uniform(0, LAST_S),
            {
                "prompt": [random.randrange(4) * 100 + place for place in range(random.choice((20, 90)))],
                "max_tokens": random.choice((1, 20, 80)),
                "ignore_eos": True,
                "stream": random.random() < 0.5,
                "stream_options": {"include_usage": True},
            },
        )
        for _ in range(random.randint(5, 25))
    ]
    for _, body in requests:
        if not body["stream"]:
            del body["stream_options"]
    return LiveCase(settings, requests)


async def play_live_case(case: LiveCase) -> dict[str, int]:
    """Play a case; AssertionError names what did not hold. Returns the losses by outcome."""
    fleet = Fleet(case.settings)
    await fleet.start()
    try:
        client = Client(fleet.port)

        async def ask(at_s: float, body: dict[str, Any]) -> None:
            await asyncio.sleep(at_s)
            answer = await client.post(C, body)
            assert answer.status == 200, answer.body
            if body["stream"]:
                assert answer.events[-1] == "[DONE]"
                assert answer.body.count(b"[DONE]") == 1
                usage = next(event["usage"] for event in answer.events[::-1] if event != "[DONE]")
            else:
                usage = answer.json["usage"]
            assert usage["completion_tokens"] == body["max_tokens"], usage

        await asyncio.gather(*(ask(at_s, body) for at_s, body in case.requests))
        elastic = fleet.front.elastic
        planned = elastic.faults
        assert planned is not None
        while planned.num_pending:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        elastic.checks.check(range(len(fleet.servers)))
        await asyncio.sleep(0.05)
        assert elastic.checks.mistakes == []
        assert elastic.ledger.open == 0
        assert elastic.ledger.ended["completed"] == len(case.requests)
        assert elastic.lost is not None
        assert elastic.lost.num_pending == 0
        for server in fleet.servers:
            assert not server.worker.live()
            assert not server.app.endpoints.in_flight
            assert server.worker.cores[0].active_blocks == 0
        return dict(elastic.lost.outcomes)
    finally:
        await fleet.stop()
        fleet.runtime.driver.stop()
