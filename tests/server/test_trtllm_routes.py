"""Routes, answers and errors of a TensorRT-LLM server, its iteration statistics and its KV events."""

from __future__ import annotations

import asyncio
import struct
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from server.client import Client, serving
from understudy._core import TrtPasses, TrtSettings
from understudy.engines.timing import Constant
from understudy.engines.trtllm_config import TrtllmConfig
from understudy.engines.trtllm_salt import derive_salt
from understudy.errors import ConfigError
from understudy.server.flags.serving import read_serve

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from understudy.server.server import Server

QUICK: dict[str, Any] = {
    "num_gpu_blocks": 1024,
    "max_model_len": 4096,
    "timing": Constant(prefill_ms=1.0, decode_ms=1.0),
}
C, CHAT = "/v1/completions", "/v1/chat/completions"
SERVE = ["--engine", "trtllm"]


def serve(test: Callable[[Client, Server], Awaitable[None]], **settings: Any) -> None:
    """Run a test against a server on a free port."""

    async def main() -> None:
        engine = TrtllmConfig(**{**QUICK, **settings})
        async with serving(engine=engine, model="m", max_model_len=engine.max_model_len) as (client, server):
            await test(client, server)

    asyncio.run(main())


def test_a_completion_has_every_key_of_trtllm_serve() -> None:
    async def test(client: Client, server: Server) -> None:
        asked = {"model": "any", "prompt": list(range(70)), "max_tokens": 5, "ignore_eos": True}
        first = (await client.post(C, asked)).json
        assert set(first) == {"id", "object", "created", "model", "choices", "usage", "prompt_token_ids"}
        assert first["model"] == "any"
        (choice,) = first["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        assert {"context_logits", "disaggregated_params", "avg_decoded_tokens_per_iter"} <= set(choice)
        again = (await client.post(C, asked)).json
        assert again["usage"] == {
            "prompt_tokens": 70,
            "total_tokens": 75,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 69},  # and the beginning of a block
        }
        streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, usage, done = (await client.post(C, streamed)).events
        assert "".join(one["choices"][0]["text"] for one in chunks) == again["choices"][0]["text"]
        assert [one["choices"][0]["finish_reason"] for one in chunks] == [None] * 4 + ["length"]
        assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], 5, "[DONE]")

    serve(test)


def test_a_chat_stream_starts_with_the_role_and_has_no_empty_keys() -> None:
    async def test(client: Client, server: Server) -> None:
        asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        whole = (await client.post(CHAT, {**asked, "ignore_eos": True})).json
        message = whole["choices"][0]["message"]
        assert set(message) == {"role", "content", "reasoning_content", "reasoning", "tool_calls"}
        first, *chunks, done = (await client.post(CHAT, {**asked, "ignore_eos": True, "stream": True})).events
        assert first["choices"] == [{"index": 0, "delta": {"role": "assistant"}}]
        assert "".join(one["choices"][0]["delta"]["content"] for one in chunks) == message["content"]
        assert set(chunks[0]["choices"][0]) == {"index", "delta", "avg_decoded_tokens_per_iter"}
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert done == "[DONE]"

    serve(test)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"model": "m", "prompt": []}, None),
        ({"prompt": [1, 2]}, "model"),
        ({"model": "m", "prompt": [1] * 4096}, "`default_max_tokens` (0) should be greater than 0"),
        (
            {"model": "m", "prompt": [1] * 600, "max_tokens": 1},
            "The sum of prompt length (600.0), query length (0) should not exceed max_num_tokens (512)",
        ),
    ],
)
def test_errors_have_the_form_of_trtllm_serve(body: dict[str, Any], message: str | None) -> None:
    async def test(client: Client, server: Server) -> None:
        reply = await client.post(C, body)
        assert reply.status == 400
        if "error" in reply.json:
            assert set(reply.json) == {"error"}
            assert (message or "") in reply.json["error"]
            return
        assert set(reply.json) == {"object", "message", "type", "param", "code"}
        assert (reply.json["type"], reply.json["code"]) == ("BadRequestError", 400)
        assert (message or "") in reply.json["message"]

    if len(body["prompt"]) == 600:
        serve(test, max_num_batched_tokens=512)
    else:
        serve(test, enable_chunked_prefill=True)


def test_more_tokens_than_the_sequence_holds_are_cut() -> None:
    async def test(client: Client, server: Server) -> None:
        asked = {"model": "m", "prompt": [1] * 4090, "max_tokens": 100, "ignore_eos": True}
        assert (await client.post(C, asked)).json["usage"]["completion_tokens"] == 6

    serve(test)


def test_a_server_describes_itself() -> None:
    async def test(client: Client, server: Server) -> None:
        assert (await client.get("/version")).json == {"version": "1.3.0rc25"}
        (card,) = (await client.get("/v1/models")).json["data"]
        assert (card["id"], card["owned_by"]) == ("m", "tensorrt_llm")
        assert (await client.get("/server_info")).json["tokens_per_block"] == 32
        assert (await client.get("/health")).status == 200
        reply = await client.get("/health_generate")
        assert (reply.status, reply.body) == (200, b"Generation health check OK")
        assert (await client.post("/_internal/tokenize", {"prompt": "hello"})).json["count"] > 0
        assert (await client.get("/perf_metrics")).status == 404  # this release has none
        assert (await client.get("/load")).status == 404
        assert set((await client.get("/steady_clock_offset")).json) == {"receive_ts", "transmit_ts"}

    serve(test)


def test_iteration_statistics_are_kept_until_they_are_read() -> None:
    async def test(client: Client, server: Server) -> None:
        asked = {"model": "m", "prompt": list(range(64)), "max_tokens": 6, "ignore_eos": True}
        await client.post(C, asked)
        stats = (await client.get("/metrics")).json
        assert len(stats) == 6
        batches = [one["inflightBatchingStats"] for one in stats]
        assert [(one["numContextRequests"], one["numGenRequests"]) for one in batches] == [
            (1, 0),
            *[(0, 1)] * 5,
        ]
        assert batches[0]["numCtxTokens"] == 64
        assert stats[0]["kvCacheStats"]["tokensPerBlock"] == 32
        assert stats[0]["kvCacheStats"]["usedNumBlocks"] > 0
        assert {one["schedulerMode"] for one in stats} == {"overlap"}
        assert sum(one["numCompletedRequests"] for one in stats) == 1
        assert [one["iterLatencyMS"] for one in stats[:2]] == [2.0, 1.0]
        assert (await client.get("/metrics")).json == []
        page = (await client.get("/prometheus/metrics")).body.decode()
        assert 'trtllm_generation_tokens_total{engine_type="pytorch",model_name="m"} 6.0' in page
        assert "trtllm_kv_cache_tokens_per_block{" in page
        assert "vllm:" not in page

    serve(test, enable_iter_perf_stats=True)


def test_without_the_option_there_are_no_iteration_statistics() -> None:
    async def test(client: Client, server: Server) -> None:
        await client.post(C, {"model": "m", "prompt": [1, 2], "max_tokens": 2})
        assert (await client.get("/metrics")).json == []
        assert (await client.post("/kv_cache_events", None)).json == []

    serve(test)


def test_kv_events_are_those_of_the_executor_on_the_same_tokens() -> None:
    """Hashes and tokens are the real ones, although the engine names blocks by our hashes."""
    prompts = [list(range(1000, 1100)), [*range(1000, 1064), *range(50)]]
    settings = TrtSettings()
    settings.max_gpu_total_bytes = 1024 * 32 * 65536
    settings.layer_bytes_per_token, settings.max_seq_len = 65536, 4096
    passes = TrtPasses(settings, True)
    expected: list[Any] = []
    for number, prompt in enumerate(prompts):
        passes.submit(number, [(token, 1) for token in prompt], 3, 1_000_000 * (number + 1))
        while not passes.idle:
            expected += passes.run()["events"]
    expected += passes.run()["events"]

    async def test(client: Client, server: Server) -> None:
        for prompt in prompts:
            await client.post(C, {"model": "m", "prompt": prompt, "max_tokens": 3, "ignore_eos": True})
        found = (await client.post("/kv_cache_events", None)).json
        assert (await client.post("/kv_cache_events", None)).json == []
        assert [one["data"]["type"] for one in found] == [one["kind"] for one in expected]
        for one, real in zip(found, expected, strict=True):
            assert (one["event_id"], one["window_size"]) == (real["id"], real["window"])
            if real["kind"] != "stored":
                continue
            assert one["data"]["parent_hash"] == real["parent"]
            blocks = [
                (block["block_hash"], [token["token_id"] for token in block["tokens"]])
                for block in one["data"]["blocks"]
            ]
            assert blocks == [
                (value, [first + k for first, count in runs for k in range(count)])
                for value, runs, *_ in real["blocks"]
            ]

    serve(test, event_buffer_max_size=100)


@pytest.mark.parametrize("algorithm", ["v2_sha256", "v2_sha256_64"])
def test_kv_events_name_blocks_by_the_digests_of_manager_v2(algorithm: str) -> None:
    """A key is the SHA-256 of its parent's key and its tokens, four bytes each; that of a zero byte is the root."""
    prompt = list(range(1000, 1064))

    def show(key: bytes) -> int | str:
        return key.hex() if algorithm == "v2_sha256" else int.from_bytes(key[:8], "big")

    first = sha256(sha256(b"\0").digest() + struct.pack("<32I", *prompt[:32])).digest()
    second = sha256(first + struct.pack("<32I", *prompt[32:])).digest()

    async def test(client: Client, server: Server) -> None:
        assert (await client.get("/server_info")).json["kv_cache_hash_algo"] == algorithm
        await client.post(C, {"model": "m", "prompt": prompt, "max_tokens": 3, "ignore_eos": True})
        found = (await client.post("/kv_cache_events", None)).json
        stored = [one for one in found if one["data"]["type"] == "stored"]
        assert {one["hash_algo"] for one in found} == {algorithm}
        blocks = [block for one in stored for block in one["data"]["blocks"]]
        assert [block["block_hash"] for block in blocks][:2] == [show(first), show(second)]
        parents = {one["data"]["blocks"][0]["block_hash"]: one["data"]["parent_hash"] for one in stored}
        assert parents.get(show(first), "inner") is None
        assert parents.get(show(second), show(first)) == show(first)

    serve(test, event_buffer_max_size=100, kv_cache_event_hash_algo=algorithm)


def stored_blocks(found: list[Any]) -> list[Any]:
    return [block for one in found if one["data"]["type"] == "stored" for block in one["data"]["blocks"]]


def test_salted_blocks_have_the_names_of_the_real_manager() -> None:
    """The salt is mixed into the first block, from which the others are chained."""
    prompt = list(range(1000, 1064))
    settings = TrtSettings()
    settings.max_gpu_total_bytes = 1024 * 32 * 65536
    settings.layer_bytes_per_token, settings.max_seq_len = 65536, 4096
    passes = TrtPasses(settings, True)
    passes.submit(0, [(1000, 64)], 3, 1_000_000, salt=derive_salt("tenant"))
    events: list[Any] = []
    while not passes.idle:
        events += passes.run()["events"]
    events += passes.run()["events"]
    expected = [block[0] for one in events if one["kind"] == "stored" for block in one["blocks"]]

    async def test(client: Client, server: Server) -> None:
        asked = {"model": "m", "prompt": prompt, "max_tokens": 3, "ignore_eos": True}
        await client.post(C, asked)
        plain = stored_blocks((await client.post("/kv_cache_events", None)).json)
        await client.post(C, asked | {"cache_salt": "tenant"})
        salted = stored_blocks((await client.post("/kv_cache_events", None)).json)
        assert [one["tokens"] for one in salted][:2] == [one["tokens"] for one in plain][:2]
        assert [one["block_hash"] for one in salted][:2] == expected[:2]
        assert not {one["block_hash"] for one in salted} & {one["block_hash"] for one in plain}
        await client.post(C, asked | {"cache_salt": "tenant"})
        assert stored_blocks((await client.post("/kv_cache_events", None)).json) == []

    serve(test, event_buffer_max_size=100)


def test_the_root_of_a_salt_has_a_digest_of_its_own() -> None:
    """A mask of the numbers that are given, then each of them in eight bytes."""
    prompt = list(range(1000, 1032))
    root = sha256(struct.pack("<BQ", 2, derive_salt("tenant"))).digest()
    first = sha256(root + struct.pack("<32I", *prompt)).hexdigest()

    async def test(client: Client, server: Server) -> None:
        body = {"model": "m", "prompt": prompt, "max_tokens": 3, "ignore_eos": True, "cache_salt": "tenant"}
        await client.post(C, body)
        blocks = stored_blocks((await client.post("/kv_cache_events", None)).json)
        assert blocks[0]["block_hash"] == first

    serve(test, event_buffer_max_size=100, kv_cache_event_hash_algo="v2_sha256")


def test_a_prompt_finds_the_beginning_of_a_block() -> None:
    async def test(client: Client, server: Server) -> None:
        asked = {"model": "m", "max_tokens": 3, "ignore_eos": True}
        await client.post(C, {**asked, "prompt": list(range(1000, 1064))})
        answer = await client.post(C, {**asked, "prompt": [*range(1000, 1050), *range(40)]})
        assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 50

    serve(test)


def test_a_block_keeps_its_name_until_the_last_group_of_layers_drops_it() -> None:
    prompts = [[*range(1000 * k, 1000 * k + 96)] for k in range(1, 6)]

    async def test(client: Client, server: Server) -> None:
        for prompt in prompts:
            await client.post(C, {"model": "m", "prompt": prompt, "max_tokens": 3, "ignore_eos": True})
        found = (await client.post("/kv_cache_events", None)).json
        stored = {
            b["block_hash"] for e in found if e["data"]["type"] == "stored" for b in e["data"]["blocks"]
        }
        removed = [
            (e["layer_group_id"], e["data"]["block_hashes"]) for e in found if e["data"]["type"] == "removed"
        ]
        assert {group for group, _ in removed} == {0, 1}
        assert {name for _, names in removed for name in names} <= stored

    serve(
        test,
        event_buffer_max_size=1000,
        max_attention_window=(64, 4096),
        num_layers=2,
        num_gpu_blocks=24,
        host_cache_size=0,
    )


def test_the_deadlock_ends_the_server() -> None:
    async def test(client: Client, server: Server) -> None:
        asked = {"model": "m", "max_tokens": 400, "ignore_eos": True}
        bodies = [{**asked, "prompt": [number + 1] * 200} for number in range(16)]
        replies = await asyncio.gather(*[client.post(C, body) for body in bodies])
        assert 500 in {reply.status for reply in replies}
        assert (await client.get("/health")).status == 503
        assert (await client.get("/health_generate")).body == b"Generation health check failed"

    serve(test, num_gpu_blocks=24, host_cache_size=0, enable_chunked_prefill=True, max_model_len=700)


def test_flags_of_trtllm_serve_set_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "o.yaml"
    path.write_text("max_batch_size: 8\nkv_cache_config: {max_tokens: 64000, enable_block_reuse: false}\n")
    for option in ("--config", "--extra_llm_api_options"):
        plan = read_serve(
            ["m", *SERVE, option, str(path), "--max_num_tokens", "4096", "--max_seq_len", "9000"]
        )
        engine = plan.settings.engine
        assert isinstance(engine, TrtllmConfig)
        assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.max_model_len) == (8, 4096, 9000)
        assert (plan.settings.max_model_len, engine.enable_prefix_caching) == (9000, False)
        assert plan.idle == []
    plan = read_serve(["m", *SERVE, "--num_postprocess_workers", "2", "--kv_cache_dtype", "fp8"])
    assert plan.idle == ["num-postprocess-workers", "kv-cache-dtype"]
    small = read_serve(["m", *SERVE, "--config", str(path), "--max_seq_len", "90000"]).settings
    assert small.max_model_len == 64000


def test_a_gpu_sizes_the_pool_and_the_context() -> None:
    plan = read_serve(["gpt-oss-120b", *SERVE, "--gpu", "H200", "--tp_size", "2"])
    assert plan.settings.max_model_len == 131072
    engine = plan.settings.engine
    assert isinstance(engine, TrtllmConfig)
    assert engine.num_layers == 36
    assert plan.idle == []


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["Llama-3.1-8B"], "runs Llama-3.1-8B on KV cache manager V1"),
        (["m", "--pp_size", "2"], "--pp_size: pipeline parallelism is not simulated"),
        (["m", "--enable_attention_dp"], "--enable_attention_dp: attention with data parallelism"),
        (["m", "--max_beam_width", "4"], "beam search is not simulated"),
        (["m", "--max_batch_sise", "4"], "did you mean --max-batch-size"),
        (["m", "--max_num_tokens", "0"], "max_num_batched_tokens must be at least 1"),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_serve([*flags, *SERVE])
