"""Structured answers satisfy their JSON schema by the reference implementation, or are refused by a keyword."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import msgspec
import pytest

from server.client import Client, serving
from server.schemas import FORMATTED, arbitrary, document_around, is_valid, value
from understudy.server.api.structured.errors import FormError
from understudy.server.api.structured.form import Form

C, H = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]


def answered(schema: Any, key: int = 1) -> Any:
    """Return the answer; it has an end and satisfies its schema."""
    text, too_long, _ = Form({"json": schema}).answer(key)
    assert not too_long
    made = msgspec.json.decode(text)
    assert is_valid(schema, made), (schema, made)
    return made


def refused(schema: Any) -> FormError:
    with pytest.raises(FormError) as caught:
        Form({"json": schema}).answer(1)
    return caught.value


def keywords_of(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(keywords_of, schema))
    return set(schema).union(*map(keywords_of, schema.values())) if isinstance(schema, dict) else set()


# ── Random schemas ──


@pytest.mark.parametrize("part", range(4))
def test_random_schemas_are_satisfied_or_refused_by_a_keyword_of_theirs(part: int) -> None:
    refusals: list[tuple[FormError, Any]] = []
    for seed in range(600 * part, 600 * (part + 1)):
        schema = arbitrary(Random(f"arbitrary{seed}"))
        try:
            answered(schema, seed)
        except FormError as error:
            refusals.append((error, schema))
    assert len(refusals) < 180  # about a fifth contradict themselves
    for refusal, schema in refusals:
        assert refusal.status == 400
        assert refusal.keyword in keywords_of(schema) | {"schema"}
        assert f"{refusal.keyword}: " in str(refusal)


@pytest.mark.parametrize("part", range(4))
def test_no_random_schema_that_a_known_value_satisfies_is_refused(part: int) -> None:
    for seed in range(600 * part, 600 * (part + 1)):
        rng = Random(f"around{seed}")
        known = value(rng)
        schema = document_around(rng, known)
        assert is_valid(schema, known)
        answered(schema, seed)


def test_an_answer_depends_on_its_key_alone() -> None:
    for seed in range(50):
        rng = Random(seed)
        schema = document_around(rng, value(rng))
        texts = {Form({"json": schema}).answer(7).text for _ in range(3)}
        assert len(texts) == 1
    assert len({Form({"json": {"type": "string"}}).answer(key).text for key in range(8)}) == 8


# ── Keywords ──

TREE = {"type": "object", "properties": {"next": {"$ref": "#"}, "v": {"type": "integer"}}}
SATISFIABLE: list[Any] = [
    *(True, {}, {"type": ["null", "integer"], "minimum": 5}),
    {"type": "string", "pattern": "^[a-z]{3}-[0-9]+$", "minLength": 9, "maxLength": 9},
    {"type": "string", "pattern": "foo", "minLength": 20, "maxLength": 20},
    {"type": "string", "pattern": r"^(\w+)-\1$"},
    {"type": "string", "pattern": r"\bend$", "minLength": 12},
    {"type": "string", "pattern": "(?i)^YES$"},
    {
        "type": "string",
        "allOf": [{"pattern": "^a"}, {"pattern": "z$"}, {"pattern": "[0-9]{3}"}],
        "maxLength": 5,
    },
    {"type": "string", "minLength": 3, "maxLength": 3, "pattern": "é"},
    {"type": "number", "multipleOf": 0.01, "exclusiveMinimum": 19.98, "maximum": 20},
    {"type": "number", "exclusiveMinimum": 0.1, "exclusiveMaximum": 0.10000000000000003},
    {"type": "number", "minimum": 0.07, "maximum": 0.07},
    {"type": "integer", "multipleOf": 7, "minimum": 10**30, "maximum": 10**30 + 6},
    {"type": "integer", "allOf": [{"multipleOf": 6}, {"multipleOf": 4}, {"exclusiveMinimum": 12}]},
    {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 2},
    {"prefixItems": [{"enum": [1, 2]}, {"const": 1}], "uniqueItems": True, "minItems": 2, "items": False},
    {"type": "array", "uniqueItems": True, "minItems": 300, "items": {"type": "string", "maxLength": 2}},
    {"type": "object", "minProperties": 3, "maxProperties": 3, "additionalProperties": {"type": "null"}},
    {"type": "object", "required": ["b"], "additionalProperties": {"const": 1}, "properties": {"a": False}},
    {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 0}]},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object", "properties": {"a": {}, "b": {}}},
    {"type": "string", "oneOf": [{"pattern": "a"}, {"pattern": "b"}], "allOf": [{"pattern": "^[ab]{3}$"}]},
    {"type": "array", "oneOf": [{"uniqueItems": True}, {"minItems": 2}], "minItems": 2},
    {"anyOf": [{"type": "integer", "minimum": 5, "maximum": 1}, {"type": "null"}]},
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "integer", "minimum": 3}}, "maximum": 3},
    *(TREE, {**TREE, "required": ["v"]}, {**TREE, "$id": "https://example.org/tree"}),
    {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"left": {"$ref": "#/$defs/link"}, "right": {"$ref": "#/$defs/link"}},
                "required": ["left", "right"],
            },
            "link": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        },
    },
]


@pytest.mark.parametrize("schema", SATISFIABLE, ids=range(len(SATISFIABLE)))
def test_a_schema_is_satisfied(schema: Any) -> None:
    for key in range(8):
        answered(schema, key)


@pytest.mark.parametrize("name", FORMATTED)
def test_a_format_is_satisfied_alone_and_with_a_pattern_and_a_length(name: str) -> None:
    answered({"type": "string", "format": name})
    for text in FORMATTED[name]:
        pattern = f"^{text[:3].replace('.', '[.]')}"
        answered({"type": "string", "format": name, "pattern": pattern, "maxLength": len(text)})
        assert answered({"format": name, "const": text}) == text


UNSUPPORTED = [
    *("not", "if", "contains", "patternProperties", "propertyNames", "dependentRequired", "unevaluatedItems"),
    *("$dynamicRef", "$anchor", "contentEncoding", "nullable", "x-own"),
]


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_another_keyword_is_refused_by_its_name_wherever_it_is(keyword: str) -> None:
    schemas: list[dict[str, Any]] = [
        {keyword: {}},
        {"properties": {"a": {"items": {keyword: {}}}}},
        {"anyOf": [{"type": "null"}, {keyword: {}}]},
        {"$defs": {"d": {keyword: {}}}, "type": "null"},
    ]
    for schema in schemas:
        assert refused(schema).keyword == keyword
    answered({"type": "object", "properties": {keyword: {"type": "null"}}})


WRONG: list[tuple[str, Any]] = [
    ("type", {"type": "text"}),
    ("type", {"type": []}),
    ("enum", {"enum": []}),
    ("minLength", {"minLength": -1}),
    ("maxItems", {"maxItems": 1.5}),
    ("minimum", {"minimum": "1"}),
    ("exclusiveMinimum", {"exclusiveMinimum": True}),
    ("multipleOf", {"multipleOf": 0}),
    ("items", {"items": [{}]}),
    ("properties", {"properties": []}),
    ("required", {"required": "a"}),
    ("anyOf", {"anyOf": []}),
    ("format", {"format": "hostname"}),
    ("pattern", {"pattern": "("}),
    ("pattern", {"pattern": "a(?=b)"}),
    ("pattern", {"pattern": "(?<!a)b"}),
    ("pattern", {"pattern": r"\p{L}"}),
    ("$ref", {"$ref": "#/$defs/none"}),
    ("$ref", {"$ref": "https://example.org/other.json"}),
    ("$ref", {"$ref": "#"}),
    (
        "$ref",
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ),
    ("minimum", {"type": "integer", "minimum": 5, "maximum": 3}),
    ("multipleOf", {"type": "integer", "multipleOf": 10, "minimum": 1, "maximum": 9}),
    ("minLength", {"type": "string", "minLength": 5, "maxLength": 3}),
    ("pattern", {"type": "string", "pattern": "^a{5}$", "maxLength": 3}),
    ("pattern", {"type": "string", "allOf": [{"pattern": "^a+$"}, {"pattern": "b"}]}),
    ("minItems", {"type": "array", "minItems": 2, "maxItems": 1}),
    ("uniqueItems", {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "uniqueItems": True}),
    ("required", {"type": "object", "required": ["a"], "additionalProperties": False}),
    ("minProperties", {"type": "object", "minProperties": 1, "additionalProperties": False}),
    ("const", {"const": 1, "enum": [2]}),
    ("type", {"allOf": [{"type": "string"}, {"type": "null"}]}),
    ("oneOf", {"oneOf": [{}, {}]}),
    ("$ref", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
]


@pytest.mark.parametrize(("keyword", "schema"), WRONG, ids=range(len(WRONG)))
def test_a_schema_that_cannot_be_is_refused_by_a_keyword(keyword: str, schema: Any) -> None:
    assert refused(schema).keyword == keyword


HEAVY: list[Any] = [
    {"type": "string", "pattern": "^(a?){500}a{500}$"},
    {"type": "string", "pattern": "^(a+)+$", "minLength": 20_000},
    {"type": "string", "pattern": "^(a{1,50}b{1,50}){1,50}$", "minLength": 300, "maxLength": 301},
    {"oneOf": [{"properties": {"kind": {"const": n}, "v": {}}, "required": ["kind"]} for n in range(100)]},
    {"allOf": [{"anyOf": [{"minimum": n}, {"maximum": -n}]} for n in range(1, 25)], "type": "integer"},
    {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2000)}},
    {"type": "array", "minItems": 20_000, "items": {"type": "integer"}},
]


@pytest.mark.parametrize("schema", HEAVY, ids=range(len(HEAVY)))
def test_a_schema_that_asks_for_much_is_answered_within_its_steps(schema: Any) -> None:
    assert not Form({"json": schema}).answer(1).too_long


def test_a_search_that_takes_too_long_is_refused() -> None:
    defs: dict[str, Any] = {"d20": {"type": "string", "minLength": 4}}
    for n in range(20):
        defs[f"d{n}"] = {"oneOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"type": "string", "maxLength": n}] * 2}
    error = refused({"$ref": "#/$defs/d0", "$defs": defs})
    assert error.keyword == "oneOf"


# ── Routes ──


def random_schemas(count: int) -> list[Any]:
    found = []
    for seed in range(count):
        rng = Random(f"route{seed}")
        found.append(document_around(rng, {"a": value(rng), "b": value(rng), "kind": value(rng)}))
    return found


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
                schema = schema if schema is None or schema == {} else {"type": "object", **schema}
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
                assert "not: this keyword is not supported" in error["message"]
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
