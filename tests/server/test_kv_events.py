"""KV events of a live server: what the recorded server sent for the same requests, in our hashes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from server.client import QUICK, Client
from server.events_scene import RUN, C, Reader, release, run
from understudy.engines.kv_groups import KvCacheGroup
from understudy.engines.speculation import SpeculativeConfig
from understudy.events.wire import AllBlocksCleared, BlockRemoved, BlockStored
from understudy.server.kv_events import KvEventsConfig
from understudy.server.settings import LoraModule
from understudy.tiers.settings import TiersConfig


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
