"""Answers of a given form: bounded, whatever the form asks for; and those that nothing meets, which are empty."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from server.client import serving
from understudy.errors import InvalidArgument
from understudy.server.api.structured import characters_for, instance, structured_text

if TYPE_CHECKING:
    from understudy.server.core import EngineCore

C = "/v1/completions"


def test_a_pattern_that_wants_more_than_anybody_could_say_is_cut() -> None:
    for pattern in ("((((a{999}){999}){999}){999}){999}", "(ab{9}){99999}", "(a{999}b{999}){999}c" * 50):
        text = structured_text({"regex": pattern}, 1)
        assert text.startswith("a")
        assert len(text) == 1 << 17
    assert structured_text({"regex": "(ab){3}c?[0-9]{2}"}, 1) == "ababab00"


def test_a_schema_that_refers_to_itself_many_times_is_cut() -> None:
    names = [f"p{n}" for n in range(20)]
    schema = {"type": "object", "properties": {name: {"$ref": "#"} for name in names}}

    def count(value: Any) -> int:
        return 1 + sum(map(count, value.values())) if isinstance(value, dict) else 1

    made = instance(schema, 1)
    assert list(made) == names
    assert count(made) < 300_000


def nested(inner: dict[str, Any], levels: int = 3) -> dict[str, Any]:
    for _ in range(levels):
        inner = {"type": "array", "minItems": 16, "items": inner}
    return inner


@pytest.mark.parametrize(
    "inner",
    [
        {"type": "string", "pattern": "a{131072}"},
        {"type": "string", "minLength": 4096},
        {"const": "a" * 100_000},
        {"enum": [["a" * 100_000]]},
        {"type": "object", "properties": {"a" * 100_000: {"type": "null"}}},
    ],
)
def test_the_parts_of_an_answer_share_what_it_may_have(inner: dict[str, Any]) -> None:
    whole = structured_text({"json": nested(inner)}, 1)
    assert 100_000 < len(whole) < 300_000
    begun = structured_text({"json": nested(inner)}, 1, characters_for(2))
    assert len(begun) < 200_000
    assert begun[:1000] == whole[:1000]


def test_what_no_token_is_left_for_is_not_made() -> None:
    for form in ({"json": nested({"type": "string", "pattern": "(ab){65536}"})}, {"regex": "(ab){65536}"}):
        assert len(structured_text(form, 1, characters_for(2))) < 2000

    async def main() -> None:
        async with serving() as (client, _):
            form = {"json": nested({"type": "string", "pattern": "a{131072}"})}
            texts = []
            for tokens in (2, 40):
                body = {"prompt": "x", "max_tokens": tokens, "structured_outputs": form}
                reply = (await client.post(C, body)).json
                assert (reply["choices"][0]["finish_reason"], reply["usage"]["completion_tokens"]) == (
                    "length",
                    tokens,
                )
                texts.append(reply["choices"][0]["text"])
            assert texts[0].startswith("[[")
            assert texts[1].startswith(texts[0])

    asyncio.run(main())


def test_the_answers_to_one_request_share_what_it_may_have() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "a{131072}"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    called = {"type": "function", "function": {"name": "f"}}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}

    async def main() -> None:
        async with serving(tool_call_parser="hermes") as (client, server):
            for path, body in (
                (C, {"prompt": "x", "max_tokens": 4000, "structured_outputs": {"json": schema}}),
                ("/v1/chat/completions", {**chat, "tools": [tool], "tool_choice": called}),
            ):
                assert (await client.post(path, {**body, "n": 4})).status == 200
                refused = await client.post(path, {**body, "n": 60})
                assert refused.status == 400
                assert "characters together; send several" in refused.json["error"]["message"]
            assert not server.app.endpoints.in_flight
            assert not server.worker.live()

    asyncio.run(main())


@pytest.mark.parametrize("form", [{"regex": "a*"}, {"choice": [""]}, {"regex": "(a|b)*$"}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_nothing_meets_is_answered_by_nothing(form: dict[str, Any], stream: bool) -> None:
    async def main() -> None:
        async with serving() as (client, server):
            body = {"prompt": "x", "max_tokens": 5, "structured_outputs": form, "stream": stream}
            reply = await client.post(C, body)
            choice = (reply.events[0] if stream else reply.json)["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("", "stop")
            if not stream:
                assert reply.json["usage"]["completion_tokens"] == 1
            chat = {"messages": [{"role": "user", "content": "x"}], "structured_outputs": form}
            told = (await client.post("/v1/chat/completions", chat)).json["choices"][0]
            assert (told["message"]["content"], told["finish_reason"]) == ("", "stop")
            assert not server.app.endpoints.in_flight

    asyncio.run(main())


def test_a_request_that_the_engine_refuses_late_is_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with serving() as (client, server):
            core: EngineCore = server.worker.cores[0]
            with monkeypatch.context() as patch:

                def refuse(_: object) -> None:
                    raise InvalidArgument("not this one")

                patch.setattr(core, "submit", refuse)
                for stream in (False, True):
                    reply = await client.post(C, {"prompt": "x", "max_tokens": 2, "stream": stream})
                    assert reply.status == 500
                    assert reply.json["error"]["type"] == "InternalServerError"
            assert (await client.post(C, {"prompt": "x", "max_tokens": 2})).status == 200
            assert not server.app.endpoints.in_flight

    asyncio.run(main())
    assert "not this one" in caplog.text
