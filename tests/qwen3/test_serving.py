"""The real engine behind the server: what is told over HTTP is what it computes."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from qwen3.building import TINY, alone
from server.client import Client
from server.events_scene import Reader
from understudy.errors import ConfigError
from understudy.qwen3.serve import open_server
from understudy.server.flags.serving import read_serve

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.qwen3.serving import Qwen3Serving
    from understudy.server.server import Server

C = "/v1/completions"
VOCAB = 2900  # all of them words, or parts of words, of the built-in tokenizer
PROMPT = [40 + (7 * number) % 80 for number in range(37)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shape = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": TINY.hidden_size,
        "intermediate_size": TINY.intermediate_size,
        "num_hidden_layers": TINY.num_layers,
        "num_attention_heads": TINY.num_heads,
        "num_key_value_heads": TINY.kv_heads,
        "head_dim": TINY.head_dim,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "rope_theta": TINY.rope_theta,
        "rms_norm_eps": TINY.norm_eps,
        "torch_dtype": "float32",
        "eos_token_id": VOCAB - 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return tmp_path


def serve(model: Path, test: Any, *flags: str) -> None:
    command = [str(model), "--engine", "qwen3", "--random-weights", "7", "--device", "cpu", "--port", "0"]
    command += ["--num-gpu-blocks", "64", "--block-size", "4", *flags]
    server, serving = open_server(read_serve(command))

    async def main() -> None:
        await server.start()
        try:
            await test(Client(server.port), server, serving)
        finally:
            await server.stop(0)
            server.runtime.driver.stop()

    try:
        asyncio.run(main())
    finally:
        serving.close()


def answer(serving: Qwen3Serving, prompt: list[int], count: int) -> list[int]:
    """What `generate` says: an engine of its own with the same weights."""
    weights = serving.engine.executor.weights  # type: ignore[attr-defined]
    return alone(prompt, count, config=serving.config, weights=weights)


def test_a_completion_is_what_the_model_generates_whole_and_as_a_stream(model: Path) -> None:
    async def test(client: Client, server: Server, serving: Qwen3Serving) -> None:
        asked = {
            "prompt": PROMPT,
            "max_tokens": 9,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        reply = (await client.post(C, asked)).json
        expected = answer(serving, PROMPT, 9)
        (choice,) = reply["choices"]
        assert choice["token_ids"] == expected
        assert choice["finish_reason"] == "length"
        assert reply["usage"]["completion_tokens"] == 9
        pieces = server.runtime.texts.pieces(expected)
        assert choice["text"] == "".join(pieces)
        events = (await client.post(C, {**asked, "stream": True})).events
        assert events[-1] == "[DONE]"
        told = [event["choices"][0] for event in events[:-1]]
        assert [token for one in told for token in one["token_ids"]] == expected
        assert "".join(one["text"] for one in told) == choice["text"]
        assert told[-1]["finish_reason"] == "length"
        page = (await client.get("/metrics")).body.decode()
        counts = {
            line.split("{")[0]: float(line.split()[-1]) for line in page.splitlines() if "engine=" in line
        }
        assert counts["vllm:generation_tokens_total"] == 18
        assert counts["vllm:prefix_cache_hits_total"] == 36
        assert counts["vllm:num_requests_running"] == 0

    serve(model, test)


def test_requests_at_the_same_time_hear_what_they_hear_alone(model: Path) -> None:
    async def test(client: Client, server: Server, serving: Qwen3Serving) -> None:
        prompts = [PROMPT[start : start + 11] for start in range(6)]
        asked = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        replies = await asyncio.gather(*(client.post(C, {"prompt": one, **asked}) for one in prompts))
        for prompt, reply in zip(prompts, replies, strict=True):
            assert reply.json["choices"][0]["token_ids"] == answer(serving, prompt, 6)

    serve(model, test)


def test_stops_end_an_answer_where_they_are_found(model: Path) -> None:
    async def test(client: Client, server: Server, serving: Qwen3Serving) -> None:
        asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1, "seed": 3, "ignore_eos": True}
        whole = (await client.post(C, {**asked, "return_token_ids": True})).json["choices"][0]
        tokens = whole["token_ids"]
        pieces = server.runtime.texts.pieces(tokens)
        assert "".join(pieces) == whole["text"]
        stop = whole["text"][2:4]
        by_text = (await client.post(C, {**asked, "stop": [stop]})).json["choices"][0]
        assert by_text["finish_reason"] == "stop"
        assert by_text["stop_reason"] == stop
        assert by_text["text"] == whole["text"][: whole["text"].find(stop)]
        last = tokens.index(tokens[5])
        by_token = (
            await client.post(C, {**asked, "stop_token_ids": [tokens[5]], "return_token_ids": True})
        ).json["choices"][0]
        assert by_token["token_ids"] == tokens[: last + 1]
        assert by_token["stop_reason"] == tokens[5]
        late = {**asked, "stop_token_ids": [tokens[5]], "min_tokens": 6, "return_token_ids": True}
        assert (await client.post(C, late)).json["choices"][0]["token_ids"] == tokens[:6]
        manager = serving.engine.scheduler.manager
        for _ in range(100):  # the step that was under way ends
            if manager.available_blocks == manager.total_blocks - 1:
                break
            await asyncio.sleep(0.02)
        assert manager.available_blocks == manager.total_blocks - 1

    serve(model, test)


def test_logprobs_are_the_models_own(model: Path) -> None:
    async def test(client: Client, server: Server, serving: Qwen3Serving) -> None:
        asked = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "logprobs": 2, "ignore_eos": True}
        told = (await client.post(C, asked)).json["choices"][0]["logprobs"]
        assert len(told["token_logprobs"]) == 3
        for own, top in zip(told["token_logprobs"], told["top_logprobs"], strict=True):
            assert own == max(top.values())  # greedy takes the likeliest
            assert own < 0

    serve(model, test)


def test_what_the_engine_cannot_do_is_refused_with_the_reason(model: Path) -> None:
    async def test(client: Client, server: Server, serving: Qwen3Serving) -> None:
        for more, word in (
            ({"prompt": PROMPT, "frequency_penalty": 1.0}, "penalties"),
            ({"prompt": PROMPT, "prompt_logprobs": 1}, "prompt_logprobs"),
            ({"prompt": PROMPT, "structured_outputs": {"choice": ["a"]}}, "structured"),
            ({"prompt": PROMPT * 20}, "maximum context length is 252 tokens"),
        ):
            reply = await client.post(C, {"max_tokens": 4, **more})
            assert reply.status == 400
            assert word in reply.body.decode()

    serve(model, test)


def test_a_client_that_leaves_gives_its_blocks_back(model: Path) -> None:
    async def test(client: Client, server: Server, serving: Qwen3Serving) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = json.dumps({"prompt": PROMPT, "max_tokens": 200, "stream": True, "ignore_eos": True}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        await reader.read(200)
        writer.close()
        manager = serving.engine.scheduler.manager
        for _ in range(200):
            if manager.available_blocks == manager.total_blocks - 1 and serving.engine.idle:
                break
            await asyncio.sleep(0.02)
        assert manager.available_blocks == manager.total_blocks - 1
        asked = {
            "prompt": PROMPT,
            "max_tokens": 2,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        assert (await client.post(C, asked)).json["choices"][0]["token_ids"] == answer(serving, PROMPT, 2)

    serve(model, test)


def test_a_pause_lets_those_in_progress_end_and_nobody_begin(model: Path) -> None:
    async def test(client: Client, server: Server, serving: Qwen3Serving) -> None:
        asked = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        running = asyncio.create_task(client.post(C, asked))
        while not any(one.emitted for one in server.worker.live()):
            await asyncio.sleep(0.001)
        # Before anything else can happen on this loop.
        paused = asyncio.get_running_loop().create_future()
        server.worker.pauses.pause("wait", clear_cache=True, then=lambda: paused.set_result(None))
        late = asyncio.create_task(client.post(C, {**asked, "max_tokens": 3, "return_token_ids": True}))
        gone = asyncio.create_task(client.post(C, asked))
        while len(server.worker.live()) < 2:
            await asyncio.sleep(0.001)
        assert (await running).json["usage"]["completion_tokens"] == 60
        await paused
        while len(server.worker.live()) < 2:
            await asyncio.sleep(0.001)
        assert (await client.get("/is_paused")).json == {"is_paused": True}
        assert server.worker.cores[0].num_waiting >= 2
        server.worker.abort([server.worker.live()[1]])  # one who has not begun
        assert {one.emitted for one in server.worker.live()} == {0}
        await client.post("/resume", None)
        ends = [(await one).json["choices"][0] for one in (late, gone)]
        assert sorted(end["finish_reason"] for end in ends) == ["abort", "length"]
        while not serving.engine.idle:
            await asyncio.sleep(0.001)

    serve(model, test, "--dev-mode")


def test_kv_events_name_the_tokens_of_every_block_that_was_computed(model: Path) -> None:
    async def test(client: Client, server: Server, serving: Qwen3Serving) -> None:
        sources = (await client.get("/kv_event_sources")).json
        reader = Reader(sources["0"]["endpoint"])
        try:
            await asyncio.sleep(0.3)
            asked = {
                "prompt": PROMPT,
                "max_tokens": 9,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            tokens = (await client.post(C, asked)).json["choices"][0]["token_ids"]
            said: list[int] = []
            while len(said) < 44:  # 37 + 8 computed tokens: eleven blocks of four
                _, batch = await reader.next()
                for event in batch.events:
                    said += event.token_ids
            assert said == (PROMPT + tokens)[:44]
        finally:
            reader.close()

    serve(
        model,
        test,
        "--dev-mode",
        "--kv-events-config",
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:0"}',
    )


@pytest.mark.parametrize(
    "flags", [("--clock-speed", "2"), ("--response-mode", "echo"), ("--data-parallel-size", "2")]
)
def test_flags_of_a_simulated_engine_are_refused(model: Path, flags: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=flags[0]):
        open_server(read_serve([str(model), "--engine", "qwen3", "--random-weights", "1", *flags]))
