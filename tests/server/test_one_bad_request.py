"""One request that nobody can answer: its client is told so, and nobody else notices."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from server.client import Client, Reply, serving
from understudy.server.api.completions import CompletionStyle

if TYPE_CHECKING:
    from understudy.server.api.generation import Choice, Generation

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
