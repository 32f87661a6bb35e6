"""The plot of docs/qwen3.md from what `qwen3_twin.py` wrote: distributions, real beside simulated.

python benchmarks/qwen3_twin_plot.py out/twin.json docs/qwen3-twin.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

WIDE, HIGH, GAP = 190, 120, 34
COLOURS = ("#1f6feb", "#d9480f")


def path_of(values: list[float], most: float, left: float, top: float) -> str:
    """The share of requests (upwards) that had at most so much (to the right), as an SVG path."""
    points = [(0.0, 0.0)]
    every = max(1, len(values) // 200)
    for number, value in list(enumerate(sorted(values), 1))[::every]:
        points.append((min(value / most, 1.0), number / len(values)))
    points.append((min(max(values) / most, 1.0), 1.0))
    return "M" + " L".join(f"{left + x * WIDE:.1f},{top + HIGH - y * HIGH:.1f}" for x, y in points)


def panel(title: str, pair: list[list[float]], left: float, top: float) -> list[str]:
    """One pair of distributions, cut at the 99th percentile of the real one."""
    real = sorted(pair[0])
    most = real[int(len(real) * 0.99) - 1] * 1.05
    parts = [
        f'<rect x="{left}" y="{top}" width="{WIDE}" height="{HIGH}" fill="none" stroke="#999"/>',
        f'<text x="{left}" y="{top - 6}">{title}</text>',
        f'<text x="{left}" y="{top + HIGH + 13}">0</text>',
        f'<text x="{left + WIDE}" y="{top + HIGH + 13}" text-anchor="end">{most:.0f} ms</text>',
    ]
    for values, colour, dash in zip(pair, COLOURS, ("", ' stroke-dasharray="5 3"'), strict=True):
        parts.append(
            f'<path d="{path_of(values, most, left, top)}" fill="none" stroke="{colour}" stroke-width="1.4"{dash}/>'
        )
    return parts


def main() -> None:
    table = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    width, height = len(table) * (WIDE + GAP) + GAP, 2 * (HIGH + 44) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="11" fill="#555">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for column, row in enumerate(table):
        left = GAP + column * (WIDE + GAP)
        parts += panel(f"{row['workload']}: TTFT", row["ttft_all"], left, 24)
        parts += panel(f"{row['workload']}: TPOT", row["tpot_all"], left, 24 + HIGH + 44)
    for number, (name, colour) in enumerate(
        zip(("the real engine", "its twin (dashed)"), COLOURS, strict=True)
    ):
        parts.append(f'<text x="{GAP + 150 * number}" y="{height - 10}" fill="{colour}">{name}</text>')
    Path(sys.argv[2]).write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
