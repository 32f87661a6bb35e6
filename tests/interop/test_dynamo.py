"""Dynamo 1.6.1's own router reads what we say, and finds what is there."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest
from dynamo._core import RadixTree, SelectionService, compute_block_hash_for_seq

from interop.fleet import SIZE, WORKERS, Worker, prompts
from understudy.events import Dialect, Removed, Stored, known_dialects
from understudy.events.dynamo import encode_dynamo_event
from understudy.events.publisher import Publisher
from understudy.router import PrefixIndex
from understudy.tokens import TokenBlocks

# The very first dialects end a batch without a rank, and Dynamo refuses such a batch as a whole.
DIALECTS = [rules for rules in known_dialects() if rules.has_rank]


@pytest.mark.parametrize("size", [1, 4, 16, 64, 512])
@pytest.mark.parametrize("lora", [None, "adapter-a"])
def test_local_hashes_are_dynamos(size: int, lora: str | None) -> None:
    tokens = [random.Random(size).randrange(1 << 32) for _ in range(3000)]
    ours = TokenBlocks(tokens, size, lora=lora or "").identities.local_hashes.tolist()
    assert ours == compute_block_hash_for_seq(tokens, size, lora_name=lora)


def test_its_radix_tree_fed_with_our_events_finds_what_the_workers_hold() -> None:
    tree, index = RadixTree(), PrefixIndex()
    workers = [Worker(200) for _ in range(WORKERS)]
    source = random.Random(1)
    said = prompts(600)
    removed = matched = 0
    for turn, prompt in enumerate(said):
        chosen = source.randrange(WORKERS)
        for event in workers[chosen].serve(prompt):
            tree.apply_event(chosen, encode_dynamo_event(event))
            removed += isinstance(event, Removed)
            hashes = [block.sequence_hash for block in event.blocks]
            (index.store if isinstance(event, Stored) else index.remove)(chosen, hashes)
        if turn % 3:
            continue
        asked = source.choice(said[: turn + 1])
        identities = TokenBlocks(asked, SIZE).identities
        scores = tree.find_matches(identities.local_hashes.tolist()).scores
        truth = {worker: each.holds(asked) for worker, each in enumerate(workers)}
        assert {worker: scores.get((worker, 0), 0) for worker in range(WORKERS)} == truth
        ours = index.find(identities.sequence_hashes)
        assert {worker: ours.of(worker)[0] for worker in range(WORKERS)} == truth
        matched += sum(truth.values())
    assert removed > 100
    assert matched > 1000


class Selector:
    """Dynamo's service, subscribed to one publisher."""

    def __init__(self, source: Publisher) -> None:
        self.service = SelectionService(indexer_threads=1)
        self.worker: dict[str, Any] = {
            "worker_id": 1,
            "endpoint": "http://localhost:1",
            "block_size": SIZE,
            "model_name": "m",
            "kv_events_endpoints": {0: source.endpoint},
            "replay_endpoint": source.replay,
        }

    async def overlap(self, prompt: list[int], **more: Any) -> dict[str, int]:
        answer = await self.service.overlap_scores({"token_ids": prompt, "model_name": "m", **more})
        found: dict[str, int] = answer["workers"][0]
        return found


async def until(selector: Selector, source: Publisher, prompt: list[int], blocks: int, **more: Any) -> int:
    """Ask until it knows, or some seconds have passed; a subscription takes a moment."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = (await selector.overlap(prompt, **more))["device_blocks"]
        if found == blocks:
            return found
        source.publish([])
        await asyncio.sleep(0.02)
    return (await selector.overlap(prompt, **more))["device_blocks"]


@pytest.mark.parametrize("rules", DIALECTS, ids=lambda rules: rules.name)
def test_its_selection_service_follows_our_publisher_in_every_dialect(rules: Dialect) -> None:
    async def follow() -> None:
        worker = Worker(64)
        served = prompts(30, seed=3)
        with Publisher("tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*", dialect=rules) as source:
            selector = Selector(source)
            try:
                await selector.service.upsert_worker(selector.worker)
                for prompt in served:
                    source.publish_events(worker.serve(prompt), block_size=SIZE)
                last = served[-1]
                assert await until(selector, source, last, len(last) // SIZE) == len(last) // SIZE
                for prompt in served:
                    assert (await selector.overlap(prompt))["device_blocks"] == worker.holds(prompt)
            finally:
                selector.service.shutdown()

    asyncio.run(follow())
