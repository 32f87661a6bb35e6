"""Compare four workers that do everything with prefill and decode workers, over links of several speeds.

    python benchmarks/disaggregation_study.py --trace PATH [--svg docs/disaggregation.svg]

Llama-3.1-8B on H100s, the trace at its own pace. Prints one line a fleet: TTFT, ITL, E2E, the share of requests within
the goals (TTFT 1,000 ms, mean ITL 15 ms). `--svg` draws where the time to the first token went, and these shares; bars
that are longer than twice the median are shortened, their parts in proportion.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import msgspec

import understudy as us
from harness.publish import add_json_flag, publish
from understudy.report.goodput import Slo

GOALS = Slo(ttft_ms=1000.0, itl_ms=15.0)
MODEL = {"model": "Llama-3.1-8B", "gpu": "H100"}
FLEETS: dict[str, us.Disaggregation | None] = {
    "4 workers": None,
    "2P + 2D, no limit": us.Disaggregation(prefill_workers=2, decode_workers=2),
    "2P + 2D, 50 GB/s": us.Disaggregation(prefill_workers=2, decode_workers=2, link_gbps=50.0),
    "2P + 2D, 12.5 GB/s": us.Disaggregation(prefill_workers=2, decode_workers=2, link_gbps=12.5),
    "2P + 2D, 5 GB/s": us.Disaggregation(prefill_workers=2, decode_workers=2, link_gbps=5.0),
    "1P + 3D, 50 GB/s": us.Disaggregation(prefill_workers=1, decode_workers=3, link_gbps=50.0),
    "3P + 1D, 50 GB/s": us.Disaggregation(prefill_workers=3, decode_workers=1, link_gbps=50.0),
    "2P + 2D, 50 GB/s, uncached:2048": us.Disaggregation(
        prefill_workers=2, decode_workers=2, link_gbps=50.0, rule="uncached:2048"
    ),
}
PARTS = ("prefill queue", "prefill", "hop", "decode queue", "transfer", "polls", "first step")
COLOURS = ("#4c78a8", "#72b7b2", "#bab0ac", "#eeca3b", "#e45756", "#b279a2", "#54a24b")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake JSONL")
    parser.add_argument("--svg", type=Path, help="draw the parts of the TTFT")
    add_json_flag(parser)
    args = parser.parse_args()
    workload = us.read_trace(args.trace)
    parts: dict[str, dict[str, float]] = {}
    goals: dict[str, float] = {}
    measured: dict[str, dict[str, float]] = {}
    for name, split in FLEETS.items():
        if split is not None:
            split = msgspec.structs.replace(split, decode_routing="least_loaded")
        report = us.replay(
            workload,
            us.VllmConfig(block_size=64, max_num_seqs=256, max_num_batched_tokens=8192),
            workers=4 if split is None else 1,
            routing="least_loaded",
            disaggregation=split,
            slo=GOALS,
            **MODEL,  # type: ignore[arg-type]
        )
        assert report.goodput is not None
        measured[name] = {
            "TTFT, mean": round(report.ttft_ms.mean),
            "TTFT, p99": round(report.ttft_ms.p99),
            "ITL, mean": report.itl_ms.mean,
            "ITL, p99": report.itl_ms.p99,
            "E2E, mean": round(report.e2e_ms.mean),
            "within goals": 100 * report.goodput.ratio,
        }
        if report.handoff is not None:
            measured[name]["handed off"] = report.handoff.remote
        print(f"{name}: {report.goodput.ratio:.1%} within the goals", flush=True)
        goals[name] = report.goodput.ratio
        waited = report.queue_ms.mean
        whole = {"prefill queue": waited, "prefill": report.ttft_ms.mean - waited}
        parts[name] = whole if report.handoff is None else report.handoff.ttft_parts_ms
    publish("disaggregation_study", measured, args.json)
    if args.svg is not None:
        args.svg.write_text(draw(parts, goals), encoding="utf-8")
    return 0


def draw(parts: dict[str, dict[str, float]], goals: dict[str, float]) -> str:
    """Draw stacked bars of the mean TTFT (of handed-off requests, where there are any), and shares within the goals."""
    limit = 2 * statistics.median(sum(part.values()) for part in parts.values())
    width, left, bars = 900, 240, 360
    height = 40 * len(parts) + 80
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="13"><style>text { fill: #1d2129 } .bg { fill: #ffffff } @media (prefers-color-scheme: dark) '
        "{ text { fill: #e8eaed } .bg { fill: #1c1f25 } }</style>"
        '<rect class="bg" width="100%" height="100%"/>'
        f'<text x="{left}" y="20">mean TTFT</text><text x="{width - 12}" y="20" text-anchor="end">within goals</text>'
    ]
    for row, (fleet, shares) in enumerate(parts.items()):
        x, y, total = float(left), 40 * row + 34, sum(shares.values())
        out.append(f'<text x="{left - 8}" y="{y + 18}" text-anchor="end">{fleet}</text>')
        for name, colour in zip(PARTS, COLOURS, strict=True):
            wide = shares.get(name, 0.0) / max(total, limit) * bars
            out.append(f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="26" fill="{colour}"/>')
            x += wide
        if total > limit:  # two slanted lines: the bar is shortened
            cut = f"M{x - 16:.1f} {y + 30}l8 -34h6l-8 34z"
            out.append(f'<path class="bg" d="{cut}"/>')
        out.append(f'<text x="{x + 8:.1f}" y="{y + 18}">{total:,.0f} ms</text>')
        out.append(f'<text x="{width - 12}" y="{y + 18}" text-anchor="end">{goals[fleet]:.1%}</text>')
    x = float(left)
    for name, colour in zip(PARTS, COLOURS, strict=True):
        out.append(f'<rect x="{x:.0f}" y="{height - 30}" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{x + 16:.0f}" y="{height - 19}">{name}</text>')
        x += 30 + 7.2 * len(name)
    return "".join(out) + "</svg>\n"


if __name__ == "__main__":
    sys.exit(main())
