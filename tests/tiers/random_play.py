"""Random engines, tiers and workloads, small enough that everything is scarce."""

from __future__ import annotations

from fractions import Fraction
from random import Random
from typing import Any

from model.tier_store import TierSettings
from model.vllm_config import PROFILES, Profile
from tiers.pair import TierPair


def random_settings(rng: Random) -> tuple[dict[str, Any], TierSettings, Profile]:
    """An engine and its tiers, small enough that everything is scarce."""
    profile = rng.choice([*PROFILES, Profile("fixed", phantom_hit=False)])

    def bandwidth(*choices: float) -> Fraction | None:
        chosen = rng.choice([None, *choices])
        return None if chosen is None else Fraction(chosen)

    config: dict[str, Any] = {
        "block_size": rng.choice([2, 4]),
        "num_blocks": rng.randrange(9, 26),
        "max_num_seqs": rng.choice([1, 2, 4, 16]),
        "max_num_batched_tokens": rng.choice([32, 64, 2048]),
        "policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "async_scheduling": rng.random() < 0.25,
        "long_prefill_token_threshold": rng.choice([0, 0, 6]),
    }
    if profile.has_watermark:
        config["watermark"] = rng.choice([0.0, 0.0, 0.1])
    if profile.has_reserve_full_isl:
        config["scheduler_reserve_full_isl"] = rng.random() < 0.5
    write_through = rng.random() < 0.4
    below = tuple(
        (tier, rng.choice([3, 10, 60]), bandwidth(0.5, 2, 8), bandwidth(0.5, 2, 8))
        for tier in (3, 4)
        if rng.random() < 0.35
    )
    tiers = TierSettings(
        g2_blocks=rng.choice([1, 3, 8, 20, 100]),
        block_bytes=1000,
        down=bandwidth(0.5, 2, 8),
        up=bandwidth(0.5, 2, 8),
        fixed_ns=rng.choice([0, 0, 300]),
        write_through=write_through,
        exclusive=not write_through and rng.random() < 0.3,
        min_reuse=rng.choice([0, 0, 0, 1]),
        batch=rng.choice([1, 2, 3, 32]),
        concurrency=rng.choice([None, None, 1, 2]),
        onboard_preempted=rng.random() < 0.8,
        below=below,
        ns_per_token=rng.choice([None, 50, 200, 700, 3000]),
    )
    return config, tiers, profile


def random_prompt(rng: Random, capacity_tokens: int) -> tuple[list[int | list[int]], int]:
    """A prompt that begins like others, and how many tokens to answer, within the device's room."""
    outputs = rng.randrange(1, 9)
    longest = max(2, capacity_tokens - outputs)
    stem = rng.randrange(3) * 1000 + 1
    shared = rng.randrange(0, longest)
    own = rng.randrange(1, 7)
    prompt: list[int | list[int]] = [[stem, shared]] if shared else []
    own = min(own, longest - shared) if shared < longest else 1
    prompt.append([10_000 + rng.randrange(4) * 50, max(1, own)])
    return prompt, outputs


def play_random(seed: int, ticks: int = 60) -> dict[str, int]:
    """A random workload with cancels and prefetches, and then until nothing is left; what happened."""
    rng = Random(f"tiers {seed}")
    config, tiers, profile = random_settings(rng)
    pair = TierPair(config, tiers, profile)
    capacity = (pair.model.config.num_blocks - 1) * pair.model.config.block_size
    for _ in range(ticks):
        if len(pair.tokens) < 6 and rng.random() < 0.45:
            prompt, outputs = random_prompt(rng, min(capacity, config["max_num_batched_tokens"]))
            pair.add(prompt, outputs, rng.randrange(3))
        if pair.tokens and rng.random() < 0.05:
            pair.cancel(rng.choice(sorted(pair.tokens)))
        if pair.tokens and rng.random() < 0.08:
            pair.prefetch(rng.choice(sorted(pair.tokens)), rng.randrange(1, 6))
        if pair.engine.idle:
            pair.now_ns += rng.randrange(1500)
        elif pair.begin():
            if rng.random() < 0.1 and pair.tokens:
                pair.cancel(rng.choice(sorted(pair.tokens)))
            pair.end(rng.choice([0, 200, 1000, 2500]))
        elif rng.random() < 0.5:
            pair.wake()
        else:
            pair.now_ns += rng.randrange(1, 800)
    pair.drain()
    model = pair.model
    for request, below in model.from_below.items():
        assert pair.records[request.index].below_total == below
        assert pair.records[request.index].parked_ns == model.parked_ns.get(request, 0)
    for request, wait in model.waits.items():
        assert pair.records[request.index].room_wait_ns == wait.total_ns
    made = ("onboarded", "offloaded", "dropped", "slow_loads")
    return pair.stats | {name: getattr(model, name) for name in made}
