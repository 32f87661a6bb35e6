"""KV events of a live server: what the recorded server sent for the same requests, in our hashes."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from server.client import QUICK, Client, serving
from understudy.engines.kv_groups import KvCacheGroup
from understudy.engines.speculation import SpeculativeConfig
from understudy.events.events import Stored
from understudy.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch
from understudy.kv import BlockManager, BlockStore, PoolConfig, Tier
from understudy.server.kv_events import KvEventsConfig, KvEventSender
from understudy.server.live_request import LiveRequest
from understudy.server.settings import LoraModule
from understudy.tiers.settings import TiersConfig
from understudy.tokens import TokenBlocks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from understudy.events.events import PublishedEvent

C = "/v1/completions"
RUN = list(range(1000, 1048))


class Reader:
    """Reads a server's events one batch at a time."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.linger = 0
        self._socket.connect(endpoint.replace("0.0.0.0", "127.0.0.1"))
        self._socket.subscribe(b"")

    async def next(self) -> tuple[int, Any]:
        _, sequence, payload = await asyncio.wait_for(self._socket.recv_multipart(), 10)
        return int.from_bytes(sequence, "big"), decode_batch(payload)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def run(
    test: Any, *, tiers: TiersConfig | None = None, settings: dict[str, Any] | None = None, **config: Any
) -> None:
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "topic": "kv-events", **config}

    async def main() -> None:
        below = TiersConfig() if tiers is None else tiers
        given = {"kv_events_config": events, "dev_mode": True, "tiers": below, **(settings or {})}
        async with serving(**given) as (client, server):
            sources = (await client.get("/kv_event_sources")).json
            reader = Reader(sources["0"]["endpoint"])
            try:
                await asyncio.sleep(0.3)  # a subscription takes a moment to arrive
                await test(client, server, reader)
            finally:
                reader.close()

    asyncio.run(main())


def test_steps_tell_what_they_stored_with_its_tokens() -> None:
    async def test(client: Client, server: Any, reader: Reader) -> None:
        await client.post(C, {"prompt": RUN, "max_tokens": 2})
        sequence, batch = await reader.next()
        (cold,) = batch.events
        assert sequence == 0
        assert isinstance(cold, BlockStored)
        assert (cold.parent_block_hash, len(cold.block_hashes), cold.block_size) == (None, 3, 16)
        assert cold.token_ids == RUN
        assert cold.medium == "GPU"

        await client.post(C, {"prompt": RUN, "max_tokens": 2})  # its last block is computed, and told, again
        sequence, batch = await reader.next()
        (again,) = batch.events
        assert sequence == 1
        assert again.block_hashes == cold.block_hashes[2:]
        assert again.token_ids == RUN[32:]

        await client.post(C, {"prompt": RUN, "max_tokens": 1, "cache_salt": "salty"})
        _, batch = await reader.next()
        (salted,) = batch.events
        assert not set(salted.block_hashes) & set(cold.block_hashes)
        assert salted.extra_keys == [["salty"], None, None]

        longer = RUN + list(range(2000, 2020))
        await client.post(C, {"prompt": longer, "max_tokens": 2, "session_id": "s-1"})
        _, batch = await reader.next()
        assert batch.events[0].parent_block_hash == cold.block_hashes[2]
        assert batch.events[0].session_id == "s-1"

    run(test)


@pytest.mark.parametrize(("version", "reported"), [("0.33", True), ("0.26", True), ("0.25", False)])
def test_cached_blocks_are_published_again_for_a_request_that_asks_for_it(
    version: str, reported: bool
) -> None:
    async def test(client: Client, server: Any, reader: Reader) -> None:
        await client.post(C, {"prompt": RUN, "max_tokens": 1})
        (cold,) = (await reader.next())[1].events
        full = {"prompt": RUN, "max_tokens": 1, "vllm_xargs": {"kv_cache_report_mode": "full"}}
        await client.post(C, full)
        *hits, last = (await reader.next())[1].events
        assert last.block_hashes == cold.block_hashes[2:]
        assert len(hits) == reported
        for event in hits:
            assert (event.block_hashes, event.parent_block_hash) == (cold.block_hashes[:2], None)
            assert (event.token_ids, event.extra_keys) == (RUN[:32], [None, None])

    run(test, settings=release(version))


def test_groups_publish_ranges_with_the_tokens_of_blocks_without_a_key() -> None:
    window = KvCacheGroup(kind="sliding_window", block_size=16, window=64)
    engine = msgspec.structs.replace(
        QUICK, kv_cache_groups=(window, KvCacheGroup(kind="full", block_size=16)), block_size=16
    )
    prompt = list(range(1000, 1160))

    async def test(client: Client, server: Any, reader: Reader) -> None:
        await client.post(C, {"prompt": prompt, "max_tokens": 1})
        _, batch = await reader.next()
        sliding, full = batch.events
        assert (sliding.group_idx, sliding.kv_cache_spec_kind) == (0, "sliding_window")
        assert (full.group_idx, full.kv_cache_spec_kind) == (1, "full_attention")
        assert (sliding.kv_cache_spec_sliding_window, full.kv_cache_spec_sliding_window) == (64, None)
        # The window of a hit at the prompt's end, 144 tokens, is 63 tokens: 4 blocks.
        assert sliding.block_hashes == full.block_hashes[5:9]
        assert sliding.token_ids == full.token_ids == prompt
        assert (sliding.block_size, sliding.parent_block_hash) == (16, None)

        await client.post(C, {"prompt": prompt, "max_tokens": 1})
        _, batch = await reader.next()
        assert [event.parent_block_hash for event in batch.events] == [full.block_hashes[8]] * 2
        assert [event.token_ids for event in batch.events] == [prompt[144:]] * 2
        assert [len(event.block_hashes) for event in batch.events] == [0, 1]

    run(test, settings={"engine": engine})


def release(version: str, **engine: Any) -> dict[str, Any]:
    return {"engine": msgspec.structs.replace(QUICK, vllm_version=version, **engine)}


@pytest.mark.parametrize(
    ("version", "keys", "group", "kind"),
    [
        ("0.33", [None] * 3, 0, "full_attention"),
        ("0.32", [None] * 3, 0, "full_attention"),
        ("0.20", [None] * 3, 0, None),
        ("0.17", [None] * 3, None, None),
        ("0.16", None, None, None),
    ],
)
def test_a_plain_prompt_is_published_as_its_release_does(
    version: str, keys: list[None] | None, group: int | None, kind: str | None
) -> None:
    async def test(client: Client, server: Any, reader: Reader) -> None:
        await client.post(C, {"prompt": RUN, "max_tokens": 1})
        _, batch = await reader.next()
        (event,) = batch.events
        assert (event.extra_keys, event.group_idx, event.kv_cache_spec_kind) == (keys, group, kind)
        assert (event.lora_id, event.session_id, event.lookahead_token_ids) == (None, None, None)

    run(test, settings=release("0.33"), dialect=f"vllm-{version}")


def test_events_have_the_format_of_the_release_that_is_served() -> None:
    async def test(client: Client, server: Any, reader: Reader) -> None:
        assert server.worker.senders[0]._publisher.dialect.name == "vllm-0.22"
        await client.post(C, {"prompt": RUN, "max_tokens": 1})
        _, batch = await reader.next()
        assert batch.events[0].extra_keys == [None] * 3

    run(test, settings=release("0.22"))


def test_an_adapter_is_published_with_its_name_and_number() -> None:
    async def test(client: Client, server: Any, reader: Reader) -> None:
        body = {"model": "second", "prompt": RUN, "max_tokens": 1, "cache_salt": "salty"}
        assert (await client.post(C, body)).status == 200
        _, batch = await reader.next()
        (event,) = batch.events
        assert (event.lora_name, event.lora_id) == ("second", 2)
        assert event.extra_keys == [["second", "salty"], ["second"], ["second"]]

    modules = (LoraModule("first", "/first"), LoraModule("second", "/second"))
    run(test, settings={"enable_lora": True, "lora_modules": modules})


def test_each_block_that_the_device_evicts_has_an_event() -> None:
    async def test(client: Client, server: Any, reader: Reader) -> None:
        for first in (0, 500, 1000):  # 6 of 9 usable blocks each
            await client.post(C, {"prompt": list(range(first, first + 96)), "max_tokens": 1})
        removed: list[BlockRemoved] = []
        while len(removed) < 6:
            _, batch = await reader.next()
            removed += [event for event in batch.events if isinstance(event, BlockRemoved)]
        assert all((len(event.block_hashes), event.group_idx) == (1, 0) for event in removed)

    run(test, settings={**release("0.33", num_gpu_blocks=10, max_model_len=112), "max_model_len": 112})


def test_native_offload_publishes_hashes_only() -> None:
    below = TiersConfig.from_dict(
        {
            "tiers": [{"tier": "g2", "blocks": 64}],
            "offload": {"mode": "vllm"},
            "kv_bytes_per_token": 2000,
        }
    )

    async def test(client: Client, server: Any, reader: Reader) -> None:
        await client.post(C, {"prompt": RUN, "max_tokens": 4})
        host: list[BlockStored] = []
        while len(host) < 3:
            _, batch = await reader.next()
            host += [event for event in batch.events if event.medium == "CPU"]
        for event in host:
            assert (len(event.block_hashes), event.parent_block_hash, event.token_ids) == (1, None, [])
            assert (event.block_size, event.group_idx) == (0, 0)
            assert (event.extra_keys, event.kv_cache_spec_kind) == (None, None)

    run(test, tiers=below)


def test_hashes_that_cover_the_next_token_are_published_with_it() -> None:
    async def test(client: Client, server: Any, reader: Reader) -> None:
        await client.post(C, {"prompt": [*RUN, 7], "max_tokens": 1})
        _, batch = await reader.next()
        stored = [event for event in batch.events if isinstance(event, BlockStored)]
        assert [ids for event in stored for ids in event.lookahead_token_ids or []] == [[1016], [1032], [7]]
        assert [token for event in stored for token in event.token_ids] == RUN

    drafts = SpeculativeConfig(method="mtp", num_speculative_tokens=2)
    run(test, settings=release("0.33", speculative_config=drafts))


def test_a_cleared_cache_is_told_with_the_next_step() -> None:
    async def test(client: Client, server: Any, reader: Reader) -> None:
        await client.post(C, {"prompt": RUN, "max_tokens": 1})
        await reader.next()
        assert (await client.post("/reset_prefix_cache", {})).json == {"success": True}
        reply = await client.post(C, {"prompt": RUN, "max_tokens": 1})
        assert reply.status == 200
        _, batch = await reader.next()
        assert isinstance(batch.events[0], AllBlocksCleared)
        assert len(batch.events[1].block_hashes) == 3  # nothing was cached any more

    run(test)


def test_what_lands_on_the_host_of_an_idle_worker_is_told_when_it_lands() -> None:
    link = {
        "down_gbps": 0.01,
        "up_gbps": 0.01,
    }  # a block of 32,000 bytes goes down in 3.2 ms, the step takes one
    below = TiersConfig.from_dict(
        {"tiers": [{"tier": "g2", "blocks": 64, "link": link}], "kv_bytes_per_token": 2000}
    )

    async def test(client: Client, server: Any, reader: Reader) -> None:
        assert (await client.post(C, {"prompt": RUN, "max_tokens": 1})).status == 200
        stored: list[BlockStored] = []
        while sum(len(event.block_hashes) for event in stored if event.medium == "CPU") < 3:
            _, batch = await reader.next()  # nobody asks for anything meanwhile
            stored += [event for event in batch.events if isinstance(event, BlockStored)]
        assert server.worker.live() == []
        device = [event for event in stored if event.medium == "GPU"]
        assert {h for event in stored for h in event.block_hashes} == {
            h for event in device for h in event.block_hashes
        }

    run(test, tiers=below)


def test_a_worker_that_dies_begins_again_at_zero_with_nothing_cached() -> None:
    async def test(client: Client, server: Any, reader: Reader) -> None:
        await client.post(C, {"prompt": RUN, "max_tokens": 1})
        await reader.next()
        assert server.worker.senders[0].next_sequence == 1
        server.worker.kill()
        await asyncio.sleep(0.05)
        assert server.worker.senders[0].next_sequence == 0
        await client.post(C, {"prompt": RUN, "max_tokens": 1})
        assert server.worker.senders[0].next_sequence == 1

    run(test)


def test_a_topic_names_its_server_as_in_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    config = KvEventsConfig.read({"topic": "kv@{host}:{port}@{model}"})
    assert config.at("127.0.0.1", 8000, "m").topic == "kv@127.0.0.1:8000@m"
    monkeypatch.setenv("POD_IP", "10.0.0.7")
    assert config.at("127.0.0.1", 8000, "m").topic == "kv@10.0.0.7:8000@m"
    assert KvEventsConfig.read({"topic": "kv-events"}).at("h", 1, "m").topic == "kv-events"


LARGE = msgspec.structs.replace(
    QUICK, num_gpu_blocks=4096, max_num_batched_tokens=65_536, max_model_len=60_000
)
"""A step of it may store more blocks than are kept of those that nobody has or holds."""


def heard(server: Any) -> list[tuple[int, ...] | None]:
    """The tokens of every block that it will say it has stored."""
    said: list[tuple[int, ...] | None] = []
    sender = server.worker.senders[0]
    tell = sender._add_tokens

    def listen(event: Stored) -> Stored:
        told: Stored = tell(event)
        said.extend(block.token_ids for block in told.blocks)
        return told

    sender._add_tokens = listen
    return said


def play_large(what: Any, **settings: Any) -> None:
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0"}

    async def main() -> None:
        async with serving(
            kv_events_config=events, dev_mode=True, engine=LARGE, max_model_len=60_000, **settings
        ) as (client, server):
            await what(client, server)

    asyncio.run(main())


def test_prompts_of_many_blocks_are_told_with_all_their_tokens() -> None:
    async def what(client: Client, server: Any) -> None:
        said = heard(server)
        prompts = [[number] * 16 * 150 for number in range(6)]  # 900 blocks in one request
        for prompt in ([*range(5000), *range(5000), *range(6000)], prompts):
            assert (await client.post(C, {"prompt": prompt, "max_tokens": 1})).status == 200
        assert len(said) == 1000 + 900
        assert None not in said
        for number in range(40):  # none of which fills a block: nobody holds what was stored any more
            await client.post(C, {"prompt": [number], "max_tokens": 1})
        assert len(server.worker.senders[0]._tokens) == 1900  # all of them are there

    play_large(what)


def test_what_a_step_stores_is_told_with_its_tokens_though_its_request_has_gone_and_others_come_and_go() -> (
    None
):
    async def what(client: Client, server: Any) -> None:
        said = heard(server)
        core = server.worker.cores[0]

        async def ask_and_go(first: int) -> None:
            asked = asyncio.create_task(
                client.post(C, {"prompt": [first, *range(15_999)], "max_tokens": 1}, x_request_id="gone")
            )
            while not server.worker.live():
                await asyncio.sleep(0.002)
            await client.post("/abort_requests", {})
            assert (await asked).status == 200
            assert server.worker.live() == []
            gc.collect()

        await ask_and_go(1)  # in the step that it began, which takes as long as we say
        for other in range(2, 5):
            await ask_and_go(other)
        assert core.engine.in_step
        assert not said
        server.runtime.driver._end(core, core.step_end_ns)
        assert len(said) == 1000
        assert None not in said
        assert len(server.worker.senders[0]._tokens) <= 1000 + 512

    play_large(what, latency_ms=(3_600_000.0, 1.0))


def test_a_request_that_comes_while_its_worker_dies_is_told_with_its_tokens() -> None:
    async def what(client: Client, server: Any) -> None:
        said, worker = heard(server), server.worker
        worker.kill()  # as soon as the event loop is free; so does the request come
        prompt = np.arange(64, dtype=np.uint32)
        named = worker.identities(prompt, prompt[:0], 0, salt="", lora="")
        request = LiveRequest("late", 64, 1, named, Nobody())
        worker.submit(request, 0)
        while not request.ended:
            await asyncio.sleep(0.002)
        assert len(said) == 4
        assert None not in said

    play_large(what)


class Nobody:
    """Hears of a request, and does nothing."""

    def on_admitted(self, request: LiveRequest, now_ns: int) -> None: ...
    def on_tokens(self, request: LiveRequest, first: int, count: int, now_ns: int) -> None: ...
    def on_end(self, request: LiveRequest, now_ns: int) -> None: ...
    def on_error(self, request: LiveRequest) -> None: ...


class Tiered:
    """Blocks of two tokens on two tiers, and what a sender that keeps few of them says. Tokens are 2n and 2n + 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, keep_blocks: int) -> None:
        self.store = BlockStore([PoolConfig(1), PoolConfig(8, tier=Tier.G2)], block_size=2, events=True)
        self.device, self.host = self.store.manager(), self.store.manager(Tier.G2)
        config = KvEventsConfig(endpoint="inproc://nobody")
        self.sender = KvEventSender(config, 2, 0, keep_blocks=keep_blocks)
        self.said: list[tuple[int, tuple[int, ...] | None]] = []
        monkeypatch.setattr(self.sender._publisher, "publish_events", self._hear)

    def _hear(self, events: Iterable[PublishedEvent], **_: object) -> None:
        for event in events:
            if isinstance(event, Stored):
                self.said += [(int(event.tier), block.token_ids) for block in event.blocks]

    def ask(self, *numbers: int) -> None:
        """Requests for these blocks come."""
        for number in numbers:
            tokens = TokenBlocks([2 * number, 2 * number + 1], 2)
            self.sender.remember(tokens.identities, tokens.tokens)

    def put(self, manager: BlockManager, number: int) -> None:
        """It is computed or copied there, maybe in another's place."""
        tokens = TokenBlocks([2 * number, 2 * number + 1], 2)
        manager.allocate(1).register(tokens.identities).release()
        self.sender.on_step(self.store.drain_events())


def test_a_block_keeps_its_tokens_while_any_tier_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Tiered(monkeypatch, keep_blocks=2)
    fleet.ask(1)
    fleet.put(fleet.device, 1)
    fleet.put(fleet.host, 1)  # copied down
    for number in range(10, 20):  # many others come, and it is evicted above
        fleet.ask(number)
        fleet.put(fleet.device, number)
    fleet.said.clear()
    fleet.put(fleet.device, 1)  # brought back, and copied down again
    fleet.host.clear_inactive()
    fleet.put(fleet.host, 1)
    assert fleet.said == [(1, (2, 3)), (2, (2, 3))]
    fleet.sender.close()


def test_of_blocks_that_no_tier_has_the_tokens_of_the_latest_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Tiered(monkeypatch, keep_blocks=2)
    fleet.ask(1, 2, 1, 3)  # 2 was wanted longest ago
    fleet.sender.trim()
    for number in (1, 2, 3):
        fleet.put(fleet.device, number)
    assert fleet.said == [(1, (2, 3)), (1, None), (1, (6, 7))]
    assert len(fleet.sender._tokens) == 2  # 1, of which nobody has a copy any more, and 3
    fleet.sender.mark_cleared()
    fleet.ask(4)
    fleet.sender.trim()
    assert len(fleet.sender._tokens) == 2
    fleet.sender.close()


def test_blocks_of_requests_on_their_way_keep_their_tokens_however_many_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Tiered(monkeypatch, keep_blocks=2)
    waiting = []
    for number in range(20):
        tokens = TokenBlocks([2 * number, 2 * number + 1], 2)
        fleet.sender.remember(tokens.identities, tokens.tokens)
        waiting.append(LiveRequest(f"{number}", 2, 1, tokens.identities, Nobody()))
        fleet.sender.retain(waiting[-1])
    again = LiveRequest("again", 2, 1, TokenBlocks([0, 1], 2).identities, Nobody())
    fleet.sender.retain(again)
    assert len(fleet.sender._tokens) == 20
    fleet.put(fleet.device, 7)
    assert fleet.said == [(1, (14, 15))]
    waiting.clear()  # they have ended
    gc.collect()
    fleet.put(fleet.device, 0)
    assert fleet.said[1:] == [(1, (0, 1))]  # of whose block another still waits
    assert len(fleet.sender._tokens) == 3  # the one that is there, and two others
    fleet.sender.restart()
    del again
    gc.collect()
    fleet.ask(5)
    fleet.sender.trim()
    assert set(fleet.sender._tokens) == set(fleet.sender._unused)
    assert not fleet.sender._retained
    fleet.sender.close()
