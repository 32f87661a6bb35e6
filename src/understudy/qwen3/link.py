"""Measure the time to copy pages to host memory and back, for the twin's simulated host memory."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from understudy.timing.recorded.load import LinkTimes
from understudy.tokens import TokenBlocks

if TYPE_CHECKING:
    from understudy.qwen3.host import HostTier

PAGES = 128
ALONE = 16


def measure_link(tier: HostTier, rounds: int = 5) -> LinkTimes:
    """Measure an idle engine: offload sealed pages one by one, then many at once, and load them again.

    The many pages are scattered, as those of requests in a running engine are.
    """
    blocks, size = tier.manager.blocks, tier.manager.layout.page_size
    many = min(PAGES, tier.blocks.available - ALONE, blocks.available // 2 - ALONE)
    alone, together, down, up = [], [], [], []
    for seed in range(rounds):
        tokens = (np.arange((ALONE + many) * size, dtype=np.uint32) * 7 + seed) % 50_000
        names = TokenBlocks(tokens, size).identities
        taken = [blocks.allocate(1) for _ in range(2 * len(names))]
        for place in range(len(names)):
            taken[2 * place].register(names[place : place + 1]).release()
            taken[2 * place + 1].release()
        scattered = names[ALONE:]
        start_ms = _now_ms()
        for place in range(ALONE):
            tier.offload(names[place : place + 1])
            tier.begin_copies()
        alone.append((_now_ms() - start_ms) / ALONE)
        _wait_for_offloads(tier)
        start_ms = _now_ms()
        tier.offload(scattered)
        tier.begin_copies()
        together.append(_now_ms() - start_ms)
        _wait_for_offloads(tier)
        down.append((_now_ms() - start_ms) / many)
        blocks.clear_inactive()
        start_ms = _now_ms()
        copy = tier.onboard(scattered)
        assert copy is not None, "the host has the offloaded pages"
        tier.begin_copies()
        while not copy.done():
            pass
        up.append((_now_ms() - start_ms) / many)
        tier.commit(copy).release()
        blocks.clear_inactive()
        tier.blocks.clear_inactive()
    tier.offloaded_blocks = tier.onboarded_blocks = 0
    page_ms = max(0.0, (median(together) - median(alone)) / max(many - 1, 1))
    return LinkTimes(max(0.0, median(alone) - page_ms), page_ms, median(down), median(up))


def _wait_for_offloads(tier: HostTier) -> None:
    while tier.offloads_in_flight:
        tier.collect_ended()


def _now_ms() -> float:
    return time.perf_counter() * 1e3
