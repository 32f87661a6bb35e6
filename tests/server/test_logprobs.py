"""Log probabilities that are made up: once for each token, however often it comes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from server.client import Client, serving
from understudy.server.api import logprobs, texts

C, H = "/v1/completions", "/v1/chat/completions"
ASKED: list[tuple[str, dict[str, Any]]] = [
    (C, {"prompt": "x", "logprobs": 5}),
    (C, {"prompt": "x", "logprobs": 2, "return_tokens_as_token_ids": True}),
    (H, {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 5}),
]


async def told(client: Client, path: str, body: dict[str, Any]) -> Any:
    reply = await client.post(path, {**body, "max_tokens": 40})
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]["logprobs"]


@pytest.mark.parametrize(("path", "body"), ASKED, ids=range(len(ASKED)))
def test_what_is_made_up_for_a_token_is_made_once(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    others, made = logprobs.others, []

    def counted(token: int, count: int, vocabulary: list[int]) -> list[int]:
        made.append(token)
        return others(token, count, vocabulary)

    monkeypatch.setattr(logprobs, "others", counted)

    async def main() -> None:
        async with serving() as (client, _):
            first = await told(client, path, body)
            before = len(made)
            assert 0 < before <= 40
            assert await told(client, path, body) == first
            assert len(made) == before

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *ASKED,
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"logprobs": 2, "max_tokens": 9}}),
    ],
    ids=range(len(ASKED) + 1),
)
def test_the_words_of_a_tokenizer_are_asked_for_when_it_is_opened(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory's are looked for in all of its vocabulary."""

    async def main() -> None:
        async with serving(enable_scale_out=True) as (client, server):

            def fails(*_: object) -> list[int]:
                raise AssertionError("it takes long")

            monkeypatch.setattr(type(server.worker.tokenizer), "words", fails)
            for stream in (False, True):
                reply = await client.post(path, {**body, "max_tokens": 9, "stream": stream})
                assert reply.status == 200, reply.body
                assert b"logprob" in reply.body
                assert b"error" not in reply.body

    asyncio.run(main())


@pytest.mark.parametrize(("path", "body"), ASKED, ids=range(len(ASKED)))
def test_not_all_of_it_is_kept(path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving() as (client, server):
            kept = server.worker.texts.logprobs
            first = await told(client, path, body)
            assert len(kept) > 10
            kept.clear()
            monkeypatch.setattr(texts, "MAX_KEPT_BYTES", 2000)
            assert await told(client, path, body) == first
            assert len(kept) < 10

    asyncio.run(main())


def test_tokens_as_strings_are_made_once_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving() as (client, server):
            kind, made = type(server.worker.tokenizer), []
            decode = kind.decode

            def counted(self: Any, ids: Any, **named: Any) -> str:
                made.append(ids)
                return decode(self, ids, **named)

            monkeypatch.setattr(kind, "decode", counted)
            body = {"prompt": " to be or not to be" * 50, "return_token_strs": True}
            reply = (await client.post("/tokenize", body)).json
            assert "".join(reply["token_strs"]) == body["prompt"]
            assert len(made) == len(set(reply["tokens"])) < reply["count"]

    asyncio.run(main())
