"""Random scenarios of SGLang's scheduler: plain, with windows, with states, and two sides of a disaggregated server."""

from __future__ import annotations

from random import Random
from typing import Any

from understudy.conformance.sglang_recording import (
    SglangAbort,
    SglangRequest,
    SglangScenario,
    SglangScenarioConfig,
)

KINDS = ("plain", "window", "state", "prefill", "decode")


def random_scenario(kind: str, seed: int) -> SglangScenario:
    """Draw prompts that share prefixes, and continue the outputs of earlier ones, in small pools."""
    rng = Random(f"{kind} {seed}")
    config = {**common(rng, kind), **SPECIAL[kind](rng)}
    page = config["page_size"]
    total = max(page * rng.choice([12, 60, 200]), 300)
    if "swa_tokens" in config:
        total = max(total, config["swa_tokens"])
    config["max_total_num_tokens"] = total // page * page
    config["max_running_requests"] = most = rng.choice([2, 8])
    if kind == "state":
        config["mamba_slots"] = 6 * most + rng.choice([0, 2, 10])
    requests = random_requests(rng, is_side=kind in ("prefill", "decode"), page=page)
    aborts = [
        SglangAbort(id=rng.choice(requests).id, step=rng.randint(0, 150))
        for _ in range(rng.choice([0, 0, 1, 5]))
    ]
    return SglangScenario(
        SglangScenarioConfig(**config), requests, f"{kind} {seed}", 600, sorted_by_step(aborts)
    )


def sorted_by_step(aborts: list[SglangAbort]) -> list[SglangAbort]:
    return sorted(aborts, key=lambda one: one.step)


def common(rng: Random, kind: str) -> dict[str, Any]:
    page = rng.choice([1, 4, 16]) if kind != "state" else 1
    config: dict[str, Any] = {
        "page_size": page,
        "chunked_prefill_size": rng.choice([-1, page * 8, 128]),
        "max_prefill_tokens": rng.choice([100, 16384]),
        "schedule_policy": rng.choice(["fcfs", "lpm", "dfs-weight", "lof"]),
        "radix_eviction_policy": rng.choice(["lru", "lfu", "slru", "fifo", "filo", "mru"]),
        "overlap": rng.random() < 0.5,
        "enable_mixed_chunk": rng.random() < 0.3,
        "disable_radix_cache": rng.random() < 0.15,
        "ignore_eos": rng.random() < 0.15,
        "schedule_conservativeness": rng.choice([0.1, 0.3, 1.0]),
        "prefill_max_requests": rng.choice([None, None, 2]),
        "prefill_decode_interval": rng.choice([0, 0, 0, 3]),
        "retract_decode_steps": rng.choice([1, 20]),
    }
    if rng.random() < 0.25:
        config |= {
            "enable_priority_scheduling": True,
            "schedule_policy": rng.choice(["fcfs", "lof"]),
            "disable_priority_preemption": rng.random() < 0.5,
            "retraction_policy": rng.choice(["length", "priority"]),
            "max_queued_requests": rng.choice([None, 4]),
        }
    return config


def plain(rng: Random) -> dict[str, Any]:
    return {}


def window(rng: Random) -> dict[str, Any]:
    page, size = rng.choice([1, 16]), rng.choice([8, 40, 100])
    return {
        "page_size": page,
        "chunked_prefill_size": rng.choice([-1, page * 8, 128]),
        "swa_window": size,
        "swa_tokens": (size // page + rng.choice([3, 8, 20])) * page,
        "swa_eviction_interval": rng.choice([1, 16, 128]),
        "release_prefill_swa": rng.random() < 0.3,
    }


def state(rng: Random) -> dict[str, Any]:
    buffered = rng.random() < 0.7
    page = rng.choice([1, 16]) if buffered else 1
    return {
        "page_size": page,
        "chunked_prefill_size": rng.choice([-1, page * 8, 128]),
        "mamba_extra_buffer": buffered,
        "mamba_lazy": buffered and rng.random() < 0.5,
        "mamba_track_interval": rng.choice([64, 128]),
        "mamba_max_states_per_path": rng.choice([-1, 1, 3]),
        "prefill_max_requests": rng.choice([None, 2]),
    }


def side(rng: Random) -> dict[str, Any]:
    return {
        "handshake_steps": rng.choice([0, 3]),
        "transfer_steps": rng.choice([0, 1, 9]),
        "metadata_slots": rng.choice([None, 2]),
        "enable_mixed_chunk": False,
        "prefill_decode_interval": 0,
        "max_queued_requests": None,
    }


def prefill(rng: Random) -> dict[str, Any]:
    return {**side(rng), "role": "prefill", "early_send": rng.random() < 0.7}


def decode(rng: Random) -> dict[str, Any]:
    backup = rng.choice(["cpu_tensor", "none", "host_pool"])
    radix = rng.random() < 0.4
    return {
        **side(rng),
        "role": "decode",
        "decode_radix": radix,
        "disable_radix_cache": not radix,
        "num_reserved_decode_tokens": rng.choice([0, 2, 32]),
        "extra_slots": rng.choice([None, 0, 2]),
        "polling_interval": rng.choice([1, 1, 3]),
        "retraction_backup": backup,
        "host_tokens": rng.choice([64, 400]) if backup == "host_pool" else None,
        "ack_steps": rng.choice([None, 0, 5]),
        "prefill_max_requests": None,
    }


SPECIAL = {"plain": plain, "window": window, "state": state, "prefill": prefill, "decode": decode}


def random_requests(rng: Random, *, is_side: bool, page: int) -> list[SglangRequest]:
    requests: list[SglangRequest] = []
    for index in range(rng.randint(5, 25)):
        prompt: list[int | tuple[int, int]] = [(rng.choice([100, 5000]), rng.randint(1, 150))]
        if index > 0 and rng.random() < 0.4:
            before = requests[rng.randrange(index)]
            output = 1_000_000 + 100_000 * int(before.id[1:])
            prompt = [*before.prompt, (output, rng.randint(1, max(before.max_tokens, 1)))]
        prompt.append((10_000 + 1000 * index, rng.randint(1, 60)))
        extra: dict[str, Any] = {}
        if is_side:
            length = sum(count for _, count in SglangRequest(id="", prompt=prompt, max_tokens=1).runs())
            extra["fail_after"] = rng.choice([None, None, None, rng.randint(0, 40)])
            extra["decode_prefix"] = rng.choice([0, 0, rng.randint(0, length) // page * page])
        requests.append(
            SglangRequest(
                id=f"r{index:02}",
                prompt=prompt,
                max_tokens=rng.randint(0, 90),
                arrival_step=rng.randint(0, 150),
                eos_at=rng.choice([None, None, rng.randint(1, 40)]),
                priority=rng.choice([None, 0, 15, 40]),
                **extra,
            )
        )
    return requests
