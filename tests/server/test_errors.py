"""What is wrong with a request is said as vLLM says it: status, type and param."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from server.client import Client, serving

C, H = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
TOOL = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
BAD, SHAPE = "BadRequestError", "Bad Request"
STREAM, OPTIONS = {"prompt": "x", "stream": True}, "body.stream_options"

CASES: list[tuple[str, str, dict[str, Any], int, str | None, str | None]] = [
    ("unknown model", C, {"model": "nope", "prompt": "x"}, 404, "NotFoundError", "model"),
    ("unknown chat", H, {"model": "nope", "messages": USER}, 404, "NotFoundError", "model"),
    ("too long ids", C, {"prompt": [1] * 5000}, 400, BAD, "input_tokens"),
    ("len==max", C, {"prompt": [1] * 4096}, 400, BAD, "max_tokens"),
    ("too long text", C, {"prompt": "the sea " * 3000}, 400, BAD, "input_tokens"),
    ("huge text", C, {"prompt": "x" * 360_000}, 400, BAD, "input_text"),
    (
        "chat too long",
        H,
        {"messages": [{"role": "user", "content": "the sea " * 3000}]},
        400,
        BAD,
        "input_tokens",
    ),
    ("max_tokens>ctx", C, {"prompt": "x", "max_tokens": 5000}, 400, BAD, "max_tokens"),
    ("mct>ctx", H, {"messages": USER, "max_completion_tokens": 5000}, 400, BAD, "max_completion_tokens"),
    ("max_tokens 0", C, {"prompt": "x", "max_tokens": 0}, 400, BAD, "max_tokens"),
    ("max_tokens -1", C, {"prompt": "x", "max_tokens": -1}, 400, BAD, "max_tokens"),
    ("chat mt 0", H, {"messages": USER, "max_tokens": 0}, 400, BAD, "max_tokens"),
    ("n=0", C, {"prompt": "x", "n": 0}, 400, BAD, None),
    ("n=2 temp0", C, {"prompt": "x", "n": 2, "temperature": 0}, 400, BAD, None),
    ("n=20000", C, {"prompt": "x", "n": 20000}, 400, BAD, None),
    ("logprobs 21", C, {"prompt": "x", "logprobs": 21}, 400, BAD, "logprobs"),
    ("logprobs -5", C, {"prompt": "x", "logprobs": -5}, 400, BAD, "logprobs"),
    ("top_logprobs 21", H, {"messages": USER, "logprobs": True, "top_logprobs": 21}, 400, BAD, "logprobs"),
    ("top without", H, {"messages": USER, "top_logprobs": 2}, 400, BAD, "top_logprobs"),
    ("temp 3", C, {"prompt": "x", "temperature": 3}, 400, BAD, "temperature"),
    ("temp -1", C, {"prompt": "x", "temperature": -1}, 400, BAD, "temperature"),
    ("top_p 0", C, {"prompt": "x", "top_p": 0}, 400, BAD, "top_p"),
    ("top_p 2", C, {"prompt": "x", "top_p": 2}, 400, BAD, "top_p"),
    ("top_k -2", C, {"prompt": "x", "top_k": -2}, 400, BAD, None),
    ("pres 3", C, {"prompt": "x", "presence_penalty": 3}, 400, BAD, None),
    ("no prompt", C, {}, 400, BAD, "prompt"),
    ("empty prompt", C, {"prompt": ""}, 400, BAD, "prompt"),
    ("empty list", C, {"prompt": []}, 400, BAD, "prompt"),
    ("[[]]", C, {"prompt": [[]]}, 400, BAD, None),
    ("neg token", C, {"prompt": [-1, 2]}, 400, SHAPE, "body.prompt.0"),
    ("oov token", C, {"prompt": [10_000_000]}, 400, BAD, None),
    ("mixed", C, {"prompt": ["a", 1]}, 400, SHAPE, "body.prompt.0"),
    ("min>max", C, {"prompt": "x", "max_tokens": 2, "min_tokens": 5}, 400, BAD, None),
    ("suffix", C, {"prompt": "x", "suffix": "y"}, 400, BAD, "suffix"),
    ("empty stop", C, {"prompt": "x", "stop": [""]}, 400, BAD, None),
    ("five stops", C, {"prompt": "x", "stop": list("abcde")}, 400, SHAPE, "body.stop"),
    ("options", C, {"prompt": "x", "stream_options": {"include_usage": True}}, 400, BAD, "stream_options"),
    (
        "usage",
        C,
        {**STREAM, "stream_options": {"include_usage": "maybe"}},
        400,
        SHAPE,
        f"{OPTIONS}.include_usage",
    ),
    ("options []", C, {**STREAM, "stream_options": []}, 400, SHAPE, OPTIONS),
    (
        "each usage",
        H,
        {"messages": USER, "stream": True, "stream_options": {"continuous_usage_stats": 7}},
        400,
        SHAPE,
        f"{OPTIONS}.continuous_usage_stats",
    ),
    ("tools auto", H, {"messages": USER, "tools": TOOL}, 400, BAD, None),
    ("tools []", H, {"messages": USER, "tools": []}, 400, BAD, "tools"),
    ("tool_choice req", H, {"messages": USER, "tools": TOOL, "tool_choice": "required"}, 400, BAD, None),
    ("no messages", H, {}, 400, SHAPE, "body.messages"),
    ("empty messages", H, {"messages": []}, 400, BAD, None),
    ("image", H, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, BAD, None),
    ("chat_template", H, {"messages": USER, "chat_template": "x"}, 400, BAD, None),
    ("cache_salt ''", C, {"prompt": "x", "cache_salt": ""}, 400, BAD, "cache_salt"),
    ("cache_salt @", C, {"prompt": "x", "cache_salt": "a@b"}, 400, BAD, "cache_salt"),
    ("seed str", C, {"prompt": "x", "seed": "x"}, 400, SHAPE, "body.seed"),
    ("tokens str", C, {"prompt": "x", "max_tokens": "many"}, 400, SHAPE, "body.max_tokens"),
    ("tokenize model", "/tokenize", {"model": "nope", "prompt": "x"}, 404, "NotFoundError", "model"),
    ("tokenize long", "/tokenize", {"prompt": "a b " * 4096}, 400, BAD, "input_tokens"),
    ("tokenize longer", "/tokenize", {"prompt": "a" * 65_537}, 400, BAD, "input_text"),
    (
        "tokenize chat",
        "/tokenize",
        {"messages": [{**USER[0], "content": "a b " * 4096}]},
        400,
        BAD,
        "input_tokens",
    ),
    ("detokenize long", "/detokenize", {"tokens": ["x"] * 4097}, 400, BAD, "input_tokens"),
    ("render", "/v1/completions/render", {}, 403, "PermissionDeniedError", None),
    ("generate", "/inference/v1/generate", {}, 403, "PermissionDeniedError", None),
    ("unload", "/v1/unload_lora_adapter", {"lora_name": "zz"}, 404, "NotFoundError", None),
]

FINE: list[tuple[str, str, dict[str, Any]]] = [
    ("no model", C, {"prompt": "x", "max_tokens": 1}),
    ("prompt+max>ctx", C, {"prompt": [1] * 4090, "max_tokens": 100}),
    ("null max", C, {"prompt": "x", "max_tokens": None}),
    ("best_of", C, {"prompt": "x", "max_tokens": 2, "best_of": 3}),
    ("logprobs true", C, {"prompt": "x", "max_tokens": 2, "logprobs": True}),
    ("priority", C, {"prompt": "x", "max_tokens": 2, "priority": 5}),
    ("stop null", C, {"prompt": "x", "max_tokens": 2, "stop": None}),
    ("tool none", H, {"messages": USER, "max_tokens": 2, "tools": TOOL, "tool_choice": "none"}),
    ("bad role", H, {"messages": [{"role": "wizard", "content": "x"}], "max_tokens": 2}),
    ("no content", H, {"messages": [{"role": "user"}], "max_tokens": 2}),
    ("extra field", C, {"prompt": "x", "max_tokens": 2, "colour": "red"}),
    ("truncate", C, {"prompt": [1] * 5000, "max_tokens": 1, "truncate_prompt_tokens": -1}),
    ("stream str", C, {"prompt": "x", "max_tokens": 2, "stream": "true"}),
    ("tokenize full", "/tokenize", {"prompt": " a" * 4096}),
    ("detokenize full", "/detokenize", {"tokens": [97] * 4095 + ["98"]}),
    ("echo0", C, {"prompt": "hello world", "max_tokens": 0, "echo": True}),
]


def test_errors_have_the_status_type_and_param_of_the_real_server() -> None:
    async def go() -> list[str]:
        async with serving(dev_mode=True, runtime_lora=True) as (client, _):
            wrong = []
            for name, path, body, status, kind, param in CASES:
                reply = await client.post(path, body)
                error = reply.json["error"]
                got = (reply.status, error["type"], error["param"], error["code"])
                if got != (status, kind, param, status):
                    wrong.append(f"{name}: {got}")
            return wrong

    assert asyncio.run(go()) == []


def test_what_the_real_server_answers_is_answered() -> None:
    async def go() -> list[str]:
        async with serving() as (client, _):
            replies = {name: await client.post(path, body) for name, path, body in FINE}
            assert replies["truncate"].json["usage"]["prompt_tokens"] == 4095
            assert replies["null max"].json["usage"]["completion_tokens"] == 16
            assert replies["prompt+max>ctx"].json["usage"]["completion_tokens"] == 6
            assert replies["echo0"].json["choices"][0]["text"] == "hello world"
            assert replies["stream str"].events[-1] == "[DONE]"
            return [f"{name}: {reply.status}" for name, reply in replies.items() if reply.status != 200]

    assert asyncio.run(go()) == []


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("GET", "/v1/embeddings", 404, b'{"detail":"Not Found"}'),
        ("GET", "/v1/models/stub", 404, b'{"detail":"Not Found"}'),
        ("GET", "/reset_prefix_cache", 405, b'{"detail":"Method Not Allowed"}'),
        ("GET", "/v1/completions", 405, b'{"detail":"Method Not Allowed"}'),
        ("POST", "/ping", 200, b""),
        ("GET", "/health", 200, b""),
    ],
)
def test_paths_and_methods(method: str, path: str, status: int, body: bytes) -> None:
    async def go() -> None:
        async with serving(dev_mode=True) as (client, _):
            reply = await client.ask(method, path)
            assert (reply.status, reply.body) == (status, body)
            if status == 405:
                assert reply.headers["allow"] == "POST"

    asyncio.run(go())


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b"{bad", "body.1"),
        (b"[1]", "body"),
        (b'"x"', "body"),
        (b"", "body"),
        (b'{"a": ' + b"[" * 100_000, "body.0"),
    ],
)
def test_bodies_that_are_no_object(data: bytes, param: str) -> None:
    async def go() -> None:
        async with serving() as (client, _):
            reply = await client.ask("POST", C, data)
            assert (reply.status, reply.json["error"]["type"]) == (400, SHAPE)
            assert reply.json["error"]["param"] == param
            plain = await client.ask("POST", C, b"{}", headers={"content-type": "text/plain"})
            assert (plain.status, plain.json["error"]["param"]) == (400, None)

    asyncio.run(go())


def test_keys_guard_the_api_and_nothing_else() -> None:
    async def go(client: Client) -> None:
        denied = await client.get("/v1/models")
        assert (denied.status, denied.json) == (401, {"error": "Unauthorized"})
        allowed = await client.ask("GET", "/v1/models", headers={"authorization": "Bearer b"})
        assert allowed.status == 200
        assert (await client.get("/health")).status == 200

    async def main() -> None:
        async with serving(api_keys=("a", "b")) as (client, _):
            await go(client)

    asyncio.run(main())


def test_a_full_queue_is_a_503_and_counted() -> None:
    async def go() -> None:
        import msgspec

        from server.client import QUICK

        slow = msgspec.structs.replace(QUICK, max_num_seqs=1)
        async with serving(engine=slow, max_num_queued_reqs=1) as (client, server):
            body = {"prompt": "x", "max_tokens": 200}
            replies = await asyncio.gather(*(client.post(C, body) for _ in range(6)))
            statuses = sorted(reply.status for reply in replies)
            assert statuses[0] == 200
            assert statuses[-1] == 503
            refused = next(reply for reply in replies if reply.status == 503)
            assert refused.json["error"]["type"] == "Service Unavailable"
            counted = server.worker.admission_rejections["max_num_queued_reqs"].value
            assert counted == statuses.count(503)

    asyncio.run(go())


def test_a_request_takes_no_more_memory_than_one_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.server.api.planner.MAX_CHOICES", 50)
    monkeypatch.setattr("understudy.server.api.planner.MAX_PLANNED", 10_000)

    async def main() -> None:
        async with serving() as (client, server):
            whole: dict[str, Any] = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True}
            for more in ({"n": 11}, {"prompt": ["x"] * 3, "n": 17, "max_tokens": 1}, {"n": 16384}):
                reply = await client.post("/v1/completions", {**whole, **more})
                assert reply.status == 400
                assert "one request has at most" in reply.json["error"]["message"]
            chats = {"messages": [[{"role": "user", "content": "x"}]] * 51, "max_tokens": 1}
            assert (await client.post("/v1/chat/completions/batch", chats)).status == 400
            assert not server.app.endpoints.in_flight
            for more in ({"n": 10}, {"prompt": ["x"] * 2, "n": 25, "max_tokens": 1}):
                assert (await client.post("/v1/completions", {**whole, **more})).status == 200

    asyncio.run(main())
