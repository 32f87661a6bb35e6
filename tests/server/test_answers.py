"""Requests of every kind get the status, type and param that vLLM's own front end gives them, 0.32's and 0.33's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from server.client import QUICK, Client, Reply, serving

GOLDEN = Path(__file__).parents[1] / "golden" / "live"


def recorded(version: str) -> list[dict[str, Any]]:
    """Recorded answers of 0.32; those of 0.33 replace the ones that differ, and add new ones."""

    def read(name: str) -> list[dict[str, Any]]:
        lines = (GOLDEN / f"vllm-{name}.0-answers.jsonl").read_bytes().splitlines()
        return [msgspec.json.decode(line) for line in lines]

    def asked(row: dict[str, Any]) -> dict[str, Any]:
        return {key: row[key] for key in row if key not in ("status", "type", "param")}

    newer = read("0.33") if version == "0.33" else []
    changed = [asked(row) for row in newer]
    return [row for row in read("0.32") if asked(row) not in changed] + newer


async def ask(client: Client, row: dict[str, Any]) -> Reply:
    given = {"host": "localhost", "connection": "close"}
    data = b""
    if "raw" in row or "body" in row:
        given["content-type"] = "application/json"
        data = row["raw"].encode() if "raw" in row else msgspec.json.encode(row["body"])
    given |= row.get("headers", {})
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items() if value is not None)
    line = f"{row['method']} {row['path']} HTTP/1.1\r\n{head}content-length: {len(data)}\r\n\r\n"
    return await client.raw(line.encode() + data)


def told(reply: Reply) -> tuple[int, str | None, str | None]:
    """Status, type and param."""
    error: Any = None
    if reply.status >= 400 and reply.body:
        error = reply.json.get("error")
    if not isinstance(error, dict):
        return reply.status, None, None
    return reply.status, error["type"], error.get("param")


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_answers_are_of_the_recorded_kind(version: str) -> None:
    rows = recorded(version)
    assert len(rows) > 1000
    engine = msgspec.structs.replace(QUICK, vllm_version=version)

    async def go() -> list[str]:
        wrong: list[str] = []
        async with serving(
            model="stub-model",
            dev_mode=True,
            runtime_lora=True,
            latency_ms=(0.0, 0.0),
            clock_speed=100.0,
            engine=engine,
        ) as (client, _):
            for row in rows:
                got = told(await ask(client, row))
                if got != (row["status"], row.get("type"), row.get("param")):
                    wrong.append(f"{msgspec.json.encode(row).decode()[:300]}: {got}")
        return wrong

    wrong = asyncio.run(go())
    assert not wrong, "\n".join(wrong)


def test_a_stream_without_usage_ends_with_the_fingerprint_and_begins_with_all_roles() -> None:
    async def go() -> list[Any]:
        async with serving() as (client, _):
            messages = [{"role": "user", "content": "hi"}]
            body = {"messages": messages, "n": 2, "max_tokens": 2, "stream": True}
            return (await client.post("/v1/chat/completions", body)).events

    events = asyncio.run(go())
    assert [event["choices"][0]["delta"].get("role") for event in events[:2]] == ["assistant", "assistant"]
    assert [event["choices"][0]["index"] for event in events[:2]] == [0, 1]
    ends = [event for event in events[:-1] if event["choices"][0]["finish_reason"]]
    assert len(ends) == 2
    assert all("system_fingerprint" in event for event in ends)
    assert not any("system_fingerprint" in event for event in events[:-1] if event not in ends)


def test_continuous_usage_of_a_chat_counts_from_the_role_on() -> None:
    async def go() -> list[Any]:
        async with serving() as (client, _):
            options = {"include_usage": True, "continuous_usage_stats": True}
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}
            return (await client.post("/v1/chat/completions", {**body, "stream_options": options})).events

    events = asyncio.run(go())
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == [0, 1, 2, 2]
    assert "completion_tokens_details" in events[0]["usage"]


def test_chunks_hold_so_many_tokens_but_the_first_and_the_last() -> None:
    async def go(**settings: Any) -> list[int]:
        async with serving(**settings) as (client, _):
            body = {"prompt": "hi", "max_tokens": 8, "stream": True, "return_token_ids": True}
            own = await client.post("/v1/completions", {**body, "stream_interval": 2})
            return [len(event["choices"][0]["token_ids"]) for event in own.events[:-1]]

    assert asyncio.run(go()) == [1, 2, 2, 2, 1]
    assert asyncio.run(go(stream_interval=3)) == [1, 3, 3, 1]


def test_a_quiet_stream_is_kept_alive_with_comments() -> None:
    async def go() -> bytes:
        async with serving(latency_ms=(400.0, 1.0), sse_keep_alive_interval_s=0.05) as (client, _):
            return (
                await client.post("/v1/completions", {"prompt": "hi", "max_tokens": 2, "stream": True})
            ).body

    body = asyncio.run(go())
    assert body.startswith(b": keep-alive\n\n")
    assert body.endswith(b"data: [DONE]\n\n")


def test_a_batch_answers_every_conversation() -> None:
    async def go() -> Any:
        async with serving() as (client, _):
            turns = [[{"role": "user", "content": text}] for text in ("hi", "good morning")]
            return (
                await client.post("/v1/chat/completions/batch", {"messages": turns, "max_tokens": 3})
            ).json

    answer = asyncio.run(go())
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["message"]["content"] for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 6


def test_scores_are_probabilities_and_the_same_every_time() -> None:
    async def go() -> tuple[Any, Any, Any]:
        async with serving() as (client, _):
            body = {"query": "is this good:", "items": ["yes", "no"], "label_token_ids": [300, 301]}
            first = (await client.post("/generative_scoring", body)).json
            again = (await client.post("/generative_scoring", body)).json
            alone = (await client.post("/generative_scoring", {**body, "label_token_ids": [300]})).json
            return first, again, alone

    first, again, alone = asyncio.run(go())
    scores = [row["score"] for row in first["data"]]
    assert all(0 < score < 1 for score in scores)
    assert scores == [row["score"] for row in again["data"]]
    assert [row["score"] for row in alone["data"]] == [1.0, 1.0]
    assert first["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("item_first", [False, True])
def test_a_query_is_read_and_scored_as_far_as_the_context_goes(
    item_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        async with serving() as (client, server):
            kind, enough = type(server.worker.tokenizer), []
            encode = kind.encode

            def counted(self: Any, text: str, **named: Any) -> list[int]:
                enough.append(named.get("enough"))
                return encode(self, text, **named)

            monkeypatch.setattr(kind, "encode", counted)
            body = {"items": ["yes", "no"], "label_token_ids": [300], "item_first": item_first}
            reply = await client.post("/generative_scoring", {**body, "query": " a" * 9000})
            assert reply.json["usage"]["prompt_tokens"] == 2 * 4095
            assert enough == [4095] * 3

    asyncio.run(go())


def test_a_message_that_is_to_be_continued_stays_open() -> None:
    async def go() -> tuple[Any, Any]:
        async with serving() as (client, _):
            turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
            body = {"messages": turns, "max_tokens": 1, "return_prompt_text": True}
            closed = {**body, "add_generation_prompt": False}
            return (await client.post("/v1/chat/completions", closed)).json, (
                await client.post("/v1/chat/completions", {**closed, "continue_final_message": True})
            ).json

    whole, opened = asyncio.run(go())
    assert opened["prompt_text"].endswith("well")
    assert whole["prompt_text"].startswith(opened["prompt_text"])
    assert len(whole["prompt_text"]) > len(opened["prompt_text"])


def test_every_answer_carries_the_requests_id_where_that_was_asked_for() -> None:
    async def go() -> list[Reply]:
        async with serving(enable_request_id_headers=True, api_keys=("k",)) as (client, _):
            asked = {"authorization": "Bearer k", "x-request-id": "mine"}
            body = {"prompt": "hi", "max_tokens": 1}
            return [
                await client.ask("POST", "/v1/completions", body, headers=asked),
                await client.ask("POST", "/v1/completions", {**body, "stream": True}, headers=asked),
                await client.ask("POST", "/v1/completions", {"prompt": ""}, headers=asked),
                await client.ask("GET", "/nope", headers=asked),
                await client.ask("GET", "/v1/models", headers={"x-request-id": "mine"}),
                await client.ask("GET", "/health"),
            ]

    *known, new = asyncio.run(go())
    assert [reply.headers["x-request-id"] for reply in known] == ["mine"] * 5
    assert [reply.status for reply in known] == [200, 200, 400, 404, 401]
    assert len(new.headers["x-request-id"]) == 32


def test_a_request_is_told_its_times_where_that_was_asked_for() -> None:
    async def go() -> tuple[Any, Any, Any]:
        async with serving(enable_per_request_metrics=True, latency_ms=(20.0, 10.0)) as (client, _):
            body = {"prompt": "hi", "max_tokens": 3}
            one = (await client.post("/v1/completions", body)).json
            two = (await client.post("/v1/completions", {**body, "n": 2})).json
            options = {"stream": True, "stream_options": {"include_usage": True}}
            return one, two, (await client.post("/v1/completions", {**body, **options})).events[-2]

    one, two, last = asyncio.run(go())
    times = one["metrics"]
    assert times["mean_itl_ms"] == pytest.approx(times["generation_time_ms"] / 2)
    assert times["generation_time_ms"] == pytest.approx(20.0)
    assert times["time_to_first_token_ms"] >= 20.0
    assert two["metrics"] is None
    assert set(last["metrics"]) == set(times) - {"speculative_decoding"}


def test_a_preflight_is_told_the_headers_that_it_asked_for() -> None:
    async def go() -> Reply:
        async with serving(allowed_origins=("http://a",)) as (client, _):
            asked = {"origin": "http://a", "access-control-request-method": "POST"}
            asked["access-control-request-headers"] = "x-a,x-b"
            return await client.ask("OPTIONS", "/v1/models", headers=asked)

    reply = asyncio.run(go())
    assert reply.status == 200
    assert reply.headers["access-control-allow-headers"] == "x-a,x-b"
    assert reply.headers["access-control-allow-origin"] == "http://a"
    assert "Access-Control-Request-Headers" in reply.headers["vary"]
