"""Phrases that clients search for in error messages: vLLM 0.32's own words, case by case.

LiteLLM decides by *this model's maximum context length is* that a context was exceeded, agent frameworks shorten their
prompts then; others look for *greedy*, *does not exist*, or the flag that tool calls need.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from server.client import serving
from server.test_errors import CASES, TOOL, USER, C, H
from server.test_serve_cli import ask, start

if TYPE_CHECKING:
    from server.client import Client

CONTEXT = "This model's maximum context length is 4096 tokens. However, your prompt contains "
TOO_LONG = (
    CONTEXT + "at least 4097 input tokens, which exceeds this limit even without any output tokens. "
    "Please reduce the length of the input prompt. (parameter=input_tokens, value=4097)"
)
PHRASES = {
    "unknown model": "The model `nope` does not exist. Valid aliases: stub.",
    "unknown chat": "The model `nope` does not exist. Valid aliases: stub.",
    "too long ids": TOO_LONG,
    "len==max": "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
    "too long text": TOO_LONG,
    "huge text": CONTEXT
    + "360000 characters (more than 65536 characters, which is the upper bound for 4096 input "
    "tokens). Please reduce the length of the input prompt. (parameter=input_text, value=360000)",
    "chat too long": TOO_LONG,
    "max_tokens>ctx": "max_tokens=5000 cannot be greater than max_model_len=4096. Please request fewer output tokens.",
    "mct>ctx": "max_completion_tokens=5000 cannot be greater than max_model_len=4096. "
    "Please request fewer output tokens.",
    "max_tokens 0": "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
    "max_tokens -1": "max_tokens must be at least 1, got -1. (parameter=max_tokens, value=-1)",
    "chat mt 0": "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
    "n=0": "n must be at least 1, got 0.",
    "n=2 temp0": "n must be 1 when using greedy sampling, got 2.",
    "n=20000": "n must be at most 16384, got 20000.",
    "logprobs 21": "Requested sample logprobs of 21, which is greater than max allowed: 20",
    "logprobs -5": "`logprobs` must be a positive value or -1.",
    "top_logprobs 21": "Requested sample logprobs of 21, which is greater than max allowed: 20",
    "top without": "when using `top_logprobs`, `logprobs` must be set to true.",
    "temp 3": "temperature must be in [0, 2], got 3.0.",
    "temp -1": "temperature must be non-negative, got -1.0.",
    "top_p 0": "top_p must be in (0, 1], got 0.0.",
    "top_p 2": "top_p must be in (0, 1], got 2.0.",
    "top_k -2": "top_k must be 0 (disable), or at least 1, got -2.",
    "pres 3": "presence_penalty must be in [-2, 2], got 3.0.",
    "no prompt": "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
    "empty prompt": "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
    "empty list": "You must pass at least one prompt",
    "[[]]": "The decoder prompt cannot be empty",
    "neg token": "{'type': 'greater_than_equal', 'loc': 'body.prompt.0', "
    "'msg': 'Input should be greater than or equal to 0'",
    "oov token": "Token id 10000000 is out of vocabulary",
    "mixed": "{'type': 'int_parsing', 'loc': 'body.prompt.0', "
    "'msg': 'Input should be a valid integer, unable to parse string as an integer",
    "min>max": "min_tokens must be less than or equal to max_tokens=2, got 5.",
    "suffix": "suffix is only supported for models with FIM completion rendering",
    "empty stop": "stop cannot contain an empty string.",
    "options": "Stream options can only be defined when `stream=True`.",
    "tools auto": '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
    "tools []": "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
    "tool_choice req": 'tool_choice="required" requires --tool-call-parser to be set',
    "no messages": "{'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required",
    "empty messages": "Cannot apply chat template to an empty conversation. Provide at least one message.",
    "image": "stub is not a multimodal model",
    "chat_template": "Chat template is passed with request, but --trust-request-chat-template is not set.",
    "cache_salt ''": "Parameter 'cache_salt' must be a non-empty string if provided.",
    "cache_salt @": "Parameter 'cache_salt' must be at most 128 characters and must not contain",
    "seed str": "1 validation error:\n  {'type': 'int_parsing', 'loc': 'body.seed', "
    "'msg': 'Input should be a valid integer, unable to parse string as an integer",
    "tokenize model": "The model `nope` does not exist. Valid aliases: stub.",
    "tokenize long": TOO_LONG,
    "tokenize longer": CONTEXT + "65537 characters (more than 65536 characters",
    "tokenize chat": TOO_LONG,
    "detokenize long": TOO_LONG,
    "render": "Scale-out endpoints are disabled.",
    "generate": "Scale-out endpoints are disabled.",
    "unload": "The lora adapter 'zz' cannot be found.",
}
"""The recorded message of a case of `test_errors`, or its beginning where the rest speaks of vLLM's own process."""

OTHERS = {"five stops", "usage", "options []", "each usage", "tokens str"}
"""Cases of a wrong shape, which have no recorded message; clients find the field in `param`."""
CLIENTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "LiteLLM: context": (C, {"prompt": [1] * 5000}, "this model's maximum context length is"),
    "LiteLLM: context of a chat": (
        H,
        {"messages": [{"role": "user", "content": "the sea " * 3000}]},
        "this model's maximum context length is",
    ),
    "LangChain: context": (C, {"prompt": [1] * 5000}, "maximum context length"),
    "OpenAI: context": (C, {"prompt": "x" * 360_000}, "please reduce the length of the"),
    "Responses: context": (
        "/v1/responses",
        {"input": "the sea " * 3000},
        "this model's maximum context length is",
    ),
    "Anthropic: context": (
        "/v1/messages",
        {"model": "stub", "messages": [{"role": "user", "content": "the sea " * 3000}], "max_tokens": 2},
        "this model's maximum context length is",
    ),
    "greedy": (H, {"messages": USER, "n": 2, "temperature": 0}, "greedy"),
    "model": (H, {"messages": USER, "model": "nope"}, "does not exist"),
    "tools": (
        H,
        {"messages": USER, "tools": TOOL},
        "tool choice requires",
    ),
}
"""What clients search for, in lower case, whatever the endpoint."""


def test_every_recorded_error_carries_its_phrase() -> None:
    assert {name for name, *_ in CASES} == PHRASES.keys() | OTHERS

    async def go() -> list[str]:
        async with serving(dev_mode=True, runtime_lora=True) as (client, _):
            return [
                f"{name}: {told}"
                for name, path, body, *_ in CASES
                if PHRASES.get(name, "validation error") not in (told := await message_of(client, path, body))
            ]

    assert asyncio.run(go()) == []


@pytest.mark.parametrize("name", CLIENTS)
def test_clients_find_the_phrase_they_search_for(name: str) -> None:
    path, body, phrase = CLIENTS[name]

    async def go() -> str:
        async with serving() as (client, _):
            return await message_of(client, path, body)

    assert phrase in asyncio.run(go()).lower()


@pytest.mark.parametrize(
    ("kind", "phrase"),
    [
        ("rate_limit", "rate limit"),
        ("invalid_api_key", "incorrect api key provided"),
        ("context_length", "this model's maximum context length is 4096 tokens"),
        ("server_error", "overloaded"),
        ("model_not_found", "the model `stub` does not exist"),
    ],
)
def test_failures_on_purpose_carry_the_phrase_of_their_kind(kind: str, phrase: str) -> None:
    async def go() -> str:
        async with serving(live_config={"failure-injection-rate": 1, "failure-types": [kind]}) as (client, _):
            return await message_of(client, C, {"prompt": "x"})

    assert phrase in asyncio.run(go()).lower()


async def message_of(client: Client, path: str, body: dict[str, Any]) -> str:
    reply = await client.post(path, body)
    assert reply.status >= 400
    return str(reply.json["error"]["message"])


def test_a_server_of_a_known_model_names_its_context_everywhere() -> None:
    process, port = start("--served-model-name", "m", model="Llama-3.1-8B")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30) as answer:
            assert json.load(answer)["data"][0]["max_model_len"] == 131072
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(port, {"prompt": [1] * 131073})
        assert b"maximum context length is 131072 tokens" in refused.value.read()
    finally:
        process.terminate()
        assert process.wait(60) == 0
        assert process.stderr is not None
        process.stderr.close()
