"""Answers of a given form: bounded, whatever the form asks for; and those that nothing meets, which are empty."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from server.client import QUICK, serving
from understudy.errors import InvalidArgument
from understudy.server.api.planner import Planner

if TYPE_CHECKING:
    from understudy.server.core import EngineCore

C, H = "/v1/completions", "/v1/chat/completions"


def nested(inner: dict[str, Any], levels: int = 3) -> dict[str, Any]:
    for _ in range(levels):
        inner = {"type": "array", "minItems": 16, "items": inner}
    return inner


def test_an_answer_that_exceeds_its_tokens_is_cut_and_one_that_exceeds_all_answers_is_refused() -> None:
    async def main() -> None:
        async with serving() as (client, _):
            form = {"json": nested({"const": "a" * 100_000})}
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
        config = msgspec.structs.replace(QUICK, max_model_len=1 << 18, num_gpu_blocks=1 << 15)
        async with serving(engine=config, max_model_len=1 << 18) as (client, _):
            body = {"prompt": "x", "max_tokens": 1 << 17, "structured_outputs": form}
            reply = await client.post(C, body)
            assert reply.status == 400
            assert "the answer would exceed 131072 characters" in reply.json["error"]["message"]

    asyncio.run(main())


def test_the_answers_to_one_request_share_what_it_may_have() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": "a" * 130_000}},
        "required": ["a"],
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    called = {"type": "function", "function": {"name": "f"}}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 600}

    async def main() -> None:
        async with serving(tool_call_parser="hermes") as (client, server):
            for path, body in (
                (C, {"prompt": "x", "max_tokens": 600, "structured_outputs": {"json": schema}}),
                ("/v1/chat/completions", {**chat, "tools": [tool], "tool_choice": called}),
            ):
                assert (await client.post(path, {**body, "n": 4})).status == 200
                refused = await client.post(path, {**body, "n": 60})
                assert refused.status == 400
                assert "characters together; send several" in refused.json["error"]["message"]
            assert not server.app.endpoints.in_flight
            assert not server.worker.live()

    asyncio.run(main())


SCHEMA = {"type": "object", "properties": {"a": {"const": "a" * 60_000}}}
CALLED: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
}
SAID = {"messages": [{"role": "user", "content": "x"}]}
MANY: list[tuple[str, dict[str, Any]]] = [
    (C, {"prompt": "x", "n": 20, "structured_outputs": {"json": SCHEMA}, "max_tokens": 400}),
    (C, {"prompt": ["x", "y"], "n": 20, "max_tokens": 2000, "stop": ["zzqq"]}),
    (C, {"prompt": "x", "n": 2000, "max_tokens": 1, "stream": True}),
    (H, {**SAID, "n": 20, "max_tokens": 400, **CALLED}),
    ("/generative_scoring", {"query": [7] * 4000, "items": ["x"] * 300, "label_token_ids": [300]}),
    (f"{H}/batch", {"messages": [SAID["messages"]] * 20, "max_tokens": 2000}),
]


@pytest.mark.parametrize(("path", "body"), MANY, ids=range(len(MANY)))
def test_others_are_served_while_many_answers_are_made(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in turns of the event loop: in none is more made than some of them."""
    made = [0]
    plan = Planner.plan_one

    def counted(*args: Any, **named: Any) -> Any:
        made[-1] += 1
        return plan(*args, **named)

    monkeypatch.setattr(Planner, "plan_one", counted)

    async def main() -> None:
        async with serving(tool_call_parser="hermes") as (client, server):
            loop = asyncio.get_running_loop()

            def tick() -> None:
                made.append(0)
                loop.call_soon(tick)

            tick()
            reply = await client.post(path, body)
            assert reply.status == 200, reply.body
            assert not server.app.endpoints.in_flight

    asyncio.run(main())
    assert sum(made) >= 20
    assert max(made) <= sum(made) // 4


def test_who_leaves_while_its_answers_are_made_costs_nothing_more() -> None:
    body = {"prompt": "x", "n": 8000, "max_tokens": 1000, "stop": ["zzqq"]}

    async def main() -> None:
        async with serving() as (client, server):
            endpoints = server.app.endpoints
            asks = asyncio.ensure_future(client.post(C, body))
            while not endpoints.in_flight:
                await asyncio.sleep(0)
            (generation,) = endpoints.in_flight
            generation.connection.drop()
            while endpoints.in_flight:
                await asyncio.sleep(0)
            assert len(generation.choices) < 8000
            assert not server.worker.live()
            assert (await client.post(C, {"prompt": "x", "max_tokens": 1})).status == 200
            await asyncio.gather(asks, return_exceptions=True)

    asyncio.run(main())


def test_a_refusal_in_the_middle_of_many_answers_is_an_answer() -> None:
    async def main() -> None:
        async with serving(max_num_queued_reqs=0) as (client, server):
            body = {"prompt": "x", "n": 20, "max_tokens": 2000}
            reply = await client.post(C, body)
            assert (reply.status, reply.json["error"]["type"]) == (503, "Service Unavailable")
            assert not server.app.endpoints.in_flight

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

                def refuse(*_: object) -> None:
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
