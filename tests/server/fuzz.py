"""Requests that no client should send: mutated JSON, mutated bytes, clients that stop in the middle."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec

from server.client import Client, parse_reply

PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize"),
    *(
        "/v1/load_lora_adapter",
        "/admin/config",
        "/invocations",
        "/v1/messages/count_tokens",
        "/v1/chat/completions/batch",
        "/generative_scoring",
        "/v1/systemone",
        "/sleep",
        "/nope",
    ),
    *(
        "/inference/v1/generate",
        "/v1/completions/render",
        "/v1/chat/completions/render",
        "/v1/messages/render",
    ),
    *(
        "/v1/responses/render",
        "/v1/completions/derender",
        "/v1/chat/completions/derender",
        "/adapters",
        "/adapters/x",
    ),
    *("/inference/v1/abort_requests", "/scale_elastic_ep", "/metrics", "/openapi.json", "/docs"),
)
DEVELOPERS = (
    *("/collective_rpc", "/init_weight_transfer_engine", "/update_weights", "/finish_weight_update"),
    *(
        "/update_weight_version",
        "/weight_checker",
        "/weight_info",
        "/abort_requests",
        "/server_info",
        "/resume",
    ),
    *("/reset_prefix_cache", "/get_world_size?include_dp=x", "/v1/completions", "/wake_up", "/is_paused"),
)
"""Of developer mode, all but those that let everybody wait."""
FIELDS = (
    *(
        "prompt",
        "messages",
        "input",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "stop",
        "stream",
        "logprobs",
        "echo",
    ),
    *(
        "top_logprobs",
        "temperature",
        "top_p",
        "top_k",
        "min_tokens",
        "seed",
        "priority",
        "cache_salt",
        "tools",
    ),
    *(
        "tool_choice",
        "response_format",
        "structured_outputs",
        "stream_options",
        "stop_token_ids",
        "request_id",
    ),
    *("truncate_prompt_tokens", "suffix", "model", "user", "prompt_logprobs", "kv_transfer_params", "tokens"),
    *(
        "add_generation_prompt",
        "session_id",
        "lora_name",
        "lora_path",
        "failure-injection-rate",
        "instructions",
    ),
    *(
        "token_ids",
        "sampling_params",
        "generate_response",
        "generate_responses",
        "output_mode",
        "name",
        "src",
    ),
    *("method", "args", "update_info", "init_info", "new_version", "weight_version", "action", "baseline"),
    *("request_ids", "new_data_parallel_size", "drain_timeout", "prompt_tokens"),
    *("generate_chunk", "stream_state", "prompt_token_ids", "chat_request", "inter-token-latency-std-dev"),
)
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        7,
        2**31,
        2**63,
        -(2**63),
        10**30,
        0.5,
        -0.0,
        1e308,
        "",
        "x",
        "5",
        "true",
    ),
    *(
        "\ud800",
        "ÿ日本\x00",
        [],
        {},
        [[]],
        [None],
        [1, 2],
        ["a"],
        [-1],
        [2**40],
        [[1], [2, "x"]],
        {"a": {"b": []}},
    ),
    *({"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$ref"}}}, {"type": "json_object"}),
    *(
        {"regex": "(a|b)*[^c]{3}"},
        {"regex": "((("},
        {"regex": "a*"},
        {"choice": [""]},
        {"choice": []},
        {"json": "{"},
        {"include_usage": True},
    ),
    *([{"role": "user", "content": "hi"}], [{"role": "user", "content": [{"type": "text"}]}], [{"role": 1}]),
    *(
        {"choices": [{"token_ids": [1, 2]}]},
        {"choices": [{"token_ids": ["x"]}]},
        [{"choices": []}],
        "text",
        "compare",
    ),
    *(
        {"choices": [{"index": 0, "token_ids": [1, 250, 3]}], "usage": {"prompt_tokens": 1}},
        {
            "choices": [
                {"index": 0, "token_ids": [5], "logprobs": {"content": [{"token_id": 9, "logprob": -1}]}}
            ]
        },
        {"prev_tokens": ["5", "7"], "read_offset": 1, "role_sent": True},
        {"prev_tokens": ["-5"], "read_offset": 1, "output_token_ids": [1], "output_chunk_lens": [1]},
    ),
    *({"max_tokens": 2}, {"max_tokens": "x", "logprobs": 3}, {"logprobs": -5, "n": 0}),
    *([{"type": "function", "function": {"name": "f", "parameters": {"enum": [1]}}}], "required"),
)


def body_of(draw: random.Random) -> bytes:
    """A body, near one that makes sense or far from it."""
    body: dict[str, Any] = {"max_tokens": draw.choice([1, 3])}
    if draw.random() < 0.7:
        body["prompt"] = draw.choice(["hello", [1, 2, 3], ["a", "b"]])
        body["messages"] = [{"role": "user", "content": "hi"}]
        body["input"] = "hi"
    for _ in range(draw.randrange(4)):
        body[draw.choice(FIELDS)] = draw.choice(VALUES)
    try:
        data = msgspec.json.encode(body)
    except (UnicodeEncodeError, ValueError):
        data = b'{"prompt":"\\ud800","max_tokens":1}'
    if draw.random() < 0.2:
        place = draw.randrange(len(data))
        data = data[:place] + bytes([draw.randrange(256)]) + data[place + draw.randrange(3) :]
    return data


async def one(client: Client, draw: random.Random, paths: tuple[str, ...] = PATHS) -> None:
    """Send one; it must be answered by JSON with a code, or by what was asked for."""
    method = draw.choice(["POST"] * 8 + ["GET", "PUT", "OPTIONS", "\x00"])
    data = body_of(draw)
    kind = draw.choice(["application/json"] * 9 + ["text/plain"])
    head = (
        f"{method} {draw.choice(paths)} HTTP/1.1\r\nhost: f\r\nconnection: close\r\ncontent-type: {kind}\r\n"
    )
    if draw.random() < 0.1:
        name = draw.choice(
            ["x-data-parallel-rank", "x-vllm-priority", "x-request-id", "x-return-error", "origin"]
        )
        head += f"{name}: {draw.choice(['-1', '999999999999', 'ÿ', '404', '', 'a' * 500])}\r\n"
    wire = head.encode("latin-1") + b"content-length: %d\r\n\r\n" % len(data) + data
    patience_s = 30.0
    if draw.random() < 0.05:
        patience_s = 0.2  # it may have become the beginning of a longer one
        place = draw.randrange(len(wire))
        wire = wire[:place] + bytes([draw.randrange(256)]) + wire[place:]
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    try:
        if draw.random() < 0.1:  # a client that vanishes
            writer.write(wire[: draw.randrange(len(wire))])
            await asyncio.sleep(draw.choice([0, 0.005]))
            return
        writer.write(wire)
        writer.write_eof() if draw.random() < 0.02 else None
        answer = await asyncio.wait_for(reader.read(), patience_s)
        if not answer:  # the mutation asked for more than it sent, and the client went away
            return
        reply = parse_reply(answer)
        asked_for = b" /scale_elastic_ep " in wire and b'"Internal Server Error"' in answer  # vLLM's own word
        assert reply.status < 500 or reply.status == 503 or asked_for, (wire, answer)
        if reply.status >= 400 and reply.headers.get("content-type") == "application/json":
            told = reply.json
            assert "detail" in told or "error" in told, answer
    except (TimeoutError, ConnectionResetError) as error:
        if isinstance(error, asyncio.TimeoutError):
            assert patience_s < 1, wire
    finally:
        writer.close()


async def play(
    client: Client, count: int, seed: int, *, at_once: int = 16, paths: tuple[str, ...] = PATHS
) -> None:
    """So many of them, some at a time."""
    draws = random.Random(seed)
    left = count
    while left > 0:
        size = min(at_once, left)
        await asyncio.gather(*(one(client, random.Random(draws.random()), paths) for _ in range(size)))
        left -= size
