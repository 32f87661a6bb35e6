"""A prefill server and a decode server hand over the blocks of prompts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from server.client import Client
from server.handoff_pair import PREFILL, make_server, runs, serving, until
from understudy.errors import ConfigError
from understudy.server.handoff import network

if TYPE_CHECKING:
    from server.client import Reply
    from understudy.server.server import Server

PROMPT = "one two three four five six seven eight nine ten " * 12


async def prefill(server: Server, prompt: str = PROMPT, **more: Any) -> Reply:
    body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": PREFILL, **more}
    return await Client(server.port).post("/v1/completions", body)


async def decode(server: Server, params: Any, prompt: str = PROMPT, **more: Any) -> Reply:
    body = {"prompt": prompt, "max_tokens": 6, "kv_transfer_params": params, **more}
    return await Client(server.port).post("/v1/completions", body)


def held(server: Server) -> int:
    return len(server.worker.cores[0].vllm.held)


@runs
async def test_blocks_go_from_prefill_to_decode_and_are_freed() -> None:
    first, second = make_server("kv_producer"), make_server("kv_consumer")
    async with serving(first, second):
        answer = await prefill(first)
        params = answer.json["kv_transfer_params"]
        assert answer.status == 200
        assert params["do_remote_prefill"] is True
        assert params["remote_num_tokens"] == answer.json["usage"]["prompt_tokens"]
        assert held(first) == 1
        free = first.worker.cores[0].engine.snapshot().active_blocks
        assert len(params["remote_block_ids"][0]) == free
        reply = await decode(second, params)
        assert reply.status == 200
        assert reply.json["usage"]["completion_tokens"] == 6
        await until(lambda: held(first) == 0)
        assert first.worker.cores[0].engine.snapshot().active_blocks == 0
        computed = second.worker.cores[0].live
        assert not computed


@runs
async def test_chat_streams_after_a_hand_off() -> None:
    first, second = make_server("kv_producer"), make_server("kv_consumer")
    async with serving(first, second):
        body: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}
        answer = await Client(first.port).post(
            "/v1/chat/completions", {**body, "kv_transfer_params": PREFILL}
        )
        params = answer.json["kv_transfer_params"]
        body |= {"max_tokens": 5, "stream": True, "kv_transfer_params": params}
        reply = await Client(second.port).post("/v1/chat/completions", body)
        assert reply.status == 200
        assert reply.events[-1] == "[DONE]"
        await until(lambda: held(first) == 0)


@runs
async def test_a_lease_ends_when_no_decode_server_reads() -> None:
    first = make_server("kv_producer", kv_connector_extra_config={"kv_lease_duration": 1})
    async with serving(first):
        await prefill(first)
        assert held(first) == 1
        await until(lambda: held(first) == 0)
        assert first.worker.cores[0].vllm.expired_leases == 1


@runs
async def test_an_unreachable_prefill_server_fails_the_request_or_has_it_recomputed() -> None:
    first = make_server("kv_producer")
    async with serving(first):
        params = (await prefill(first)).json["kv_transfer_params"]
    fails = make_server("kv_consumer")
    recomputes = make_server("kv_consumer", kv_load_failure_policy="recompute")
    async with serving(fails, recomputes):
        assert (await decode(fails, params)).status == 500
        reply = await decode(recomputes, params)
        assert reply.status == 200
        assert reply.json["usage"]["completion_tokens"] == 6


@runs
async def test_a_decode_that_is_dropped_frees_the_prefill_servers_blocks() -> None:
    first = make_server("kv_producer")
    second = make_server("kv_consumer", "--kv-link-gbps", "0.0001", "--kv-bytes-per-token", "1000")
    async with serving(first, second):
        params = (await prefill(first)).json["kv_transfer_params"]
        task = asyncio.create_task(decode(second, params))
        await until(lambda: second.worker.handoff is not None and second.worker.handoff.in_flight == 1)
        task.cancel()
        await until(lambda: not second.worker.cores[0].live)
        assert second.worker.cores[0].engine.snapshot().active_blocks > 0  # until its read has ended
        await until(lambda: second.worker.cores[0].engine.snapshot().active_blocks == 0)
        await until(lambda: held(first) == 0)


@runs
async def test_parameters_that_would_hang_vllm_are_refused_by_name() -> None:
    first, second = make_server("kv_producer"), make_server("kv_consumer")
    async with serving(first, second):
        params = (await prefill(first)).json["kv_transfer_params"]
        for field, value in (
            ("remote_port", None),
            ("remote_block_ids", None),
            ("remote_block_ids", [[]]),
            ("remote_block_ids", [[1]]),
            ("remote_engine_id", None),
            ("remote_request_id", ""),
            ("remote_host", "192.0.2.1"),
            ("transfer_mode", "push"),
        ):
            reply = await decode(second, {**params, field: value})
            assert reply.status == 400, field
            assert field in reply.json["error"]["message"]
        assert "kv_producer" in (await prefill(second)).json["error"]["message"]
        assert "kv_consumer" in (await decode(first, params)).json["error"]["message"]
        assert held(first) == 1


@runs
async def test_a_request_without_parameters_is_an_ordinary_one_on_either_server() -> None:
    first, second = make_server("kv_producer"), make_server("kv_consumer")
    async with serving(first, second):
        for server in (first, second):
            reply = await decode(server, None)
            assert reply.status == 200
            assert reply.json["kv_transfer_params"] is None
        assert held(first) == 0


@runs
async def test_a_read_that_fails_leaves_the_blocks_to_their_lease() -> None:
    first = make_server("kv_producer", kv_connector_extra_config={"kv_lease_duration": 2})
    second = make_server("kv_consumer", kv_load_failure_policy="recompute")
    async with serving(first, second):
        params = (await prefill(first)).json["kv_transfer_params"]
        fault = {"kind": "fail_reads"}
        assert (await Client(second.port).post("/admin/fault", fault)).status == 200
        assert (await Client(first.port).post("/admin/fault", fault)).status == 400
        assert (await decode(second, params)).status == 200
        assert held(first) == 1
        await until(lambda: held(first) == 0)
        assert first.worker.cores[0].vllm.expired_leases == 1


@runs
async def test_a_killed_prefill_server_fails_the_reads_from_it() -> None:
    first = make_server("kv_producer")
    second = make_server("kv_consumer", "--kv-link-gbps", "0.001", "--kv-bytes-per-token", "1000")
    async with serving(first, second):
        params = (await prefill(first)).json["kv_transfer_params"]
        task = asyncio.create_task(decode(second, params))
        await until(lambda: second.worker.handoff is not None and second.worker.handoff.in_flight == 1)
        first.worker.kill()
        assert (await task).status == 500
        assert held(first) == 0


@runs
async def test_another_engines_id_fails_the_handshake() -> None:
    first, second = make_server("kv_producer"), make_server("kv_consumer")
    async with serving(first, second):
        params = (await prefill(first)).json["kv_transfer_params"]
        assert (await decode(second, {**params, "remote_engine_id": "another"})).status == 500
        assert (await decode(second, params)).status == 200


@runs
async def test_a_client_cannot_name_a_server_that_keeps_no_blocks() -> None:
    first, second = make_server("kv_producer"), make_server("kv_consumer", engine_id="decode-0")
    async with serving(first, second):
        params = (await prefill(first)).json["kv_transfer_params"]
        reply = await decode(second, {**params, "remote_engine_id": "decode-0"})
        assert reply.status == 400
        assert "keeps no blocks" in reply.json["error"]["message"]
        both = {**params, "do_remote_decode": True}
        assert "contradict" in (await decode(first, both)).json["error"]["message"]
        assert (await decode(second, params)).status == 200


@runs
async def test_a_read_after_the_lease_is_counted() -> None:
    first = make_server("kv_producer", kv_connector_extra_config={"kv_lease_duration": 1})
    second = make_server("kv_consumer")
    async with serving(first, second):
        params = (await prefill(first)).json["kv_transfer_params"]
        await until(lambda: held(first) == 0)
        assert (await decode(second, params)).status == 200
        await until(lambda: first.worker.handoff is not None and first.worker.handoff.late_notices == 1)


@runs
async def test_an_order_to_end_faults_ends_failing_reads() -> None:
    first, second = make_server("kv_producer"), make_server("kv_consumer")
    async with serving(first, second):
        params = (await prefill(first)).json["kv_transfer_params"]
        await Client(second.port).post("/admin/fault", {"kind": "fail_reads", "count": 3})
        await Client(second.port).post("/admin/fault", {"kind": "none"})
        assert (await decode(second, params)).status == 200


@runs
async def test_servers_that_do_not_answer_give_way_to_others() -> None:
    first, second = make_server("kv_producer"), make_server("kv_consumer")
    with mock.patch.object(network, "MAX_PEERS", 2):
        async with serving(first, second):
            params = (await prefill(first)).json["kv_transfer_params"]
            for port in (1, 2, 3):
                assert (await decode(second, {**params, "remote_port": port})).status == 500
            assert (await decode(second, params)).status == 200


@pytest.mark.parametrize("peer", ["10.0.0.5:5600", "", "http://a", "a b"])
def test_a_peer_that_can_never_match_is_refused(peer: str) -> None:
    with pytest.raises(ConfigError, match="--kv-peer"):
        make_server("kv_consumer", "--kv-peer", peer)


@runs
async def test_a_side_channel_that_is_taken_is_named() -> None:
    first = make_server("kv_producer")
    async with serving(first):
        assert first.worker.handoff is not None
        port = first.worker.handoff.port
        second = make_server("kv_producer", "--kv-side-channel-port", str(port))
        with pytest.raises(
            ConfigError, match=f"listen on 127.0.0.1:{port} .*; choose another --kv-side-channel"
        ):
            await second.start()
        second.runtime.driver.stop()
