"""Random scenarios with several KV cache groups."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from model.vllm_format import expand_prompt

Line = dict[str, Any]


def draw_groups(rng: Random) -> list[Line]:
    """Draw the groups of a model, in shapes that models have and in some that none has."""
    size = rng.choice([8, 16, 16, 32])
    full = {"kind": rng.choice(["full", "full", "mla"]), "block_size": size}

    def window(block: int = size) -> Line:
        return {"kind": "sliding_window", "block_size": block, "window": rng.randint(2, 8 * block)}

    def state(block: int) -> Line:
        checkpoint = rng.random() < 0.5
        return {
            "kind": "mamba",
            "block_size": block,
            "mode": "align",
            "checkpoint_blocks": 1 if checkpoint else 0,
            "checkpoint_alignment": rng.choice([1, 1, 16, block]) if checkpoint else None,
        }

    shape = rng.choice(
        ["windows", "windows", "sizes", "local", "states", "states", "mixed", "none", "lone", "ring"]
    )
    match shape:
        case "windows":
            groups = [window()] * rng.randint(1, 4) + [window()] * rng.randint(0, 1) + [full]
        case "sizes":
            groups = [window(size * rng.choice([1, 2, 4])), {**full, "block_size": size * rng.choice([1, 3])}]
        case "local":
            local = {"kind": "chunked_local", "block_size": size, "chunk": size * rng.randint(1, 8)}
            groups = [local] * rng.randint(1, 3) + [full]
        case "states":
            block = rng.choice([32, 64])
            groups = [state(block)] * rng.randint(1, 3) + [{**full, "block_size": block}]
        case "mixed":
            block = rng.choice([32, 64])
            groups = [state(block), window(block // rng.choice([1, 2])), {**full, "block_size": block}]
        case "none":
            groups = [window(), window()]
        case "lone":
            groups = [rng.choice([window(), {"kind": "rswa", "block_size": size, "window": 2 * size}, full])]
        case _:
            groups = [
                {**full, "kind": "mla", "block_size": 4 * size},
                {
                    "kind": "sliding_window_mla",
                    "block_size": size,
                    "window": 2 * size,
                    "bounded_replay": rng.random() < 0.6,
                },
                {"kind": "circular", "block_size": 8},
            ]
    groups = [dict(group) for group in groups]
    rng.shuffle(groups)
    return groups


def with_groups(scenario: Line, seed: int) -> Line:
    """Return a plain scenario with KV cache groups, a pool for them, and a retention interval."""
    rng = Random(f"groups {seed}")
    groups = draw_groups(rng)
    common = math.lcm(*(group["block_size"] for group in groups))
    config = {key: value for key, value in scenario["config"].items() if key != "block_size"}
    longest = max(len(expand_prompt(spec["prompt"])) + spec["max_tokens"] for spec in scenario["requests"])
    config["max_model_len"] = max(config.get("max_model_len", 0), 4096, longest + 1)
    config["groups"] = groups
    limited = any(g["kind"] in ("sliding_window", "sliding_window_mla", "mamba") for g in groups)
    intervals = [0, 0, None, common, 3 * common] if limited else [0, None]
    config["prefix_cache_retention_interval"] = rng.choice(intervals)
    states = [group["block_size"] for group in groups if group["kind"] == "mamba"]
    if states and len(groups) > 1 and rng.random() < 0.5:
        config["prefix_match_unit"] = 16
    needs = sum(math.ceil(longest / group["block_size"]) for group in groups) + len(groups)
    config["num_blocks"] = 2 + int(needs * rng.choice([1.0, 1.2, 2.0, 6.0]))
    return {**scenario, "config": config}


def with_group_offload(scenario: Line, seed: int, *, rare: bool = False) -> Line:
    """Return a scenario with an offload, with KV cache groups of full attention, windows and chunks.

    `rare`: with rswa, or with a group that is not cached.
    """
    rng = Random(f"group offload {seed}")
    size = rng.choice([8, 16])
    full: Line = {"kind": rng.choice(["full", "full", "mla"]), "block_size": size}

    def window() -> Line:
        kind = rng.choice(["sliding_window", "sliding_window", "sliding_window_mla"])
        return {"kind": kind, "block_size": size, "window": rng.randint(2, 8 * size)}

    match rng.choice(["rswa", "ring"] if rare else ["windows", "windows", "windows", "sizes", "local"]):
        case "rswa":
            rswa: Line = {"kind": "rswa", "block_size": size, "window": rng.randint(2, 8 * size)}
            groups = [rswa] + [window()] * rng.randint(0, 1) + [full] * rng.randint(0, 1)
        case "ring":
            groups = [window(), full, {"kind": "circular", "block_size": 8}]
        case "windows":
            groups = [window()] * rng.randint(1, 3) + [window()] * rng.randint(0, 1) + [full]
        case "sizes":
            groups = [window(), {**full, "block_size": size * rng.choice([1, 2, 3])}]
        case _:
            groups = [{"kind": "chunked_local", "block_size": size, "chunk": size * rng.randint(1, 8)}, full]
    groups = [dict(group) for group in groups]
    rng.shuffle(groups)
    config = {key: value for key, value in scenario["config"].items() if key != "block_size"}
    longest = max(len(expand_prompt(spec["prompt"])) + spec["max_tokens"] for spec in scenario["requests"])
    config["max_model_len"] = max(config.get("max_model_len", 0), 4096, longest + 1)
    config["groups"] = groups
    per_chunk = scenario["offload"]["blocks_per_chunk"]
    common = math.lcm(*(group["block_size"] for group in groups)) * per_chunk
    has_windows = any(group["kind"].startswith("sliding") for group in groups)
    config["prefix_cache_retention_interval"] = rng.choice(
        [0, 0, None, common, 3 * common] if has_windows else [0, None]
    )
    needs = sum(math.ceil(longest / group["block_size"]) for group in groups) + len(groups)
    config["num_blocks"] = 2 + int(needs * rng.choice([1.0, 1.2, 2.0, 6.0]))
    chunks = int(rng.uniform(0.3, 4.0) * needs / per_chunk)
    offload = {**scenario["offload"], "host_chunks": max(2, chunks)}
    return {**scenario, "config": config, "offload": offload}


def with_state_offload(scenario: Line, seed: int, *, replay: bool = False) -> Line:
    """Return a scenario with an offload and state groups; `replay`: with a window that is computed again instead."""
    rng = Random(f"state offload {replay} {seed}")
    size = rng.choice([16, 32])

    def state() -> Line:
        checkpoint = rng.random() < 0.5
        return {
            "kind": "mamba",
            "block_size": size,
            "mode": "align",
            "checkpoint_blocks": 1 if checkpoint else 0,
            "checkpoint_alignment": rng.choice([1, 1, 8, size]) if checkpoint else None,
        }

    full: Line = {"kind": rng.choice(["full", "full", "mla"]), "block_size": size}
    window: Line = {"kind": "sliding_window", "block_size": size, "window": rng.randint(2, 4 * size)}
    if replay:
        again = {"kind": "sliding_window_mla", "block_size": 16, "window": rng.choice([16, 16, 32, 48])}
        full = {"kind": "mla", "block_size": rng.choice([16, 32])}
        # With another window, or a state of another block size or inside a block, vLLM stops with an assertion.
        groups = [full, {**again, "bounded_replay": True}]
        groups += [{**state(), "block_size": full["block_size"]}] * rng.choice([0, 0, 0, 1])
        groups += [{"kind": "circular", "block_size": 8}] * rng.randint(0, 1)
    else:
        match rng.choice(["states", "states", "states", "wide", "window", "no full"]):
            case "states":
                groups = [state()] * rng.randint(1, 3) + [full]
            case "wide":
                groups = [state(), {**full, "block_size": size // 2}]
            case "window":
                groups = [state(), {**window, "block_size": size // rng.choice([1, 2])}, full]
            case _:
                groups = [state(), window]
    groups = [dict(group) for group in groups]
    rng.shuffle(groups)
    config = {key: value for key, value in scenario["config"].items() if key != "block_size"}
    longest = max(len(expand_prompt(spec["prompt"])) + spec["max_tokens"] for spec in scenario["requests"])
    config["max_model_len"] = max(config.get("max_model_len", 0), 4096, longest + 1)
    config["groups"] = groups
    cached = [group for group in groups if group["kind"] != "circular" and not group.get("bounded_replay")]
    unit = math.gcd(*(group["block_size"] for group in cached))
    if not replay and any(group["kind"] == "mamba" for group in groups) and rng.random() < 0.6:
        config["prefix_match_unit"] = rng.choice([4, 8, unit])
    per_chunk = min(scenario["offload"]["blocks_per_chunk"], 2)
    common = math.lcm(*(group["block_size"] for group in groups)) * per_chunk
    limited = any(group["kind"].startswith(("sliding", "mamba")) for group in cached)
    config["prefix_cache_retention_interval"] = rng.choice(
        [0, 0, None, common, 3 * common] if limited else [0, None]
    )
    needs = sum(math.ceil(longest / group["block_size"]) for group in groups) + len(groups)
    config["num_blocks"] = 2 + int(needs * rng.choice([1.0, 1.1, 1.3] if replay else [1.0, 1.2, 2.0, 6.0]))
    chunks = int(rng.uniform(0.3, 8.0 if replay else 4.0) * needs / per_chunk)
    offload = {**scenario["offload"], "host_chunks": max(2, chunks), "blocks_per_chunk": per_chunk}
    return {**scenario, "config": config, "offload": offload}
