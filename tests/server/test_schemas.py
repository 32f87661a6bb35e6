"""Structured answers of all routes satisfy their JSON schema, or are refused in the library's words."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import msgspec
import pytest

from server.client import Client, serving
from structured.draws import draw_schema
from structured.schemas import is_valid

C, H = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]


def random_schemas(count: int) -> list[dict[str, Any]]:
    drawn = (draw_schema(Random(f"route{seed}")) for seed in range(count))
    return [{"type": "object", "properties": {"a": part}} for part in drawn]


def test_answers_of_all_routes_satisfy_their_schema() -> None:
    async def text_of(client: Client, path: str, body: dict[str, Any]) -> str:
        reply = await client.post(path, body)
        assert reply.status == 200, reply.body
        if not body.get("stream"):
            choice = reply.json["choices"][0]
            assert choice["finish_reason"] == "stop"
            return str(choice["text"] if path == C else choice["message"]["content"])
        events = [event for event in reply.events if event != "[DONE]"]
        parts = [event["choices"][0] for event in events if event["choices"]]
        assert parts[-1]["finish_reason"] == "stop"
        return "".join(part["text"] if path == C else part["delta"].get("content") or "" for part in parts)

    async def main() -> None:
        async with serving() as (client, server):
            for schema in random_schemas(12):
                form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
                texts = [
                    await text_of(client, C, {"prompt": "x", "max_tokens": 3000, **how, "stream": stream})
                    for stream in (False, True)
                    for how in ({"structured_outputs": {"json": schema}}, {"response_format": form})
                ]
                assert len(set(texts)) == 1
                chat = {"messages": USER, "response_format": form}
                texts += [await text_of(client, H, {**chat, "stream": stream}) for stream in (False, True)]
                body = {
                    "input": "x",
                    "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
                }
                reply = (await client.post("/v1/responses", body)).json
                texts.append(reply["output"][0]["content"][0]["text"])
                assert all(is_valid(schema, msgspec.json.decode(text)) for text in texts)
            assert not server.app.endpoints.in_flight

    asyncio.run(main())


def test_arguments_of_tools_satisfy_their_schema() -> None:
    named = {"type": "function", "function": {"name": "f"}}

    async def main() -> None:
        async with serving(tool_call_parser="hermes") as (client, _):
            for schema in (*random_schemas(6), None, {}):
                function = {"name": "f"} if schema is None else {"name": "f", "parameters": schema}
                tools = [{"type": "function", "function": function}]
                for choice in ("required", named):
                    body = {"messages": USER, "tools": tools, "tool_choice": choice, "n": 2}
                    for told in (await client.post(H, body)).json["choices"]:
                        (call,) = told["message"]["tool_calls"]
                        made = msgspec.json.decode(call["function"]["arguments"])
                        assert isinstance(made, dict)
                        assert schema is None or is_valid(schema, made)
                        assert told["finish_reason"] == "tool_calls"
                    events = (await client.post(H, {**body, "stream": True})).events
                    calls = [
                        call
                        for event in events
                        if event != "[DONE]"
                        for told in event["choices"]
                        for call in told["delta"].get("tool_calls", ())
                    ]
                    assert len(calls) == 2
                    for call in calls:
                        made = msgspec.json.decode(call["function"]["arguments"])
                        assert schema is None or is_valid(schema, made)

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_an_answer_with_the_keyword(stream: bool) -> None:
    async def main() -> None:
        async with serving(tool_call_parser="hermes") as (client, server):
            schema = {"type": "object", "properties": {"a": {"not": {}}}}
            tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
            for path, body in (
                (C, {"prompt": "x", "structured_outputs": {"json": schema}}),
                (
                    H,
                    {
                        "messages": USER,
                        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
                    },
                ),
                (H, {"messages": USER, "tools": tools, "tool_choice": "required"}),
                (
                    "/v1/responses",
                    {"input": "x", "text": {"format": {"type": "json_schema", "schema": schema}}},
                ),
            ):
                reply = await client.post(path, {**body, "stream": stream})
                assert reply.status == 400
                error = reply.json["error"]
                assert (error["type"], error["code"]) == ("BadRequestError", 400)
                assert error["message"].startswith('Grammar error: Unimplemented keys: ["not"]')
            assert not server.app.endpoints.in_flight

    asyncio.run(main())


def test_a_value_that_looks_like_a_special_token_is_answered() -> None:
    async def main() -> None:
        async with serving() as (client, _):
            schema = {"const": ["<|im_end|>", "<|endoftext|>", "</s>"]}
            body = {"prompt": "x", "max_tokens": 200, "structured_outputs": {"json": schema}}
            choice = (await client.post(C, body)).json["choices"][0]
            assert choice["finish_reason"] == "stop"
            assert msgspec.json.decode(choice["text"]) == schema["const"]

    asyncio.run(main())


def test_arguments_of_a_tool_end_with_the_tokens() -> None:
    async def main() -> None:
        async with serving(tool_call_parser="hermes") as (client, _):
            schema = {"type": "object", "required": ["a"], "properties": {"a": {"const": "word " * 50}}}
            tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
            body = {"messages": USER, "tools": tools, "tool_choice": "required", "max_tokens": 10}
            choice = (await client.post(H, body)).json["choices"][0]
            assert choice["finish_reason"] == "length"
            (call,) = choice["message"]["tool_calls"]
            assert 8 < len(call["function"]["arguments"]) < 100
            assert call["function"]["arguments"] in '{"a":"' + "word " * 50

    asyncio.run(main())
