"""Random scenarios for SGLang's scheduler by family: the same seed always gives the same scenario."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Scenario = dict[str, Any]
Request = dict[str, Any]


def draw_plain(seed: int) -> Scenario:
    """Draw requests and settings: policies, pages, chunks, mixed batches, pools from tight to roomy."""
    rng = Random(f"sglang {seed}")
    page = rng.choice([1, 1, 2, 4, 8, 16, 32, 64])
    requests = _requests(rng, page)
    config: dict[str, Any] = {"page_size": page, "max_total_num_tokens": _pool(rng, requests, page)}
    config["overlap"] = rng.random() < 0.6
    _maybe(rng, config, 0.4, max_running_requests=rng.choice([1, 2, 3, 5, 8, 16]))
    chunk = -1 if rng.random() < 0.2 else page * rng.randint(1, max(1, 96 // page))
    _maybe(rng, config, 0.7, chunked_prefill_size=chunk)
    _maybe(rng, config, 0.3, max_prefill_tokens=rng.choice([16, 48, 100, 256]))
    _maybe(rng, config, 0.15, prefill_max_requests=rng.randint(1, 4))
    _maybe(rng, config, 0.7, schedule_policy=rng.choice(["lpm", "dfs-weight", "lof"]))
    _maybe(rng, config, 0.4, schedule_conservativeness=rng.choice([0.1, 0.3, 0.7, 1.3]))
    _maybe(rng, config, 0.3, enable_mixed_chunk=True)
    _maybe(rng, config, 0.12, disable_radix_cache=True)
    _maybe(rng, config, 0.5, radix_eviction_policy=rng.choice(["lfu", "slru", "fifo", "filo", "mru"]))
    _maybe(rng, config, 0.15, tree="radix")
    _maybe(rng, config, 0.15, ignore_eos=True)
    _maybe(rng, config, 0.2, clip_max_new_tokens=rng.choice([4, 16]))
    _maybe(rng, config, 0.2, in_batch_check_threshold=rng.choice([0, 8, 64]))
    _maybe(rng, config, 0.2, in_batch_deprioritize_threshold=rng.choice([1, 8, 64]))
    _maybe(rng, config, 0.3, init_new_token_ratio=rng.choice([0.2, 0.5, 1.0]))
    _maybe(rng, config, 0.2, new_token_ratio_decay_steps=rng.choice([10, 50]))
    _maybe(rng, config, 0.3, retract_decode_steps=rng.choice([0, 1, 5]))
    _maybe(rng, config, 0.1, context_len=rng.choice([64, 160, 400]))
    return {"config": config, "requests": requests, "max_steps": 600}


def draw_ends(seed: int) -> Scenario:
    """Draw a plain scenario whose requests also end by EOS and by aborts."""
    rng = Random(f"sglang ends {seed}")
    scenario = draw_plain(seed + 10_000_000)
    _add_ends(rng, scenario)
    return scenario


def draw_priority(seed: int) -> Scenario:
    """Draw a scenario with priorities, some requests without one, preemption, and queue limits."""
    rng = Random(f"sglang priority {seed}")
    scenario = draw_plain(seed + 20_000_000)
    config = scenario["config"]
    if config.get("schedule_policy") in ("lpm", "dfs-weight"):
        del config["schedule_policy"]
    config["enable_priority_scheduling"] = True
    _maybe(rng, config, 0.6, priority_scheduling_preemption_threshold=rng.choice([0, 1, 5]))
    _maybe(rng, config, 0.4, schedule_low_priority_values_first=True)
    _maybe(rng, config, 0.2, disable_priority_preemption=True)
    _maybe(rng, config, 0.3, retraction_policy="priority")
    _maybe(rng, config, 0.3, max_queued_requests=rng.randint(1, 6))
    for request in scenario["requests"]:
        if rng.random() < 0.9:
            request["priority"] = rng.randint(0, rng.choice([3, 30]))
    if rng.random() < 0.4:
        _add_ends(rng, scenario)
    return scenario


def draw_options(seed: int) -> Scenario:
    """Draw a scenario with a queue limit, a prefill interval, or both."""
    rng = Random(f"sglang options {seed}")
    scenario = draw_plain(seed + 30_000_000)
    config = scenario["config"]
    if rng.random() < 0.6:
        config["prefill_decode_interval"] = rng.randint(1, 6)
        _maybe(rng, config, 0.5, prefill_decode_interval_min_bs=rng.randint(1, 5))
    if rng.random() < 0.6:
        config["max_queued_requests"] = rng.randint(1, 8)
    if rng.random() < 0.3:
        _add_ends(rng, scenario)
    return scenario


def draw_host(seed: int) -> Scenario:
    """Draw a scenario with a host tier, each write policy, small and large host pools, slow transfers."""
    rng = Random(f"sglang host {seed}")
    draw = rng.choice([draw_plain, draw_ends, draw_priority, draw_options])
    scenario = draw(seed + 40_000_000)
    config = scenario["config"]
    for name in ("tree", "disable_radix_cache"):
        config.pop(name, None)
    config["hicache_write_policy"] = rng.choice(["write_through", "write_through_selective", "write_back"])
    config["hicache_ratio"] = rng.choice([0.3, 0.8, 1.5, 3.0])
    config["load_back_threshold"] = rng.choice([0, 1, 10, 40])
    config["write_steps"] = rng.choice([0, 1, 1, 3])
    config["load_steps"] = rng.choice([1, 1, 2, 5])
    _maybe(rng, config, 0.3, write_tokens_per_step=rng.choice([16, 64]))
    return scenario


def draw_loads(seed: int) -> Scenario:
    """Draw a scenario whose requests return to evicted prefixes while loads are slow, with aborts meanwhile."""
    rng = Random(f"sglang loads {seed}")
    scenario = draw_host(seed + 70_000_000)
    config, requests = scenario["config"], scenario["requests"]
    config["hicache_write_policy"] = rng.choice(
        ["write_back", "write_back", "write_back", "write_through", "write_through_selective"]
    )
    config |= {"load_steps": rng.choice([3, 5, 10, 25]), "load_back_threshold": rng.choice([0, 1, 10])}
    first = len(requests)
    step = requests[-1]["arrival_step"]
    for index in range(first, first + rng.randint(5, 30)):
        prompt = list(rng.choice(requests[:first])["prompt"])
        if rng.random() < 0.5:
            start, length = prompt[-1]
            prompt[-1] = [start, rng.randint(1, length)]
        step += rng.randint(0, 6)
        requests.append(
            {"id": f"r{index:03d}", "arrival_step": step, "prompt": prompt, "max_tokens": rng.randint(1, 12)}
        )
    config["max_total_num_tokens"] = _pool(rng, requests, config["page_size"])
    aborts = [
        {"id": one["id"], "step": one["arrival_step"] + rng.randint(0, 8)}
        for one in requests
        if rng.random() < 0.3
    ]
    scenario["aborts"] = sorted([*scenario.get("aborts", ()), *aborts], key=lambda abort: abort["step"])
    return scenario


def draw_events(seed: int) -> Scenario:
    """Draw a scenario whose KV events are published as a server does."""
    rng = Random(f"sglang events {seed}")
    draw = rng.choice([draw_plain, draw_ends, draw_priority, draw_host])
    scenario = draw(seed + 50_000_000)
    scenario["config"] |= {"publish_events": True, "decode_log_interval": rng.choice([1, 3, 10, 40])}
    scenario["config"].pop("disable_radix_cache", None)
    return scenario


def draw_clock(seed: int) -> Scenario:
    """Draw a scenario on a clock, with host times from none to longer than a batch."""
    rng = Random(f"sglang clock {seed}")
    scenario = rng.choice([draw_plain, draw_ends, draw_priority, draw_options])(seed + 60_000_000)
    stretch = rng.choice([0, 1, 3, 20]) * 1_000_000
    for request in scenario["requests"]:
        request["t"] = request.pop("arrival_step") * stretch + rng.randint(0, stretch)
    for abort in scenario.get("aborts", ()):
        abort["t"] = abort.pop("step") * stretch + rng.randint(0, 5_000_000)
    scenario["clock"] = {
        "base_ns": rng.choice([1_000_000, 10_000_000]),
        "prefill_token_ns": rng.choice([0, 20_000]),
        "decode_row_ns": rng.choice([0, 100_000]),
        "launch_ns": rng.choice([0, 0, 300_000, 4_000_000]),
        "result_ns": rng.choice([0, 0, 200_000, 5_000_000]),
    }
    return scenario


def _maybe(rng: Random, config: dict[str, Any], chance: float, **settings: Any) -> None:
    if rng.random() < chance:
        config |= settings


def _requests(rng: Random, page: int) -> list[Request]:
    """Draw prompts with shared prefixes, next turns that extend a prompt, and prompts of their own."""
    longest = rng.choice([20, 60, 150]) + page
    prefixes = [[(1000 + 1000 * place), rng.randint(1, longest)] for place in range(rng.randint(1, 4))]
    gap, most = rng.choice([0, 1, 4, 15]), rng.choice([1, 8, 30, 60])
    requests: list[Request] = []
    step = 0
    for index in range(rng.randint(3, 28)):
        own = [100_000 + 1000 * index, rng.randint(1, longest)]
        kind = rng.random()
        if kind < 0.5:
            prompt = [rng.choice(prefixes), own]
        elif kind < 0.75 and requests:
            prompt = [*rng.choice(requests)["prompt"], own]
            while len(prompt) > 6:
                del prompt[rng.randrange(1, len(prompt))]
        elif kind < 0.85 and requests:
            prompt = list(rng.choice(requests)["prompt"])
        else:
            prompt = [own]
        step += rng.randint(0, gap)
        requests.append(
            {
                "id": f"r{index:03d}",
                "arrival_step": step,
                "prompt": prompt,
                "max_tokens": rng.randint(1, most),
            }
        )
    return requests


def _pool(rng: Random, requests: list[Request], page: int) -> int:
    """Draw a pool that fits the largest request at least, in whole pages."""
    sizes: list[int] = [sum(count for _, count in one["prompt"]) + one["max_tokens"] for one in requests]
    most = max(sizes) + 2 * page + 8
    tokens = most + int(rng.choice([0.0, 0.1, 0.3, 1.0]) * sum(sizes)) if rng.random() < 0.95 else most // 2
    return max(tokens // page + 1, 2) * page


def _add_ends(rng: Random, scenario: Scenario) -> None:
    """Let some requests end by EOS, and abort some; an abort's id may be a prefix of several ids."""
    for request in scenario["requests"]:
        if rng.random() < 0.5:
            request["eos_at"] = rng.randint(1, request["max_tokens"])
    aborts = [
        {"id": request["id"], "step": request["arrival_step"] + rng.randint(0, 40)}
        for request in scenario["requests"]
        if rng.random() < 0.3
    ]
    if rng.random() < 0.1:
        aborts.append({"id": rng.choice(["r00", "*"]), "step": rng.randint(0, 60)})
    scenario["aborts"] = sorted(aborts, key=lambda abort: abort["step"])


SGLANG_FAMILIES: dict[str, tuple[str, Callable[[int], Scenario]]] = {
    "plain": ("steps", draw_plain),
    "ends": ("steps", draw_ends),
    "priority": ("steps", draw_priority),
    "options": ("steps", draw_options),
    "host": ("steps", draw_host),
    "loads": ("steps", draw_loads),
    "events": ("steps", draw_events),
    "clock": ("clock", draw_clock),
}
"""Kind of recording and function that draws, by name."""
