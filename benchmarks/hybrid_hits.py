"""Show how wrong one KV cache group is for models with windows and states: hit rate and TTFT of conversations.

    python benchmarks/hybrid_hits.py [--model gpt-oss-20b] [--json [FOLDER]]

120 conversations of six turns on one simulated worker with vLLM 0.33's rules. `retention none` keeps every block of
windows and states (prefix_cache_retention_interval None); `one group` treats all layers as full attention,
with as many blocks.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

import msgspec

from harness.publish import add_json_flag, publish
from understudy.engines.kv_groups import kv_cache_groups
from understudy.engines.vllm_config import VllmConfig
from understudy.groups import groups_of_model
from understudy.report.report import Report
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload import Normal, Poisson, SyntheticSpec, synthesise

if TYPE_CHECKING:
    from understudy.workload import Workload

CASES = (
    ("gpt-oss-20b", 32),
    ("gpt-oss-20b", 8),
    ("Gemma-3-27B", 160),
    ("Gemma-3-27B", 40),
    ("Qwen3-Next-80B-A3B", 30),
)


def conversations() -> Workload:
    """Return the workload: prompts that grow by each turn's answer and the next question."""
    return synthesise(
        SyntheticSpec(
            sessions=120,
            turns=Normal(mean=6, std=0),
            prompt_tokens=Normal(mean=3000, std=800),
            followup_tokens=Normal(mean=400, std=100),
            output_tokens=Normal(mean=300, std=80),
            think_time_ms=Normal(mean=4000, std=1000),
            arrivals=Poisson(qps=4),
        )
    )


def measure(workload: Workload, engine: VllmConfig) -> tuple[float, float]:
    """Return the share of prompt tokens found in the cache, and the mean TTFT in ms."""
    report = Report.build(run_offline(RunPlan(workload, engine)).timeline)
    return report.prefix_hit_ratio.first_admission, report.ttft_ms.mean


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted({model for model, _ in CASES}), help="only this model")
    add_json_flag(parser)
    args = parser.parse_args()
    workload = conversations()
    measured: dict[str, dict[str, float]] = {}
    for model, gib in (case for case in CASES if args.model in (None, case[0])):
        plan = groups_of_model(
            model, memory_bytes=gib << 30, max_model_len=32768, max_num_batched_tokens=8192
        )
        groups = kv_cache_groups(plan)
        engine = VllmConfig(
            kv_cache_groups=groups,
            num_gpu_blocks=plan.num_blocks - 1,
            max_model_len=32768,
            max_num_batched_tokens=8192,
        )
        keeps_all = msgspec.structs.replace(engine, prefix_cache_retention_interval=None)
        one = VllmConfig(
            block_size=groups[-1].block_size,
            num_gpu_blocks=plan.num_blocks - 1,
            max_model_len=32768,
            max_num_batched_tokens=8192,
        )
        row = measured[f"{model}, {gib} GiB"] = {"groups": len(groups)}
        for name, config in {"vLLM's default": engine, "retention none": keeps_all, "one group": one}.items():
            row[f"{name}: hit rate"], ttft_ms = measure(workload, config)
            row[f"{name}: TTFT"] = round(ttft_ms)
    publish("hybrid_hits", measured, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
