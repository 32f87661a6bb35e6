"""With --retry, a request whose engine fails before the first byte of an answer goes to another engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from server.raw_engine import BODY, answer, routed, says
from server.router_scene import Scene, play
from understudy.cli import build_parser
from understudy.router import Choice, PrefixIndex, Router

if TYPE_CHECKING:
    from server.raw_engine import Act

C = "/v1/completions"
GOOD = says(answer(b'{"ok": true}'))
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def cuts(data: bytes) -> Act:
    async def act(line: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(data)
        return False

    return act


FAILURES = {
    "closes at once": cuts(b""),
    "closes in the head": cuts(b"HTTP/1.1 200 OK\r\ncontent-"),
    "closes in the body": cuts(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nhalf"),
    "says 500": says(b"HTTP/1.1 500 Oh\r\ncontent-length: 4\r\n\r\ndead"),
    "closes before the first event": cuts(STREAM),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_another_engine_answers_for_one_that_fails(failure: str) -> None:
    async def test() -> None:
        async with routed(FAILURES[failure], GOOD, retries=1) as (client, service, engines):
            reply = await client.post(C, BODY)
            assert (reply.status, reply.json) == (200, {"ok": True})
            assert reply.headers["x-understudy-worker"] == "1"
            assert [len(engine.asked) for engine in engines] == [1, 1]
            assert service.proxy.counts["failed_over"] == 1
            assert service.dispatcher.outstanding.requests == [0, 0]
            assert "understudy:router_failed_over_requests 1" in (await client.get("/metrics")).body.decode()

    asyncio.run(test())


@pytest.mark.parametrize("failure", FAILURES)
def test_without_retries_the_client_gets_the_failure(failure: str) -> None:
    async def test() -> None:
        async with routed(FAILURES[failure], GOOD) as (client, _, engines):
            reply = await client.post(C, BODY)
            assert reply.status in (200, 500, 502)
            assert reply.body != b'{"ok": true}'
            assert engines[1].asked == []

    asyncio.run(test())


def test_no_engine_is_asked_twice_and_no_more_than_were_allowed() -> None:
    async def test() -> None:
        bad = FAILURES["closes at once"]
        for retries, asked in ((1, 2), (2, 3), (9, 3)):
            async with routed(bad, bad, bad, retries=retries) as (client, _, engines):
                reply = await client.post(C, BODY)
                assert reply.status == 502
                assert sum(len(engine.asked) for engine in engines) == asked
                assert max(len(engine.asked) for engine in engines) == 1

    asyncio.run(test())


def test_an_answer_that_has_begun_is_not_sent_again() -> None:
    begun = cuts(STREAM + b"9\r\ndata: 1\n\n\r\n")

    async def test() -> None:
        async with routed(begun, GOOD, retries=3) as (client, service, engines):
            reply = await client.post(C, BODY)
            assert reply.status == 200
            assert reply.body.startswith(b"data: 1")
            assert b"broke off" in reply.body
            assert engines[1].asked == []
            assert service.proxy.counts["failed_over"] == 0

    asyncio.run(test())


def test_the_flag_says_how_often() -> None:
    args = build_parser().parse_args(["router", "--retry", "2"])
    assert args.retry == 2


class Prefers(Router):
    """Routes by an index of its own, and says why."""

    def __init__(self) -> None:
        self.index = PrefixIndex()

    def observe(self, batch: Any) -> None:
        self.index.apply(worker=batch.worker, events=batch.events)

    def choose(self, request: Any, view: Any) -> int:
        found = self.index.find(request.prompt_blocks.sequence_hashes)
        held = {
            worker: tiers[0] for (worker, _), tiers in zip(found.workers, found.blocks.tolist(), strict=True)
        }
        best = max(view.ready.tolist(), key=lambda worker: (held.get(worker, 0), worker))
        return Choice(best, score=held.get(best, 0), reason=f"holds {held.get(best, 0)} blocks")


def test_a_router_of_ones_own_follows_real_streams_and_answers_queries() -> None:
    prompt = list(range(320))

    async def test(told: Scene) -> None:
        first = await told.client.post(C, {"prompt": prompt, "max_tokens": 1})
        home = int(first.headers["x-understudy-worker"])

        async def held() -> bool:
            asked = (await told.client.post("/query", {"token_ids": prompt})).json
            return bool(asked["workers"][home]["held"]["device"] == 20)

        await told.until(held)
        asked = (await told.client.post("/query", {"token_ids": prompt})).json
        assert asked["workers"][0]["prefill_tokens"] is None
        assert asked["workers"][home]["outstanding_tokens"] == 0
        again = await told.client.post(C, {"prompt": prompt, "max_tokens": 1})
        assert int(again.headers["x-understudy-worker"]) == home
        dump = await told.dump()
        assert dump["failure"] is None
        assert dump["degraded"] == [
            row["worker"] for row in dump["workers"] if row["view"]["state"] not in ("live", "not_followed")
        ]

    play(test, 2, Prefers())


def test_a_router_that_reads_no_events_answers_queries_with_loads_alone() -> None:
    async def test(told: Scene) -> None:
        asked = (await told.client.post("/query", {"token_ids": list(range(64))})).json
        assert [row["held"] for row in asked["workers"]] == [None, None]
        assert [row["outstanding_requests"] for row in asked["workers"]] == [0, 0]

    play(test, 2, "round_robin")
