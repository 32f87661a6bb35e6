"""The cost of a worker, computed by hand."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from understudy.errors import ConfigError, InvalidArgument, WrongState
from understudy.kv import Tier
from understudy.router import KvRouter, KvRouting

BLOCK = 64
PROMPT = list(range(1000, 1004))  # 256 tokens in 4 blocks


def router(workers: int = 2, seed: int = 0, **settings: Any) -> KvRouter:
    made = KvRouting(**settings).build(seed)
    made.begin(workers)
    return made


def ask(who: KvRouter, row: int, blocks: list[int], tokens: int | None = None, now_ms: float = 0) -> int:
    chosen = who.decide(row, blocks, BLOCK * len(blocks) if tokens is None else tokens, BLOCK, now_ms)
    assert chosen is not None  # nobody waits here
    return chosen


def price_on(worker: int, prepare: Any, workers: int = 2, **settings: Any) -> float:
    """The cost of the prompt on a worker, whoever would be chosen."""
    made = KvRouting(**settings).build(imposed=np.array([worker] * 100, np.int32))
    made.begin(workers)
    prepare(made)
    ask(made, 99, PROMPT)
    return float(made.decisions.cost[-1])


def nothing(_: KvRouter) -> None:
    pass


def test_idle_without_overlap_costs_prompt_and_decode_blocks() -> None:
    assert price_on(0, nothing) == 8


def test_cached_blocks_need_no_prefill() -> None:
    assert price_on(0, lambda r: r.index.store(0, PROMPT[:3])) == 5


def active_prefill(r: KvRouter) -> None:
    """512 tokens before it, and 3 of its blocks cached."""
    ask(r, 0, [], tokens=512)
    r.index.store(0, PROMPT[:3])


def test_prompts_before_it_count() -> None:
    assert price_on(0, active_prefill) == 13


def test_blocks_that_decode_there_count() -> None:
    def prepare(r: KvRouter) -> None:
        active_prefill(r)
        ask(r, 1, list(range(8)))
        r.first_token(1)

    assert price_on(0, prepare) == 21


def test_blocks_of_its_own_that_are_active_there_count_once() -> None:
    def prepare(r: KvRouter) -> None:
        ask(r, 0, [*PROMPT[:3], 1, 2, 3, 4, 5])
        r.first_token(0)
        r.index.store(0, PROMPT[:3])

    assert price_on(0, prepare) == 10


def test_credit_decays_with_the_load_above_the_least() -> None:
    assert price_on(0, active_prefill, overlap_score_credit_decay=1.0) == 15


def test_host_blocks_earn_three_quarters() -> None:
    def prepare(r: KvRouter) -> None:
        r.index.store(0, PROMPT[:1])
        r.index.store(0, PROMPT[1:3], tier=Tier.G2)

    assert price_on(0, prepare) == 5.5
    assert price_on(0, prepare, host_cache_hit_weight=0.5) == 6


@pytest.mark.parametrize(("tier", "cost"), [(Tier.G3, 7.5), (Tier.G4, 8.0)])
def test_disk_earns_a_quarter_and_external_storage_nothing_by_default(tier: Tier, cost: float) -> None:
    assert price_on(0, lambda r: r.index.store(0, PROMPT[:2], tier=tier)) == cost


def test_live_requests_have_a_weight_of_their_own() -> None:
    def prepare(r: KvRouter) -> None:
        for row in range(3):
            ask(r, row, [], tokens=10)
            r.first_token(row)

    assert price_on(0, prepare, decode_active_request_weight=2.0) == 14
    assert price_on(1, prepare, decode_active_request_weight=2.0) == 14  # imposed: all went to worker 1


def test_the_tail_of_a_prompt_is_prefilled_and_not_a_block() -> None:
    made = router()
    ask(made, 0, PROMPT, tokens=4 * BLOCK + 16)
    assert made.decisions.cost[-1] == 4.25 + 4


def test_an_ended_request_leaves_nothing() -> None:
    made = router(workers=1)
    ask(made, 0, PROMPT)
    made.ended(0)  # without a first token
    made.ended(0)
    ask(made, 1, PROMPT)
    assert made.decisions.cost.tolist() == [8, 8]


def test_the_lowest_cost_wins() -> None:
    made = router(workers=3)
    made.index.store(2, PROMPT)
    assert ask(made, 0, PROMPT) == 2
    assert made.decisions.overlap_blocks.tolist() == [4]


def test_ties_are_drawn_by_the_seed_and_evenly() -> None:
    def drawn(seed: int) -> list[int]:
        made = router(workers=4, seed=seed)
        out = []
        for row in range(400):
            out.append(ask(made, row, [row]))
            made.ended(row)
        return out

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert min(Counter(drawn(3)).values()) > 70


def test_temperature_prefers_the_cheaper_by_softmax() -> None:
    made = router(workers=2, temperature=0.5)
    made.index.store(1, PROMPT[:3])
    counts = Counter[int]()
    for row in range(4000):
        counts[ask(made, row, PROMPT)] += 1
        made.ended(row)
    assert counts[1] / 4000 == pytest.approx(1 / (1 + math.exp(-2)), abs=0.02)


def test_what_was_sent_counts_until_its_time_is_up() -> None:
    made = router(workers=2, predict_ttl_ms=100)
    first = ask(made, 0, PROMPT, now_ms=0)
    made.ended(0)
    assert ask(made, 1, PROMPT, now_ms=99) == first
    assert made.decisions.overlap_blocks.tolist() == [0, 4]
    assert made.decisions.true_overlap_blocks.tolist() == [0, 0]
    made.ended(1)
    ask(made, 2, PROMPT, now_ms=300)
    assert made.decisions.overlap_blocks[-1] == 0


def test_without_events_only_what_was_sent_counts() -> None:
    made = router(workers=2, use_events=False, approximate_blocks=4)
    first = ask(made, 0, PROMPT)
    made.ended(0)
    assert ask(made, 1, PROMPT) == first
    made.ended(1)
    assert made.decisions.overlap_blocks.tolist() == [0, 4]


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap_score_credit": -1.0},
        {"temperature": math.nan},
        {"event_delay_ms": -1.0},
        {"event_loss": 1.0},
        {"use_events": False, "predict_ttl_ms": 5.0},
        {"approximate_blocks": -1},
        {"approximate_ttl_ms": 0.0},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        KvRouting(**settings).build()


def test_a_router_needs_workers_and_blocks_that_fit() -> None:
    with pytest.raises(WrongState, match="begin"):
        KvRouting().build().decide(0, [], 1, BLOCK, 0)
    with pytest.raises(InvalidArgument, match="blocks"):
        ask(router(), 0, PROMPT, tokens=3 * BLOCK)
