"""What users of llm-d-inference-sim have: thresholds of cached prompts, latencies that stray, pods, encryption."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from server.client import QUICK, parse_reply, serving
from understudy.errors import ConfigError
from understudy.server.flags.serving import read_serve
from understudy.server.latency import Latency
from understudy.tiers.settings import TiersConfig

if TYPE_CHECKING:
    from pathlib import Path

C = "/v1/completions"
FORCED = {"x_cache_threshold_finish_reason": "true"}


def why(reply: Any) -> str:
    """The reason with which the first choice ended."""
    assert reply.status == 200
    return str(reply.json["choices"][0]["finish_reason"])


def test_a_prompt_that_is_not_cached_enough_is_left_to_others_and_leaves_nothing() -> None:
    async def main() -> None:
        async with serving() as (client, server):
            body = {"prompt": list(range(64)), "max_tokens": 3, "cache_hit_threshold": 0.5}
            for _ in range(2):  # the first has not filled the cache for the second
                reply = await client.post(C, body)
                assert why(reply) == "cache_threshold"
                assert reply.json["choices"][0]["text"] == ""
                assert reply.json["usage"]["completion_tokens"] == 0
            assert server.worker.cores[0].vllm.resident_hashes() == []
            assert server.worker.cores[0].steps == 0
            assert why(await client.post(C, {**body, "cache_hit_threshold": 0})) == "length"
            assert why(await client.post(C, {**body, "cache_hit_threshold": 1})) == "length"
            longer = {**body, "prompt": list(range(128))}
            assert why(await client.post(C, longer)) == "length"  # just half of it
            other = {**body, "prompt": [*range(48), *range(900, 980)]}
            assert why(await client.post(C, other)) == "cache_threshold"
            events = (await client.post(C, {**other, "stream": True})).events
            assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == ["cache_threshold"]
            assert not server.worker.live()
            assert not server.app.endpoints.in_flight
            assert server.worker.cores[0].vllm.pool[1] == 0

    asyncio.run(main())


def test_a_threshold_that_is_no_share_is_refused() -> None:
    async def main() -> None:
        async with serving() as (client, _):
            for wrong in (-0.1, 1.5, "much"):
                reply = await client.post(C, {"prompt": "x", "cache_hit_threshold": wrong})
                assert reply.status == 400

    asyncio.run(main())
    with pytest.raises(ConfigError, match="--global-cache-hit-threshold must be from 0 to 1"):
        read_serve(["m", "--global-cache-hit-threshold", "2"])


def test_a_servers_threshold_holds_where_a_request_has_none() -> None:
    settings = read_serve(["m", "--global-cache-hit-threshold", "0.1"]).settings

    async def main() -> None:
        async with serving(global_cache_hit_threshold=settings.global_cache_hit_threshold) as (client, _):
            assert why(await client.post(C, {"prompt": "x"})) == "cache_threshold"
            own = {"prompt": "x", "max_tokens": 2, "cache_hit_threshold": 0}
            assert why(await client.post(C, own)) == "length"

    asyncio.run(main())


def test_what_tiers_below_hold_counts_as_cached() -> None:
    tiers = TiersConfig.from_dict({"tiers": [{"tier": "g2", "blocks": 64}], "kv_bytes_per_token": 1024})
    small = msgspec.structs.replace(QUICK, num_gpu_blocks=16, max_model_len=200)

    async def main() -> None:
        async with serving(tiers=tiers, engine=small, max_model_len=200) as (client, server):
            first = {"prompt": list(range(96)), "max_tokens": 2}
            assert why(await client.post(C, first)) == "length"
            await client.post(C, {"prompt": list(range(1000, 1190)), "max_tokens": 2})  # pushes it out
            core = server.worker.cores[0]
            here = set(core.vllm.resident_hashes())
            named = server.worker.identities(_array(first["prompt"]), _array([]), 0, salt="", lora="")
            assert named is not None
            assert not here >= set(named.sequence_hashes.tolist())
            assert why(await client.post(C, {**first, "cache_hit_threshold": 0.9})) == "length"

    asyncio.run(main())


def _array(tokens: Any) -> Any:
    import numpy as np

    return np.array(tokens, dtype=np.uint32)


def test_every_endpoint_tells_that_it_was_turned_away() -> None:
    said = [{"role": "user", "content": "x"}]

    async def main() -> None:
        async with serving(enable_per_request_metrics=True) as (client, server):
            model = server.settings.names[0]
            assert (
                why(await client.post("/v1/chat/completions", {"messages": said}, **FORCED))
                == "cache_threshold"
            )
            message = {"model": model, "max_tokens": 5, "messages": said}
            reply = await client.post("/v1/messages", message, **FORCED)
            assert reply.json["stop_reason"] == "cache_threshold"
            reply = await client.post("/v1/responses", {"input": "x"}, **FORCED)
            assert reply.json["status"] == "incomplete"
            assert reply.json["incomplete_details"] == {"reason": "cache_threshold"}
            for path, body in (
                ("/v1/chat/completions", {"messages": said}),
                ("/v1/messages", message),
                ("/v1/responses", {"input": "x"}),
                (C, {"prompt": ["x", "y"], "n": 2}),
            ):
                reply = await client.post(path, {**body, "stream": True}, **FORCED)
                assert reply.status == 200
                assert b"cache_threshold" in reply.body
            assert not server.app.endpoints.in_flight

    asyncio.run(main())


def test_a_message_that_is_aborted_is_answered() -> None:
    async def main() -> None:
        async with serving(latency_ms=(0.0, 1e6)) as (client, server):
            body = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "x"}]}
            body["model"] = server.settings.names[0]
            asked = asyncio.create_task(client.post("/v1/messages", body))
            while not server.worker.live() and not asked.done():
                await asyncio.sleep(0)
            server.worker.abort(server.worker.live())
            assert (await asked).json["stop_reason"] is None

    asyncio.run(main())


def test_latencies_stray_by_seed_and_not_far() -> None:
    line = ["m", "--inter-token-latency", "10", "--inter-token-latency-std-dev", "3", "--seed", "4"]
    settings = read_serve(line).settings
    assert settings.latency_std_dev_ms == (0.0, 3.0)

    def draws(seed: int) -> list[float]:
        latency = Latency(5.0, 10.0, (0.0, 3.0), seed)
        assert latency.prefill_ms(1, 10, 0) == 5.0
        return [latency.decode_ms() for _ in range(2000)]

    seen = draws(4)
    assert seen == draws(4) != draws(5)
    mean = sum(seen) / len(seen)
    assert 9.5 < mean < 10.5
    assert 2.5 < (sum((value - mean) ** 2 for value in seen) / len(seen)) ** 0.5 < 3.5
    assert all(3 <= value <= 17 for value in seen)

    async def main() -> None:
        async with serving(
            latency_ms=(0.0, 10.0), latency_std_dev_ms=(0.0, 3.0), seed=4, clock_speed=50.0
        ) as (
            client,
            server,
        ):
            assert (await client.post(C, {"prompt": "x", "max_tokens": 20})).status == 200
            assert server.worker.latency is not None
            assert server.worker.latency.decode_ms() != seen[0]  # steps have drawn before

    asyncio.run(main())


@pytest.mark.parametrize("name", ["time-to-first-token", "inter-token-latency"])
def test_a_latency_that_no_step_can_take_is_refused(name: str) -> None:
    async def main() -> None:
        async with serving(latency_ms=(2.0, 1.0)) as (client, server):
            for value in ("1e308", "86400001", "-1", "Infinity", "NaN"):
                refused = await client.post("/admin/config", f'{{"{name}": {value}}}'.encode())
                assert refused.status == 400
                assert f"{name} must be from 0 to 86400000 ms" in refused.json["error"]["message"]
            latency = server.worker.latency
            assert latency is not None
            assert (latency.prefill_cost_ms, latency.decode_cost_ms) == (2.0, 1.0)
            assert (await client.post(C, {"prompt": "x", "max_tokens": 2})).status == 200

    asyncio.run(main())
    with pytest.raises(ConfigError, match=f"--{name} must be from 0 to"):
        read_serve(["m", f"--{name}", "1e308"])


def test_how_far_latencies_stray_is_turned_while_the_server_runs() -> None:
    async def main() -> None:
        async with serving(latency_ms=(20.0, 10.0), latency_std_dev_ms=(0.0, 3.0)) as (client, server):
            latency = server.worker.latency
            assert latency is not None
            told = (await client.get("/admin/config")).json
            assert (told["time-to-first-token-std-dev"], told["inter-token-latency-std-dev"]) == (0.0, 3.0)
            turned = await client.post("/admin/config", {"time-to-first-token-std-dev": 6})
            assert turned.json["time-to-first-token-std-dev"] == 6.0
            assert latency.std_devs_ms == (6.0, 3.0)
            assert len({latency.prefill_ms(1, 1, 0) for _ in range(9)}) == 9
            # More than 30 % of the latency that there is then, or none at all: nothing changes.
            for wrong, what in (
                ({"time-to-first-token-std-dev": 6.1}, "time-to-first-token-std-dev"),
                ({"inter-token-latency": 9}, "inter-token-latency-std-dev"),
                ({"inter-token-latency-std-dev": -1}, "inter-token-latency-std-dev"),
                ({"inter-token-latency-std-dev": None}, "inter-token-latency-std-dev"),
            ):
                refused = await client.post("/admin/config", wrong)
                assert refused.status == 400
                assert what in refused.json["error"]["message"]
                assert (latency.decode_cost_ms, latency.std_devs_ms) == (10.0, (6.0, 3.0))
            both = {"inter-token-latency": 5, "inter-token-latency-std-dev": 0}
            assert (await client.post("/admin/config", both)).status == 200
            assert latency.decode_ms() == 5.0
        async with serving() as (client, _):
            refused = await client.post("/admin/config", {"inter-token-latency-std-dev": 1})
            assert refused.status == 400

    asyncio.run(main())


@pytest.mark.parametrize("name", ["time-to-first-token", "inter-token-latency"])
def test_a_latency_strays_by_at_most_30_percent(name: str) -> None:
    read_serve(["m", f"--{name}", "10", f"--{name}-std-dev", "3"])
    for line in ([f"--{name}", "10", f"--{name}-std-dev", "4"], [f"--{name}-std-dev", "1"]):
        with pytest.raises(ConfigError, match=f"--{name}-std-dev must be from 0 to 30 %"):
            read_serve(["m", *line])


def test_answers_say_which_pod_gave_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def headers() -> tuple[int, dict[str, str]]:
        async with serving() as (client, server):
            return server.port, (await client.get("/version")).headers

    monkeypatch.delenv("POD_NAME", raising=False)
    monkeypatch.delenv("POD_NAMESPACE", raising=False)
    assert not [name for name in asyncio.run(headers())[1] if name.startswith("x-inference")]
    monkeypatch.setenv("POD_NAME", "decode-0")
    monkeypatch.setenv("POD_NAMESPACE", "llm")
    port, told = asyncio.run(headers())
    assert told["x-inference-pod"] == "decode-0"
    assert told["x-inference-namespace"] == "llm"
    assert told["x-inference-port"] == str(port)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_connections_are_encrypted_with_vllms_flags(tmp_path: Path) -> None:
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    make = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -keyout {key} -out {cert}"
    subprocess.run([*make.split(), "-subj", "/CN=localhost"], check=True, capture_output=True)
    settings = read_serve(["m", "--ssl-certfile", cert, "--ssl-keyfile", key]).settings
    trust = ssl.create_default_context(cafile=cert)
    trust.check_hostname = False

    async def ask(port: int, text: str) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
        writer.write(text.encode())
        reply = parse_reply(await reader.read())
        writer.close()
        return reply

    async def main() -> None:
        async with serving(ssl_certfile=settings.ssl_certfile, ssl_keyfile=settings.ssl_keyfile) as (
            client,
            server,
        ):
            end = "host: t\r\nconnection: close\r\n"
            reply = await ask(client.port, f"GET /version HTTP/1.1\r\n{end}\r\n")
            assert reply.json == {"version": "0.33.0"}
            reply = await ask(client.port, f"GET /version/ HTTP/1.1\r\n{end}\r\n")
            assert reply.headers["location"] == "https://t/version"
            body = '{"prompt": "x", "max_tokens": 30, "stream": true}'
            head = f"POST {C} HTTP/1.1\r\n{end}content-type: application/json\r\n"
            reply = await ask(client.port, f"{head}content-length: {len(body)}\r\n\r\n{body}")
            assert len(reply.events) == 31
            assert not server.worker.live()

    asyncio.run(main())


def test_encryption_without_its_files_is_refused_before_anything_listens(tmp_path: Path) -> None:
    async def start(**settings: Any) -> None:
        async with serving(**settings):
            pass

    with pytest.raises(ConfigError, match="--ssl-certfile"):
        asyncio.run(start(ssl_certfile=str(tmp_path / "none.pem")))
    with pytest.raises(ConfigError, match="--ssl-keyfile needs --ssl-certfile"):
        asyncio.run(start(ssl_keyfile=str(tmp_path / "none.pem")))
    assert set(read_serve(["m", "--ssl-ca-certs", "x", "--ssl-cert-reqs", "2"]).idle) == {
        "ssl-ca-certs",
        "ssl-cert-reqs",
    }
