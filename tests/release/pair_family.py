"""Random pairs of a prefill and a decode instance.

What vLLM answers with a failed assertion or a request that is parked for ever because a field is missing cannot be
written in this format. Push instances that stand still after a failed WRITE or an expired lease are recorded as they
are, for few ticks.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

Line = dict[str, Any]

OUTPUTS, OUTPUT_STRIDE = 1_000_000, 100_000
"""Output tokens of the request with index i start at OUTPUTS + i * OUTPUT_STRIDE."""


def draw_pair(seed: int) -> Line:
    """Return a scenario of two instances, without its name."""
    rng = Random(f"pd {seed}")
    return _draw(rng, push=rng.random() < 0.35)


def draw_hosted_pair(seed: int) -> Line:
    """Return a scenario in which one instance or both also offload to a host of their own."""
    rng = Random(f"multi {seed}")
    # In blocks of one token vLLM loads a prompt of one token again and again, and computes it never.
    scenario = _draw(rng, push=False, block_sizes=(2, 4, 8, 8, 16, 16, 32))
    scenario["max_ticks"] = 900
    hosted = rng.choice(["p", "d", "pd", "pd", "pd"])
    for name in ("p", "d"):
        side = scenario[name]["side"]
        if name not in hosted:
            side["connector"] = "nixl"
            continue
        side["connector"] = rng.choice(["multi", "multi", "multi_rev"])
        side["host"] = _draw_host(rng, scenario["requests"], scenario[name]["config"]["block_size"])
        if rng.random() < 0.1:
            side["nixl_role"] = "kv_both"
        if rng.random() < 0.1:
            side["host_role"] = "kv_producer" if name == "p" else "kv_consumer"
    if rng.random() < 0.2:
        last = scenario["requests"][-1]["arrival_tick"]
        scenario["resets"] = [
            {"side": rng.choice(hosted), "tick": rng.randint(0, last + 30)} for _ in range(rng.randint(1, 2))
        ]
    return scenario


def _draw_host(rng: Random, requests: list[Line], block_size: int) -> Line:
    longest = max(sum(length for _, length in spec["prompt"]) for spec in requests)
    per_chunk = rng.choice([1, 1, 1, 2, 4])
    host: Line = {
        "host_chunks": max(2, int(rng.uniform(0.3, 6.0) * longest / block_size / per_chunk)),
        "blocks_per_chunk": per_chunk,
        "offload_prompt_only": rng.random() < 0.6,
        "store_ticks": rng.choice([0, 1, 2, 5, 12]),
        "load_ticks": rng.choice([0, 1, 3, 6]),
    }
    if rng.random() < 0.25:
        host["blocks_per_tick"] = rng.choice([1, 2, 4])
    return host


def _draw(rng: Random, *, push: bool, block_sizes: Sequence[int] = (1, 2, 4, 8, 8, 16, 16, 32)) -> Line:
    block_size = rng.choice(block_sizes)
    requests = _draw_requests(rng, block_size)
    if rng.random() < 0.25:
        for spec in requests:
            spec["priority"] = rng.randint(0, 3)
    asynchronous, priority = rng.random() < 0.5, "priority" in requests[0]
    wire = _draw_wire(rng, push=push)
    scenario: Line = {"mode": "push"} if push else {}
    for name in ("p", "d"):
        scenario[name] = {
            "config": _draw_config(rng, block_size, requests, asynchronous, priority, decodes=name == "d"),
            "side": _draw_side(rng, decodes=name == "d"),
        }
    scenario |= {"wire": wire, "requests": requests, "max_ticks": 300 if push else 700}
    names = [spec["id"] for spec in requests]
    if rng.random() < 0.5:
        scenario["aborts"] = _draw_aborts(rng, requests)
    if rng.random() < (0.15 if push else 0.4):
        share = rng.choice([0.1, 0.4])
        fail: Line = {name: rng.choice(["setup", "read"]) for name in names if rng.random() < share}
        scenario["fail"] = fail
    if wire.get("handshake") and rng.random() < 0.4:
        scenario["fail"] = {**scenario.get("fail", {}), "handshake": True}
    return scenario


def _draw_requests(rng: Random, block_size: int) -> list[Line]:
    longest = rng.choice([3, 6, 12]) * block_size
    gaps = rng.choice([[0, 0, 1, 4], [0, 1, 2], [0, 0, 0, 12], [3, 8]])
    local, drop, slow = (rng.choice([0.0, 0.0, share]) for share in (0.3, 0.15, 0.2))
    prefixes = [[10_000 * (1 + i), rng.randint(1, longest)] for i in range(rng.randint(1, 4))]
    requests: list[Line] = []
    tick = 0
    for index in range(rng.randint(2, 40)):
        tick += rng.choice(gaps)
        own = [500_000 + 1_000 * index, rng.choice([1, block_size, rng.randint(1, longest)])]
        prompt = [own]
        way = rng.random()
        if way < 0.35:
            prompt = [rng.choice(prefixes), own]
        elif way < 0.45:
            prompt = [rng.choice(prefixes)]
        elif way < 0.6 and requests:  # the next turn of a conversation
            before = rng.randrange(index)
            answer = [OUTPUTS + before * OUTPUT_STRIDE, rng.randint(1, requests[before]["max_tokens"])]
            prompt = [*requests[before]["prompt"], answer, own]
            if sum(length for _, length in prompt) > 3 * longest:
                prompt = [own]
        spec: Line = {
            "id": f"r{index}",
            "arrival_tick": tick,
            "prompt": prompt,
            "max_tokens": rng.randint(1, rng.choice([2, 3 * block_size, 24])),
        }
        if rng.random() < local:
            spec["local"] = True
        elif rng.random() < drop:
            spec["drop"] = True
        elif rng.random() < slow:
            spec["proxy"] = rng.randint(0, 60)
        requests.append(spec)
    return requests


def _draw_config(
    rng: Random, block_size: int, requests: list[Line], asynchronous: bool, priority: bool, *, decodes: bool
) -> Line:
    """Draw an instance's settings; every request fits into its pool."""
    prompts = [sum(length for _, length in spec["prompt"]) for spec in requests]
    ends = [
        prompt + (spec["max_tokens"] if decodes else 1)
        for prompt, spec in zip(prompts, requests, strict=True)
    ]
    needs = [-(-end // block_size) for end in ends]
    watermark = rng.choice([0.0, 0.0, 0.0, 0.05, 0.2])
    spare = rng.choice([0.0, 0.05, 0.2, 1.0]) * sum(needs)
    config: Line = {
        "block_size": block_size,
        "num_blocks": 2 + int((max(needs) + spare) / (1 - watermark)),
        "max_num_seqs": rng.choice([1, 2, 4, 8, 16]),
        "max_num_batched_tokens": rng.choice([16, 24, 64, 128, 512]),
        "max_model_len": 4096,
        "async_scheduling": asynchronous if rng.random() < 0.8 else not asynchronous,
    }
    config["max_num_seqs"] = min(config["max_num_seqs"], config["max_num_batched_tokens"])
    if rng.random() < 0.12:
        config["enable_chunked_prefill"] = False
        config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], max(ends))
    elif rng.random() < 0.2:
        config["long_prefill_token_threshold"] = rng.choice([3, 8, 16, 32])
        if rng.random() < 0.2:
            config["long_prefill_token_threshold_adaptive"] = True
    if priority:
        config["policy"] = "priority"
    if watermark:
        config["watermark"] = watermark
    if rng.random() < 0.2:
        config["scheduler_reserve_full_isl"] = False
    if rng.random() < 0.12:
        config["enable_prefix_caching"] = False
    if rng.random() < 0.1:
        config["prefill_schedule_interval"] = rng.choice([2, 3, 8])
    if rng.random() < 0.1:
        config["max_num_active_seqs"] = rng.randint(1, config["max_num_seqs"])
    return config


def _draw_side(rng: Random, *, decodes: bool) -> Line:
    side: Line = {}
    if rng.random() < 0.25:
        side["every"] = rng.choice([2, 3, 5])
    if rng.random() < 0.25:
        side["stall"] = [
            [first, first + rng.randint(1, 45)]
            for first in sorted(rng.randint(0, 80) for _ in range(rng.randint(1, 2)))
        ]
    if rng.random() < 0.6:
        side["kv_lease_duration"] = rng.choice([2, 5, 6, 8, 12, 18])
    if decodes and rng.random() < 0.5:
        side["kv_load_failure_policy"] = "recompute"
    if rng.random() < 0.15:
        side["kv_role"] = "kv_both"
    return side


def _draw_wire(rng: Random, *, push: bool) -> Line:
    wire: Line = {"latency": rng.choice([0, 0, 1, 2, 7]), "proxy": rng.choice([0, 1, 1, 2, 10])}
    if rng.random() < 0.6:
        wire["blocks_per_tick"] = rng.choice([1, 2, 4])
    if rng.random() < 0.3:
        wire["link"] = "fifo"
    if rng.random() < 0.25:
        wire["handshake"] = rng.choice([1, 3, 5, 20])
    if push and rng.random() < 0.4:
        wire["dispatch"] = "parallel"
    if rng.random() < 0.2:
        wire["tick_s"] = rng.choice([0.25, 0.5, 2.0])
    return wire


def _draw_aborts(rng: Random, requests: list[Line]) -> list[Line]:
    share, latest = rng.choice([0.15, 0.5]), rng.choice([6, 20, 60])
    return [
        {
            "id": spec["id"],
            "side": rng.choice(["p", "d", "d"]),
            "tick": spec["arrival_tick"] + rng.randint(0, latest),
            "when": rng.choice(["before", "mid"]),
        }
        for spec in requests
        for _ in range(rng.randint(1, 2))
        if rng.random() < share
    ]
