"""One request that nobody can answer: its client is told so, and nobody else notices."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from server.client import Client, Reply, serving
from server.fleet_scene import fleet_of
from understudy.fleets.front import FleetFront
from understudy.server.api.choice import Choice
from understudy.server.api.completions import CompletionStyle

if TYPE_CHECKING:
    from understudy.server.api.generation import Generation
    from understudy.server.live_request import LiveRequest

C, H = "/v1/completions", "/v1/chat/completions"
HALF = b'"a\\ud800"'
"""Half of a surrogate pair: JSON has it, text cannot."""

HALVES: list[tuple[str, bytes, str | None]] = [
    (C, b'{"prompt":%s,"echo":true,"max_tokens":20}', "body.prompt"),
    (C, b'{"prompt":["x",%s]}', "body.prompt.1"),
    (C, b'{"prompt":"x","model":%s}', "body.model"),
    (C, b'{"prompt":"x","request_id":%s}', "body.request_id"),
    (C, b'{"prompt":"x","cache_salt":%s}', "body.cache_salt"),
    (C, b'{"prompt":"x","unknown":%s}', "body.unknown"),
    (C, b'{"prompt":"x",%s:1}', "body"),
    (C, b'{"prompt":"x","structured_outputs":{"json":{"const":%s}}}', "body.structured_outputs.json.const"),
    (C, b'{"prompt":"x","kv_transfer_params":{"do_remote_decode":true,"a":%s}}', "body.kv_transfer_params.a"),
    (H, b'{"messages":[{"role":%s,"content":"x"}],"add_generation_prompt":false}', "body.messages.0.role"),
    (H, b'{"messages":[{"role":"user","content":%s}],"return_prompt_text":true}', "body.messages.0.content"),
    ("/tokenize", b'{"prompt":%s}', "body.prompt"),
    ("/admin/fault", b'{"kind":%s}', "body.kind"),
    ("/abort_requests", b'{"request_ids":[%s]}', None),
]


@pytest.mark.parametrize(("path", "body", "param"), HALVES)
def test_half_of_a_surrogate_pair_is_refused_where_json_is_read(
    path: str, body: bytes, param: str | None
) -> None:
    async def main() -> None:
        async with serving(dev_mode=True) as (client, _):
            reply = await client.post(path, body % HALF)
            assert (reply.status, reply.json["error"]["type"]) == (400, "Bad Request"), reply.body
            assert "surrogate pair" in reply.json["error"]["message"]
            assert reply.json["error"]["param"] == param
            whole = await client.post(
                C, b'{"prompt":"\\ud83d\\ude00 \\\\ud800","max_tokens":1,"top_p":1,"x":NaN}'
            )
            assert whole.status == 200, whole.body

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_an_answer_that_cannot_be_told_ends_its_own_request_alone(
    stream: bool, n: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chunk, whole = CompletionStyle.chunk, CompletionStyle.whole

    def tell(self: CompletionStyle, generation: Generation, choice: Choice, *rest: Any) -> bytes:
        if generation.id.endswith("bad") and choice.index == n - 1 and choice.emitted == 5:
            raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "no such character")
        return chunk(self, generation, choice, *rest)

    def tell_all(self: CompletionStyle, generation: Generation) -> bytes:
        if generation.id.endswith("bad"):
            raise ValueError("no such answer")
        return whole(self, generation)

    monkeypatch.setattr(CompletionStyle, "chunk", tell)
    monkeypatch.setattr(CompletionStyle, "whole", tell_all)

    async def ask(client: Client, name: str) -> Reply:
        body = {"prompt": name, "max_tokens": 8, "stream": stream, "n": n, "request_id": name}
        return await asyncio.wait_for(client.post(C, body), 10)

    async def main() -> None:
        async with serving() as (client, server):
            replies = await asyncio.gather(*(ask(client, name) for name in ("1", "2", "bad", "3", "4")))
            bad = replies.pop(2)
            told = bad.events[-2] if stream else bad.json
            assert told["error"]["code"] == 500
            assert told["error"]["type"] == "InternalServerError"
            assert bad.status == (200 if stream else 500)
            assert [reply.status for reply in replies] == [200] * 4
            for reply in replies:
                assert not stream or (reply.events[-1] == "[DONE]" and "choices" in reply.events[-2])
            assert (await ask(client, "5")).status == 200
            assert server.worker.live() == []
            assert not server.app.endpoints.in_flight
            assert not server.worker.failed
            assert server.worker.cores[0].usage == 0

    asyncio.run(main())
    assert "cmpl-bad" in caplog.text
    assert "no such" in caplog.text


def test_nor_does_an_admission_that_fails_take_the_engine_along(monkeypatch: pytest.MonkeyPatch) -> None:
    admitted = Choice.on_admitted

    def fails(self: Choice, request: LiveRequest, now_ns: int) -> None:
        if request.name.endswith("bad"):
            raise ValueError("no such request")
        admitted(self, request, now_ns)

    monkeypatch.setattr(Choice, "on_admitted", fails)

    async def main() -> None:
        async with serving() as (client, server):
            bodies = [{"prompt": name, "max_tokens": 8, "request_id": name} for name in ("1", "bad", "2")]
            replies = await asyncio.gather(*(client.post(C, body) for body in bodies))
            assert [reply.status for reply in replies] == [200, 500, 200]
            assert not server.worker.failed
            assert server.worker.live() == []

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_an_abort_that_comes_with_the_end_of_an_answer_changes_nothing(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Choice.on_tokens

    def aborts(self: Choice, request: LiveRequest, *rest: int) -> None:
        told(self, request, *rest)
        if self.emitted >= self.plan.total:
            self.generation.worker.abort([request])

    monkeypatch.setattr(Choice, "on_tokens", aborts)

    async def main() -> None:
        async with serving() as (client, _):
            body = {"prompt": "x", "max_tokens": 50, "n": 2, "stop": [" "], "stream": stream}
            reply = await client.post(C, body)
            parts = reply.events[:-1] if stream else [reply.json]
            ends = [choice["finish_reason"] for part in parts for choice in part["choices"]]
            assert [end for end in ends if end] == ["stop"] * 2
            page = (await client.get("/metrics")).body.decode()
            assert 'request_success_total{engine="0",finished_reason="stop",model_name="stub"} 2.0' in page

    asyncio.run(main())


def test_what_nobody_foresaw_is_answered_behind_a_delay_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with serving() as (client, server):

            def fails(*_: Any) -> None:
                raise RuntimeError("no such thing")

            monkeypatch.setitem(server.app.routes.generators, C, fails)
            await client.post("/admin/fault", {"kind": "delay", "delay_ms": 1})
            reply = await asyncio.wait_for(client.post(C, {"prompt": "x"}), 5)
            assert (reply.status, reply.json["error"]["type"]) == (500, "InternalServerError")

    asyncio.run(main())
    assert "no such thing" in caplog.text


def test_what_nobody_foresaw_is_answered_at_the_door_of_a_fleet(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: FleetFront) -> None:
        raise RuntimeError("no such thing")

    async def main() -> None:
        async with fleet_of(2, "kv") as (client, _):
            for priority in ("--5", "\xb2", "5", "-5", "9" * 400):
                reply = await client.raw(
                    _post(C, b'{"prompt":"x","max_tokens":1}', "x-vllm-priority", priority)
                )
                assert reply.status == 200, priority
            for name in ("%C2%B2", "-1", "2", "9" * 5000):
                assert (await client.get(f"/fleet/workers/{name}")).status == 404
            assert (await client.get("/fleet/workers/1")).json["worker"] == 1
            assert (await client.post(C, b'{"prompt":"x","cache_salt":"\\ud800"}')).status == 400
            assert (await client.post("/admin/fault", b'{"kind":"\\ud800"}')).status == 400
            monkeypatch.setattr(FleetFront, "report", fails)
            reply = await client.get("/fleet/state")
            assert (reply.status, reply.json["error"]["type"]) == (500, "InternalServerError")

    asyncio.run(main())
    assert "no such thing" in caplog.text


def _post(path: str, body: bytes, name: str, value: str) -> bytes:
    named = {"connection": "close", "content-type": "application/json", name: value}
    head = "".join(f"{name}: {value}\r\n" for name, value in named.items()).encode("latin-1")
    line = f"POST {path} HTTP/1.1\r\nhost: t\r\n".encode()
    return line + head + b"content-length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("name", ["x-vllm-priority", "x-data-parallel-rank", "x-return-error"])
@pytest.mark.parametrize("value", ["--5", "\xb2", "-", "5\xb2", "9" * 400])
def test_a_header_that_is_no_number_says_nothing(name: str, value: str) -> None:
    async def main() -> None:
        async with serving() as (client, _):
            body = b'{"prompt":"x","max_tokens":1}'
            assert (await client.raw(_post(C, body, name, value))).status == 200
            refused = await client.raw(_post(C, body, "x-return-error", "418"))
            assert refused.status == 418

    asyncio.run(main())


WRONG: list[tuple[str, bytes, str | None]] = [
    (C, b'{"prompt":"x","logit_bias":{"--5":1}}', "logit_bias"),
    (C, b'{"prompt":"x","logit_bias":{"-":1}}', "logit_bias"),
    (C, '{"prompt":"x","logit_bias":{"²":1}}'.encode(), "logit_bias"),
    (C, b'{"prompt":"x","logit_bias":{"%s":1}}' % (b"9" * 5000), "logit_bias"),
    ("/generative_scoring", b'{"query":[-1],"items":["x"],"label_token_ids":[1]}', "body.query"),
    ("/generative_scoring", b'{"query":[1],"items":[[-5]],"label_token_ids":[1]}', "body.items"),
    *(
        (
            C,
            b'{"prompt":"x","structured_outputs":{"json":{"type":"%s","%s":%s}}}' % (kind, least, value),
            None,
        )
        for kind in (b"integer", b"number")
        for least in (b"minimum", b"exclusiveMinimum")
        for value in (b"Infinity", b"-Infinity", b"NaN", b"1e400", b"9" * 4300)
    ),
    (C, b'{"prompt":"x","structured_outputs":{"regex":"\\\\ud800"}}', None),
    (C, b'{"prompt":"x","structured_outputs":{"json":{"type":"string","pattern":"[\\\\ud800]"}}}', None),
]


@pytest.mark.parametrize(("path", "body", "param"), WRONG, ids=range(len(WRONG)))
def test_values_that_cannot_be_are_refused(path: str, body: bytes, param: str | None) -> None:
    async def main() -> None:
        async with serving() as (client, _):
            reply = await client.post(path, body)
            assert reply.status == 400, reply.body
            assert reply.json["error"]["param"] == param

    asyncio.run(main())


@pytest.mark.parametrize("what", ["on_step", "on_idle"])
def test_what_cannot_be_told_of_a_step_stops_no_engine_and_is_counted(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with serving() as (client, server):
            assert b'understudy:errors_total{engine="0"} 0.0' in (await client.get("/metrics")).body

            def fails(*_: Any) -> None:
                raise RuntimeError("no such address")

            fails.__name__ = what
            monkeypatch.setattr(server.worker, what, fails)
            for _ in range(2):
                reply = await asyncio.wait_for(client.post(C, {"prompt": "x", "max_tokens": 3}), 5)
                assert reply.status == 200
            assert server.worker.cores[0].errors >= 2
            errors = f'understudy:errors_total{{engine="0"}} {server.worker.cores[0].errors}.0'
            assert errors.encode() in (await client.get("/metrics")).body
            assert (await client.get("/health")).status == 200

    asyncio.run(main())
    assert caplog.text.count("RuntimeError: no such address") == 1


def test_an_order_that_an_engine_cannot_follow_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    def fails(_: int) -> None:
        raise ValueError("no such order")

    async def main() -> None:
        async with serving() as (client, server):
            server.worker.driver.enqueue(server.worker.cores[0], fails)
            assert (await client.post(C, {"prompt": "x", "max_tokens": 3})).status == 200
            assert b'understudy:errors_total{engine="0"} 1.0' in (await client.get("/metrics")).body

    asyncio.run(main())
    assert "no such order" in caplog.text
