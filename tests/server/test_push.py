"""A prefill server and a decode server of SGLang: rooms, transfers, failures and limits of time."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from server.client import Client
from server.handoff_pair import runs, serving, until
from server.push_pair import ask, bootstrap_port, is_empty, make_side, meet
from understudy._core import HandOffLinks, LiveNet
from understudy.errors import ConfigError
from understudy.server.flags.serving import read_serve

if TYPE_CHECKING:
    from understudy.server.server import Server

TEXT = "one two three four five six seven eight nine ten " * 12


async def both(prefill: Server, decode: Server, text: str = TEXT, **more: Any) -> tuple[Any, Any]:
    """Send a request to both sides at once, as a router does."""
    fields = meet(prefill)
    return await asyncio.gather(ask(prefill, fields, text, **more), ask(decode, fields, text, **more))


def has_computed(prefill: Server) -> bool:
    """Return True if a prompt is computed whose KV is on its way."""
    return any(request.emitted for request in prefill.worker.live())


@runs
async def test_kv_goes_from_prefill_to_decode() -> None:
    first, second = make_side("prefill"), make_side("decode")
    async with serving(first, second):
        for _ in range(2):
            computed, answer = await both(first, second)
            assert (computed.status, answer.status) == (200, 200)
            assert computed.json["meta_info"]["completion_tokens"] == 1
            assert computed.json["meta_info"]["finish_reason"]["type"] == "length"
            assert answer.json["meta_info"]["completion_tokens"] == 6
            assert computed.json["meta_info"]["prompt_tokens"] == answer.json["meta_info"]["prompt_tokens"]
        assert answer.json["meta_info"]["cached_tokens"] == computed.json["meta_info"]["cached_tokens"] > 0
        await until(lambda: is_empty(first) and is_empty(second))


@runs
async def test_openai_routes_and_streams_take_rooms() -> None:
    first, second = make_side("prefill"), make_side("decode")
    async with serving(first, second):
        for path, body in (
            ("/v1/completions", {"prompt": TEXT}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
        ):
            whole = {"max_tokens": 5, "ignore_eos": True, **body, **meet(first)}
            one, other = await asyncio.gather(*(Client(s.port).post(path, whole) for s in (first, second)))
            assert one.json["usage"]["completion_tokens"] == 1
            assert other.json["usage"]["completion_tokens"] == 5
            stream = {**whole, **meet(first), "stream": True}
            one, other = await asyncio.gather(*(Client(s.port).post(path, stream) for s in (first, second)))
            assert other.events[-1] == "[DONE]"


@runs
async def test_a_batch_counts_rooms_up_from_the_first() -> None:
    first, second = make_side("prefill"), make_side("decode")
    async with serving(first, second):
        texts: Any = [TEXT, "another prompt " * 20, "a third " * 9]
        for fields in (meet(first, 1000), {**meet(first), "bootstrap_room": [7000, 9, 5]}):
            one, other = await asyncio.gather(
                ask(first, fields, texts, tokens=4), ask(second, fields, texts, tokens=4)
            )
            assert [len(reply.json) for reply in (one, other)] == [3, 3]
            assert [row["meta_info"]["completion_tokens"] for row in other.json] == [4, 4, 4]


@runs
async def test_a_prefix_on_the_decode_side_is_not_sent() -> None:
    link = ["--kv-link-gbps", "1", "--kv-bytes-per-token", "1000"]
    first = make_side("prefill", *link)
    second = make_side("decode", "--disaggregation-decode-enable-radix-cache")
    async with serving(first, second):
        assert first.worker.push is not None
        await both(first, second)
        moved = first.worker.push.moved_bytes
        assert moved > 0
        await both(first, second)
        assert 0 < first.worker.push.moved_bytes - moved < moved


@runs
async def test_a_slow_link_delays_the_first_token() -> None:
    first = make_side("prefill", "--kv-link-gbps", "0.001", "--kv-bytes-per-token", "1000")
    second = make_side("decode")
    async with serving(first, second):
        computed, answer = await both(first, second)
        assert computed.status == answer.status == 200
        sent_s = computed.json["meta_info"]["prompt_tokens"] * 1000 / 1e6
        assert computed.json["meta_info"]["e2e_latency"] > sent_s


@runs
async def test_wrong_rooms_are_refused_by_name() -> None:
    first, second = make_side("prefill"), make_side("decode")
    async with serving(first, second):
        fields = meet(first)
        for field, value, server in (
            ("bootstrap_room", None, first),
            ("bootstrap_room", None, second),
            ("bootstrap_room", -1, second),
            ("bootstrap_room", "7", first),
            ("bootstrap_room", [1, 2], second),
            ("bootstrap_host", None, second),
            ("bootstrap_host", "192.0.2.1", second),
            ("bootstrap_port", 0, second),
        ):
            reply = await ask(server, {**fields, field: value}, TEXT)
            assert reply.status == 400, field
            message = reply.json["error"]["message"]
            assert (field if value is not None or field == "bootstrap_host" else "bootstrap room") in message
        waiting = asyncio.create_task(ask(first, fields, TEXT))
        await until(lambda: first.worker.cores[0].live)
        assert "room of another request" in (await ask(first, fields, TEXT)).json["error"]["message"]
        waiting.cancel()
        await until(lambda: is_empty(first))


@runs
async def test_a_prefill_server_waits_for_memory_and_then_gives_up() -> None:
    first = make_side("prefill", boot_timeout_s=0.2)
    async with serving(first):
        reply = await ask(first, meet(first), TEXT)
        assert reply.status == 500
        assert "Prefill bootstrap failed" in reply.json["message"]
        assert "KVPoll.Bootstrapping" in reply.json["message"]
        assert is_empty(first)
        assert first.worker.push is not None
        assert first.worker.push.failures == {"bootstrap": 1, "transfer": 0}
        page = (await Client(first.port).get("/metrics")).body.decode()
        (line,) = [
            one for one in page.splitlines() if one.startswith("sglang:num_bootstrap_failed_reqs_total{")
        ]
        assert line.endswith(" 1.0")


@runs
async def test_a_decode_server_whose_room_is_unknown_gives_up() -> None:
    first, second = make_side("prefill"), make_side("decode", wait_timeout_s=0.2)
    async with serving(first, second):
        reply = await ask(second, meet(first), TEXT)
        assert reply.status == 500
        assert "Decode transfer failed" in reply.json["message"]
        assert "KVPoll.WaitingForInput" in reply.json["message"]
        await until(lambda: is_empty(second))  # the prefill server has acknowledged that it writes nothing


@runs
async def test_a_prefill_server_that_is_away_is_looked_for_fifteen_times() -> None:
    second = make_side("decode", "--clock-speed", "200")
    async with serving(second):
        reply = await ask(second, meet(1), TEXT)
        assert reply.status == 500
        assert "Decode handshake failed" in reply.json["message"]
        assert "after 15 attempts" in reply.json["message"]
        await until(lambda: is_empty(second))


@runs
async def test_other_pages_fail_the_request_by_name() -> None:
    first, second = make_side("prefill"), make_side("decode", "--page-size", "32")
    async with serving(first, second):
        reply = await ask(second, meet(first), TEXT)
        assert reply.status == 500
        assert "page_size mismatch: prefill server has 16, but decode server has 32" in reply.json["message"]


@runs
async def test_a_client_that_leaves_the_decode_side_fails_the_prefill_side() -> None:
    first = make_side("prefill", "--kv-link-gbps", "0.0002", "--kv-bytes-per-token", "1000")
    second = make_side("decode")
    async with serving(first, second):
        fields = meet(first)
        computing = asyncio.create_task(ask(first, fields, TEXT))
        decoding = asyncio.create_task(ask(second, fields, TEXT))
        await until(lambda: has_computed(first))
        decoding.cancel()
        reply = await computing
        assert reply.status == 500
        assert "Prefill transfer failed" in reply.json["message"]
        await until(lambda: is_empty(first) and is_empty(second))


@runs
async def test_a_client_that_leaves_the_prefill_side_fails_the_decode_side() -> None:
    first = make_side("prefill", "--kv-link-gbps", "0.0002", "--kv-bytes-per-token", "1000")
    second = make_side("decode")
    async with serving(first, second):
        fields = meet(first)
        computing = asyncio.create_task(ask(first, fields, TEXT))
        decoding = asyncio.create_task(ask(second, fields, TEXT))
        await until(lambda: has_computed(first))
        computing.cancel()
        reply = await decoding
        assert reply.status == 500
        assert "Decode transfer failed" in reply.json["message"]
        await until(lambda: is_empty(first) and is_empty(second))


@runs
async def test_a_prefill_server_that_dies_is_noticed_by_its_heartbeat() -> None:
    first = make_side("prefill", "--kv-link-gbps", "0.00002", "--kv-bytes-per-token", "1000")
    second = make_side("decode", heartbeat_s=0.1)
    async with serving(first, second):
        fields = meet(first)
        computing = asyncio.create_task(ask(first, fields, TEXT))
        decoding = asyncio.create_task(ask(second, fields, TEXT))
        net = first.worker.push
        assert net is not None
        await until(lambda: net.net.in_flight(net.number) == 1)
        await net.close()  # without a word, as when the process is killed
        reply = await decoding
        assert reply.status == 500
        assert "Lost connection with prefill instance" in reply.json["message"]
        await until(lambda: is_empty(second))
        assert (await computing).status == 500  # its decode server has gone


@runs
async def test_a_killed_engine_fails_the_other_side() -> None:
    first = make_side("prefill", "--kv-link-gbps", "0.0002", "--kv-bytes-per-token", "1000")
    second = make_side("decode")
    async with serving(first, second):
        fields = meet(first)
        computing = asyncio.create_task(ask(first, fields, TEXT))
        decoding = asyncio.create_task(ask(second, fields, TEXT))
        net = first.worker.push
        assert net is not None
        await until(lambda: has_computed(first))
        first.worker.kill()
        assert (await decoding).status == 500
        assert (await computing).status == 500
        await until(lambda: is_empty(second) and not net.rooms)
        one, other = await both(first, second, "short " * 20)
        assert (one.status, other.status) == (200, 200)


@runs
async def test_health_is_checked_without_another_server() -> None:
    first, second = make_side("prefill"), make_side("decode")
    async with serving(first, second):
        for server in (first, second):
            assert (await Client(server.port).get("/health_generate")).status == 200
            fields = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
            reply = await ask(server, fields, TEXT, tokens=3)
            assert reply.status == 200
            assert reply.json["meta_info"]["completion_tokens"] == (1 if server is first else 3)
            await until(partial(is_empty, server))


@runs
async def test_the_bootstrap_server_answers_as_sglangs() -> None:
    first = make_side("prefill")
    async with serving(first):
        client = Client(bootstrap_port(first))
        assert (await client.get("/health")).body == b"OK"
        all_ranks = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
        info = (await client.get(f"/route?{all_ranks}")).json
        assert (info["page_size"], info["dp_size"], info["decode_allocation_policy"]) == (16, 1, "early")
        assert info["prefill_http_port"] == first.port
        rank = (await client.get(f"/route?{all_ranks.replace('-1', '0')}")).json
        assert rank["rank_ip"] == "127.0.0.1"
        assert (await client.get(f"/route?{all_ranks.replace('-1', '1')}")).status == 404
        assert (await client.get("/route?prefill_dp_rank=0")).status == 400
        assert (await client.get("/nothing")).status == 404
        assert (await client.post("/register_dp_rank", {"bootstrap_room": 3, "dp_rank": 0})).status == 200
        found = await client.post("/query_dp_ranks", {"bootstrap_rooms": [3, 4]})
        assert found.json == {"3": 0}
        assert (await client.post("/query_dp_ranks", {"rooms": 1})).status == 400
        info = (await Client(first.port).get("/server_info")).json
        assert info["disaggregation_mode"] == "prefill"


@runs
async def test_a_bootstrap_port_that_is_taken_is_named() -> None:
    first = make_side("prefill")
    async with serving(first):
        port = bootstrap_port(first)
        second = make_side("prefill", "--disaggregation-bootstrap-port", str(port))
        with pytest.raises(ConfigError, match=f"--disaggregation-bootstrap-port: cannot listen on .*{port}"):
            await second.start()
        await second.stop()
        second.runtime.driver.stop()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--disaggregation-mode", "both"], "--disaggregation-mode must be null, prefill or decode"),
        (["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "rsync"], "must be one of"),
        (["--disaggregation-mode", "decode", "--dp-size", "2"], "--dp-size is not simulated"),
        (
            [
                *("--disaggregation-mode", "prefill", "--enable-hierarchical-cache"),
                *("--tiers", '{"kv_bytes_per_token": 1000}'),
            ],
            "a host tier",
        ),
        (["--disaggregation-mode", "decode", "--kv-peer", "a b"], "--kv-peer"),
        (
            ["--disaggregation-mode", "decode", "--disaggregation-decode-enable-offload-kvcache"],
            "offload is not simulated",
        ),
        (
            [
                *("--disaggregation-mode", "decode"),
                *("--disaggregation-decode-allocation-policy", "prefill_complete"),
            ],
            "must be early",
        ),
    ],
)
def test_flags_that_one_side_cannot_have_are_refused(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_serve(["--engine", "sglang", *flags])


def test_limits_of_time_are_those_of_sglangs_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["--engine", "sglang", "--disaggregation-mode", "decode"]
    push = read_serve(line).settings.push
    assert push is not None
    assert (push.boot_timeout_s, push.wait_timeout_s, push.drain_timeout_s) == (300, 300, 30)
    assert (push.heartbeat_s, push.heartbeat_failures) == (5, 2)
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "600")
    push = read_serve(line).settings.push
    assert push is not None
    assert push.wait_timeout_s == 600
    monkeypatch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "soon")
    with pytest.raises(ConfigError, match="SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL must be a number"):
        read_serve(line)


@pytest.mark.parametrize("prefills", [True, False])
def test_an_engine_that_is_lost_takes_its_own_requests_with_it(prefills: bool) -> None:
    net = LiveNet(HandOffLinks())
    worker = net.add_worker(produces=prefills, consumes=not prefills)
    net.pushes.open_alone(7, worker, prefills=prefills)
    net.pushes.abandon(worker, 1000)
    net.pushes.open_alone(7, worker, prefills=prefills)  # the room is free
