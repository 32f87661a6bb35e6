"""Prompts to tokens, tokens to tokens, tokens to text: each by itself, and together what the usual way says."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from server.client import serving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from server.client import Client

C = "/v1/completions"
G = "/inference/v1/generate"


def talk(what: Callable[[Client], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        async with serving(enable_scale_out=True, **settings) as (client, server):
            await what(client)
            assert not server.app.endpoints.in_flight

    asyncio.run(main())


def test_what_is_rendered_generated_and_read_is_what_a_completion_says() -> None:
    async def what(client: Client) -> None:
        body = {"prompt": [[8, 9], [5, 6, 7]], "max_tokens": 6, "seed": 3}
        usual = (await client.post(C, body)).json
        rendered = (await client.post(f"{C}/render", body, x_request_id="r")).json
        assert [one["request_id"] for one in rendered] == ["cmpl-r-0", "cmpl-r-1"]
        assert rendered[1]["token_ids"] == [5, 6, 7]
        generated = [(await client.post(G, one)).json for one in rendered]
        assert generated[0]["request_id"] == "generate-tokens-cmpl-r-0"
        assert [len(one["choices"][0]["token_ids"]) for one in generated] == [6, 6]
        lengths = [len(one["token_ids"]) for one in rendered]
        told = (
            await client.post(f"{C}/derender", {"generate_responses": generated, "prompt_tokens": lengths})
        ).json
        assert [choice["text"] for choice in told["choices"]] == [
            choice["text"] for choice in usual["choices"]
        ]
        assert told["usage"]["total_tokens"] == usual["usage"]["total_tokens"]

    talk(what)


def test_chats_of_all_kinds_are_rendered_to_the_same_tokens() -> None:
    async def what(client: Client) -> None:
        messages = [{"role": "user", "content": "hi"}]
        counted = (await client.post("/tokenize", {"messages": messages})).json["tokens"]
        chat = (await client.post("/v1/chat/completions/render", {"messages": messages})).json
        assert chat["token_ids"] == counted
        assert chat["sampling_params"]["max_tokens"] == 4096 - len(counted)
        asked = {"model": "stub", "max_tokens": 5, "messages": messages}
        theirs = (await client.post("/v1/messages/render", asked)).json
        assert (theirs["token_ids"], theirs["sampling_params"]["max_tokens"]) == (counted, 5)
        response = (await client.post("/v1/responses/render", {"input": "hi"})).json
        assert response["token_ids"] == counted
        assert response["request_id"].startswith("resp_")
        generated = (await client.post(G, {**chat, "sampling_params": {"max_tokens": 4, "seed": 1}})).json
        told = (await client.post("/v1/chat/completions/derender", {"generate_response": generated})).json
        usual = await client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4, "seed": 1})
        assert told["choices"][0]["message"]["content"] == usual.json["choices"][0]["message"]["content"]

    talk(what)


def test_tokens_are_streamed_with_their_text_where_that_is_asked_for() -> None:
    async def what(client: Client) -> None:
        body = {
            "token_ids": [1, 2, 3],
            "sampling_params": {"max_tokens": 3},
            "request_id": "a",
            "stream": True,
        }
        events = (await client.post(G, {**body, "return_token_ids": True})).events
        assert events[-1] == "[DONE]"
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, "length"]
        assert [event.get("prompt_token_ids") for event in events[:-1]] == [[1, 2, 3], None, None]
        assert {event["request_id"] for event in events[:-1]} == {"generate-tokens-a"}
        assert "text" not in events[0]["choices"][0]
        spoken = {**body, "output_mode": "text", "stream_options": {"include_usage": True}}
        texts = (await client.post(G, spoken)).events
        assert texts[-2]["usage"] == {"prompt_tokens": 3, "total_tokens": 6, "completion_tokens": 3}
        whole = (await client.post(G, {**body, "stream": False, "output_mode": "text"})).json
        assert "".join(event["choices"][0]["text"] for event in texts[:-2]) == whole["choices"][0]["text"]
        ids = [token for event in events[:-1] for token in event["choices"][0]["token_ids"]]
        assert ids == whole["choices"][0]["token_ids"]

    talk(what)


def test_log_probabilities_of_tokens_are_by_number() -> None:
    async def what(client: Client) -> None:
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 2, "logprobs": 2}}
        choice = (await client.post(G, body)).json["choices"][0]
        content = choice["logprobs"]["content"]
        assert [entry["token_id"] for entry in content] == choice["token_ids"]
        assert [[top["rank"] for top in entry["top_logprobs"]] for entry in content] == [[1, 2], [1, 2]]
        assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in content)

    talk(what)


def test_wrong_bodies_are_refused_as_vllm_does() -> None:
    async def what(client: Client) -> None:
        asked = {
            (G, "body.token_ids"): {},
            (G, "body.sampling_params"): {"token_ids": [1]},
            (f"{C}/render", "prompt"): {},
            ("/v1/chat/completions/render", "body.messages"): {},
            ("/v1/messages/render", "body.model"): {},
            ("/v1/responses/render", "body.input"): {},
            (f"{C}/derender", "body.generate_responses"): {},
            ("/v1/chat/completions/derender", "body.DerenderChatRequest.generate_response"): {},
        }
        for (path, param), body in asked.items():
            reply = await client.post(path, body)
            assert (reply.status, reply.json["error"]["param"]) == (400, param), path
        for tokens in ([], [-1]):
            reply = await client.post(G, {"token_ids": tokens, "sampling_params": {}})
            assert reply.json["error"]["param"].startswith("body.token_ids")
        odd = {"generate_responses": [{"choices": [{"token_ids": ["x"]}]}]}
        assert (await client.post(f"{C}/derender", odd)).status == 400
        assert (await client.ask("GET", "/v1/responses/render")).json["error"]["param"] == "response_id"
        assert (await client.post("/inference/v1/abort_requests", {})).status == 400
        assert (await client.post("/inference/v1/abort_requests", {"request_ids": ["x"]})).body == b""

    talk(what)
