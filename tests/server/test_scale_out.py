"""Prompts to tokens, tokens to tokens, tokens to text: each by itself, and together what the usual way says."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from server.client import serving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

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


def test_a_stream_is_read_chunk_by_chunk_with_nothing_kept_here() -> None:
    async def what(client: Client) -> None:
        messages = [{"role": "user", "content": "hi"}]
        chat = {"messages": messages, "max_tokens": 6, "seed": 1, "logprobs": True, "top_logprobs": 2}
        usual = (await client.post("/v1/chat/completions", chat)).json["choices"][0]
        rendered = (await client.post("/v1/chat/completions/render", chat)).json
        options = {"stream": True, "stream_options": {"include_usage": True}}
        for path, said in (("/v1/chat/completions/derender", "delta"), (f"{C}/derender", "text")):
            text, state, roles, tokens, seen = "", None, [], [], None
            for event in (await client.post(G, {**rendered, **options})).events[:-1]:
                asked = {"stream": True, "generate_chunk": event, "stream_state": state, "prompt_tokens": 50}
                told = await client.post(path, {**asked, "prompt_token_ids": rendered["token_ids"]})
                assert told.status == 200, told.body
                chunk, state = told.json["chunk"], told.json["stream_state"]
                assert chunk["id"] == event["request_id"]
                assert len(state["prev_tokens"]) < 9
                for choice in chunk["choices"]:
                    seen = choice["finish_reason"]
                    if said == "delta":
                        roles.append(choice["delta"]["role"])
                        text += choice["delta"]["content"] or ""
                        tokens += [entry["token"] for entry in choice["logprobs"]["content"]]
                    else:
                        assert choice["logprobs"]["text_offset"][0] == len(text)
                        text += choice["text"]
                        tokens += choice["logprobs"]["tokens"]
            assert text == usual["message"]["content"]
            assert tokens == [entry["token"] for entry in usual["logprobs"]["content"]]
            assert seen == usual["finish_reason"]
            assert roles == ["assistant", *[None] * 5] or said == "text"
            assert chunk["choices"] == []
            assert (chunk["usage"]["prompt_tokens"], chunk["usage"]["total_tokens"]) == (50, 56)

    talk(what)


def test_half_a_character_waits_for_its_other_half() -> None:
    async def what(client: Client) -> None:
        ids = (await client.post("/tokenize", {"prompt": "☃ 雪 a"})).json["tokens"]
        assert len(ids) > 3
        whole = {"choices": [{"index": 0, "token_ids": ids}]}
        for cut in range(len(ids) + 1):
            text, state = "", None
            for part in (ids[:cut], ids[cut:]):
                chunk = {"request_id": "a", "choices": [{"index": 0, "token_ids": part}]}
                asked = {"stream": True, "generate_chunk": chunk, "stream_state": state}
                told = (await client.post(f"{C}/derender", asked)).json
                state = told["stream_state"]
                text += told["chunk"]["choices"][0]["text"]
                assert "�" not in text
            assert text == "☃ 雪 a"
        told = (await client.post(f"{C}/derender", {"generate_responses": [whole]})).json
        assert told["choices"][0]["text"] == "☃ 雪 a"

    talk(what)


@pytest.mark.parametrize("kind", ["half a character", "nothing to see"])
def test_tokens_that_never_become_text_cost_no_more_than_others(kind: str) -> None:
    async def main() -> None:
        async with serving(enable_scale_out=True) as (client, server):
            tokenizer = server.worker.tokenizer
            token, shown = (0xE2, "\ufffd") if kind == "half a character" else (tokenizer.end_id, "")
            decode, seen = tokenizer.decode, []

            def counted(ids: Sequence[int], **how: Any) -> str:
                seen.append(len(ids))
                return str(decode(ids, **how))

            tokenizer.decode = counted  # type: ignore[method-assign]
            whole = {"generate_responses": [{"choices": [{"index": 0, "token_ids": [token] * 2000}]}]}
            told = (await client.post(f"{C}/derender", whole)).json
            assert told["choices"][0]["text"] == shown * 2000
            assert sum(seen) < 2000 * 300
            state, text = None, ""
            for _ in range(4):  # the state stays one that is taken
                chunk = {"choices": [{"index": 0, "token_ids": [token] * 500}]}
                asked = {"stream": True, "generate_chunk": chunk, "stream_state": state}
                reply = await client.post(f"{C}/derender", asked)
                assert reply.status == 200
                state, text = reply.json["stream_state"], text + reply.json["chunk"]["choices"][0]["text"]
                assert len(state["prev_tokens"]) < 200
            assert text == shown * len(text)
            assert len(text) >= len(shown) * 1900

    asyncio.run(main())


def test_chunks_and_states_that_are_none_are_refused() -> None:
    async def what(client: Client) -> None:
        chunk = {"request_id": "a", "choices": [{"index": 0, "token_ids": [5, 6]}]}
        two = {"choices": [{"index": n, "token_ids": [5]} for n in (0, 1)]}
        for path, where in (
            ("/v1/chat/completions/derender", "body.DerenderChatRequest.stream"),
            (f"{C}/derender", "body.stream"),
        ):
            for param, more in (
                (where, {"generate_chunk": {}}),
                (where, {"generate_chunk": {"choices": [{"token_ids": [1]}]}}),
                (where, {"generate_chunk": {"choices": [{"index": 0, "token_ids": ["x"]}]}}),
                (where, {"generate_chunk": {**chunk, "output_mode": "text"}}),
                (where, {"stream": "true"}),
                (where, {"stream": None}),
                (where, {"stream_state": {"prev_tokens": 5}}),
                (where, {"stream_state": {"prev_tokens": ["1"] * 2000}}),
                (where, {"stream_state": {"prefix_offset": -1}}),
                (where, {"stream_state": {"output_token_ids": [1]}}),
                (where, {"stream_state": {"logprob_context_token_ids": [1, 2, 3, 4, 5]}}),
                (where, {"prompt_token_ids": [-1]}),
                (None, {"generate_chunk": two}),
                (None, {"stream_state": {"prev_tokens": ["not ours"], "read_offset": 1}}),
                (None, {"stream_state": {"read_offset": 7}}),
                (None, {"generate_chunk": {"choices": [{"index": 0, "token_ids": [10**9]}]}}),
                (None, {"prompt_token_ids": [1] * 5000}),
            ):
                told = await client.post(path, {"stream": True, "generate_chunk": chunk, **more})
                assert (told.status, told.json["error"]["param"]) == (400, param), (path, more)
            lost = {"stream": True, "generate_chunk": chunk, "model": "nobody"}
            assert (await client.post(path, lost)).status == 404
        none: tuple[dict[str, Any], ...] = (
            {"generate_responses": []},
            {"generate_responses": [{"choices": [{"index": 0, "token_ids": None}]}]},
            {"generate_responses": [chunk], "prompt_tokens": [1, 2]},
        )
        for body in none:
            assert (await client.post(f"{C}/derender", body)).status == 400, body

    talk(what)


def test_sampling_parameters_of_another_type_are_refused_and_others_are_nobodys() -> None:
    async def what(client: Client) -> None:
        wrong: tuple[dict[str, Any], ...] = (
            {"max_tokens": "x"},
            {"temperature": "a"},
            {"stop": 5},
            {"output_kind": 7},
            {"detokenize": "x"},
            {"extra_args": 3},
            {"seed": "x"},
        )
        for given in wrong:
            told = await client.post(G, {"token_ids": [1], "sampling_params": given})
            assert (told.status, told.json["error"]["param"]) == (400, "body.sampling_params"), given
            assert "2 validation errors" in told.json["error"]["message"]
        told = await client.post(G, {"token_ids": [1], "sampling_params": {"colour": "red", "max_tokens": 2}})
        assert len(told.json["choices"][0]["token_ids"]) == 2

    talk(what)
