"""Random scenarios in the format of the golden set: the same seed gives the same scenario.

Every scenario draws its own mixture of prompt shapes, arrival pattern, id and priority scheme, and a pool
that is roomy, tight or (rarely) too small, so that many seeds meet the scheduler's rules in combination.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any, cast

from .vllm_config import RECORDED, Profile
from .vllm_format import Abort, RequestSpec, Scenario, expand_prompt, output_token

Prompt = list[int | list[int]]

MAX_STEPS = 600  # enough for most runs to end; the rest stall or are cut off, which compares as well


def random_scenario(seed: int, profile: Profile = RECORDED) -> Scenario:
    """The scenario of that seed. It sets only what `profile` has; run it under the same profile."""
    rng = Random(seed)
    if rng.random() < 0.12:
        return _elephant_and_mice(rng, seed, profile)
    pressed = rng.random() < 0.6  # many at once, long outputs, few blocks: where preemption happens
    config = _random_config(rng, profile, pressed)
    requests = _random_requests(rng, config, pressed)
    config["num_blocks"] = _random_pool(rng, config["block_size"], requests, pressed)
    if not config["enable_chunked_prefill"] and rng.random() < 0.9:
        # Otherwise a prompt beyond the budget starves all others: worth a few scenarios, not all.
        needed = max(_prompt_tokens(spec["prompt"]) + spec["max_tokens"] for spec in requests)
        config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], needed)
    _reconcile(config)
    return {"name": f"seed_{seed}", "config": config, "max_steps": MAX_STEPS, "requests": requests}


def _reconcile(config: dict[str, Any]) -> None:
    """VLLM takes no limits that contradict each other."""
    config["max_num_seqs"] = min(config["max_num_seqs"], config["max_num_batched_tokens"])
    if "max_model_len" in config and "long_prefill_token_threshold" in config:
        threshold = min(config["long_prefill_token_threshold"], config["max_model_len"])
        config["long_prefill_token_threshold"] = threshold


def with_bursts(scenario: Scenario, seed: int) -> Scenario:
    """The same scenario with speculation, synchronously scheduled."""
    rng = Random(f"bursts {seed}")
    config = {**scenario["config"], "async_scheduling": False}
    config |= {
        "aic_nextn": rng.randint(1, 5),
        "aic_mtp_seed": rng.choice([42, 2**64 - 1, rng.getrandbits(64)]),
    }
    if rng.random() < 0.8:
        rates = [rng.choice([0.0, 1.0, 1.0, round(rng.random(), 2)]) for _ in range(rng.randint(1, 6))]
        config["aic_nextn_accept_rates"] = ",".join(map(str, rates))
    return {**scenario, "config": config}


def with_ends(scenario: Scenario, seed: int) -> Scenario:
    """The same scenario in which some requests end by EOS, and some are aborted at any time."""
    rng = Random(f"ends {seed}")
    share = rng.choice([0.0, 0.5, 1.0])
    requests = [spec.copy() for spec in scenario["requests"]]
    for spec in requests:
        if rng.random() < share:
            spec["eos_at"] = rng.randint(1, spec["max_tokens"])
    aborts: list[Abort] = []
    share, longest = rng.choice([0.0, 0.1, 0.6]), rng.choice([2, 20, 200])
    for spec in requests:
        if rng.random() < share:
            step = max(0, spec["arrival_step"] + rng.randint(-1, longest))
            aborts.append({"id": spec["id"], "step": step, "when": rng.choice(["before", "mid"])})
    rng.shuffle(aborts)
    return {**scenario, "requests": requests, "aborts": aborts}


def with_adapters(scenario: Scenario, seed: int) -> Scenario:
    """The same scenario with LoRA: a few adapters, and fewer places for them in a batch."""
    rng = Random(f"adapters {seed}")
    count = rng.randint(2, 5)
    requests = [{**spec, "lora": rng.randint(0, count)} for spec in scenario["requests"]]
    config = {**scenario["config"], "max_loras": rng.randint(1, count - 1)}
    return {**scenario, "config": config, "requests": cast("list[RequestSpec]", requests)}


def with_caps(scenario: Scenario, seed: int) -> Scenario:
    """The same scenario with settings that came with v0.31."""
    rng = Random(f"caps {seed}")
    config = dict(scenario["config"])
    config["long_prefill_token_threshold"] = rng.choice([1, 3, 10, 50])
    config["long_prefill_token_threshold_adaptive"] = rng.random() < 0.6
    if rng.random() < 0.6:
        config["max_num_active_seqs"] = rng.randint(1, config["max_num_seqs"])
    _reconcile(config)
    return {**scenario, "config": config}


def _elephant_and_mice(rng: Random, seed: int, profile: Profile) -> Scenario:
    """A long unimportant prefill in chunks of several blocks among short urgent requests, in a small pool.

    The elephant stands at the front of the running list and loses turns that already keyed blocks: the way to
    hits on blocks that nobody computed, which the general mixture hardly ever meets.
    """
    config = _random_config(rng, profile, pressed=True)
    size = config["block_size"]
    chunk = rng.randint(2, 5) * size + rng.choice([0, 0, rng.randrange(size)])
    config |= {"policy": "priority", "enable_prefix_caching": True, "enable_chunked_prefill": True}
    spare = rng.choice(
        [rng.randint(1, 4), rng.randint(1, 10) * size]
    )  # for the mice, until the elephant falls
    config |= {"long_prefill_token_threshold": chunk, "max_num_batched_tokens": chunk + spare}
    config |= {"max_num_seqs": 8, "max_model_len": 10_000}
    _reconcile(config)
    if profile.has_reserve_full_isl:
        config["scheduler_reserve_full_isl"] = False
    elephant = rng.randint(10, 40)  # blocks
    mice = rng.randint(1, 7)
    requests: list[RequestSpec] = [
        {
            "id": "elephant",
            "prompt": [[1, elephant * size]],
            "max_tokens": 5,
            "arrival_step": 0,
            "priority": 9,
        }
    ]
    for index in range(1, mice + 1):
        prompt: Prompt = [[1 + index * 10_000, rng.randint(1, 3 * size)]]
        if rng.random() < 0.3:
            prompt = [[1, rng.randint(1, elephant * size)]]  # a part of the elephant
        arrival_step, max_tokens = rng.randint(0, 8), rng.randint(1, 3 * size)
        requests.append(
            {
                "id": f"m{index}",
                "prompt": prompt,
                "max_tokens": max_tokens,
                "arrival_step": arrival_step,
                "priority": 0,
            }
        )
    config["num_blocks"] = 1 + elephant + rng.randint(0, 2 * mice)
    return {"name": f"seed_{seed}", "config": config, "max_steps": MAX_STEPS, "requests": requests}


def _random_config(rng: Random, profile: Profile, pressed: bool) -> dict[str, Any]:
    budget = _log_uniform(rng, 32 if pressed else 2, 2048)
    if rng.random() < 0.15:
        budget = rng.randint(4, 24)  # about one token for each running request
    config: dict[str, Any] = {
        "block_size": rng.choice([1, 2, 3, 4, 4, 8, 16, 16, 16, 64]),
        "max_num_seqs": rng.choice([5, 8, 16, 64, 256] if pressed else [1, 2, 3, 5, 8, 16, 64, 256]),
        "max_num_batched_tokens": budget,
        "enable_prefix_caching": rng.random() < 0.85,
        "enable_chunked_prefill": rng.random() < 0.85,
        "policy": rng.choice(["fcfs", "priority"]),
        "async_scheduling": rng.random() < 0.45,
    }
    if rng.random() < 0.4:
        config["long_prefill_token_threshold"] = _log_uniform(rng, 1, budget)
    if rng.random() < 0.2:
        config["max_model_len"] = _log_uniform(rng, 2, 300)
    if profile.has_reserve_full_isl:
        config["scheduler_reserve_full_isl"] = rng.random() < 0.4
    if profile.has_watermark and rng.random() < 0.3:
        config["watermark"] = rng.choice(
            [0.01, 0.05, 0.1, 0.3, 0.5, 0.95, min(round(rng.random(), 3), 0.999)]
        )
    return config


def _random_pool(rng: Random, block_size: int, requests: list[RequestSpec], pressed: bool) -> int:
    """Blocks including the unusable one, relative to what the requests need."""
    needs = [
        math.ceil((_prompt_tokens(spec["prompt"]) + spec["max_tokens"]) / block_size) for spec in requests
    ]
    largest, together = max(needs), sum(needs)
    if rng.random() < 0.06:  # somebody may never fit
        usable = rng.randint(1, largest)
    elif pressed:
        usable = largest + int(rng.uniform(0.0, 0.3) * min(together, 8 * largest))
    else:
        usable = largest + int(rng.uniform(0.0, 1.2) * together)
    return usable + 1


def _random_requests(rng: Random, config: dict[str, Any], pressed: bool) -> list[RequestSpec]:
    count = _log_uniform(rng, 8 if pressed else 1, 60)
    prompts = _PromptMixture(rng, config["block_size"], config.get("max_model_len", 131072) - 1)
    mean_outputs = _log_uniform(rng, 12 if pressed else 1, 80)
    ids = _random_ids(rng, count)
    arrivals = _random_arrivals(rng, count)
    priorities = rng.choice([[0], [0, 1], [0, 0, 0, 5], list(range(-2, 6))])
    later_is_urgent = rng.random() < 0.4  # victims then stand at the front of the running list
    arrival_time = rng.choice(["index", "tied", "few", "quarters", "reversed"])
    requests: list[RequestSpec] = []
    for index in range(count):
        spec: RequestSpec = {
            "id": ids[index],
            "prompt": prompts.draw(requests),
            "max_tokens": rng.randint(1, 2 * mean_outputs),
            "arrival_step": arrivals[index],
        }
        if config["policy"] == "priority":
            spec["priority"] = count - index if later_is_urgent else rng.choice(priorities)
            if arrival_time == "tied":
                spec["arrival_time"] = 0
            elif arrival_time == "few":
                spec["arrival_time"] = rng.randint(0, 3)
            elif arrival_time == "quarters":
                spec["arrival_time"] = rng.randint(-40, 40) / 4
            elif arrival_time == "reversed":
                spec["arrival_time"] = -index
        requests.append(spec)
    return requests


class _PromptMixture:
    """Draws prompts of several shapes; their weights belong to the scenario."""

    def __init__(self, rng: Random, block_size: int, longest: int) -> None:
        self.rng = rng
        self.block_size = block_size
        self.longest = min(longest, 800)
        self.mean_tokens = min(_log_uniform(rng, 4, 250) * (2 if block_size == 64 else 1), self.longest)
        self.next_token = 1
        self.prefixes = [self._fresh(self._length()) for _ in range(rng.randint(1, 4))]
        self.shapes = ["fresh", "prefix", "copy", "branch", "turn", "letters"]
        self.weights = [rng.random() ** 2 for _ in self.shapes]

    def draw(self, earlier: list[RequestSpec]) -> Prompt:
        """The prompt of the next request in the list."""
        rng = self.rng
        (shape,) = rng.choices(self.shapes, self.weights)
        if shape == "prefix":
            prompt = rng.choice(self.prefixes) + self._fresh(self._length())
        elif shape == "letters":  # so few different tokens that equal prefixes arise by chance
            prompt = [rng.randint(900_001, 900_002) for _ in range(min(self._length(), 40))]
        elif shape == "fresh" or not earlier:
            prompt = self._fresh(self._length())
        else:
            index = rng.randrange(len(earlier))
            before = earlier[index]
            prompt = list(before["prompt"])
            if shape == "branch":
                prompt = _truncate(prompt, rng.randint(1, _prompt_tokens(prompt)))
                prompt += self._fresh(self._length())
            elif shape == "turn":
                prompt += [[output_token(index, 0), rng.randint(1, before["max_tokens"])]]
                prompt += self._fresh(rng.randint(0, self.mean_tokens))
        return _truncate(prompt, self.longest)

    def _length(self) -> int:
        """A length around the mean, often at or next to a multiple of the block size."""
        length = self.rng.randint(1, 2 * self.mean_tokens)
        if self.rng.random() < 0.4:
            length = math.ceil(length / self.block_size) * self.block_size + self.rng.choice([-1, 0, 0, 1])
        return max(1, length)

    def _fresh(self, length: int) -> Prompt:
        if length == 0:
            return []
        self.next_token += length
        return [[self.next_token - length, length]]


def _random_ids(rng: Random, count: int) -> list[str]:
    """Distinct ids; as strings they sort differently from the list in most schemes."""
    scheme = rng.choice(["plain", "shuffled", "reversed", "words"])
    if scheme == "plain":
        return [f"r{index}" for index in range(count)]  # r10 < r9
    if scheme == "shuffled":
        return [f"q{number}" for number in rng.sample(range(count), count)]
    if scheme == "reversed":
        return [f"{count - index:04d}" for index in range(count)]
    letters = ["a", "B", "Z", "_", "-", "é", "字"]  # different lengths, cases and scripts
    return ["".join(rng.choices(letters, k=rng.randint(0, 3))) + str(index) for index in range(count)]


def _random_arrivals(rng: Random, count: int) -> list[int]:
    """Arrival steps; in some scenarios not in list order."""
    scheme = rng.choice(["together", "poisson", "bursts", "unordered"])
    if scheme == "together":
        return [0] * count
    if scheme == "unordered":
        return [rng.randint(0, 4 * count) for _ in range(count)]
    gap = rng.choice([0.3, 1.0, 3.0, 8.0])
    arrivals, step = [], 0.0
    for _ in range(count):
        if scheme == "poisson":
            step += rng.expovariate(1.0 / gap)
        elif rng.random() < 0.2:
            step += rng.uniform(0.0, 10.0 * gap)
        arrivals.append(int(step))
    return arrivals


def _prompt_tokens(prompt: Prompt) -> int:
    return len(expand_prompt(prompt))


def _truncate(prompt: Prompt, length: int) -> Prompt:
    """The first `length` tokens of the prompt."""
    kept: Prompt = []
    for item in prompt:
        if length == 0:
            break
        if isinstance(item, int):
            kept.append(item)
            length -= 1
        else:
            kept.append([item[0], min(item[1], length)])
            length -= min(item[1], length)
    return kept


def _log_uniform(rng: Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))
