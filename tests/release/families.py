"""Random scenarios by family: the same seed always gives the same scenario."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Literal, cast

from model.scenario_gen import random_scenario, with_adapters, with_caps, with_ends
from model.vllm_config import V0_31
from model.vllm_format import expand_prompt
from release.group_family import with_group_offload, with_groups, with_state_offload
from release.pair_family import draw_hosted_pair, draw_pair

if TYPE_CHECKING:
    from collections.abc import Callable

    from model.vllm_format import Scenario as ByStep

Scenario = dict[str, Any]
Kind = Literal["steps", "speculation", "clock", "offload", "groups", "pairs"]


@dataclass(frozen=True)
class Family:
    """Scenarios of one kind; `draw` returns the scenario of a seed."""

    name: str
    kind: Kind
    draw: Callable[[int], Scenario]

    def scenario(self, seed: int) -> tuple[str, Scenario]:
        """Return name and scenario of a seed."""
        name = f"{self.name.replace('-', '_')}_{seed}"
        scenario = self.draw(seed)
        return name, scenario if self.kind == "clock" else {"name": name, **scenario}


def _plain(seed: int) -> Scenario:
    scenario = cast("Scenario", random_scenario(seed, V0_31))
    del scenario["name"]
    return scenario


def _configured(seed: int, **settings: Any) -> Scenario:
    scenario = _plain(seed)
    return {**scenario, "config": {**scenario["config"], **settings}}


def _without_name(scenario: ByStep) -> Scenario:
    return {key: value for key, value in scenario.items() if key != "name"}


def _caps(seed: int) -> Scenario:
    return _without_name(with_caps(cast("ByStep", {"name": "", **_plain(seed)}), seed))


def _eos(seed: int) -> Scenario:
    rng = Random(f"eos {seed}")
    scenario = _plain(seed)
    for spec in scenario["requests"]:
        if rng.random() < 0.7:
            spec["eos_at"] = rng.randint(1, spec["max_tokens"])
    return scenario


def _aborts(seed: int, asynchronous: bool) -> Scenario:
    scenario = _configured(seed, async_scheduling=asynchronous)
    ended = _without_name(with_ends(cast("ByStep", {"name": "", **scenario}), seed))
    if not ended["aborts"]:
        rng = Random(f"aborts {seed}")
        ended["aborts"] = [
            {
                "id": spec["id"],
                "step": spec["arrival_step"] + rng.randint(0, 30),
                "when": rng.choice(["before", "mid"]),
            }
            for spec in ended["requests"]
            if rng.random() < 0.4
        ]
    return ended


def _priority(seed: int) -> Scenario:
    rng = Random(f"priority {seed}")
    scenario = _configured(seed, policy="priority")
    urgent_last = rng.random() < 0.5  # victims are then at the front of the running list
    count, config = len(scenario["requests"]), scenario["config"]
    for index, spec in enumerate(scenario["requests"]):
        spec["priority"] = count - index if urgent_last else rng.randint(0, 4)
    # Few blocks, so that requests preempt each other.
    needs = _blocks(scenario)
    config["num_blocks"] = 1 + max(needs) + int(rng.uniform(0.0, 0.3) * min(sum(needs), 8 * max(needs)))
    return scenario


def _blocks(scenario: Scenario) -> list[int]:
    """Return the number of blocks that each request needs."""
    tokens = [len(expand_prompt(spec["prompt"])) + spec["max_tokens"] for spec in scenario["requests"]]
    return [math.ceil(count / scenario["config"]["block_size"]) for count in tokens]


def _lora(seed: int) -> Scenario:
    return _without_name(with_adapters(cast("ByStep", {"name": "", **_plain(seed)}), seed))


def _interval(seed: int) -> Scenario:
    return _configured(seed, prefill_schedule_interval=Random(f"interval {seed}").choice([2, 3, 4, 8, 20]))


def _clock(seed: int) -> Scenario:
    rng = Random(f"clock {seed}")
    scenario = _plain(seed)
    if rng.random() < 0.2:
        scenario["config"]["prefill_schedule_interval"] = rng.choice([2, 4, 8])
    # A request that does not fit would be admitted and preempted forever: without steps, there is no limit.
    scenario["config"]["num_blocks"] = max(scenario["config"]["num_blocks"], 2 + max(_blocks(scenario)))
    stretch = rng.choice([0, 1, 3, 20]) * 1_000_000
    requests, aborts = [], []
    for spec in scenario["requests"]:
        arrival = spec.pop("arrival_step") * stretch + rng.randint(0, stretch)
        requests.append({**spec, "t": arrival})
        if rng.random() < 0.1:
            aborts.append({"id": spec["id"], "t": arrival + rng.randint(0, 100_000_000)})
    return {
        "step_ns": rng.choice([1_000_000, 5_000_000]),
        "per_token_ns": rng.choice([0, 10_000]),
        "config": scenario["config"],
        "requests": requests,
        "aborts": aborts,
    }


def _spec(seed: int, asynchronous: bool) -> Scenario:
    rng = Random(f"drafts {seed}")
    scenario = _configured(seed, async_scheduling=asynchronous)
    k = rng.randint(1, 5)
    # With a smaller threshold vLLM's scheduler fails its own assertion on an admission with blank drafts.
    if scenario["config"].get("long_prefill_token_threshold"):
        threshold = max(scenario["config"]["long_prefill_token_threshold"], 1 + k)
        longest = scenario["config"].get("max_model_len", threshold)
        scenario["config"]["long_prefill_token_threshold"] = threshold if threshold <= longest else 0
    for spec in scenario["requests"]:
        spec["accept"] = [rng.randint(0, k) for _ in range(rng.randint(1, 6))]
        if rng.random() < 0.2:
            spec["eos_at"] = rng.randint(1, spec["max_tokens"])
    methods = ["mtp", "eagle", "eagle3"] if asynchronous else ["mtp", "eagle", "eagle3", "ngram", "ngram"]
    return {"method": rng.choice(methods), "k": k, **scenario}


def _offload(seed: int) -> Scenario:
    rng = Random(f"offload {seed}")
    scenario = _configured(seed, enable_prefix_caching=True)
    needs = _blocks(scenario)
    per_chunk = rng.choice([1, 1, 2, 4])
    chunks = rng.uniform(0.3, 4.0) * max(needs) / per_chunk
    offload = {
        "host_chunks": max(2, int(chunks)),
        "blocks_per_chunk": per_chunk,
        "eviction_policy": "lru" if rng.random() < 0.85 else "arc",
        "offload_prompt_only": rng.random() < 0.6,
        "store_steps": rng.choice([0, 1, 1, 4]),
        "load_steps": rng.choice([0, 1, 1, 4]),
    }
    return {**scenario, "offload": offload, "max_steps": 400}


def _groups(seed: int) -> Scenario:
    return with_groups(_plain(seed), seed)


FAMILIES = {
    family.name: family
    for family in (
        Family("versions", "steps", _plain),
        Family("caps", "steps", _caps),
        Family("eos", "steps", _eos),
        Family("aborts", "steps", lambda seed: _aborts(seed, False)),
        Family("async-aborts", "steps", lambda seed: _aborts(seed, True)),
        Family("priority", "steps", _priority),
        Family("lora", "steps", _lora),
        Family("interval", "steps", _interval),
        Family("clock", "clock", _clock),
        Family("spec", "speculation", lambda seed: _spec(seed, False)),
        Family("async-spec", "speculation", lambda seed: _spec(seed, True)),
        Family("offload", "offload", _offload),
        Family("groups", "groups", _groups),
        Family("pd", "pairs", draw_pair),
        Family("multi", "pairs", draw_hosted_pair),
        Family("group-offload", "offload", lambda seed: with_group_offload(_offload(seed), seed)),
        Family("rare-offload", "offload", lambda seed: with_group_offload(_offload(seed), seed, rare=True)),
        Family("state-offload", "offload", lambda seed: with_state_offload(_offload(seed), seed)),
        Family(
            "replay-offload", "offload", lambda seed: with_state_offload(_offload(seed), seed, replay=True)
        ),
    )
}
