"""Fields of the wrong type are the client's error on every route that translates a body into a chat."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from server.client import Client, serving
from understudy.server.api import schema

M = {"model": "stub", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
R = {"model": "stub", "max_output_tokens": 2, "input": "hi"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
_KINDS: list[Any] = ["x", 1, None, ["any"], {}, "enabled", "function", "tool", "any", "none"]
_NAMES: list[Any] = [1, [], {}, "", None, "f", "g"]
CHOICES: list[Any] = [
    *({"type": kind} for kind in _KINDS),
    *({"type": "tool", "name": name} for name in _NAMES),
    *({}, [], "auto", 1, {"name": "f"}, {"type": "auto", "name": {}}),
]
_PARTS = ("text", "image")
VALUES: list[Any] = [
    *(
        None,
        True,
        0,
        -1,
        1.5,
        "",
        "x",
        [],
        {},
        [[]],
        [None],
        [1],
        ["a"],
        [{}],
        10**30,
        {"type": "x"},
        {"type": 1},
    ),
    *(
        {"type": "enabled"},
        {"type": "enabled", "budget_tokens": "x"},
        {"format": {"type": "json_schema", "schema": 1}},
    ),
    *(
        [{"name": 1}],
        [{"name": "f"}],
        [{"name": "f", "input_schema": 1}],
        [{"name": None, "input_schema": {}}],
    ),
    *(
        [{"role": "user"}],
        [{"role": 1, "content": 1}],
        [{"role": "user", "content": [1]}],
        [{"type": "text"}],
    ),
    *(
        [{"role": "user", "content": [{"type": kind, "text": 1, "content": 1, "input": 1}]}]
        for kind in ("text", "image")
    ),
]
ROUTES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/v1/messages": (M, (*schema.MESSAGES, "output_config")),
    "/v1/messages/count_tokens": (M, tuple(schema.COUNT)),
    "/v1/messages/render": (M, tuple(schema.MESSAGES)),
    "/v1/responses": (
        {"model": "stub", "max_output_tokens": 2, "input": "hi"},
        (*schema.RESPONSES, "tools", "tool_choice"),
    ),
}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("parser", [None, "hermes"])
def test_no_type_of_a_field_is_an_error_inside_the_server(path: str, parser: str | None) -> None:
    base, names = ROUTES[path]
    bodies = [{**base, name: value} for name in names for value in VALUES]
    bodies += [{**base, "tools": [TOOL], "tool_choice": choice} for choice in CHOICES]
    bodies += [{**base, "tools": tools, "tool_choice": choice} for tools in VALUES for choice in CHOICES[-9:]]

    async def main() -> None:
        given: dict[str, Any] = {"enable_auto_tool_choice": parser is not None, "tool_call_parser": parser}
        async with serving(enable_scale_out=True, latency_ms=(0.0, 0.0), clock_speed=100.0, **given) as (
            client,
            _,
        ):
            for start in range(0, len(bodies), 32):
                part = bodies[start : start + 32]
                replies = await asyncio.gather(*(client.post(path, body) for body in part))
                wrong = [body for body, reply in zip(part, replies, strict=True) if reply.status >= 500]
                assert not wrong

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("more", "kind", "param"),
    [
        ({"tool_choice": {"type": "x"}}, "literal_error", "body.tool_choice.type"),
        ({"tool_choice": {"type": ["any"]}}, "literal_error", "body.tool_choice.type"),
        ({"tool_choice": {}}, "missing", "body.tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "value_error", "body.tool_choice"),
        ({"tool_choice": {"type": "tool", "name": 1}}, "string_type", "body.tool_choice.name"),
        ({"tools": [{"input_schema": {}}]}, "missing", "body.tools.0.name"),
        ({"tools": [TOOL, {"name": 1, "input_schema": {}}]}, "string_type", "body.tools.1.name"),
        ({"tools": [{"name": "f"}]}, "missing", "body.tools.0.input_schema"),
        ({"tools": [{"name": "f", "input_schema": "x"}]}, "dict_type", "body.tools.0.input_schema"),
    ],
)
def test_tools_in_anthropics_form_are_checked_as_vllm_does(
    path: str, more: dict[str, Any], kind: str, param: str
) -> None:
    async def main() -> None:
        async with serving() as (client, _):
            for tools in ({}, {"tools": [TOOL]}):
                reply = await client.post(path, {**M, **tools, **more})
                told = reply.json["error"]
                assert (reply.status, told["type"], told["param"]) == (400, "Bad Request", param)
                assert kind in told["message"]

    asyncio.run(main())


def test_a_tool_that_is_not_there_cannot_be_chosen() -> None:
    async def test(client: Client) -> None:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            choice = {"type": "tool", "name": "g"}
            reply = await client.post(path, {**M, "tools": [TOOL], "tool_choice": choice})
            assert reply.status == 400
            assert "does not match any of the specified `tools`" in reply.json["error"]["message"]

    async def main() -> None:
        async with serving(tool_call_parser="hermes") as (client, _):
            await test(client)

    asyncio.run(main())
