"""Measure hit rate and TTFT of gpt-oss-120b in conversations: retention, routing, host memory, one group.

    python benchmarks/hybrid_study.py [--routing kv] [--plot docs/hybrid-kv.svg]

300 conversations of six turns on four simulated H200 with vLLM 0.33's rules and the preset's step times. The memory of
the KV cache is varied, from 5 % of what an H200 leaves to all of it. Rows with host memory have as many host blocks as
all of an H200's KV blocks, in vLLM's own offload.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

import understudy as us
from understudy.groups import groups_of_model
from understudy.report.report import Report
from understudy.run.offline import run_offline
from understudy.run.settings import ReplaySettings
from understudy.tiers.settings import TiersConfig
from understudy.workload import Normal, Poisson, SyntheticSpec, synthesise

if TYPE_CHECKING:
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


def measure(workload: Workload, share: float, setting: Setting, policy: str) -> tuple[float, ...]:
    """Return hit rate, that of full attention alone, mean and p99 TTFT in ms, preemptions, and regret in blocks."""
    routing = us.KvRouting(**(setting.routing or {})) if policy == "kv" else policy
    tiers = host_memory() if setting.host else None
    run = run_offline(
        workload,
        engine_with(share, setting.retention),
        workers=WORKERS,
        routing=routing,  # type: ignore[arg-type]
        tiers=tiers,
    )
    report = Report.build(run.timeline, run.facts)
    groups = run.facts.kv_groups
    full_hit = None if groups is None else groups.full_attention_hit_ratio
    hit = report.prefix_hit_ratio.first_admission
    return (
        hit,
        hit if full_hit is None else full_hit,
        report.ttft_ms.mean,
        report.ttft_ms.p99,
        report.preemptions,
        run.facts.router.get("mean_cost_regret_blocks", 0.0),
    )


def plot(path: Path, found: dict[str, list[tuple[float, ...]]]) -> None:
    """Write hit rate and mean TTFT by memory as two charts in one SVG."""
    width, height, left, top = 330, 230, 52, 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="800" height="{height + 150}" font-family="sans-serif" '
        'font-size="11" fill="#333">'
    ]
    for chart, (title, column) in enumerate((("hit rate", 0), ("mean TTFT, ms", 2))):
        x0 = left + chart * (width + 70)
        most = 1.0 if column == 0 else max(row[column] for rows in found.values() for row in rows)
        parts.append(
            f'<text x="{x0}" y="{top - 12}" font-weight="bold">{title} by share of the KV memory</text>'
        )
        for tick in range(5):
            y = top + height - height * tick / 4
            label = f"{most * tick / 4:.2f}" if column == 0 else f"{most * tick / 4:,.0f}"
            parts.append(f'<path d="M{x0} {y:.1f}h{width}" stroke="#ddd"/>')
            parts.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
        for number, share in enumerate(SHARES):
            x = x0 + width * number / (len(SHARES) - 1)
            parts.append(f'<text x="{x:.1f}" y="{top + height + 16}" text-anchor="middle">{share:.0%}</text>')
        for name, rows in found.items():
            points = " ".join(
                f"{x0 + width * number / (len(SHARES) - 1):.1f},{top + height * (1 - row[column] / most):.1f}"
                for number, row in enumerate(rows)
            )
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{SERIES[name].colour}" stroke-width="2"/>'
            )
    for number, name in enumerate(found):
        y = top + height + 40 + 17 * number
        parts.append(f'<path d="M{left} {y - 4}h24" stroke="{SERIES[name].colour}" stroke-width="3"/>')
        parts.append(f'<text x="{left + 32}" y="{y}">{name}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--routing", choices=("kv", "session_affinity", "round_robin"), default="session_affinity"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the two charts as SVG")
    args = parser.parse_args()
    workload = conversations()
    console = Console(width=130)
    series = {name: one for name, one in SERIES.items() if one.routing is None or args.routing == "kv"}
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in series}
    for share in SHARES:
        blocks = engine_with(share, 0).num_gpu_blocks
        table = Table(
            "setting", title=f"{share:.0%} of the KV memory of {WORKERS} × {GPU}: {blocks:,} blocks each"
        )
        for column in (
            "hit rate",
            "full attention alone",
            "mean TTFT ms",
            "p99 TTFT ms",
            "preemptions",
            "regret",
        ):
            table.add_column(column, justify="right")
        for name, setting in series.items():
            row = measure(workload, share, setting, args.routing)
            found[name].append(row)
            cells = (
                f"{row[0]:.3f}",
                f"{row[1]:.3f}",
                f"{row[2]:,.0f}",
                f"{row[3]:,.0f}",
                f"{row[4]:.0f}",
                f"{row[5]:.1f}",
            )
            table.add_row(name, *cells)
        console.print(table)
    if args.plot is not None:
        plot(args.plot, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
