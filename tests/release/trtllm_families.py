"""Random scenarios for TensorRT-LLM's executor by family: the same seed always gives the same scenario."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Scenario = dict[str, Any]
Request = dict[str, Any]

_MIB = 1 << 20
_OUTPUT_BASE = 1_000_000
_OUTPUT_STRIDE = 100_000


def draw_plain(seed: int) -> Scenario:
    """Draw requests and settings: budgets, chunks, reuse, waiting policies, pools from tight to roomy."""
    rng = Random(f"trtllm plain {seed}")
    block = rng.choice([16, 32, 32, 64])
    longest = rng.choice([200, 400, 600])
    config: dict[str, Any] = {
        "tokens_per_block": block,
        "max_seq_len": longest,
        "max_batch_size": rng.choice([1, 2, 4, 8, 12]),
        "max_num_tokens": rng.choice([96, 128, 256, 512, 1024]),
        "overlap": rng.random() < 0.6,
    }
    requests = _requests(rng, longest)
    config["max_tokens"] = _pool(rng, requests, block)
    _maybe(rng, config, 0.15, chunked=False, max_num_tokens=1024)
    _maybe(rng, config, 0.2, prefix_aware=False)
    _maybe(rng, config, 0.15, enable_partial_reuse=False)
    _maybe(rng, config, 0.1, enable_block_reuse=False)
    _maybe(rng, config, 0.2, max_util_for_resume=rng.choice([0.5, 0.7, 1.0]))
    _maybe(rng, config, 0.2, reuse_policy="per_request")
    _maybe(rng, config, 0.15, recompute_pause=False)
    _maybe(rng, config, 0.2, waiting_policy="priority")
    _maybe(rng, config, 0.2, batch_wait_timeout_iters=rng.choice([1, 3, 8]))
    _maybe(rng, config, 0.2, batch_wait_max_tokens_ratio=rng.choice([0.2, 0.5, 0.9]))
    _maybe(rng, config, 0.1, policy=rng.choice(["GUARANTEED_NO_EVICT", "STATIC_BATCH"]))
    _maybe(rng, config, 0.1, layers=rng.choice([1, 3, 5]))
    if config.get("waiting_policy") == "priority":
        for request in requests:
            request["priority"] = rng.choice([0.1, 0.3, 0.5, 0.5, 0.9])
    return {"config": config, "requests": requests, "max_steps": 1200}


def draw_ends(seed: int) -> Scenario:
    """Draw a plain scenario whose requests also end by EOS and by cancellation."""
    rng = Random(f"trtllm ends {seed}")
    scenario = draw_plain(seed + 10_000_000)
    _add_ends(rng, scenario)
    return scenario


def draw_scopes(seed: int) -> Scenario:
    """Draw a scenario with salts and adapters, which share no blocks with others."""
    rng = Random(f"trtllm scopes {seed}")
    scenario = draw_host(seed + 20_000_000) if rng.random() < 0.4 else draw_plain(seed + 20_000_000)
    for request in scenario["requests"]:
        if rng.random() < 0.5:
            request["salt"] = rng.choice(["a", "tenant", "é"])
        if rng.random() < 0.5:
            request["lora"] = rng.choice([1, 2, 70_000])
    return scenario


def draw_host(seed: int) -> Scenario:
    """Draw a scenario with a host level, smaller and larger than the device's."""
    rng = Random(f"trtllm host {seed}")
    scenario = rng.choice([draw_plain, draw_ends])(seed + 30_000_000)
    config = scenario["config"]
    config["host_cache_size"] = rng.choice([1, 2, 2, 4, 8, 24]) * _MIB
    config.pop("enable_block_reuse", None)
    return scenario


def draw_disk(seed: int) -> Scenario:
    """Draw a scenario with a disk level below the host's, or below the device's."""
    rng = Random(f"trtllm disk {seed}")
    scenario = draw_host(seed + 40_000_000)
    config = scenario["config"]
    config["disk_cache_size"] = rng.choice([2, 4, 8, 32]) * _MIB
    if rng.random() < 0.3:
        config["host_cache_size"] = 0
    return scenario


def draw_windows(seed: int) -> Scenario:
    """Draw a scenario with layers that attend to windows: groups of pools of one size or of several."""
    rng = Random(f"trtllm windows {seed}")
    scenario = rng.choice([draw_plain, draw_ends, draw_host])(seed + 50_000_000)
    config = scenario["config"]
    config["windows"] = rng.choice(
        [[64], [96, 4096], [64, 128, 4096], [64, 64, 4096], [32, 128], [64, 64, 128, 4096]]
    )
    config["layers"] = rng.choice([2, 3, 4, 5, 6])
    config["max_num_tokens"] = rng.choice([256, 300, 512, 1024])  # a chunk has 256 tokens at least
    _maybe(rng, config, 0.4, reuse_policy="per_request")
    return scenario


def draw_pools(seed: int) -> Scenario:
    """Draw a scenario with several groups of pools, divided by defaults, by a ratio or by a mean length."""
    rng = Random(f"trtllm pools {seed}")
    scenario = rng.choice([draw_plain, draw_ends, draw_host, draw_disk])(seed + 60_000_000)
    config = scenario["config"]
    windows = rng.choice(
        [[64, 64, 4096], [4096, 96, 4096], [128, 4096, 4096, 4096], [64, 64, 64, 128, 128, 4096]]
    )
    config |= {"layers": len(windows), "windows": windows, "max_num_tokens": rng.choice([256, 512, 1024])}
    groups = len({windows.count(one) for one in windows})  # pages of equal size share a pool
    way = rng.random()
    if way < 0.3:
        shares = [rng.randint(1, 5) for _ in range(groups)]
        config["pool_ratio"] = [share / sum(shares) for share in shares]
    elif way < 0.6:
        config["avg_seq_len"] = rng.choice([64, 150, config["max_seq_len"]])
    _maybe(rng, config, 0.3, reuse_policy="per_request")
    return scenario


def draw_pauses(seed: int) -> Scenario:
    """Draw a scenario whose pool is short of blocks for its batch, so that running requests are paused."""
    rng = Random(f"trtllm pauses {seed}")
    scenario = rng.choice([draw_plain, draw_ends, draw_host])(seed + 70_000_000)
    config, requests = scenario["config"], scenario["requests"]
    config |= {"max_batch_size": rng.choice([4, 8, 12]), "overlap": rng.random() < 0.8}
    config.pop("recompute_pause", None)
    for request in requests:
        request["arrival"] //= 4
        request["max_new"] = rng.randint(20, 120)
        request.pop("cancel", None)
    config["max_tokens"] = max(_most_tokens(requests) + config["tokens_per_block"], 3 * 128)
    return scenario


def _maybe(rng: Random, config: dict[str, Any], chance: float, **settings: Any) -> None:
    if rng.random() < chance:
        config |= settings


def _requests(rng: Random, longest: int) -> list[Request]:
    """Draw prompts with shared prefixes, parts of blocks, next turns with outputs, and prompts of their own."""
    most = rng.choice([30, 90, longest * 2 // 3])
    prefixes = [[1000 * (place + 1), rng.randint(1, most)] for place in range(rng.randint(1, 4))]
    gap, most_new = rng.choice([0, 1, 4, 15]), rng.choice([1, 10, 40, 100])
    requests: list[Request] = []
    arrival = 0
    for index in range(rng.randint(3, 26)):
        own = [100_000 + 1000 * index, rng.randint(1, most)]
        kind = rng.random()
        if kind < 0.4:
            first, count = rng.choice(prefixes)
            prompt: list[Any] = [
                [first, rng.randint(1, count)] if rng.random() < 0.5 else [first, count],
                own,
            ]
        elif kind < 0.7 and requests:
            other = rng.randrange(len(requests))
            outputs = [_OUTPUT_BASE + other * _OUTPUT_STRIDE, rng.randint(1, requests[other]["max_new"])]
            prompt = [*requests[other]["prompt"][-3:], outputs, own]
        elif kind < 0.85 and requests:
            prompt = list(rng.choice(requests)["prompt"])
        else:
            prompt = [own]
        arrival += rng.randint(0, gap)
        requests.append(
            {
                "arrival": arrival,
                "prompt": _cut(prompt, longest - 2),
                "max_new": rng.randint(1, most_new),
            }
        )
    return requests


def _cut(prompt: list[Any], most: int) -> list[Any]:
    """Return the first `most` tokens of a prompt."""
    out = []
    for first, count in prompt:
        if most <= 0:
            break
        out.append([first, min(count, most)])
        most -= count
    return out


def _most_tokens(requests: list[Request]) -> int:
    return max(_size_of(one) for one in requests)


def _size_of(request: Request) -> int:
    tokens: int = request["max_new"] + sum(count for _, count in request["prompt"])
    return tokens


def _pool(rng: Random, requests: list[Request], block: int) -> int:
    """Draw a pool that fits the largest request: the real server shortens larger ones before the executor does."""
    sizes = [_size_of(one) for one in requests]
    return max(sizes) + 2 * block + int(rng.choice([0.0, 0.0, 0.1, 0.3, 1.0]) * sum(sizes))


def _add_ends(rng: Random, scenario: Scenario) -> None:
    """Let some requests end by EOS, and cancel some."""
    for request in scenario["requests"]:
        if rng.random() < 0.5:
            request["eos_at"] = rng.randint(1, request["max_new"])
        if rng.random() < 0.3:
            request["cancel"] = request["arrival"] + rng.randint(0, 40)


TRTLLM_FAMILIES: dict[str, Callable[[int], Scenario]] = {
    "plain": draw_plain,
    "ends": draw_ends,
    "scopes": draw_scopes,
    "host": draw_host,
    "disk": draw_disk,
    "windows": draw_windows,
    "pools": draw_pools,
    "pauses": draw_pauses,
}
"""Function that draws, by name."""
