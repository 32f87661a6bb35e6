"""Answers as they look on the wire: keys, chunks, ids, usage, stops, choices."""

from __future__ import annotations

import asyncio
from typing import Any

from server.client import Client, serving
from understudy.server.tokenizer import builtin

C, H = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]

COMPLETION_KEYS = (
    *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage"),
    *("kv_transfer_params", "ec_transfer_params", "metrics"),
)
CHOICE_KEYS = (
    *("index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs"),
    *("prompt_token_ids", "routed_experts", "weight_versions"),
)


def run(test: Any, **settings: Any) -> None:
    async def main() -> None:
        async with serving(**settings) as (client, server):
            await test(client, server)

    asyncio.run(main())


def test_a_completion_carries_every_key_in_order() -> None:
    async def test(client: Client, _: object) -> None:
        body = (await client.post(C, {"prompt": [1000] * 48, "max_tokens": 2})).json
        assert tuple(body) == COMPLETION_KEYS
        assert tuple(body["choices"][0]) == CHOICE_KEYS
        assert body["usage"] == {
            "prompt_tokens": 48,
            "total_tokens": 50,
            "completion_tokens": 2,
            "prompt_tokens_details": {
                "cached_tokens": 0,
                "created_cache_tokens": None,
                "multimodal_tokens": None,
            },
            "completion_tokens_details": None,
        }
        again = (await client.post(C, {"prompt": [1000] * 48, "max_tokens": 2})).json
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        salted = (await client.post(C, {"prompt": [1000] * 48, "max_tokens": 2, "cache_salt": "s"})).json
        assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert again["choices"][0]["text"] == body["choices"][0]["text"]

    run(test, enable_prompt_tokens_details=True)


def test_details_need_their_flag_and_ids_may_be_given() -> None:
    async def test(client: Client, _: object) -> None:
        reply = await client.post(C, {"prompt": "x", "max_tokens": 1}, x_request_id="abc-1")
        assert reply.json["id"] == "cmpl-abc-1"
        assert reply.json["usage"]["prompt_tokens_details"] is None
        assert "x-request-id" not in reply.headers
        other = await client.post(H, {"messages": USER, "max_tokens": 1, "request_id": "mine"})
        assert other.json["id"] == "chatcmpl-mine"

    run(test)


def test_streams_of_completions_tell_a_token_a_chunk_and_the_end_with_the_last() -> None:
    async def test(client: Client, _: object) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"prompt": "hello", "max_tokens": 3, "stream": True, "stream_options": options}
        reply = await client.post(C, body)
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        *chunks, usage, done = reply.events
        assert done == "[DONE]"
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]
        assert tuple(chunks[0]["choices"][0]) == (
            *("index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"),
            "weight_versions",
        )
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 3
        assert "system_fingerprint" in usage
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        whole = (await client.post(C, {"prompt": "hello", "max_tokens": 3})).json["choices"][0]["text"]
        assert text == whole
        assert len(builtin().encode(text)) == 3
        quiet = {**body, "stream_options": {"include_usage": "false", "continuous_usage_stats": "true"}}
        assert not any("usage" in chunk for chunk in (await client.post(C, quiet)).events[:-1])

    run(test)


def test_streams_of_chat_send_the_role_with_the_first_token() -> None:
    async def test(client: Client, _: object) -> None:
        reply = await client.post(H, {"messages": USER, "max_tokens": 2, "stream": True})
        role, first, last, done = reply.events
        assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert tuple(role) == (
            "id",
            "object",
            "created",
            "model",
            "choices",
            "prompt_token_ids",
            "prompt_text",
        )
        assert tuple(first["choices"][0]["delta"]) == ("content",)
        assert first["choices"][0]["delta"]["content"]
        assert "stop_reason" not in first["choices"][0]
        assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == ("length", None)
        assert done == "[DONE]"

    run(test)


def test_a_stop_string_ends_the_answer_before_itself() -> None:
    async def test(client: Client, server: Any) -> None:
        whole = (await client.post(C, {"prompt": "q", "max_tokens": 12})).json["choices"][0]["text"]
        words = whole.split(" ")
        stop = f"{words[5][-1]} {words[6][:2]}"
        cut = whole[: whole.index(stop)]
        body = {"prompt": "q", "max_tokens": 12, "stop": ["never there", stop]}
        plain = (await client.post(C, body)).json
        assert plain["choices"][0]["text"] == cut
        assert (plain["choices"][0]["finish_reason"], plain["choices"][0]["stop_reason"]) == ("stop", stop)
        *chunks, _ = (await client.post(C, {**body, "stream": True})).events
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == cut
        assert chunks[-1]["choices"][0]["stop_reason"] == stop
        kept = (await client.post(C, {**body, "include_stop_str_in_output": True})).json
        assert kept["choices"][0]["text"] == cut + stop
        await asyncio.sleep(0.05)
        assert server.worker.cores[0].engine.pool[1] == 0

    run(test)


def test_choices_and_prompts_have_indexes_and_prompts_are_counted_once() -> None:
    async def test(client: Client, _: object) -> None:
        body = (await client.post(C, {"prompt": ["a b", "c"], "n": 3, "max_tokens": 2})).json
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        assert len({choice["text"] for choice in body["choices"]}) > 1
        alone = (await client.post(C, {"prompt": "a b", "max_tokens": 2})).json
        other = (await client.post(C, {"prompt": "c", "max_tokens": 2})).json
        assert (
            body["usage"]["prompt_tokens"]
            == alone["usage"]["prompt_tokens"] + other["usage"]["prompt_tokens"]
        )
        assert body["usage"]["completion_tokens"] == 12

    run(test)


def test_log_probabilities_have_their_forms() -> None:
    async def test(client: Client, _: object) -> None:
        body = (await client.post(C, {"prompt": "x", "max_tokens": 2, "logprobs": 2})).json
        told = body["choices"][0]["logprobs"]
        assert tuple(told) == ("text_offset", "token_logprobs", "tokens", "top_logprobs")
        assert "".join(told["tokens"]) == body["choices"][0]["text"]
        assert told["text_offset"] == [0, len(told["tokens"][0])]
        assert [len(top) for top in told["top_logprobs"]] == [3, 3]
        chat = (
            await client.post(H, {"messages": USER, "max_tokens": 1, "logprobs": True, "top_logprobs": 2})
        ).json
        (entry,) = chat["choices"][0]["logprobs"]["content"]
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 2

    run(test)


def test_structured_answers_have_their_structure() -> None:
    async def test(client: Client, _: object) -> None:
        import msgspec

        schema = {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 3},
                "b": {"enum": ["x"]},
                "c": {"type": "array"},
            },
        }
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        body = (await client.post(H, {"messages": USER, "response_format": form})).json
        said = msgspec.json.decode(body["choices"][0]["message"]["content"])
        assert said["a"] == 3
        assert said["b"] == "x"
        assert body["choices"][0]["finish_reason"] == "stop"
        choice = (await client.post(C, {"prompt": "x", "structured_outputs": {"choice": ["yes", "no"]}})).json
        assert choice["choices"][0]["text"] in ("yes", "no")
        pattern = (
            await client.post(C, {"prompt": "x", "structured_outputs": {"regex": r"\d{3}-[a-f]+"}})
        ).json
        assert pattern["choices"][0]["text"] == "000-a"

    run(test)


def test_a_named_tool_is_called() -> None:
    async def test(client: Client, _: object) -> None:
        import msgspec

        function = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "number"}}}}
        tools = [{"type": "function", "function": function}]
        wanted = {"type": "function", "function": {"name": "f"}}
        body = (await client.post(H, {"messages": USER, "tools": tools, "tool_choice": wanted})).json
        (call,) = body["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "f"
        assert msgspec.json.decode(call["function"]["arguments"]) == {"x": 0}
        assert body["choices"][0]["finish_reason"] == "tool_calls"

    run(test, tool_call_parser="hermes")


def test_without_a_length_an_answer_ends_by_itself() -> None:
    async def test(client: Client, _: object) -> None:
        body = (await client.post(H, {"messages": USER})).json
        assert body["choices"][0]["finish_reason"] == "stop"
        long = (await client.post(H, {"messages": USER, "ignore_eos": True, "max_tokens": 600})).json
        assert long["usage"]["completion_tokens"] == 600

    run(test)


def test_responses_and_messages_in_their_plain_form() -> None:
    async def test(client: Client, _: object) -> None:
        reply = (await client.post("/v1/responses", {"input": "hi", "max_output_tokens": 3})).json
        assert reply["object"] == "response"
        assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
        text = reply["output"][0]["content"][0]["text"]
        events = (
            await client.post("/v1/responses", {"input": "hi", "max_output_tokens": 3, "stream": True})
        ).events
        assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == text
        assert [e["sequence_number"] for e in events] == list(range(len(events)))
        message = (
            await client.post("/v1/messages", {"model": "stub", "messages": USER, "max_tokens": 3})
        ).json
        assert message["stop_reason"] == "max_tokens"
        streamed = (
            await client.post(
                "/v1/messages", {"model": "stub", "messages": USER, "max_tokens": 3, "stream": True}
            )
        ).events
        parts = [e["delta"]["text"] for e in streamed if e["type"] == "content_block_delta"]
        assert "".join(parts) == message["content"][0]["text"]
        assert streamed[-1]["type"] == "message_stop"

    run(test)


def test_sleeping_requests_wait_until_the_server_wakes() -> None:
    async def test(client: Client, _: object) -> None:
        assert (await client.post("/sleep?level=1", {})).status == 200
        assert (await client.get("/is_sleeping")).json == {"is_sleeping": True}
        waiting = asyncio.create_task(client.post(C, {"prompt": "x", "max_tokens": 2}))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await client.post("/wake_up", {})
        assert (await waiting).status == 200

    run(test, dev_mode=True)


def test_adapters_come_and_go_and_share_no_blocks_with_the_model() -> None:
    async def test(client: Client, _: object) -> None:
        body = {"prompt": [7] * 40, "max_tokens": 1}
        await client.post(C, body)
        loaded = await client.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/p"})
        assert (loaded.status, loaded.body[:8]) == (200, b"Success:")
        twice = await client.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/p"})
        assert twice.json["error"]["type"] == "InvalidUserInput"
        answer = (await client.post(C, {**body, "model": "a"})).json
        assert answer["model"] == "a"
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        names = [card["id"] for card in (await client.get("/v1/models")).json["data"]]
        assert names == ["stub", "a"]
        assert (await client.post("/v1/unload_lora_adapter", {"lora_name": "a"})).status == 200
        assert (await client.post(C, {**body, "model": "a"})).status == 404

    run(test, runtime_lora=True, enable_prompt_tokens_details=True)
