"""Tokens of published blocks: how long they are kept, and that none is missing."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from server.client import QUICK, Client, serving
from server.events_scene import C
from understudy.events.events import Stored
from understudy.kv import BlockManager, BlockStore, PoolConfig, Tier
from understudy.server.kv_events import KvEventsConfig, KvEventSender
from understudy.server.live_request import LiveRequest
from understudy.tokens import TokenBlocks

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest

    from understudy.events.events import PublishedEvent


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
