"""OpenAI's own client against the server, where it is installed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import understudy as us
from server.client import serving

openai = pytest.importorskip("openai")


def run(test: Any, **settings: Any) -> None:
    async def main() -> None:
        async with (
            serving(**settings) as (client, _),
            openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{client.port}/v1", api_key="x", max_retries=0
            ) as asked,
        ):
            await test(asked)

    asyncio.run(main())


def test_a_tensorrt_llm_server_answers_chats_and_completions() -> None:
    async def test(client: Any) -> None:
        messages = [{"role": "user", "content": "hello"}]
        asked = {"model": "stub", "max_tokens": 8}
        whole = await client.chat.completions.create(messages=messages, **asked)
        assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (8, "length")
        stream = await client.chat.completions.create(
            messages=messages, stream=True, stream_options={"include_usage": True}, **asked
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert (text, chunks[-1].usage.completion_tokens) == (whole.choices[0].message.content, 8)
        done = await client.completions.create(prompt="hello", **asked)
        assert len(done.choices[0].text) > 0
        with pytest.raises(openai.BadRequestError, match="should be greater than 0"):
            await client.completions.create(prompt=[1] * 4096, **asked)

    run(test, engine=us.TrtllmConfig(num_gpu_blocks=1024, max_model_len=4096), max_model_len=4096)


def test_chat_and_completions_whole_and_streamed() -> None:
    async def test(client: Any) -> None:
        models = await client.models.list()
        assert [model.id for model in models.data] == ["stub"]
        messages = [{"role": "user", "content": "hello"}]
        whole = await client.chat.completions.create(model="stub", messages=messages, max_tokens=8)
        assert whole.usage.completion_tokens == 8
        stream = await client.chat.completions.create(
            model="stub", messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == 8
        one = await client.completions.create(model="stub", prompt="x", max_tokens=4, logprobs=1)
        assert len(one.choices[0].logprobs.tokens) == 4
        several = await client.completions.create(model="stub", prompt=["x", "y"], n=2, max_tokens=4)
        assert len(several.choices) == 4

    run(test)


def test_errors_are_the_clients_own_classes() -> None:
    async def test(client: Any) -> None:
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="nope", prompt="x")
        with pytest.raises(openai.BadRequestError) as told:
            await client.completions.create(model="stub", prompt="x", max_tokens=0)
        assert told.value.param == "max_tokens"

    run(test)


def test_responses_and_structured_output() -> None:
    async def test(client: Any) -> None:
        reply = await client.responses.create(model="stub", input="hi", max_output_tokens=4)
        assert reply.output_text
        events = [
            event
            async for event in await client.responses.create(
                model="stub", input="hi", max_output_tokens=4, stream=True
            )
        ]
        assert events[-1].response.output_text == reply.output_text
        schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        whole = await client.chat.completions.create(
            model="stub", messages=[{"role": "user", "content": "x"}], response_format=form
        )
        assert whole.choices[0].message.content in ('{"ok":true}', '{"ok":false}')

    run(test)
