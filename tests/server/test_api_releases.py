"""A server answers as the vLLM release that its engine simulates: 0.33 by default, 0.32 for older ones."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from server.client import QUICK, Client, serving
from understudy.errors import ConfigError
from understudy.server.flags.ours import find_flags_version
from understudy.server.flags.serving import read_serve
from understudy.server.release import find_release

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from understudy.server.server import Server

GOLDEN = Path(__file__).parents[1] / "golden" / "live"
C, H = "/v1/completions", "/v1/chat/completions"
COMPLETION = {"prompt": "hello world", "max_tokens": 3}
CHAT = {"messages": [{"role": "user", "content": "hi there"}], "max_tokens": 3}
PAUSED = "Generation is paused. Please retry after it resumes."


def run(test: Callable[[Client, Server], Awaitable[None]], version: str = "", **settings: Any) -> None:
    async def main() -> None:
        engine = msgspec.structs.replace(QUICK, vllm_version=version) if version else QUICK
        async with serving(engine=engine, dev_mode=True, **settings) as (client, server):
            await test(client, server)

    asyncio.run(main())


def shape(value: Any) -> Any:
    """Keys in order and kinds of values; of a list, those of its first member. The order in events is free."""
    if isinstance(value, dict) and str(value.get("type")).startswith("response."):
        return {key: shape(member) for key, member in value.items() if key != "part"}
    if isinstance(value, dict):
        return [(key, shape(member)) for key, member in value.items()]
    if isinstance(value, list):
        return [shape(member) for member in value[:1]]
    return None if value is None else type(value).__name__


def read_answer(text: str) -> list[Any]:
    """Shapes of a body, or of a stream's events with their names."""
    if text.startswith("{"):
        return [shape(msgspec.json.decode(text))]
    events = []
    for line in text.splitlines():
        name, _, data = line.partition(": ")
        if name == "event":
            events.append(data)
        elif name == "data":
            events.append(shape(msgspec.json.decode(data)) if data.startswith("{") else data)
    return events


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_answers_have_the_recorded_fields_in_order(version: str) -> None:
    rows = [
        msgspec.json.decode(line)
        for line in (GOLDEN / f"vllm-{version}.0-wire.jsonl").read_bytes().splitlines()
    ]
    assert len(rows) > 15

    async def test(client: Client, _: object) -> None:
        for row in rows:
            reply = await client.post(row["path"], {**row["body"], "ignore_eos": True})
            assert reply.status == row["status"], row
            assert read_answer(reply.body.decode()) == read_answer(row["answer"]), row

    run(test, version, model="stub-model")


@pytest.mark.parametrize(
    ("version", "answers_as"),
    [("", "0.33.0"), ("0.33", "0.33.0"), ("v0.33.1", "0.33.0"), ("0.32", "0.32.0"), ("0.26", "0.32.0")],
)
def test_a_server_names_the_release_that_it_answers_as(version: str, answers_as: str) -> None:
    async def test(client: Client, _: object) -> None:
        assert (await client.get("/version")).json == {"version": answers_as}
        assert (await client.get("/openapi.json")).json["info"]["version"] == answers_as
        for path, body in ((C, COMPLETION), (H, CHAT)):
            fingerprint = (await client.post(path, body)).json["system_fingerprint"]
            assert fingerprint.startswith(f"vllm-{answers_as}-")
            *_, last, _ = (await client.post(path, {**body, "stream": True})).events
            assert last["system_fingerprint"] == fingerprint

    run(test, version)


def test_an_unknown_release_is_refused_and_the_recorded_revision_is_older() -> None:
    assert find_release("recorded").version == "0.32.0"
    with pytest.raises(ConfigError, match=r"the newest known release is 0\.33"):
        find_release("0.99")


def test_routes_of_0_33_are_absent_from_0_32() -> None:
    def ask(version: str) -> tuple[int, int, Any]:
        found: list[Any] = []

        async def test(client: Client, _: object) -> None:
            question = {"type": "predicate", "instructions": "is it so"}
            body = {"model": "m", "input": "x", "questions": [question]}
            found.append((await client.post("/v1/decisions", body)).status)
            described = (await client.get("/openapi.json")).json
            found.append("/v1/decisions" in described["paths"])
            fields = described["components"]["schemas"]["CompletionRequest"]["properties"]
            found.append("return_weight_versions" in fields)

        run(test, version)
        return found[0], found[1], found[2]

    assert ask("0.32") == (404, False, False)
    assert ask("0.33") == (501, True, True)


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_requests_that_arrive_during_a_pause_are_answered_503(mode: str) -> None:
    async def test(client: Client, server: Server) -> None:
        assert (await client.post(f"/pause?mode={mode}", None)).status == 200
        openai = {"message": PAUSED, "type": "ServiceUnavailableError", "param": None, "code": 503}
        anthropic = {"type": "error", "error": {"type": "overloaded_error", "message": PAUSED}}
        message = {"model": server.worker.settings.names[0], **CHAT}
        for path, body, error in (
            (C, COMPLETION, {"error": openai}),
            (C, {**COMPLETION, "n": 2}, {"error": openai}),
            (H, CHAT, {"error": openai}),
            ("/v1/responses", {"input": "hi"}, {"error": openai}),
            ("/v1/messages", message, anthropic),
        ):
            reply = await client.post(path, body)
            assert (reply.status, reply.json) == (503, error), path
        stream = await client.post(C, {**COMPLETION, "stream": True})
        assert (stream.status, stream.events) == (200, [{"error": openai}, "[DONE]"])
        stream = await client.post(H, {**CHAT, "stream": True})
        assert stream.events == [{"error": {**openai, "type": "InternalServerError"}}, "[DONE]"]
        assert (await client.post("/v1/messages", {**message, "stream": True})).events == [anthropic]
        stream = await client.post("/v1/responses", {"input": "hi", "stream": True})
        assert [event["type"] for event in stream.events] == ["response.created", "response.in_progress"]
        assert (await client.post(C, {**COMPLETION, "max_tokens": 0})).status == 400
        assert (await client.post("/tokenize", {"prompt": "x"})).status == 200
        assert not server.worker.live()
        assert not server.app.endpoints.in_flight
        await client.post("/resume", None)
        assert (await client.post(C, COMPLETION)).status == 200

    run(test)


@pytest.mark.parametrize(
    ("version", "pause"), [("0.33", "/pause?mode=keep"), ("0.33", "/sleep"), ("0.32", "/pause")]
)
def test_otherwise_requests_that_arrive_while_paused_wait(version: str, pause: str) -> None:
    async def test(client: Client, server: Server) -> None:
        assert (await client.post(pause, None)).status == 200
        waiting = asyncio.create_task(client.post(C, COMPLETION))
        while not server.worker.live():
            await asyncio.sleep(0.002)
        await client.post("/wake_up" if pause == "/sleep" else "/resume", None)
        assert (await waiting).status == 200

    run(test, version)


def test_weight_versions_are_ranges_of_output_tokens() -> None:
    async def test(client: Client, server: Server) -> None:
        asked = {"max_tokens": 6, "ignore_eos": True, "return_weight_versions": True}
        for path, body in ((C, {**COMPLETION, **asked}), (H, {**CHAT, **asked})):
            (choice,) = (await client.post(path, body)).json["choices"]
            assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 6}]
            *first, last, _ = (await client.post(path, {**body, "stream": True})).events
            assert last["choices"][0]["weight_versions"] == choice["weight_versions"]
            assert not any(event["choices"][0].get("weight_versions") for event in first)
        assert server.worker.latency is not None
        server.worker.latency.decode_cost_ms = 50.0
        running = asyncio.create_task(client.post(C, {**COMPLETION, **asked}))
        while not any(request.emitted >= 2 for request in server.worker.live()):
            await asyncio.sleep(0.002)
        await client.post("/pause?mode=keep", None)
        await client.post("/update_weight_version", {"new_version": "v2"})
        await client.post("/resume", None)
        old, new = (await running).json["choices"][0]["weight_versions"]
        assert (old["version"], old["start"], old["end"]) == ("default", 0, new["start"])
        assert (new["version"], new["end"]) == ("v2", 6)

    run(test, latency_ms=(0.0, 0.0))


def test_the_last_chunk_of_a_stream_has_the_parameters_of_the_transfer() -> None:
    def last_chunk(version: str, path: str, body: dict[str, Any]) -> Any:
        found: list[Any] = []

        async def test(client: Client, _: object) -> None:
            prefill = {"kv_transfer_params": {"do_remote_decode": True}, "stream": True}
            found.extend((await client.post(path, {**body, **prefill})).events)

        run(test, version)
        assert not any(event.get("kv_transfer_params") for event in found[:-2])
        return found[-2]

    for path, body in ((C, COMPLETION), (H, CHAT)):
        assert "kv_transfer_params" not in last_chunk("0.32", path, body)
        assert last_chunk("0.33", path, body)["kv_transfer_params"]["do_remote_prefill"] is True


# ── Flags ──


@pytest.mark.parametrize(
    ("arguments", "version"),
    [
        ([], "0.33.0"),
        (["--vllm-version", "0.32"], "0.32.0"),
        (["--vllm_version=0.28.1"], "0.32.0"),
        (["--set", "vllm_version=0.32.0", "block_size=32"], "0.32.0"),
        (["--kv-cache-dtype", "fp8", "--vllm-version", "0.33"], "0.33.0"),
    ],
)
def test_the_flags_are_those_of_the_release(arguments: list[str], version: str) -> None:
    assert find_flags_version(["m", *arguments], {}) == version
    assert read_serve(["m", *arguments]).settings.release.version == version


def test_a_config_file_names_the_release_too(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("vllm-version: '0.32'\nenable-prefix-caching: false\n")
    settings = read_serve(["m", "--config", str(file)]).settings
    assert (settings.release.version, settings.engine.enable_prefix_caching) == ("0.32.0", False)


@pytest.mark.parametrize("flag", ["--disable-prefix-caching", "--no-enable-prefix-caching"])
def test_switches_have_an_inverse_since_0_33_and_keep_the_old_one(flag: str) -> None:
    assert read_serve(["m", flag]).settings.engine.enable_prefix_caching is False
    assert read_serve(["m", f"{flag}=false"]).settings.engine.enable_prefix_caching is True
    assert read_serve(["m", "--enable-fastapi-docs"]).settings.disable_fastapi_docs is False
    assert read_serve(["m", "--no-disable-fastapi-docs"]).settings.disable_fastapi_docs is False
    assert read_serve(["m", "--disable-log-requests"]).settings.enable_log_requests is False


@pytest.mark.parametrize(
    "arguments", [["--disable-prefix-caching"], ["--monokernel"], ["--sleep-mode-backend", "cumem"]]
)
def test_a_flag_of_a_newer_release_is_refused_with_its_name(arguments: list[str]) -> None:
    read_serve(["m", *arguments])
    with pytest.raises(ConfigError, match=r"is a flag of vLLM 0\.33\.0; give --vllm-version 0\.33\.0"):
        read_serve(["m", "--vllm-version", "0.32", *arguments])


def test_choices_are_those_of_the_release() -> None:
    read_serve(["m", "--kv-cache-dtype", "float32"])
    with pytest.raises(ConfigError, match="--kv-cache-dtype must be one of"):
        read_serve(["m", "--kv-cache-dtype", "float32", "--vllm-version", "0.32"])


# ── Metrics ──


@pytest.mark.parametrize(("version", "known"), [("0.32", False), ("0.33", True)])
def test_labels_of_the_cache_settings_are_those_of_the_release(version: str, known: bool) -> None:
    async def test(client: Client, _: object) -> None:
        page = (await client.get("/metrics")).body.decode()
        assert ("simple_cpu_offload_num_blocks" in page) is known

    run(test, version)
