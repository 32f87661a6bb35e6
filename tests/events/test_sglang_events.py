"""Events that SGLang 0.5.23 published: pages and evictions of ours, joined as its queue joins them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from understudy.events.dialects import dialect
from understudy.events.events import Cleared, Removed, RemovedBlock, Stored, StoredBlock
from understudy.events.translate import to_wire
from understudy.events.verify import Verifier
from understudy.events.wire import WireBatch, decode_batch, encode_batch, live_frames
from understudy.kv import Tier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.events.events import PublishedEvent

RECORDED = sorted((Path(__file__).parents[1] / "golden" / "sglang-events" / "golden").glob("*.jsonl.gz"))
RULES = dialect("sglang-0.5.23")


@pytest.fixture(params=RECORDED, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def batches(request: pytest.FixtureRequest) -> list[list[dict[str, Any]]]:
    lines = [json.loads(line) for line in gzip.decompress(request.param.read_bytes()).decode().splitlines()]
    return [batch["events"] for line in lines for batch in line.get("published", [])]


def flat(event: dict[str, Any]) -> dict[str, Any]:
    """An event with its token ids as sent."""
    if "token_ids" not in event:
        return event
    ids = [token for first, count in event["token_ids"] for token in range(first, first + count)]
    return {**event, "token_ids": ids, "lora_id": None}


def by_page(events: list[dict[str, Any]]) -> Iterator[PublishedEvent]:
    """The same events, one for each page."""
    for event in map(flat, events):
        if event["type"] == "AllBlocksCleared":
            yield Cleared(0, 0)
            continue
        tier = Tier.G1 if event["medium"] == "GPU" else Tier.G2
        hashes = [value % (1 << 64) for value in event["block_hashes"]]
        if event["type"] == "BlockRemoved":
            yield from (Removed(0, (RemovedBlock(value, 0, 0),), tier, 0) for value in hashes)
            continue
        parent = None if event["parent_block_hash"] is None else event["parent_block_hash"] % (1 << 64)
        size = event["block_size"]
        for index, value in enumerate(hashes):
            tokens = tuple(event["token_ids"][index * size : (index + 1) * size])
            yield Stored(0, parent, (StoredBlock(value, None, 0, 0, tokens),), tier, 0)
            parent = value


def test_events_of_pages_are_joined_as_recorded(batches: list[list[dict[str, Any]]]) -> None:
    assert batches
    for events in batches:
        size = next((event["block_size"] for event in events if "block_size" in event), 1)
        sent = encode_batch(WireBatch(1.0, to_wire(by_page(events), RULES, block_size=size), 0), RULES)
        assert msgspec.msgpack.decode(sent)[1] == [flat(event) for event in events]
        assert not decode_batch(sent).bad


def test_the_stream_starts_with_a_cleared_cache_and_follows_the_rules(
    batches: list[list[dict[str, Any]]],
) -> None:
    assert RULES.starts_cleared
    assert batches[0][0] == {"type": "AllBlocksCleared"}
    verifier = Verifier("raw", dialect=RULES)
    for sequence, events in enumerate(batches):
        size = next((event["block_size"] for event in events if "block_size" in event), 1)
        payload = encode_batch(WireBatch(1.0, to_wire(by_page(events), RULES, block_size=size), 0), RULES)
        found = verifier.check_message(live_frames(b"", sequence, payload))
        assert found == [], [str(each) for each in found]
