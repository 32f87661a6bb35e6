"""The load that a router books: distinct blocks of prompts under way, and what a new prompt shares with them."""

from __future__ import annotations

import zlib

from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.router import KvRouter, KvRouting

BLOCK = 16
WORKERS = 3

# Prompts of few words, so that they share beginnings, part in the middle and end inside each other.
PROMPTS = st.lists(st.sampled_from("aab"), max_size=9)


def hashes(prompt: list[str]) -> list[int]:
    """A block's hash stands for all that comes before it, too."""
    return [zlib.crc32("".join(prompt[: i + 1]).encode()) + i + 1 for i in range(len(prompt))]


def router() -> KvRouter:
    made = KvRouting(prefill_load_scale=0.0).build(0)
    made.begin(WORKERS, 8192)
    return made


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(PROMPTS, st.booleans(), st.integers(0, 20)), max_size=25))
def test_what_is_booked_is_what_live_prompts_have(steps: list[tuple[list[str], bool, int]]) -> None:
    who = router()
    live: dict[int, tuple[int, list[int]]] = {}
    for row, (prompt, ends_one, which) in enumerate(steps):
        blocks = hashes(prompt)
        held = [{block for at, own in live.values() if at == w for block in own} for w in range(WORKERS)]
        shared = [next((i for i, b in enumerate(blocks) if b not in own), len(blocks)) for own in held]
        chosen = who.decide(row, blocks, len(blocks) * BLOCK + 1, BLOCK, 0.0)
        assert chosen is not None
        # Without weight on prompts, a cost is what decodes there with it.
        assert who.costs.tolist() == [len(held[w]) + len(blocks) - shared[w] for w in range(WORKERS)]
        live[row] = (chosen, blocks)
        if ends_one:
            gone = sorted(live)[which % len(live)]
            del live[gone]
            who.ended(gone)
        now = [{block for at, own in live.values() if at == w for block in own} for w in range(WORKERS)]
        assert who.active_blocks.tolist() == [len(own) for own in now]
    for row in live:
        who.ended(row)
    assert who.active_blocks.tolist() == [0] * WORKERS
