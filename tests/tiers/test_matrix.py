"""Every pair of choices, of tiers and scheduler alike, with every invariant checked after every step."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import pytest

from tiers.building import INF, Only, shared, tiers, way
from tiers.fleets import crowd_of, digest, drained, play
from understudy import _core
from understudy.engines.profiles import PROFILES

CHOICES: dict[str, list[Any]] = {
    "manager": ["native", "kvbm lineage", "kvbm lru"],
    "tiers": ["g2", "g2 g3", "g2 g4", "g2 g3 g4"],
    "placement": ["inclusive", "exclusive", "write-through"],
    "min_reuse": [0, 1],
    "filter": ["all", "some"],
    "policy": ["lru", "fifo", "lineage", "multi_lru"],
    "below_policy": ["lru", "lineage"],
    "host_blocks": [3, 16, 200],
    "bandwidth": ["slow", "fast", "unlimited", "duplex"],
    "batch": [1, 3, 32],
    "concurrency": [None, 1],
    "demand_first": [False, True],
    "fallback": [False, True],
    "failures": [0.0, 0.4],
    "onboard_preempted": [True, False],
    "scheduling": ["fcfs", "priority", "fifo"],
    "ahead": ["no", "asynchronous", "bursts"],
    "prefill": ["chunked", "whole", "capped"],
    "watermark": [0.0, 0.1],
    "reserve_full_isl": [True, False],
    "version": sorted(PROFILES),
    "device_blocks": [14, 24, 60],
    "workers": [1, 2],
}


def all_pairs(choices: dict[str, list[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Rows in which every two values of different choices meet; greedy, the best of some tries each."""
    rng = Random(seed)
    names = list(choices)
    open_pairs = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(choices[a]))
        for j in range(len(choices[b]))
    }
    rows = []
    while open_pairs:
        a, i, b, j = min(open_pairs)
        best: dict[str, int] = {}
        most: set[tuple[str, int, str, int]] = set()
        for _ in range(30):
            row = {name: rng.randrange(len(choices[name])) for name in names} | {a: i, b: j}
            met = {(x, row[x], y, row[y]) for x, y in itertools.combinations(names, 2)} & open_pairs
            if len(met) > len(most):
                best, most = row, met
        open_pairs -= most
        rows.append({name: choices[name][index] for name, index in best.items()})
    return rows


ROWS = all_pairs(CHOICES)
REQUESTS = 120


def tier_config(row: dict[str, Any]) -> Any:
    host, below = {
        "slow": (way(0.3), 0.2),
        "fast": (way(5.0, down_fixed_ns=20_000, up_fixed_ns=30_000), 2.0),
        "unlimited": (way(INF), INF),
        "duplex": (way(1.0, 2.0, duplex_gbps=1.5), 1.0),
    }[row["bandwidth"]]
    lower: dict[str, Any] = {
        tier: shared(
            num_blocks=30,
            worker=below,
            backend=below,
            policy=row["below_policy"],
            offload_concurrency=row["concurrency"],
        )
        for tier in ("g3", "g4")
        if tier in row["tiers"]
    }
    return tiers(
        g2_blocks=row["host_blocks"],
        host=host,
        g2_policy=row["policy"],
        write_through=row["placement"] == "write-through",
        exclusive=row["placement"] == "exclusive",
        min_reuse=row["min_reuse"],
        offload_filter=EveryOther() if row["filter"] == "some" else None,
        offload_batch_size=row["batch"],
        offload_concurrency=row["concurrency"],
        demand_first=row["demand_first"],
        recompute_fallback=row["fallback"],
        onboard_failure_rate=row["failures"],
        onboard_preempted=row["onboard_preempted"],
        **lower,
    )


class EveryOther(Only):
    """Half of the blocks, whoever asks."""

    def select(self, lineages: Any, reuse: Any) -> list[bool]:
        self.asked.append((len(lineages), int(max(reuse))))
        return [lineage % 2 == 0 for lineage in lineages]


def engine_settings(row: dict[str, Any]) -> dict[str, Any]:
    profile = PROFILES[row["version"]]
    manager, _, eviction_policy = row["manager"].partition(" ")
    return {
        "kv_manager": manager,
        "eviction_policy": eviction_policy or "lineage",
        "mocker": _core.MockerSettings(accept_rates=[0.7, 0.4] if row["ahead"] == "bursts" else []),
        "num_gpu_blocks": row["device_blocks"],
        "scheduling_policy": "priority" if row["scheduling"] == "priority" else "fcfs",
        "preemption_mode": "fifo" if row["scheduling"] == "fifo" else "lifo",
        "async_scheduling": row["ahead"] == "asynchronous",
        "enable_chunked_prefill": row["prefill"] != "whole",
        "max_num_batched_tokens": 8192 if row["prefill"] == "whole" else 16,
        "long_prefill_token_threshold": 6 if row["prefill"] == "capped" else 0,
        "watermark": row["watermark"] if profile.has_watermark else 0.0,
        "scheduler_reserve_full_isl": row["reserve_full_isl"] and profile.has_reserve_full_isl,
        "free_order": profile.free_order,
        "phantom_hits": profile.phantom_hits and manager == "native",
    }


def test_every_pair_is_in_the_matrix() -> None:
    for a, b in itertools.combinations(CHOICES, 2):
        met = {(str(row[a]), str(row[b])) for row in ROWS}
        assert len(met) == len(CHOICES[a]) * len(CHOICES[b]), (a, b)


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_a_row_of_the_matrix_keeps_every_invariant(number: int) -> None:
    row = ROWS[number]
    for seed in (number, 1000 + number):
        crowd = crowd_of(seed, REQUESTS, burst=1 + seed % 3)
        crowd = type(crowd)(**columns_of(crowd, priority=[r % 3 for r in range(REQUESTS)]))
        how = {"workers": row["workers"], "seed": 3, **engine_settings(row)}
        result = play(crowd, tier_config(row), **how)
        drained(result)
        assert result.output_tokens.tolist() == crowd.output_tokens.tolist()
        for tier in result.tiers:
            assert tier.resident_blocks <= tier.capacity_blocks
            left = tier.stored_blocks - tier.evicted_blocks - tier.resident_blocks
            assert left == 0 or (left > 0 and row["placement"] == "exclusive")
        again = play(crowd, tier_config(row), **how, check=False)
        assert digest(again) == digest(result)


def columns_of(crowd: Any, **changes: Any) -> dict[str, Any]:
    names = ("arrival_ns", "prompt_tokens", "output_tokens", "hash_offsets", "hash_ids", "trace_block_size")
    return {name: getattr(crowd, name) for name in names} | changes


def test_something_happens_in_the_matrix() -> None:
    happened: dict[str, int] = {}
    for number, row in enumerate(ROWS):
        how = {"workers": row["workers"], **engine_settings(row)}
        result = play(crowd_of(1000 + number, REQUESTS, burst=2), tier_config(row), check=False, **how)
        totals = result.tier_totals
        for name in (
            "offloaded_blocks",
            "dropped_blocks",
            "onboards",
            "joined_loads",
            "slow_loads",
            "failed_loads",
        ):
            happened[name] = happened.get(name, 0) + getattr(totals, name)
        happened["preemptions"] = happened.get("preemptions", 0) + int(result.preemptions.sum())
        for tier, column in enumerate(result.below_tokens_total, 2):
            happened[f"g{tier}"] = happened.get(f"g{tier}", 0) + int(column.sum())
    assert all(happened.values()), happened
