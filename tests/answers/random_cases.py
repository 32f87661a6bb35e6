"""Random deployments: a trace and the flags of `understudy replay`. The same seed gives the same case."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

from answers.random_traces import BLOCK, Row, random_trace

if TYPE_CHECKING:
    from collections.abc import Callable

ROUTINGS = ("round_robin", "random", "least_loaded", "power_of_two", "session_affinity", "kv")
MODELS = (
    ("Llama-3.1-8B", "H100"),
    ("Llama-3.1-8B", "RTX-4090"),
    ("Llama-3.1-70B", "H200"),
    ("Qwen3-32B", "H100"),
    ("gpt-oss-20b", "H100"),
    ("Qwen3-30B-A3B", "H100"),
    ("Gemma-3-27B", "H200"),
)
Flags = dict[str, str]
"""Flags and their values; an empty value is a switch."""


@dataclass(frozen=True)
class Case:
    """A trace and how it is replayed."""

    seed: int
    kind: str
    rows: tuple[Row, ...]
    flags: Flags

    def arguments(self) -> list[str]:
        """The flags as arguments of a command."""
        return [part for name, value in self.flags.items() for part in (f"--{name}", value) if part]

    @property
    def pools(self) -> list[dict[str, Any]]:
        """Settings of the pools, of each worker's; none if all workers are equal."""
        given = self.flags.get("set", "")
        return list(json.loads(given.removeprefix("pools="))) if given.startswith("pools=") else []

    @property
    def engines(self) -> list[dict[str, Any]]:
        """Settings of each worker's engine in a fleet of pools, by the worker's number; none elsewhere."""
        return [pool["engine"] for pool in self.pools for _ in range(pool["workers"])]

    @property
    def pool_of(self) -> list[str]:
        """Name of each worker's pool in a fleet of pools, by the worker's number; none elsewhere."""
        return [pool["name"] for pool in self.pools for _ in range(pool["workers"])]

    @property
    def has_sglang(self) -> bool:
        """Whether a worker runs SGLang, which shortens answers that its pool cannot hold."""
        kinds = [self.flags.get("engine"), *(engine.get("engine_type") for engine in self.engines)]
        return "sglang" in kinds

    def with_flags(self, **changes: str | None) -> Case:
        """Change flags, in Python's spelling of their names; None removes one."""
        flags = dict(self.flags)
        for name, value in changes.items():
            flags.pop(name.replace("_", "-"), None)
            if value is not None:
                flags[name.replace("_", "-")] = value
        return replace(self, flags=flags)


def random_case(seed: int, kind: str | None = None) -> Case:
    """Draw the case of that seed; kinds take turns."""
    rng = Random(f"answers {seed}")
    kind = list(KINDS)[seed % len(KINDS)] if kind is None else kind
    rows = random_trace(rng)
    flags = {"trace-block-size": str(BLOCK), **KINDS[kind](rng, rows)}
    if "concurrency" not in flags and rng.random() < 0.15:
        flags["arrival-rate-scale"] = rng.choice(["2", "0.5", "3"])
    if rng.random() < 0.1:
        flags["max-tokens"] = str(rng.randint(1, 30))
    for name, limits in (("ttft", (5, 40, 200)), ("itl", (2, 6, 20)), ("e2e", (50, 400, 3000))):
        if rng.random() < 0.5:
            flags[f"slo-{name}-ms"] = str(rng.choice(limits))
    return Case(seed, kind, tuple(rows), flags)


def _fleet(rng: Random, rows: list[Row]) -> Flags:
    workers = rng.choice([1, 1, 2, 3, 6])
    flags = {"workers": str(workers)}
    if workers > 1:
        flags["routing"] = rng.choice(ROUTINGS)
    if flags.get("routing") in ("random", "power_of_two", "kv"):
        flags["seed"] = str(rng.randint(0, 9))
    if rng.random() < 0.25:
        flags["concurrency"] = str(rng.choice([1, 2, 5]))
    if flags.get("routing") == "kv" and rng.random() < 0.6:
        flags["event-delay-ms"] = rng.choice(["1", "50"])
    if flags.get("routing") == "kv" and rng.random() < 0.3:
        flags["router-queue-threshold"] = rng.choice(["0.5", "2"])
    return flags


def _longest(rows: list[Row]) -> int:
    return max(int(row["input_length"]) + int(row["output_length"]) for row in rows)


def _vllm(rng: Random, rows: list[Row], *, block_sizes: tuple[int, ...] = (4, 16, 16, 32)) -> Flags:
    block = rng.choice(block_sizes)
    fits = -(-_longest(rows) // block) + 2
    flags = {
        "block-size": str(block),
        "num-gpu-blocks": str(round(fits * rng.choice([1, 1.5, 3, 10]))),
        "max-num-seqs": str(rng.choice([1, 4, 64])),
        "max-num-batched-tokens": str(rng.choice([64, 256, 2048])),
    }
    if rng.random() < 0.2:
        flags["no-async-scheduling"] = ""
    if rng.random() < 0.1:
        flags["no-enable-prefix-caching"] = ""
    if rng.random() < 0.1:
        flags["long-prefill-token-threshold"] = "32"
    if rng.random() < 0.1:
        flags["max-model-len"] = str(max(40, _longest(rows) // 2))
    return flags


def plain(rng: Random, rows: list[Row]) -> Flags:
    """Workers of vLLM with one pool of blocks each."""
    flags = _fleet(rng, rows) | _vllm(rng, rows)
    if rng.random() < 0.15:
        flags["enable-lora"] = ""
        flags["max-loras"] = rng.choice(["1", "2"])
        adapters: dict[str, str] = {}
        for number, row in enumerate(rows):
            session = row.get("session_id", f"row {number}")
            row["lora"] = adapters.setdefault(session, rng.choice("abc"))
    if rng.random() < 0.15:
        flags["scheduling-policy"] = "priority"
        for row in rows:
            row["priority"] = rng.randint(0, 3)
    return flags


def sglang(rng: Random, rows: list[Row]) -> Flags:
    """Workers of SGLang, half of them with HiCache."""
    host = rng.random() < 0.3
    page = 16 if host else rng.choice([1, 4, 16])
    flags = _fleet(rng, rows) | {
        "engine": "sglang",
        "page-size": str(page),
        "max-total-tokens": str((_longest(rows) // page + 4) * rng.choice([2, 4, 20]) * page),
        "chunked-prefill-size": str(rng.choice([64, 8192])),
        "schedule-policy": rng.choice(["fcfs", "lpm"]),
    }
    if rng.random() < 0.3:
        flags["disable-overlap-schedule"] = ""
    if host:
        flags |= {"g2": "200", "kv-bytes-per-token": "65536", "hicache-write-policy": "write_through"}
        flags["g2-bandwidth-gbps"] = rng.choice(["0.5", "14"])
    return flags


def tiers(rng: Random, rows: list[Row]) -> Flags:
    """Host memory, disk and an object store below the GPU."""
    flags = _fleet(rng, rows) | _vllm(rng, rows)
    flags.pop("no-enable-prefix-caching", None)
    flags |= {"kv-bytes-per-token": rng.choice(["4096", "131072"]), "g2": rng.choice(["40", "400"])}
    flags["g2-bandwidth-gbps"] = rng.choice(["0.5", "14", "inf"])
    flags["offload-mode"] = rng.choice(["write_through", "evict"])
    if rng.random() < 0.5:
        flags |= {"g3": rng.choice(["60", "1000"]), "g3-bandwidth-gbps": rng.choice(["0.3", "7"])}
        if rng.random() < 0.5:
            flags["g4"] = rng.choice(["200", "unlimited"])
    return flags


def offload(rng: Random, rows: list[Row]) -> Flags:
    """vLLM's own offload to host memory."""
    flags = _fleet(rng, rows) | _vllm(rng, rows)
    flags.pop("no-enable-prefix-caching", None)
    blocks = rng.choice([30, 300])
    flags |= {"g2": str(blocks), "offload-mode": "vllm", "kv-bytes-per-token": "131072"}
    flags["g2-bandwidth-gbps"] = rng.choice(["0.5", "14"])
    return flags


def hand_offs(rng: Random, rows: list[Row]) -> Flags:
    """Prefill and decode workers."""
    flags = _vllm(rng, rows)
    flags |= {
        "prefill-workers": rng.choice("123"),
        "decode-workers": rng.choice("123"),
        "disaggregation": rng.choice(["always", "always", "uncached:64", "ratio:0.5"]),
    }
    if rng.random() < 0.7:
        flags |= {"kv-link-gbps": rng.choice(["0.2", "25"]), "kv-bytes-per-token": "131072"}
    if rng.random() < 0.3:
        flags["hand-off-hop-ms"] = "1.5"
    if rng.random() < 0.2:
        flags |= {"transfer-failure-rate": "0.3", "seed": str(rng.randint(0, 9))}
        flags["kv-load-failure-policy"] = rng.choice(["fail", "recompute"])
    return flags


def groups(rng: Random, rows: list[Row]) -> Flags:
    """Models whose layers keep different KV: a window and full attention, or states."""
    flags = _fleet(rng, rows) | _vllm(rng, rows, block_sizes=(16,))
    flags.pop("no-enable-prefix-caching", None)
    full = {"kind": "full", "block_size": 16}
    other = rng.choice(
        [
            {"kind": "sliding_window", "block_size": 16, "window": rng.choice([32, 128])},
            {"kind": "chunked_local", "block_size": 16, "chunk": 64},
        ]
    )
    flags["kv-cache-groups"] = json.dumps([full, *[other] * rng.randint(1, 2)])
    flags["num-gpu-blocks"] = str(4 * int(flags["num-gpu-blocks"]))
    return flags


def models(rng: Random, rows: list[Row]) -> Flags:
    """Known models on known GPUs, with tensor-parallel workers or data-parallel ranks."""
    model, gpu = rng.choice(MODELS)
    flags = _fleet(rng, rows) | {"model": model, "gpu": gpu}
    if model == "Llama-3.1-70B":
        flags["tensor-parallel-size"] = rng.choice(["2", "4"])
    elif model == "Qwen3-30B-A3B" and rng.random() < 0.6:
        flags |= {"data-parallel-size": "2", "enable-expert-parallel": ""}
        flags.pop("workers")
    elif gpu != "RTX-4090":
        flags["tensor-parallel-size"] = rng.choice(["1", "2"])
    return flags


def speculation(rng: Random, rows: list[Row]) -> Flags:
    """Drafts that a step verifies."""
    flags = _fleet(rng, rows) | _vllm(rng, rows)
    flags.pop("no-async-scheduling", None)
    if rng.random() < 0.5:
        flags["no-async-scheduling"] = ""
    tokens = rng.randint(1, 4)
    method = rng.choice(["mtp", "eagle3", "ngram"])
    config = {
        "method": method,
        "num_speculative_tokens": tokens,
        "accept_rates": [0.8, 0.5, 0.4, 0.1][:tokens],
    }
    flags["speculative-config"] = json.dumps(config)
    return flags


def pools(rng: Random, rows: list[Row]) -> Flags:
    """Groups of workers that differ: engines, sizes, limits, step times, and tiers of their own."""
    flags = _fleet(rng, rows)
    flags.pop("workers")
    block = rng.choice([4, 16])
    drawn = []
    for name in "abc"[: rng.randint(2, 3)]:
        blocks = (-(-_longest(rows) // block) + 4) * rng.choice([1, 2, 8])
        engine: dict[str, Any] = {"block_size": block, "num_gpu_blocks": blocks}
        if rng.random() < 0.3:
            engine |= {"engine_type": "sglang", "chunked_prefill_size": rng.choice([64, 8192])}
        else:
            engine |= {
                "max_num_seqs": rng.choice([1, 4, 64]),
                "max_num_batched_tokens": rng.choice([64, 256, 2048]),
                "async_scheduling": rng.random() < 0.7,
                "enable_prefix_caching": rng.random() < 0.9,
            }
        if rng.random() < 0.5:
            prefill_ms, decode_ms = rng.choice([5, 30]), rng.choice([0.5, 3])
            engine["timing"] = {"kind": "constant", "prefill_ms": prefill_ms, "decode_ms": decode_ms}
        pool: dict[str, Any] = {"name": name, "workers": rng.randint(1, 3), "engine": engine}
        if rng.random() < 0.25 and engine.get("enable_prefix_caching", True):
            link = {"down_gbps": rng.choice([0.5, 14]), "up_gbps": rng.choice([0.5, 14])}
            pool |= {"tiers": [{"tier": "g2", "blocks": rng.choice([40, 400]), "link": link}]}
            pool |= {"kv_bytes_per_token": 65536}
        drawn.append(pool)
    flags.setdefault("routing", "round_robin")
    return flags | {"set": f"pools={json.dumps(drawn)}"}


KINDS: dict[str, Callable[[Random, list[Row]], Flags]] = {
    "plain": plain,
    "sglang": sglang,
    "tiers": tiers,
    "offload": offload,
    "hand_offs": hand_offs,
    "groups": groups,
    "models": models,
    "speculation": speculation,
    "pools": pools,
}
