"""Bodies are bounded in size and depth, and a large one does not stop the others."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import msgspec
import pytest

from server.client import Client, serving
from server.fleet_scene import run as in_fleet
from server.router_scene import C, Scene, play
from understudy.errors import ConfigError
from understudy.http import bodies
from understudy.http.bodies import LARGE_BODY_BYTES, MAX_CONTAINERS, decode, structure_error
from understudy.server.api.body_checks import check_completion
from understudy.server.api.errors import ApiError, Problem
from understudy.server.flags.serving import read_serve


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def is_deeper(data: bytes, depth: int) -> bool:
    return "levels" in structure_error(data, depth)


def ask(body: bytes) -> bytes:
    return b'{"prompt":"x","max_tokens":1,"user":"u","vllm_xargs":{"a":%b}}' % body


# ── Depth ──


@pytest.mark.parametrize(
    ("data", "depth"),
    [
        (b"1", 0),
        (b"[]", 1),
        (b'{"a":[{}]}', 3),
        (b'"[[[["', 0),
        (b'["\\"[[["]', 1),
        (b'["\\\\",[]]', 2),
        (b'["\\\\\\"[[",[]]', 2),
        (b'{"[":"{"}', 1),
        (b"[],[],[[]],[]", 2),
        (nested(200), 200),
        ('["日本",[]]'.encode("utf-16"), 2),
        ('["嬀嬀嬀"]'.encode("utf-16-le"), 1),  # U+5B00: a byte of it is that of a bracket
    ],
)
def test_depth_is_counted_outside_of_strings(data: bytes, depth: int) -> None:
    assert not is_deeper(data, depth)
    assert depth == 0 or is_deeper(data, depth - 1)


def test_depth_is_that_of_the_value() -> None:
    draw = random.Random(5)

    def value(left: int) -> Any:
        texts = ["", '"', "\\", '\\"', "[", "]}", "{[", "\n", "é"]
        if not left or draw.random() < 0.3:
            return draw.choice([*texts, 1, None])
        if draw.random() < 0.5:
            return [value(left - 1) for _ in range(draw.randrange(4))]
        return {f"{draw.choice(texts)}{place}": value(left - 1) for place in range(draw.randrange(4))}

    def depth(given: Any) -> int:
        if not isinstance(given, list | dict):
            return 0
        return 1 + max(map(depth, given.values() if isinstance(given, dict) else given), default=0)

    for _ in range(500):
        given = value(9)
        data = msgspec.json.encode(given)
        assert not is_deeper(data, depth(given))
        assert depth(given) == 0 or is_deeper(data, depth(given) - 1)


def test_depth_is_carried_over_the_slices_of_a_large_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_SLICE", 3)
    for data, depth in ((nested(50), 50), (b'["[[[[","]]",[{}]]', 3), (b'{"a":{"b":"{{{{{"}}', 2)):
        assert not is_deeper(data, depth)
        assert is_deeper(data, depth - 1)


def test_what_is_too_deep_or_has_too_many_lists_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: bytes) -> Any:
        raise AssertionError("decoded")

    monkeypatch.setattr("msgspec.json.decode", never)
    monkeypatch.setattr("json.loads", never)
    for data in (nested(65), b"[" * 3_000_000, (nested(800) + b",") * 2000, b'{"a":' * 65):
        assert "64 levels" in decode(data, 64).error
    for data in (b"[%b1]" % (b"[]," * 10**6), b"[%b1]" % ((nested(60) + b",") * 25_000)):
        assert f"more than {MAX_CONTAINERS} lists and objects" in decode(data, 64).error


def test_brackets_in_texts_are_no_lists() -> None:
    data = b'["%b"]' % (b"[]" * (MAX_CONTAINERS + 1))
    assert decode(data, 64).value == ["[]" * (MAX_CONTAINERS + 1)]
    data = b"[%b1]" % (b"[]," * (MAX_CONTAINERS - 1))
    assert len(decode(data, 64).value) == MAX_CONTAINERS


@pytest.mark.parametrize("path", [C, "/abort_requests", "/collective_rpc", "/admin/config", "/tokenize"])
def test_a_body_that_is_too_deep_is_refused_and_names_limit_and_flag(path: str) -> None:
    async def main() -> None:
        async with serving(dev_mode=True) as (client, _):
            for data in (
                nested(65),
                b"[" * 3_000_000,
                b'{"request_ids":[%b1]}' % ((nested(900) + b",") * 1600),
            ):
                reply = await client.post(path, data)
                assert (reply.status, reply.json["error"]["code"]) == (400, 400)
                assert "deeper than 64 levels" in reply.json["error"]["message"]
                assert "--max-request-body-depth" in reply.json["error"]["message"]

    asyncio.run(main())


def test_the_limits_are_those_of_the_settings() -> None:
    async def main() -> None:
        async with serving(max_body_depth=5, max_body_bytes=200) as (client, _):
            assert (await client.post(C, ask(nested(3)))).status == 200
            assert (await client.post(C, ask(nested(4)))).status == 400
            reply = await client.post(C, ask(b"1" + b" " * 200))
            assert reply.status == 413
            assert "200 bytes" in reply.json["error"]["message"]
            assert "--max-request-body-size-mb" in reply.json["error"]["message"]

    asyncio.run(main())


def test_a_fleet_and_a_router_have_the_limits_too() -> None:
    async def fleet(client: Client, _: object) -> None:
        assert (await client.post(C, ask(nested(62)))).status == 200
        assert (await client.post(C, ask(nested(63)))).status == 400
        assert (await client.post("/admin/fault", nested(65))).status == 400

    async def router(told: Scene) -> None:
        assert (await told.client.post(C, ask(nested(3)))).status == 200
        reply = await told.client.post(C, ask(nested(4)))
        assert (reply.status, "--max-request-body-depth" in reply.json["error"]["message"]) == (400, True)
        assert (await told.client.post("/query", nested(6))).status == 400
        assert (await told.client.post(C, b" " * 1001)).status == 413

    in_fleet(fleet, 2, "kv")
    play(router, 1, "kv", max_body_depth=5, max_body_bytes=1000)


def test_flags_set_the_limits() -> None:
    given = read_serve(["m", "--max-request-body-depth", "9", "--max-request-body-size-mb", "0.5"]).settings
    assert (given.max_body_depth, given.max_body_bytes) == (9, 512 * 1024)
    given = read_serve(["m"]).settings
    assert (given.max_body_depth, given.max_body_bytes) == (64, 32 * 1024 * 1024)
    for flag in ("--max-request-body-depth", "--max-request-body-size-mb"):
        for value in ("0", "-1"):
            with pytest.raises(ConfigError, match=flag):
                read_serve(["m", f"{flag}={value}"])


# ── Large ones ──


def test_a_large_body_is_decoded_once_and_not_in_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[tuple[int, int]] = []
    real = msgspec.json.decode

    def noted(data: Any, *args: Any, **named: Any) -> Any:
        threads.append((len(data), threading.get_ident()))
        return real(data, *args, **named)

    monkeypatch.setattr("msgspec.json.decode", noted)
    small, large = ask(b"1"), ask(b"[%b1]" % (b"123," * LARGE_BODY_BYTES))

    async def test(client: Client, _: object) -> None:
        threads.clear()
        assert (await client.post(C, small)).status == 200
        assert (await client.post(C, large)).status == 200
        assert (await client.post(C, small)).status == 200
        here = threading.get_ident()
        assert [(size, ident == here) for size, ident in threads] == [
            (len(small), True),
            (len(large), False),
            (len(small), True),
        ]

    in_fleet(test, 2, "kv")


def test_requests_behind_a_large_one_wait_for_their_turn() -> None:
    async def main() -> None:
        async with serving() as (client, server):
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            large = ask(b"[%b1]" % (b"123," * LARGE_BODY_BYTES))
            head = f"POST {C} HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
            writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(large) + large)
            writer.write(b"GET /version HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
            told = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            assert told.count(b"HTTP/1.1 200 OK") == 2
            assert told.index(b'"text_completion"') < told.index(b'"version"')
            _, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(large) + large)
            await writer.drain()
            writer.close()  # a client that goes away meanwhile is not answered
            assert (await client.get("/health")).status == 200
            while server.app.answering or server.worker.live():
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_messages_show_the_beginning_of_a_wrong_value_and_render_no_more() -> None:
    class Loud(list[Any]):
        """Counts the members that are asked for."""

        seen = 0

        def __iter__(self) -> Any:
            for member in super().__iter__():
                Loud.seen += 1
                yield member

    values: list[Any] = [
        None,
        1,
        1.5,
        True,
        "a'b",
        "",
        [],
        {},
        [1, "x", None],
        {"a": [1, {"b": "c"}]},
        [[]] * 300,
    ]
    values += [list(range(1000)), {str(i): [i] for i in range(500)}, "x" * 500]
    for value in values:
        shown = str({"type": "t", "loc": "l", "msg": "m", "input": str(value)[:200]})
        assert str(Problem("t", "l", "m", value)) == shown
    str(Problem("t", "l", "m", Loud(range(10**6))))
    assert Loud.seen < 200


def test_names_of_requests_to_abort_may_be_many_and_of_any_type() -> None:
    async def main() -> None:
        async with serving(dev_mode=True, enable_scale_out=True) as (client, _):
            names = [[], {}, 1, None, "x", [["y"]]] * 1000
            for path in ("/abort_requests", "/inference/v1/abort_requests"):
                assert (await client.post(path, {"request_ids": names})).status == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "refused"),
    [
        ([7] * 40, False),
        ([7] * 39 + [True], False),
        ([7] * 39 + ["a"], True),
        ([[7]] * 40, True),
        (["a"] * 8, False),
    ],
)
def test_many_prompts_are_refused_and_many_token_ids_are_not(prompt: list[Any], refused: bool) -> None:
    if not refused:
        check_completion({"prompt": prompt}, 32)
        return
    with pytest.raises(ApiError, match="prompt list length 40 exceeds the maximum allowed count of 32"):
        check_completion({"prompt": prompt}, 32)
