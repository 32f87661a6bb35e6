"""Measure hit rate and TTFT of gpt-oss-120b in conversations: retention, routing, host memory, one group.

    python benchmarks/hybrid_study.py [--routing kv] [--plot docs/hybrid-kv.svg] [--json [FOLDER]]

300 conversations of six turns on four simulated H200 with vLLM 0.33's rules and the preset's step times. The memory of
the KV cache is varied, from 5 % of what an H200 leaves to all of it. Rows with host memory have as many host blocks as
all of an H200's KV blocks, in vLLM's own offload. Moved turns are later turns that go to another worker than the turn
before; regret is that of KV routing, in blocks per decision.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

import understudy as us
from harness.publish import add_json_flag, publish
from understudy.groups import groups_of_model
from understudy.report.report import Report
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.run.settings import ReplaySettings
from understudy.tiers.settings import TiersConfig
from understudy.workload import Normal, Poisson, SyntheticSpec, synthesise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.run.timeline import Timeline
    from understudy.workload import Workload

MODEL, GPU, WORKERS = "gpt-oss-120b", "H200", 4
SHARES = (0.05, 0.1, 0.2, 1.0)
"""Parts of the KV memory of an H200."""


class Setting(NamedTuple):
    """One line of the study."""

    retention: int | str | None
    """Retention interval; "one": no groups."""
    colour: str
    routing: dict[str, Any] | None = None
    """Settings of KV routing; given: only with --routing kv."""
    host: bool = False
    """With host memory."""


SERIES = {
    "retention 0 (vLLM's default)": Setting(0, "#1f77b4"),
    "retention none": Setting(None, "#2ca02c"),
    "hybrid manager off: one group": Setting("one", "#ff7f0e"),
    "retention 0, host memory": Setting(0, "#9467bd", host=True),
    "retention none, host memory": Setting(None, "#8c564b", host=True),
    "retention 0, first group indexed": Setting(0, "#d62728", {"index_groups": "first"}),
    "retention 0, prefill_load_scale 16": Setting(0, "#17becf", {"prefill_load_scale": 16.0}),
}


def conversations() -> Workload:
    """Return the workload: prompts that grow by each turn's answer and the next question."""
    return synthesise(
        SyntheticSpec(
            sessions=300,
            turns=Normal(mean=6, std=0),
            prompt_tokens=Normal(mean=3000, std=800),
            followup_tokens=Normal(mean=400, std=100),
            output_tokens=Normal(mean=300, std=80),
            think_time_ms=Normal(mean=20000, std=5000),
            arrivals=Poisson(qps=8),
        )
    )


def engine_with(share: float, retention: int | str | None) -> us.VllmConfig:
    """Return an engine with `share` of the blocks; retention "one" plans all layers as full attention."""
    off = "true" if retention == "one" else "null"
    settings = ReplaySettings.read(
        None,
        {},
        [
            f"model={MODEL}",
            f"gpu.name={GPU}",
            f"gpu.disable_hybrid_kv_cache_manager={off}",
            "engine.block_size=16",
            "engine.max_num_seqs=256",
            "engine.max_num_batched_tokens=8192",
        ],
    )
    engine = settings.engine
    assert isinstance(engine, us.VllmConfig)
    changes = {"num_gpu_blocks": round(engine.num_gpu_blocks * share)}
    if retention != "one":
        changes["prefix_cache_retention_interval"] = retention  # type: ignore[assignment]
    return msgspec.structs.replace(engine, **changes)


def host_memory() -> TiersConfig:
    """Return host memory for as many blocks as an H200 has, in vLLM's own offload."""
    blocks = engine_with(1.0, 0).num_gpu_blocks
    plan = groups_of_model(MODEL, memory_bytes=1 << 40, max_model_len=1, block_size=16)
    return TiersConfig.from_dict(
        {
            "tiers": [{"tier": "g2", "blocks": blocks}],
            "offload": {"mode": "vllm"},
            "kv_bytes_per_token": plan.bytes_per_block // 16,
        }
    )


class Row(NamedTuple):
    """Results of one setting with one share of the memory."""

    hit_ratio: float
    full_hit_ratio: float
    """Hit rate of full attention alone; NaN without a group of it."""
    ttft_ms: float
    ttft_p99_ms: float
    preemptions: int
    moved_turns: int
    """Later turns that go to another worker than the turn before."""
    regret_blocks: float


def measure(workload: Workload, share: float, setting: Setting, policy: str) -> Row:
    """Replay the workload with one setting."""
    routing = us.KvRouting(**(setting.routing or {})) if policy == "kv" else policy
    tiers = host_memory() if setting.host else None
    run = run_offline(
        RunPlan(
            workload,
            engine_with(share, setting.retention),
            workers=WORKERS,
            routing=routing,  # type: ignore[arg-type]
            tiers=tiers,
        )
    )
    report = Report.build(run.timeline, run.facts)
    groups = run.facts.kv_groups
    hit = report.prefix_hit_ratio.first_admission
    full = hit if groups is None else groups.full_attention_hit_ratio
    return Row(
        hit,
        math.nan if full is None else full,
        report.ttft_ms.mean,
        report.ttft_ms.p99,
        report.preemptions,
        count_moved_turns(run.timeline),
        run.facts.router.get("mean_cost_regret_blocks", 0.0),
    )


def count_moved_turns(timeline: Timeline) -> int:
    """Count the turns of a session that another worker served than the turn before."""
    order = np.lexsort((timeline.turn, timeline.session))
    session, worker = timeline.session[order], timeline.worker[order]
    return int(((session[1:] == session[:-1]) & (worker[1:] != worker[:-1])).sum())


WIDTH, HEIGHT, LEFT, TOP = 400, 360, 62, 40


class Axis(NamedTuple):
    """A vertical axis: its ticks from the foot to the top, and whether it is logarithmic."""

    title: str
    ticks: tuple[float, ...]
    log: bool

    def pixel(self, value: float) -> float:
        """Return the vertical position of a value."""
        low, high = self.ticks[0], self.ticks[-1]
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return TOP + HEIGHT * (1 - (value - low) / (high - low))


def latency_axis(values: Sequence[float]) -> Axis:
    """Return a logarithmic axis with round ticks around the values."""
    rounds = [step * 10.0**power for power in range(6) for step in (1, 2, 5)]
    first = max(index for index, tick in enumerate(rounds) if tick <= min(values))
    last = min(index for index, tick in enumerate(rounds) if tick >= max(values))
    return Axis("mean TTFT, ms (log scale)", tuple(rounds[first : last + 1]), log=True)


def plot(path: Path, found: dict[str, list[Row]]) -> None:
    """Write hit rate and mean TTFT by memory as two charts in one SVG, with host memory dashed."""
    charts = (
        ([row.hit_ratio for rows in found.values() for row in rows], "hit_ratio"),
        ([row.ttft_ms for rows in found.values() for row in rows], "ttft_ms"),
    )
    size = 2 * (LEFT + WIDTH) + 30, TOP + HEIGHT + 50 + 18 * len(found)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}" '
        f'height="{size[1]}" font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{size[0]}" height="{size[1]}" fill="#fff"/>',
    ]
    for number, (values, column) in enumerate(charts):
        axis = latency_axis(values) if number else Axis("hit rate", (0, 0.2, 0.4, 0.6, 0.8, 1), log=False)
        parts += draw_chart(LEFT + number * (WIDTH + LEFT + 10), axis, column, found)
    for number, name in enumerate(found):
        y = TOP + HEIGHT + 50 + 18 * number
        parts.append(f'<path d="M{LEFT} {y - 4}h32" {stroke_of(name)}/>')
        parts.append(f'<text x="{LEFT + 40}" y="{y}">{name}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def draw_chart(left: int, axis: Axis, column: str, found: dict[str, list[Row]]) -> list[str]:
    """Return the axes and the lines of one chart."""
    parts = [
        f'<text x="{left}" y="{TOP - 16}" font-weight="bold">{axis.title}, by share of the KV memory</text>'
    ]
    for tick in axis.ticks:
        y = axis.pixel(tick)
        parts.append(f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:,.10g}</text>')
    places = [left + WIDTH * number / (len(SHARES) - 1) for number in range(len(SHARES))]
    for x, share in zip(places, SHARES, strict=True):
        parts.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{share:.0%}</text>')
    for name, rows in found.items():
        points = [(x, axis.pixel(getattr(row, column))) for x, row in zip(places, rows, strict=True)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" {stroke_of(name)}/>')
        colour = SERIES[name].colour
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    return parts


def stroke_of(name: str) -> str:
    """Return the attributes of a setting's line."""
    dashes = ' stroke-dasharray="7 4"' if SERIES[name].host else ""
    return f'fill="none" stroke="{SERIES[name].colour}" stroke-width="2"{dashes}'


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--routing", choices=("kv", "session_affinity", "round_robin"), default="session_affinity"
    )
    add_json_flag(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the two charts as SVG")
    args = parser.parse_args()
    workload = conversations()
    series = {name: one for name, one in SERIES.items() if one.routing is None or args.routing == "kv"}
    found: dict[str, list[Row]] = {name: [] for name in series}
    measured: dict[str, dict[str, float]] = {}
    for share in SHARES:
        for name, setting in series.items():
            row = measure(workload, share, setting, args.routing)
            found[name].append(row)
            numbers = {
                "hit rate": row.hit_ratio,
                "hit rate of full attention": row.full_hit_ratio,
                "TTFT, mean": round(row.ttft_ms),
                "TTFT, p99": round(row.ttft_p99_ms),
                "preemptions": row.preemptions,
                "moved turns": row.moved_turns,
                "regret": row.regret_blocks,
            }
            measured[f"{100 * share:g} %, {name}"] = {
                key: number for key, number in numbers.items() if not math.isnan(number)
            }
    publish("hybrid_study_kv" if args.routing == "kv" else "hybrid_study", measured, args.json)
    if args.plot is not None:
        plot(args.plot, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
