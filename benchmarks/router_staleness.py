"""What a late view of caches costs: mean TTFT by how old the router's knowledge is, and the picture in docs/.

    python benchmarks/router_staleness.py [--traces PATH] [--svg docs/staleness.svg]

Without traces it makes the two workloads itself (`understudy workload fanout|turns`). Engines schedule synchronously,
as those of Dynamo's replay do, so that the numbers can be laid beside its.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

from harness.publish import add_json_flag, publish
from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.vllm_config import VllmConfig
from understudy.router import KvRouting
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload import Workload, read_trace
from understudy.workload.families import FanOut, QuickTurns

ENGINE = VllmConfig(
    block_size=64,
    num_gpu_blocks=16384,
    max_num_batched_tokens=8192,
    mocker=MockerSettings(charge_first_token=False),
    async_scheduling=False,
)
WORKERS = 16
SEEDS = range(5)
DELAYS_MS = (0, 50, 500, 5000)
PREDICT_TTL_MS = 10_000.0


def mean_ttft_ms(workload: Workload, routing: KvRouting | str) -> tuple[float, float]:
    """Mean TTFT and share of cached prompt tokens, over the seeds that matter."""
    ttft, hit = [], []
    for seed in SEEDS if isinstance(routing, KvRouting) else range(1):
        kwargs = {"routing": routing if isinstance(routing, KvRouting) else "round_robin"}
        timeline = run_offline(RunPlan(workload, ENGINE, workers=WORKERS, seed=seed, **kwargs)).timeline  # type: ignore[arg-type]
        ttft.append(float((timeline.first_token_ns - timeline.arrival_ns).mean()) / 1e6)
        hit.append(timeline.cached_tokens_first.sum() / timeline.prompt_tokens.sum())
    return fmean(ttft), fmean(hit)


def measure(workload: Workload) -> dict[str, list[tuple[float, float]]]:
    """(TTFT, hit) by delay, of a router that waits for events and of one that predicts; and of round robin."""
    return {
        "kv": [mean_ttft_ms(workload, KvRouting(event_delay_ms=delay)) for delay in DELAYS_MS],
        "kv, predict on route": [
            mean_ttft_ms(workload, KvRouting(event_delay_ms=delay, predict_ttl_ms=PREDICT_TTL_MS))
            for delay in DELAYS_MS
        ],
        "round robin": [mean_ttft_ms(workload, "round_robin")] * len(DELAYS_MS),
    }


def describe(rows: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    """Return the mean TTFT in ms by column."""
    names = ("no delay", "events 50 ms late", "500 ms late", "5 s late")
    numbers = {name: ttft for name, (ttft, _) in zip(names, rows["kv"], strict=True)}
    numbers["predict-on-route at 500 ms"] = rows["kv, predict on route"][DELAYS_MS.index(500)][0]
    return numbers | {"round robin": rows["round robin"][0][0]}


def main() -> None:
    """Print a table for each workload, and draw the picture if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, metavar="PATH")
    parser.add_argument("--svg", type=Path, metavar="PATH")
    add_json_flag(parser)
    args = parser.parse_args()
    if args.traces:
        workloads = {name: read_trace(args.traces / f"{name}.jsonl.gz") for name in ("fanout", "turns")}
    else:
        workloads = {"fanout": FanOut().build(), "turns": QuickTurns().build()}
    results = {name: measure(workload) for name, workload in workloads.items()}
    publish("router_staleness", {name: describe(rows) for name, rows in results.items()}, args.json)
    for name, rows in results.items():
        print(f"{name}: cached share of the prompt tokens after {DELAYS_MS} ms")
        for label, cells in rows.items():
            print(f"  {label}: " + ", ".join(f"{hit:.1%}" for _, hit in cells))
    if args.svg:
        args.svg.write_text(draw(results), encoding="utf-8")
        print(f"\nwritten: {args.svg}")


# ── The picture ──

COLOURS = {"kv": "#0969da", "kv, predict on route": "#1a7f37", "round robin": "#9a6700"}
WIDTH, HEIGHT, LEFT, TOP = 330, 200, 60, 50


def draw(results: dict[str, dict[str, list[tuple[float, float]]]]) -> str:
    """One panel a workload: TTFT over the delay of events, a line a router."""
    panels = len(results)
    total_width, total_height = panels * (WIDTH + LEFT) + 30, TOP + HEIGHT + 80
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_width} {total_height}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#57606a">',
        f'<rect width="{total_width}" height="{total_height}" fill="#ffffff"/>',
    ]
    for panel, (name, rows) in enumerate(results.items()):
        out += _panel(LEFT + panel * (WIDTH + LEFT), name, rows)
    for i, (label, colour) in enumerate(COLOURS.items()):
        x = LEFT + i * 180
        y = total_height - 14
        out.append(f'<path d="M{x} {y - 4}h22" stroke="{colour}" stroke-width="2.5"/>')
        out.append(f'<text x="{x + 28}" y="{y}">{label}</text>')
    return "\n".join([*out, "</svg>", ""])


def _panel(x0: int, name: str, rows: dict[str, list[tuple[float, float]]]) -> list[str]:
    top_ms = max(ttft for cells in rows.values() for ttft, _ in cells) * 1.15
    xs = [x0 + WIDTH * i / (len(DELAYS_MS) - 1) for i in range(len(DELAYS_MS))]

    def y(ms: float) -> float:
        return TOP + HEIGHT * (1 - ms / top_ms)

    out = [
        f'<text x="{x0}" y="{TOP - 22}" font-size="14" font-weight="600" fill="#1f2328">'
        f"{name}: mean time to first token</text>"
    ]
    step = next(s for s in (10, 20, 50, 100, 200, 500) if top_ms / s <= 6)
    for ms in range(0, int(top_ms) + 1, step):
        out.append(f'<path d="M{x0} {y(ms):.1f}h{WIDTH}" stroke="#d0d7de" stroke-width="0.7"/>')
        out.append(f'<text x="{x0 - 8}" y="{y(ms) + 4:.1f}" text-anchor="end">{ms}</text>')
    out.append(f'<text x="{x0 - 8}" y="{TOP - 8}" text-anchor="end">ms</text>')
    for x, delay in zip(xs, DELAYS_MS, strict=True):
        label = "oracle" if delay == 0 else f"{delay} ms"
        out.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{label}</text>')
    out.append(
        f'<text x="{x0 + WIDTH / 2}" y="{TOP + HEIGHT + 36}" text-anchor="middle">events reach the router after</text>'
    )
    for label, cells in rows.items():
        points = " ".join(f"{x:.1f},{y(ttft):.1f}" for x, (ttft, _) in zip(xs, cells, strict=True))
        out.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[label]}" stroke-width="2.5"/>')
        if label != "round robin":
            out += [
                f'<circle cx="{x:.1f}" cy="{y(ttft):.1f}" r="3.5" fill="{COLOURS[label]}"/>'
                for x, (ttft, _) in zip(xs, cells, strict=True)
            ]
    return out


if __name__ == "__main__":
    main()
