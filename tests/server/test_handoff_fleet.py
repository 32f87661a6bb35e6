"""A fleet with prefill and decode workers in one process."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from server.client import Client
from server.handoff_pair import FAST, PREFILL, runs, until
from understudy.cli.fleet import read_fleet
from understudy.errors import ConfigError
from understudy.fleets.fleet import Fleet
from understudy.router import Router

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PORTS = ["--port", "0", "--base-port", "0", "--kv-side-channel-port", "0"]
BODY = {"prompt": "one two three four five six seven eight nine ten " * 12, "max_tokens": 5}


@contextlib.asynccontextmanager
async def fleet_of(*flags: str) -> AsyncIterator[tuple[Client, Fleet]]:
    settings, _ = read_fleet([*PORTS, *FAST, *flags])
    fleet = Fleet(settings)
    await fleet.start()
    try:
        yield Client(fleet.port), fleet
    finally:
        await fleet.stop()
        fleet.runtime.driver.stop()


def counts(fleet: Fleet) -> list[float]:
    return [server.worker.metrics[0].prompt_tokens.value for server in fleet.servers]


def computed(fleet: Fleet) -> list[float]:
    return [server.worker.metrics[0].by_source["local_compute"].value for server in fleet.servers]


@runs
async def test_a_prompt_is_computed_by_one_worker_and_decoded_by_another() -> None:
    async with fleet_of("--prefill-workers", "1", "--decode-workers", "2") as (client, fleet):
        reply = await client.post("/v1/completions", BODY)
        assert reply.status == 200
        assert reply.json["usage"]["completion_tokens"] == 5
        prompt = reply.json["usage"]["prompt_tokens"]
        assert computed(fleet)[0] == prompt
        assert sorted(computed(fleet)[1:]) == [0, 1]  # the last token is computed again
        streamed = await client.post("/v1/completions", {**BODY, "stream": True})
        assert streamed.events[-1] == "[DONE]"
        await until(lambda: fleet.servers[0].worker.cores[0].engine.snapshot().active_blocks == 0)
        state = (await client.get("/fleet/state")).json
        assert [pool["role"] for pool in state["pools"]] == ["prefill", "decode"]
        assert state["routing"] == "round_robin, decode: round_robin"
        assert state["workers"]["transfers"] == [0, 0, 0]
        assert state["workers"]["hit"][0] > 0  # the second prompt
        assert max(state["workers"]["hit"][1:]) < 1  # what was read from the prefill worker is no hit
        page = (await client.get("/metrics")).body.decode()
        assert 'understudy:requests_by_way{way="remote"} 2.0' in page
        assert "vllm:nixl_xfer_time_seconds_count" in page


class _ReadsRoles(Router):
    """Chooses the first worker, and keeps the roles that it has read."""

    def __init__(self) -> None:
        self.read: list[tuple[str, tuple[str, ...]]] = []

    def choose(self, request: Any, view: Any) -> int:
        self.read.append((request.stage, view.roles))
        return int(view.ready[0])


@runs
async def test_routers_read_the_roles_of_their_workers() -> None:
    prefill, decode = _ReadsRoles(), _ReadsRoles()
    settings, _ = read_fleet([*PORTS, *FAST, "--prefill-workers", "1", "--decode-workers", "2"])
    assert settings.disaggregation is not None
    stages = msgspec.structs.replace(settings.disaggregation, decode_routing=decode)
    fleet = Fleet(msgspec.structs.replace(settings, routing=prefill, disaggregation=stages))
    await fleet.start()
    try:
        assert (await Client(fleet.port).post("/v1/completions", BODY)).status == 200
    finally:
        await fleet.stop()
        fleet.runtime.driver.stop()
    assert prefill.read == [("prefill", ("prefill",))]
    assert decode.read == [("decode", ("decode", "decode"))]


@runs
async def test_a_rule_keeps_cached_prompts_on_their_decode_worker() -> None:
    flags = ("--prefill-workers", "1", "--decode-workers", "1", "--disaggregation", "uncached:100")
    async with fleet_of(*flags) as (client, fleet):
        await client.post("/v1/completions", BODY)
        first = counts(fleet)
        await client.post("/v1/completions", BODY)  # its blocks are cached where it was decoded
        assert counts(fleet)[0] == first[0]
        assert counts(fleet)[1] == 2 * first[1]
        short = await client.post("/v1/completions", {"prompt": "hello", "max_tokens": 2})
        assert short.status == 200
        assert counts(fleet)[0] == first[0]


@runs
async def test_many_clients_get_their_answers_and_no_block_stays() -> None:
    flags = ("--prefill-workers", "2", "--decode-workers", "2", "--routing", "kv", "--decode-routing", "kv")
    link = ("--kv-link-gbps", "0.05", "--kv-bytes-per-token", "4096", "--num-gpu-blocks-override", "200")
    async with fleet_of(*flags, *link, "--max-model-len", "2048") as (client, fleet):

        async def ask(number: int) -> int:
            body = {"prompt": f"{number % 5} " + "word " * (20 + 7 * number), "max_tokens": 1 + number % 9}
            if number % 7 == 3:  # a client that disconnects
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(client.post("/v1/completions", body), 0.02)
                return 200
            return (await client.post("/v1/completions", body)).status

        assert set(await asyncio.gather(*(ask(number) for number in range(40)))) == {200}
        cores = [server.worker.cores[0] for server in fleet.servers]
        await until(lambda: all(core.engine.snapshot().active_blocks == 0 for core in cores))
        assert not any(core.live for core in cores)


@runs
async def test_requests_that_cannot_be_divided_stay_on_a_decode_worker() -> None:
    async with fleet_of("--disaggregate", "--workers", "2") as (client, fleet):
        reply = await client.post("/v1/completions", {**BODY, "n": 2})
        assert reply.status == 200
        assert len(reply.json["choices"]) == 2
        assert (await client.post("/v1/completions", {**BODY, "prompt": ["a", "b"]})).status == 200
        assert (await client.post("/v1/completions", {"prompt": 3})).status == 400
        assert counts(fleet)[0] == 0


@runs
async def test_a_killed_prefill_worker_fails_its_requests_and_others_go_on() -> None:
    async with fleet_of("--prefill-workers", "1", "--decode-workers", "1") as (client, fleet):
        fault: dict[str, Any] = {"kind": "kill", "workers": [0], "duration_s": 30}
        assert (await client.post("/admin/fault", fault)).status == 200
        assert (await client.post("/v1/completions", BODY)).status == 503
        assert (await client.post("/admin/fault", {"kind": "none"})).status == 200
        assert (await client.post("/v1/completions", BODY)).status == 200
        assert not fleet.servers[1].worker.cores[0].live


@runs
async def test_blocks_that_are_no_longer_kept_are_read_even_so() -> None:
    async with fleet_of("--prefill-workers", "1", "--decode-workers", "1") as (_, fleet):
        first, second = (Client(server.port) for server in fleet.servers)
        reply = await first.post("/v1/completions", {**BODY, "max_tokens": 1, "kv_transfer_params": PREFILL})
        params = {**reply.json["kv_transfer_params"], "remote_request_id": "another"}
        assert (await second.post("/v1/completions", {**BODY, "kv_transfer_params": params})).status == 200
        assert len(fleet.servers[0].worker.cores[0].vllm.held) == 1  # the other one's


@runs
async def test_a_request_that_is_refused_keeps_no_block_of_a_prefill_worker() -> None:
    async with fleet_of("--prefill-workers", "1", "--decode-workers", "1") as (client, fleet):
        wrong: tuple[dict[str, Any], ...] = (
            {"max_tokens": "abc"},
            {"max_tokens": -3},
            {"min_tokens": 9},
            {"stream_options": {"include_usage": True}},
        )
        for fields in wrong:
            assert (await client.post("/v1/completions", {**BODY, **fields})).status == 400, fields
        assert not fleet.servers[0].worker.cores[0].vllm.held


def test_a_file_of_flags_can_ask_for_both_kinds_of_workers(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("prefill-workers: 2\ndecode-workers: 3\n", encoding="utf-8")
    settings, _ = read_fleet(["--config", str(path)])
    assert [count for count, _ in settings.pools] == [2, 3]


def test_side_channels_of_all_workers_need_ports() -> None:
    settings, _ = read_fleet(
        ["--prefill-workers", "3", "--decode-workers", "1", "--kv-side-channel-port", "65534"]
    )
    with pytest.raises(ConfigError, match="--kv-side-channel-port"):
        Fleet(settings)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--disaggregation", "always"], "--disaggregate"),
        (["--disaggregate", "--workers", "1"], "--workers"),
        (["--prefill-workers", "1"], "decode_workers"),
        (["--disaggregate", "--processes", "2"], "--processes"),
        (["--disaggregate", "--engine", "sglang"], "SGLang"),
        (
            ["--disaggregate", "--kv-transfer-config", '{"kv_connector": "NixlConnector"}'],
            "--kv-lease-duration",
        ),
        (["--no-disaggregate", "--prefill-workers", "1", "--decode-workers", "1"], "--no-disaggregate"),
        (["--disaggregate", "--disaggregation", "uncached:99999999999"], "rule"),
        (["--disaggregate", "--vllm-version", "0.32"], "0.33"),
        (["--disaggregate", "--disaggregation", "sometimes"], "rule"),
        (["--disaggregate", "--kv-link-gbps", "1"], "--kv-bytes-per-token"),
        (["--disaggregate", "--tiers", '{"tiers": [{"tier": "g2", "blocks": 10}]}'], "tiers"),
    ],
)
def test_flags_that_do_not_go_together_are_refused_by_name(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_fleet(flags)
