"""Build the tiles with the main numbers of the page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from understudy.report.engine_terms import terms_of
from understudy.report.html.scale import latency_label
from understudy.text import NONE, compact, quantity

if TYPE_CHECKING:
    from understudy.report.data import ReportData
    from understudy.report.statistics import Statistics


@dataclass(frozen=True, slots=True)
class Tile:
    """A number with its labels. `better` is +1 if higher is better, −1 if lower is, 0 if neither."""

    what: str
    value: str
    unit: str
    more: str
    number: float
    better: int


def tiles(report: ReportData, baseline: ReportData | None) -> str:
    """Return the row of tiles, with the change relative to `baseline` if there is one."""
    others = _tiles(baseline) if baseline is not None else {}
    out = []
    for name, tile in _tiles(report).items():
        compare = points if tile.value.endswith("%") else change
        delta = compare(tile.number, others[name].number, tile.better) if name in others else ""
        unit = f" <small>{escape(tile.unit)}</small>" if tile.unit else ""
        out.append(
            f'<div class="tile"><div class="what">{escape(tile.what)}</div>'
            f'<div class="value">{escape(tile.value)}{unit}{delta}</div>'
            f'<div class="more">{escape(tile.more)}</div></div>'
        )
    return f'<div class="tiles">{"".join(out)}</div>'


def change(now: float, before: float, better: int = 0) -> str:
    """Return the relative change as coloured text; empty if either value is missing."""
    if math.isnan(now) or math.isnan(before) or before == 0:
        return ""
    share = now / before - 1
    if abs(share) < 0.0005:
        return '<span class="delta">± 0 %</span>'
    sign = "+" if share > 0 else "−"
    style = "" if better == 0 else " good" if share * better > 0 else " bad"
    return f'<span class="delta{style}">{sign}{abs(100 * share):,.1f} %</span>'


def points(now: float, before: float, better: int = 0) -> str:
    """Return the difference of two ratios in percentage points, as coloured text."""
    if math.isnan(now) or math.isnan(before):
        return ""
    difference = 100 * (now - before)
    if abs(difference) < 0.05:
        return '<span class="delta">± 0 points</span>'
    sign = "+" if difference > 0 else "−"
    style = "" if better == 0 else " good" if difference * better > 0 else " bad"
    return f'<span class="delta{style}">{sign}{abs(difference):,.1f} points</span>'


def _tiles(report: ReportData) -> dict[str, Tile]:
    requests, throughput, kv, hits = report.requests, report.throughput, report.kv, report.prefix_hit_ratio
    lost = [
        f"{getattr(requests, name):,} {name}" for name in ("rejected", "cancelled", "failed", "unfinished")
    ]
    lost = [text for text in lost if not text.startswith("0 ")]
    shown = {
        "ttft": _latency("Time to first token, median", report.ttft_ms),
        "itl": _latency("Inter-token latency, median", report.itl_ms),
        "e2e": _latency("Request latency, median", report.e2e_ms),
        "output": Tile(
            "Output throughput",
            compact(throughput.output_tokens_per_s),
            "tokens/s",
            f"{compact(throughput.total_tokens_per_s)} with input · "
            f"{compact(throughput.requests_per_s)} requests/s",
            throughput.output_tokens_per_s,
            +1,
        ),
        "prefix": Tile(
            "Prefix hit",
            quantity(hits.first_admission, "ratio"),
            "",
            f"at first admission · all admissions {quantity(hits.total, 'ratio')}",
            hits.first_admission,
            +1,
        ),
        "kv": Tile(
            "KV usage, mean",
            quantity(kv.usage_mean, "ratio"),
            "",
            f"max {quantity(kv.usage_max, 'ratio')} · {kv.evictions:,} evictions",
            kv.usage_mean,
            0,
        ),
        "requests": Tile(
            "Completed requests",
            f"{requests.completed:,}",
            f"of {requests.total:,}",
            " · ".join([*lost, f"{report.preemptions:,} {terms_of(report).requeued}"]),
            math.nan,
            0,
        ),
    }
    if report.goodput is not None:
        slo = report.goodput.slo
        limits = (("TTFT", slo.ttft_ms), ("ITL", slo.itl_ms), ("E2E", slo.e2e_ms))
        shown["goodput"] = Tile(
            "SLO attainment",
            quantity(report.goodput.ratio, "ratio"),
            "",
            f"{compact(report.goodput.requests_per_s)} req/s · "
            + ", ".join(f"{name} ≤ {latency_label(limit)}" for name, limit in limits if limit is not None),
            report.goodput.ratio,
            +1,
        )
    else:
        per_user = report.output_tokens_per_s_per_user
        shown["user"] = Tile(
            "Output per user, median",
            compact(per_user.p50),
            "tokens/s",
            f"mean {compact(per_user.mean)} · min {compact(per_user.min)}",
            per_user.p50,
            +1,
        )
    return shown


def _latency(what: str, latency: Statistics) -> Tile:
    if not latency.count:
        return Tile(what, NONE, "", "no request has a value", math.nan, -1)
    value, _, unit = latency_label(latency.p50).partition(" ")
    more = f"mean {latency_label(latency.mean)} · p99 {latency_label(latency.p99)}"
    return Tile(what, value, unit, more, latency.p50, -1)
