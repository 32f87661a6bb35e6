"""Random pairs of a prefill and a decode instance: no block is lost, whatever is aborted, fails, expires or preempts.

    python tests/engines/handoff_random.py FIRST COUNT [push]

Runs scenarios by ticks, with the engines' own checks after every step; at the end every block of both is free. In push
mode vLLM leaves some decode requests loading for ever; each of them has one of the known causes.
"""

from __future__ import annotations

import math
import random
import sys
from typing import Any

import msgspec

from understudy.conformance.handoff_recording import HandOffRun
from understudy.conformance.handoff_scenario import HandOffScenario
from understudy.engines.profiles import find_recorded_profile


def make_scenario(seed: int, *, push: bool = False) -> HandOffScenario:
    """Draw a scenario; in push mode for few ticks, because some of them stand still, as vLLM does."""
    draw = random.Random(seed)
    block_size = draw.choice([4, 8, 16])
    longest = 12 * block_size

    def make_side(*, decodes: bool) -> dict[str, Any]:
        config: dict[str, Any] = {
            "block_size": block_size,
            "num_blocks": draw.choice([24, 32, 64, 160]),
            "max_num_seqs": draw.choice([2, 6, 16]),
            "max_num_batched_tokens": draw.choice([24, 64, 512]),
            "max_model_len": 4096,
            "async_scheduling": asynchronous,
            "policy": policy,
            "scheduler_reserve_full_isl": draw.random() < 0.8,
            "watermark": draw.choice([0.0, 0.0, 0.1]),
            "enable_prefix_caching": draw.random() < 0.9,
        }
        side: dict[str, Any] = {
            "kv_lease_duration": draw.choice([6, 12, 30]),
            "every": draw.choice([1, 1, 1, 2, 3]),
        }
        if decodes:
            side["kv_load_failure_policy"] = draw.choice(["fail", "recompute"])
        if draw.random() < 0.15:
            first = draw.randint(5, 40)
            side["stall"] = [[first, first + draw.randint(5, 40)]]
        return {"config": config, "side": side}

    asynchronous = draw.random() < 0.5
    policy = draw.choice(["fcfs", "fcfs", "priority"])
    requests, tick = [], 0
    for index in range(draw.randint(5, 40)):
        tick += draw.choice([0, 0, 1, 3])
        tokens = draw.randint(1, longest)
        shared = draw.choice([0, min(tokens, 2 * block_size)])
        prompt: list[tuple[int, int]] = [(500, shared)] if shared else []
        if tokens > shared:
            prompt.append((10_000 + 1000 * index, tokens - shared))
        request: dict[str, Any] = {
            "id": f"r{index}",
            "arrival_tick": tick,
            "prompt": prompt,
            "max_tokens": draw.randint(1, 3 * block_size),
        }
        request |= {"priority": draw.randint(0, 3)} if policy == "priority" else {}
        request |= {"local": True} if draw.random() < 0.1 else {"drop": True} if draw.random() < 0.05 else {}
        requests.append(request)
    names = [request["id"] for request in requests]
    fail: dict[str, Any] = {}
    if draw.random() < 0.4:
        fail = {name: draw.choice(["setup", "read"]) for name in names if draw.random() < 0.3}
    aborts = []
    if draw.random() < 0.5:
        for name in names:
            if draw.random() < 0.4:
                when = draw.choice(["before", "mid"])
                side = draw.choice(["p", "d"])
                aborts.append({"id": name, "side": side, "tick": draw.randint(0, tick + 60), "when": when})
    wire: dict[str, Any] = {
        "latency": draw.choice([0, 1, 5]),
        "proxy": draw.choice([1, 2, 10]),
        "blocks_per_tick": draw.choice([None, 2, 4]),
        "link": draw.choice(["parallel", "fifo"]),
        "handshake": draw.choice([0, 0, 4]),
    }
    if push and draw.random() < 0.4:
        wire["dispatch"] = "parallel"
    return msgspec.convert(
        {
            "mode": "push" if push else "pull",
            "name": f"random {seed}",
            "p": make_side(decodes=False),
            "d": make_side(decodes=True),
            "wire": wire,
            "requests": requests,
            "max_ticks": 400 if push else 3000,
            "fail": fail,
            "aborts": aborts,
        },
        HandOffScenario,
    )


def check_scenario(seed: int, *, push: bool = False) -> str:
    """Run one scenario; returns how it ended. AssertionError: a block or a request is missing."""
    scenario = make_scenario(seed, push=push)
    run = HandOffRun(scenario, find_recorded_profile("0.33.0"), check=True)
    *lines, end = run.lines()
    reason = str(end["end"]["reason"])
    if reason == "done":
        for side, total in (("p", scenario.p.config.num_blocks), ("d", scenario.d.config.num_blocks)):
            last = next((line for line in reversed(lines) if line["i"] == side), None)
            assert last is None or (last["free_blocks"], last["deferred"]) == (total - 1, 0), (
                seed,
                side,
                last,
            )
        sent = {name for line in lines if line["i"] == "p" for name in line.get("sent", ())}
        held = {name for line in lines for name in line.get("handoff", ())}
        assert sent == held, (seed, held - sent)
    elif push:
        unexplained = _waits_too_long(scenario, lines) - _known_losses(scenario, lines)
        assert not unexplained, (seed, unexplained)
    return reason


def _waits_too_long(scenario: HandOffScenario, lines: list[dict[str, Any]]) -> set[str]:
    """Requests on the decode instance, also aborted ones, whose blocks have long been registered and do not come."""
    last: dict[str, Any] = next((line for line in reversed(lines) if line["i"] == "d"), {})
    registered = _names(lines, "registered", before=scenario.max_ticks - 100)
    return {*last.get("loading", ()), *last.get("held", ())} & registered - _names(lines, "recved")


def _known_losses(scenario: HandOffScenario, lines: list[dict[str, Any]]) -> set[str]:
    """Requests whose WRITE failed, whose lease ended, or whose prompt was not computed or only just now."""
    computed = _names(lines, "handoff", before=scenario.max_ticks - 100)
    uncomputed = {request.id for request in scenario.requests} - computed
    return {*scenario.fail, *_names(lines, "expired"), *uncomputed}


def _names(lines: list[dict[str, Any]], key: str, before: float = math.inf) -> set[str]:
    return {name for line in lines if line["tick"] < before for name in line.get(key, ())}


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:3])
    reasons = [check_scenario(seed, push="push" in sys.argv[3:]) for seed in range(first, first + count)]
    print({reason: reasons.count(reason) for reason in set(reasons)})
