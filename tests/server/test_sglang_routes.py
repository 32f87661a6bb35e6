"""Routes of an SGLang server: health, information, control, OpenAI's, access and metrics."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from server.sglang_server import QUICK, serve, until
from understudy.tiers.settings import TiersConfig

if TYPE_CHECKING:
    from server.client import Client
    from understudy.server.server import Server

G = "/generate"
LONG = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}
SHORT = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}


def test_health_is_empty_and_health_generate_computes_a_token() -> None:
    async def check(client: Client, server: Server) -> None:
        for path in ("/health", "/ready", "/ping", "/health_generate"):
            reply = await client.get(path)
            assert (reply.status, reply.body) == (200, b"")
        assert server.worker.cores[0].steps > 0
        assert "sglang:num_requests_total" not in (await client.get("/metrics")).body.decode()

    serve(check)


def test_the_server_describes_its_model_and_settings() -> None:
    async def check(client: Client, server: Server) -> None:
        model = (await client.get("/model_info")).json
        assert model["model_path"] == "stub"
        assert model["tokenizer_path"] == "understudy/tok"  # SGLang's benchmark loads it
        assert model["is_generation"] is True
        assert model["weight_version"] == "default"
        assert (await client.get("/get_model_info")).json == model
        info = (await client.get("/server_info")).json
        assert info["version"] == "0.5.23"
        assert info["page_size"] == 1
        assert info["max_total_num_tokens"] == 16384
        assert info["max_req_input_len"] == 4090
        assert info["internal_states"][0]["schedule_policy"] == "fcfs"
        assert (await client.get("/get_server_info")).json == info
        (card,) = (await client.get("/v1/models")).json["data"]
        assert set(card) == {"id", "object", "created", "owned_by", "root", "parent", "max_model_len"}
        assert (card["id"], card["owned_by"], card["max_model_len"]) == ("stub", "sglang", 4096)
        assert (await client.get("/v1/models/stub")).json["id"] == "stub"
        assert (await client.get("/v1/loads")).json["loads"][0]["num_running_reqs"] == 0

    serve(check)


def test_the_cache_is_flushed_only_while_the_server_is_idle() -> None:
    async def check(client: Client, server: Server) -> None:
        await client.post(G, SHORT)
        await until(lambda: server.worker.cores[0].is_empty)
        assert (await client.post(G, SHORT)).json["meta_info"]["cached_tokens"] == 2
        await until(lambda: server.worker.cores[0].is_empty)
        flushed = await client.post("/flush_cache", None)
        assert flushed.status == 200
        assert flushed.body.startswith(b"Cache flushed.\n")
        assert (await client.post(G, SHORT)).json["meta_info"]["cached_tokens"] == 0
        task = asyncio.create_task(client.post(G, LONG))
        await until(lambda: server.worker.cores[0].num_running == 1)
        refused = await client.get("/flush_cache")
        assert (refused.status, refused.body) == (400, b"Flush cache failed.\n")
        late = await client.get("/flush_cache?timeout=0.05")
        assert (late.status, late.body) == (400, b"Timed out waiting for idle state.")
        waits = asyncio.create_task(client.get("/flush_cache?timeout=10"))
        await client.post("/abort_request", {"abort_all": True})
        await task
        assert (await waits).status == 200

    serve(check)


def test_requests_are_aborted_by_id_and_keep_their_outputs() -> None:
    async def check(client: Client, server: Server) -> None:
        mine = asyncio.create_task(client.post(G, {**LONG, "rid": "mine"}))
        other = asyncio.create_task(client.post(G, {**LONG, "rid": "other"}))
        await until(lambda: len(server.worker.live()) == 2 and server.worker.cores[0].steps > 5)
        assert (await client.post("/abort_request", {"rid": "unknown"})).status == 200
        assert (await client.post("/abort_request", {"rid": "mine"})).status == 200
        answer = (await mine).json
        reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        assert answer["meta_info"]["finish_reason"] == reason
        assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] > 0
        assert not other.done()
        assert (await client.post("/abort_request", {"abort_all": True})).status == 200
        assert (await other).json["meta_info"]["finish_reason"]["type"] == "abort"
        page = (await client.get("/metrics")).body.decode()
        (line,) = [one for one in page.splitlines() if one.startswith("sglang:num_aborted_requests_total{")]
        assert line.endswith(" 2.0")

    serve(check)


def test_an_abort_in_the_queue_has_its_own_message() -> None:
    async def check(client: Client, server: Server) -> None:
        first = asyncio.create_task(client.post(G, LONG))
        await until(lambda: server.worker.cores[0].num_running == 1)
        waits = asyncio.create_task(client.post(G, {**LONG, "rid": "w"}))
        await until(lambda: server.worker.cores[0].num_waiting == 1)
        await client.post("/abort_request", {"rid": "w"})
        meta = (await waits).json["meta_info"]
        assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
        await client.post("/abort_request", {"abort_all": True})
        await first

    serve(check, engine=msgspec.structs.replace(QUICK, max_num_seqs=1))


@pytest.mark.parametrize("mode", ["abort", "in_place"])
def test_a_pause_keeps_new_requests_until_it_ends(mode: str) -> None:
    async def check(client: Client, server: Server) -> None:
        before = asyncio.create_task(client.post(G, LONG))
        core = server.worker.cores[0]
        await until(lambda: core.steps > 3)
        reply = await client.post("/pause_generation", {"mode": mode})
        assert reply.json == {"message": "Generation paused successfully.", "status": "ok"}
        new = asyncio.create_task(client.post(G, SHORT))
        if mode == "abort":
            assert (await before).json["meta_info"]["finish_reason"]["type"] == "abort"
            await until(lambda: core.is_empty)
        else:
            await until(lambda: core.step_end_ns < 0)
        steps = core.steps
        await asyncio.sleep(0.02)
        assert (core.steps, new.done()) == (steps, False)
        assert (await client.post("/continue_generation", {})).json["status"] == "ok"
        assert (await new).json["meta_info"]["completion_tokens"] == 2
        await client.post("/abort_request", {"abort_all": True})
        await before

    serve(check)


def test_a_pause_that_is_not_simulated_is_refused_by_name() -> None:
    async def check(client: Client, server: Server) -> None:
        reply = await client.post("/pause_generation", {"mode": "retract"})
        assert reply.status == 400
        assert "retract is not simulated" in reply.json["message"]

    serve(check)


def test_openai_answers_have_sglangs_fields() -> None:
    async def check(client: Client, server: Server) -> None:
        body = {"prompt": "hello there", "max_tokens": 3, "ignore_eos": True}
        answer = (await client.post("/v1/completions", body)).json
        assert set(answer) == {"id", "object", "created", "model", "choices", "usage", "metadata"}
        (choice,) = answer["choices"]
        assert set(choice) == {"index", "text", "logprobs", "finish_reason", "matched_stop"}
        assert (answer["model"], choice["finish_reason"]) == ("default", "length")
        assert answer["metadata"] == {"weight_version": "default"}
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["usage"]["reasoning_tokens"] == 0
        streamed = await client.post(
            "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}
        )
        *chunks, usage, done = streamed.events
        assert done == "[DONE]"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 3

    serve(check)


def test_chats_begin_with_a_role_and_end_with_a_chunk_of_their_own() -> None:
    async def check(client: Client, server: Server) -> None:
        body = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        answer = (await client.post("/v1/chat/completions", body)).json
        message = answer["choices"][0]["message"]
        assert set(message) == {"role", "content", "reasoning_content"}
        assert answer["model"] == "any"
        *chunks, done = (await client.post("/v1/chat/completions", {**body, "stream": True})).events
        assert done == "[DONE]"
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0] == {"reasoning_content": None, "role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
        assert deltas[-1] == {"reasoning_content": None}
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"

    serve(check)


def test_errors_of_openais_routes_are_flat() -> None:
    async def check(client: Client, server: Server) -> None:
        for body, kind in (
            ({"prompt": [1] * 4000, "max_tokens": 200}, "BadRequest"),
            ({"prompt": {"no": "text"}}, "Bad Request"),
            ({"prompt": "x", "max_tokens": 0}, "Bad Request"),
        ):
            reply = await client.post("/v1/completions", body)
            assert reply.status == 400
            assert set(reply.json) == {"object", "message", "type", "param", "code"}
            assert (reply.json["object"], reply.json["type"]) == ("error", kind)
        assert (await client.get("/nowhere")).json == {"detail": "Not Found"}

    serve(check)


def test_control_routes_answer_this_machine_only_and_a_key_protects_all_but_health() -> None:
    async def keyed(client: Client, server: Server) -> None:
        for path in ("/health", "/health_generate", "/metrics"):
            assert (await client.get(path)).status == 200
        for path in ("/model_info", "/server_info", "/v1/models", "/flush_cache"):
            assert (await client.get(path)).status == 401
        assert (await client.post(G, SHORT)).status == 401
        assert (await client.post(G, SHORT, authorization="Bearer k")).status == 200
        assert (await client.ask("GET", "/flush_cache", headers={"authorization": "Bearer k"})).status == 200

    async def foreign(client: Client, server: Server) -> None:
        rebound = await client.ask("GET", "/flush_cache", headers={"host": "evil.example"})
        assert rebound.status == 403
        page = await client.ask("POST", "/abort_request", {}, headers={"origin": "http://evil.example"})
        assert page.status == 403

    serve(keyed, api_keys=("k",))
    serve(foreign)


def values_of(page: str) -> dict[str, float]:
    """Sum the samples of each name."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            name, _, value = line.partition("{")[0], *line.rpartition(" ")[1:]
            found[name] = found.get(name, 0.0) + float(value)
    return found


def test_the_page_of_metrics_has_sglangs_families_and_none_of_vllms() -> None:
    async def check(client: Client, server: Server) -> None:
        for stream in (False, True):
            await client.post(G, {**SHORT, "stream": stream})
        await until(lambda: server.worker.cores[0].is_empty)
        page = (await client.get("/metrics")).body.decode()
        assert "vllm:" not in page
        values = values_of(page)
        assert values["sglang:num_requests_total"] == 2
        assert values["sglang:prompt_tokens_total"] == 6
        assert values["sglang:generation_tokens_total"] == 4
        assert values["sglang:cached_tokens_total"] == 2
        prefilled = [line for line in page.splitlines() if "prefill_effective_tokens_total{" in line]
        assert [float(line.rpartition(" ")[2]) for line in prefilled] == [4, 2, 0, 0]
        assert values["sglang:evicted_tokens_total"] == 0
        assert values["sglang:num_retracted_input_tokens_total"] == 0
        assert values["sglang:num_retracted_output_tokens_total"] == 0
        assert values["sglang:time_to_first_token_seconds_count"] == 2
        assert values["sglang:page_size"] == 1
        assert values["sglang:max_total_num_tokens"] == values["sglang:num_pages"] == 16384
        used = values["sglang:kv_used_tokens"]
        assert used + values["sglang:kv_available_tokens"] + values["sglang:kv_evictable_tokens"] == 16384
        assert (
            'sglang:num_requests_total{engine_type="unified",is_streaming="true",model_name="stub"} 1.0'
            in page
        )
        labels = '{engine_type="unified",model_name="stub",moe_ep_rank="0",pp_rank="0",tp_rank="0"}'
        assert f"sglang:token_usage{labels} " in page

    serve(check)


def test_hicache_loads_evicted_prompts_back_and_says_so() -> None:
    engine = msgspec.structs.replace(QUICK, block_size=16, num_gpu_blocks=16)
    tiers = TiersConfig.from_dict({"kv_bytes_per_token": 1024, "tiers": [{"tier": "g2", "blocks": 64}]})

    async def ask(client: Client, first: int) -> Any:
        body = {"input_ids": list(range(first, first + 100)), "sampling_params": {"max_new_tokens": 2}}
        return (await client.post(G, body)).json["meta_info"]

    async def check(client: Client, server: Server) -> None:
        for first in (0, 1000, 2000, 3000):
            assert (await ask(client, first))["cached_tokens"] == 0
            await until(lambda: server.worker.cores[0].is_empty)
        meta = await ask(client, 0)
        assert meta["cached_tokens_details"]["host"] >= 80
        values = values_of((await client.get("/metrics")).body.decode())
        assert values["sglang:load_back_tokens_total"] >= 80
        assert values["sglang:hicache_backup_tokens_total"] >= 384
        assert values["sglang:hicache_host_total_tokens"] == 1024
        assert values["sglang:hicache_dropped_tokens_total"] == 0
        assert values["sglang:evicted_tokens_total"] >= 80

    serve(check, engine=engine, tiers=tiers)


def test_a_slow_link_lengthens_the_loads_of_hicache() -> None:
    engine = msgspec.structs.replace(QUICK, block_size=16, num_gpu_blocks=48)
    link = {"down_gbps": 1.0, "up_gbps": 0.032}
    given = {"kv_bytes_per_token": 2000, "tiers": [{"tier": "g2", "blocks": 256, "link": link}]}

    async def load_ms(client: Client, server: Server) -> float:
        """Return the time to the first token of a prompt whose 320 tokens are on the host."""

        async def ask(first: int, count: int) -> Any:
            body = {"input_ids": [*range(first, first + count)], "sampling_params": {"max_new_tokens": 1}}
            return (await client.post(G, body)).json["meta_info"]

        for first in (1000, 2000):
            await ask(first, 640)
            await until(lambda: server.worker.cores[0].is_empty)
        meta = await ask(0, 321)
        assert meta["cached_tokens_details"]["host"] == 320
        return float(meta["e2e_latency"]) * 1e3

    async def check(client: Client, server: Server) -> None:
        await client.post(G, {"input_ids": [*range(321)], "sampling_params": {"max_new_tokens": 1}})
        assert 20 <= await load_ms(client, server) < 30
        order = {"kind": "slow_link", "tier": "g2", "factor": 8}
        assert (await client.post("/admin/fault", order)).status == 200
        assert 160 <= await load_ms(client, server) < 190
        await client.post("/admin/fault", {"kind": "none"})
        assert 20 <= await load_ms(client, server) < 30

    serve(check, engine=engine, tiers=TiersConfig.from_dict(given))
