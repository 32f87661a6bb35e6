"""Random replays: a workload, an engine and a way to play it; the same seed gives the same case."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any

from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.timing import Constant, Polynomial
from understudy.engines.vllm_config import VllmConfig
from understudy.workload import ClosedLoop, OpenLoop, Workload

MS = 1_000_000

REQUEST_COLUMNS = (
    "arrival_ns",
    "first_admit_ns",
    "first_token_ns",
    "second_token_ns",
    "last_token_ns",
    "finish_ns",
    "output_tokens",
    "cached_tokens_first",
    "cached_tokens_total",
    "looked_up_tokens",
    "preemptions",
    "worker",
    "status",
)
"""Those with a row a request."""

COLUMNS = (
    *REQUEST_COLUMNS,
    "queued_ns",
    "itl_ns",
    "itl_count",
    "sample_time_ns",
    "sample_worker",
    "sample_running",
    "sample_waiting",
    "sample_used_blocks",
    "sample_cached_blocks",
)
"""What a run is compared by."""


@dataclass(frozen=True)
class Case:
    """A replay: `run_offline(RunPlan(case.workload, case.config, **case.how))`."""

    workload: Workload
    config: VllmConfig
    how: dict[str, Any]


def random_case(seed: int, *, single_turns: bool = False, **changes: Any) -> Case:
    """The case of that seed; with `single_turns` its workers are independent. `changes` are of the engine."""
    rng = Random(f"replay {seed}")
    config, longest_prompt = _random_engine(rng)
    workload = _random_workload(rng, longest_prompt, single_turns)
    if rng.random() < 0.9:  # else some requests may be rejected, or all
        needed = max(workload.prompt_tokens + workload.output_tokens, default=1)
        config["num_gpu_blocks"] = max(
            config["num_gpu_blocks"], math.ceil(int(needed) / config["block_size"])
        )
        if not config["enable_chunked_prefill"]:
            # A preempted request must be able to return whole.
            config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], int(needed))
    how: dict[str, Any] = {"workers": rng.choice([1, 1, 1, 2, 3, 7]), "seed": rng.randint(0, 9)}
    how["routing"] = rng.choice(["round_robin", "random"])
    how["load"] = OpenLoop(arrival_rate_scale=rng.choice([1.0, 1.0, 3.0]))
    if not single_turns:
        if rng.random() < 0.4:
            how["routing"] = "least_loaded"
        if rng.random() < 0.4:
            how["load"] = ClosedLoop(concurrency=rng.choice([1, 2, 5, 20]))
    bursts = Random(f"bursts {seed}")
    if not config["async_scheduling"] and bursts.random() < 0.2:
        config |= {
            "aic_nextn": bursts.randint(1, 5),
            "aic_mtp_seed": bursts.getrandbits(64),
            "decode_speedup_ratio": 1.0,
        }
        config["aic_nextn_accept_rates"] = bursts.choice([None, "1,1", "1,1,1,1,1", "0.5,0,1", "0.9,0.7,0.4"])
    # vLLM takes no limits that contradict each other.
    if config["max_num_batched_tokens"] is not None and config["max_num_seqs"] is not None:
        config["max_num_seqs"] = min(config["max_num_seqs"], config["max_num_batched_tokens"])
    if "max_model_len" in config and "long_prefill_token_threshold" in config:
        threshold = min(config["long_prefill_token_threshold"], config["max_model_len"])
        config["long_prefill_token_threshold"] = threshold
    config |= changes
    mocker = {name: config.pop(name) for name in MockerSettings.__struct_fields__ if name in config}
    return Case(workload, VllmConfig(**config, mocker=MockerSettings(**mocker)), how)


def _random_engine(rng: Random) -> tuple[dict[str, Any], int]:
    block_size = rng.choice([1, 2, 3, 4, 5, 8, 16, 16, 33, 64])
    longest_prompt = rng.choice([4, 20, 100, 100, 400])
    budget = rng.choice([1, 3, 8, 16, 50, 200, 1000, None])
    config: dict[str, Any] = {
        "block_size": block_size,
        "num_gpu_blocks": rng.randint(1, 8) * max(1, longest_prompt // block_size),
        "max_num_seqs": rng.choice([1, 2, 4, 8, 30, 256, None]),
        "max_num_batched_tokens": budget,
        "enable_prefix_caching": rng.random() < 0.8,
        "enable_chunked_prefill": rng.random() < 0.8 or budget is None,
        "scheduling_policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "async_scheduling": rng.random() < 0.15,
        "vllm_version": rng.choice(["recorded", "recorded", "v0.27", "v0.24", "v0.23", "v0.18"]),
        "timing": rng.choice(
            [
                Polynomial(),
                Polynomial(),
                Constant(2.0, 1.0),
                Constant(0.0, 0.0),
                Constant(5.0, 0.0),
                Constant(0.0, 3.0),
            ]
        ),
        "speedup_ratio": rng.choice([1.0, 1.0, 7.0]),
        "decode_speedup_ratio": rng.choice([1.0, 1.0, 0.3]),
    }
    if config["scheduling_policy"] == "fcfs" and rng.random() < 0.15:
        config["preemption_mode"] = "fifo"
    if config["vllm_version"] in ("recorded", "v0.27", "v0.24") and rng.random() < 0.3:
        config["watermark"] = rng.choice([0.01, 0.1, 0.5, 0.9])
    if config["vllm_version"] != "v0.18":
        config["scheduler_reserve_full_isl"] = rng.choice([None, True, False, False])
    if rng.random() < 0.3:
        config["long_prefill_token_threshold"] = rng.choice([1, 5, 30])
    if rng.random() < 0.2:
        config["max_model_len"] = rng.randint(2, 2 * longest_prompt)
    return config, longest_prompt


def _random_workload(rng: Random, longest_prompt: int, single_turns: bool) -> Workload:
    trace_block_size = rng.choice([1, 1, 3, 4, 16, 16, 64, 100])
    next_id = 10_000
    few_ids = rng.random() < 0.5  # so few that equal prefixes abound
    exact = rng.random() < 0.3  # outputs are known, and made of the same few tokens
    longest_output = rng.choice([2, 10, 40, 120])
    gap_ms = rng.choice([0.0, 0.0, 0.5, 5.0, 60.0])
    arrival_ns = 0
    rows: list[dict[str, Any]] = []
    families = [[rng.randint(0, 3) for _ in range(longest_prompt)] for _ in range(rng.randint(1, 4))]
    for session in range(rng.choice([1, 3, 10, 40])):
        arrival_ns += rng.choice([0, round(rng.expovariate(1.0) * gap_ms * MS)])
        turns = 1 if single_turns else rng.choice([1, 1, 2, 4])
        prompt = rng.randint(1, longest_prompt)
        blocks = math.ceil(prompt / trace_block_size)
        ids = list(rng.choice(families)[:blocks])
        if not few_ids:
            fresh = rng.randint(0, blocks)
            ids[blocks - fresh :] = range(next_id, next_id + fresh)
            next_id += fresh
        for turn in range(turns):
            output = rng.randint(0, longest_output)
            quoted = turn + 1 < turns and rng.random() < 0.6
            rows.append(
                {
                    "arrival_ns": arrival_ns,
                    "prompt_tokens": prompt,
                    "output_tokens": output,
                    "ids": ids[: math.ceil(prompt / trace_block_size)],
                    "session": session,
                    "turn": turn,
                    "delay_ns": rng.choice([0, rng.randint(0, 30 * MS)]) if turn else 0,
                    "priority": rng.choice([0, 0, 1, -3]),
                    "output_in_next": quoted,
                    "exact": [rng.randint(0, 3) for _ in range(output)] if exact and not quoted else [],
                }
            )
            prompt += (output if quoted else 0) + rng.randint(1, longest_prompt)
            more = math.ceil(prompt / trace_block_size) - len(ids)
            ids += range(next_id, next_id + more)
            next_id += more
    names = (
        "arrival_ns",
        "prompt_tokens",
        "output_tokens",
        "session",
        "turn",
        "delay_ns",
        "priority",
        "output_in_next",
    )
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in names}
    columns |= _ragged("hash_offsets", "hash_ids", [row["ids"] for row in rows])
    if exact:
        columns |= _ragged("output_token_offsets", "output_token_ids", [row["exact"] for row in rows])
    return Workload(**columns, trace_block_size=trace_block_size)


def _ragged(offsets: str, values: str, rows: list[list[int]]) -> dict[str, list[int]]:
    return {offsets: [0, *accumulate(map(len, rows))], values: [value for row in rows for value in row]}
