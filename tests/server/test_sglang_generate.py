"""`/generate` of an SGLang server: prompts, batches, streams, ends and errors as SGLang 0.5.23 has them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from server.sglang_server import QUICK, serve, until
from understudy.server.sglang.planner import SglangPlanner

if TYPE_CHECKING:
    from server.client import Client
    from understudy.server.server import Server

G = "/generate"
META = {
    *("id", "finish_reason", "prompt_tokens", "weight_version", "num_retractions", "reasoning_tokens"),
    *("completion_tokens", "cached_tokens", "cached_tokens_details", "dp_rank", "e2e_latency"),
    "response_sent_to_client_ts",
}


def asking(**parameters: Any) -> dict[str, Any]:
    return {"sampling_params": parameters}


def test_an_answer_has_text_ids_and_meta_info() -> None:
    async def check(client: Client, server: Server) -> None:
        body = {"input_ids": [5, 6, 7, 8], "rid": "mine", **asking(max_new_tokens=5, ignore_eos=True)}
        reply = await client.post(G, body)
        assert reply.status == 200
        answer = reply.json
        assert set(answer) == {"text", "output_ids", "meta_info"}
        assert len(answer["output_ids"]) == 5
        assert answer["text"]
        meta = answer["meta_info"]
        assert set(meta) == META
        assert meta["id"] == "mine"
        assert meta["finish_reason"] == {"type": "length", "length": 5}
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (4, 5, 0)
        assert meta["cached_tokens_details"] is None
        assert meta["e2e_latency"] > 0
        again = (await client.ask("PUT", G, body)).json
        assert again["text"] == answer["text"]
        assert again["meta_info"]["cached_tokens"] == 3
        assert again["meta_info"]["cached_tokens_details"] == {"device": 3, "host": 0}

    serve(check)


def test_a_text_without_a_length_gets_at_most_128_tokens() -> None:
    async def check(client: Client, server: Server) -> None:
        reply = await client.post(G, {"text": "hello there", "sampling_params": {"ignore_eos": True}})
        assert reply.json["meta_info"]["completion_tokens"] == 128

    serve(check)


def test_zero_new_tokens_compute_the_prompt_only() -> None:
    async def check(client: Client, server: Server) -> None:
        meta = (await client.post(G, {"input_ids": [1, 2, 3], **asking(max_new_tokens=0)})).json["meta_info"]
        assert meta["completion_tokens"] == 0
        assert meta["finish_reason"] == {"type": "length", "length": 0}
        after = await client.post(G, {"input_ids": [1, 2, 3, 4], **asking(max_new_tokens=1)})
        assert after.json["meta_info"]["cached_tokens"] == 3

    serve(check)


def test_a_batch_is_answered_with_a_list_and_each_with_its_parameters() -> None:
    async def check(client: Client, server: Server) -> None:
        parameters = [{"max_new_tokens": 2, "ignore_eos": True}, {"max_new_tokens": 3, "ignore_eos": True}]
        body = {"input_ids": [[1, 2], [3, 4, 5]], "rid": ["a", "b"], "sampling_params": parameters}
        answers = (await client.post(G, body)).json
        assert [one["meta_info"]["id"] for one in answers] == ["a", "b"]
        assert [one["meta_info"]["prompt_tokens"] for one in answers] == [2, 3]
        assert [len(one["output_ids"]) for one in answers] == [2, 3]
        many = (await client.post(G, {"text": ["x", "y"], "rid": "r", **asking(max_new_tokens=1)})).json
        assert [one["meta_info"]["id"] for one in many] == ["r_0", "r_1"]

    serve(check)


def test_several_samples_of_a_prompt_are_a_list_too() -> None:
    async def check(client: Client, server: Server) -> None:
        answers = (await client.post(G, {"text": "hi", **asking(max_new_tokens=4, n=3)})).json
        assert len(answers) == 3
        assert len({one["meta_info"]["id"] for one in answers}) == 3
        assert len({one["text"] for one in answers}) > 1

    serve(check)


def test_a_stream_repeats_the_text_so_far() -> None:
    async def check(client: Client, server: Server) -> None:
        body = {"input_ids": [5, 6, 7], **asking(max_new_tokens=4, ignore_eos=True)}
        whole = (await client.post(G, body)).json
        reply = await client.post(G, {**body, "stream": True})
        assert reply.headers["content-type"].startswith("text/event-stream")
        *chunks, done = reply.events
        assert done == "[DONE]"
        assert [len(chunk["output_ids"]) for chunk in chunks] == [1, 2, 3, 4]
        assert [chunk["meta_info"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4]
        assert chunks[-1]["text"] == whole["text"]
        assert chunks[-1]["text"].startswith(chunks[0]["text"])
        assert [chunk["meta_info"]["finish_reason"] for chunk in chunks[:-1]] == [None] * 3
        assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
        assert "e2e_latency" in chunks[-1]["meta_info"]
        assert "index" not in chunks[0]

    serve(check)


def test_an_incremental_stream_has_only_the_new_text_and_a_batch_has_indexes() -> None:
    async def check(client: Client, server: Server) -> None:
        body = {"input_ids": [[5, 6], [7, 8]], "stream": True, **asking(max_new_tokens=3, ignore_eos=True)}
        *chunks, _ = (await client.post(G, body)).events
        for index in (0, 1):
            mine = [chunk for chunk in chunks if chunk["index"] == index]
            assert [len(chunk["output_ids"]) for chunk in mine] == [1, 1, 1]
            whole = (await client.post(G, {**body, "stream": False})).json[index]
            assert "".join(chunk["text"] for chunk in mine) == whole["text"]

    serve(check, incremental_streaming_output=True)


def test_a_stop_string_ends_the_answer_in_the_engine_and_is_cut_off() -> None:
    async def check(client: Client, server: Server) -> None:
        base = {"input_ids": [5, 6, 7], **asking(max_new_tokens=20, ignore_eos=True)}
        full = (await client.post(G, base)).json
        word = full["text"].split()[3]
        body = {"input_ids": [5, 6, 7], **asking(max_new_tokens=20, ignore_eos=True, stop=word)}
        cut = (await client.post(G, body)).json
        assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}
        assert word not in cut["text"]
        assert cut["meta_info"]["completion_tokens"] < 20
        body["sampling_params"]["no_stop_trim"] = True
        assert (await client.post(G, body)).json["text"].endswith(word)
        assert not server.worker.live()
        token = full["output_ids"][2]
        ids = {"input_ids": [5, 6, 7], **asking(max_new_tokens=20, ignore_eos=True, stop_token_ids=[token])}
        stopped = (await client.post(G, ids)).json
        assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
        assert stopped["output_ids"][-1] == token

    serve(check)


def test_logprobs_are_triples() -> None:
    async def check(client: Client, server: Server) -> None:
        body = {"input_ids": [5], "return_logprob": True, "top_logprobs_num": 2, **asking(max_new_tokens=2)}
        meta = (await client.post(G, body)).json["meta_info"]
        assert [len(one) for one in meta["output_token_logprobs"]] == [3, 3]
        assert [len(one) for one in meta["output_top_logprobs"]] == [2, 2]
        assert meta["output_token_logprobs_length"] == 2

    serve(check)


def test_a_schema_shapes_the_answer() -> None:
    async def check(client: Client, server: Server) -> None:
        schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
        reply = await client.post(G, {"text": "x", **asking(max_new_tokens=100, json_schema=schema)})
        assert isinstance(msgspec.json.decode(reply.json["text"])["a"], int)

    serve(check)


WRONG = [
    ({}, 400, "Either text, input_ids or input_embeds should be provided."),
    ({"input_ids": []}, 400, "input_ids cannot be empty."),
    ({"input_ids": [1] * 4096}, 400, "The input (4096 tokens) is longer than the model's context length"),
    ({"input_ids": [1] * 4000, **asking(max_new_tokens=200)}, 400, "Requested token count exceeds"),
    (
        {"text": "x", **asking(temperature=-1)},
        400,
        "temperature must be a non-negative finite number, got -1.",
    ),
    ({"text": "x", **asking(top_p=2)}, 400, "top_p must be in (0, 1], got 2."),
    ({"text": "x", **asking(max_new_tokens=-1)}, 400, "max_new_tokens must be at least 0, got -1."),
    ({"text": ["x", "y"], "rid": ["a", "a"]}, 400, "Duplicate request IDs detected"),
    ({"text": "x", "image_data": "a.png"}, 400, "image_data: is not simulated"),
    ({"input_ids": [10**7]}, 400, "contains values greater than the vocab size"),
]


@pytest.mark.parametrize(("body", "status", "message"), WRONG)
def test_wrong_values_are_answered_with_their_message(
    body: dict[str, Any], status: int, message: str
) -> None:
    async def check(client: Client, server: Server) -> None:
        reply = await client.post(G, body)
        assert reply.status == status
        assert set(reply.json) == {"error"}
        assert message in reply.json["error"]["message"]
        streamed = await client.post(G, {**body, "stream": True})
        assert streamed.status == 200
        error, done = streamed.events
        assert done == "[DONE]"
        assert message in error["error"]["message"]
        assert error["error"]["type"] == "invalid_request_error"

    serve(check)


def test_an_unknown_parameter_and_a_wrong_type_have_forms_of_their_own() -> None:
    async def check(client: Client, server: Server) -> None:
        unknown = await client.post(G, {"text": "x", **asking(max_tokens=3)})
        assert unknown.status == 400
        assert unknown.json["error"].startswith(
            "unknown field `max_tokens`, expected one of `max_new_tokens`"
        )
        wrong = await client.post(G, {"text": 5})
        assert wrong.status == 400
        assert set(wrong.json) == {"object", "message", "type", "param", "code"}
        assert (wrong.json["object"], wrong.json["type"], wrong.json["code"]) == ("error", "Bad Request", 400)
        assert (await client.get(G)).status == 405

    serve(check)


def test_a_full_queue_is_answered_503() -> None:
    engine = msgspec.structs.replace(QUICK, max_num_seqs=1, max_queued_requests=1)

    async def check(client: Client, server: Server) -> None:
        body = {"input_ids": [1, 2], **asking(max_new_tokens=2000, ignore_eos=True)}
        first = asyncio.create_task(client.post(G, body))
        await until(lambda: server.worker.cores[0].num_running == 1)
        second = asyncio.create_task(client.post(G, body))
        await until(lambda: server.worker.cores[0].num_waiting == 1)
        refused = await client.post(G, body)
        assert refused.status == 503
        assert refused.json["message"] == "The request queue is full."
        assert (refused.json["type"], refused.json["code"]) == ("503", 503)
        await client.post("/abort_request", {"abort_all": True})
        for task in (first, second):
            assert (await task).json["meta_info"]["finish_reason"]["type"] == "abort"

    serve(check, engine=engine)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (G, {"text": "hello", **asking(n=10**30, json_schema='{"type":"object"}')}),
        (G, {"text": ["a", "b"], **asking(n=10_000)}),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 3, "n": 60_000, "regex": "a+"}),
    ],
)
def test_too_many_answers_are_refused_before_any_is_planned(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []
    monkeypatch.setattr(SglangPlanner, "plan_one", lambda *_, **__: planned.append(1))

    async def check(client: Client, server: Server) -> None:
        reply = await client.post(path, body)
        assert reply.status == 400
        assert "at most 16384" in str(reply.json)
        assert not planned

    serve(check)


def test_sampling_parameters_of_null_are_the_defaults() -> None:
    async def check(client: Client, server: Server) -> None:
        reply = await client.post(G, {"text": ["hello there"], "sampling_params": [None]})
        assert reply.status == 200
        assert reply.json[0]["meta_info"]["completion_tokens"] <= 128

    serve(check)
