"""State in one sentence what a comparison of saved reports shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.report.text import quantity

if TYPE_CHECKING:
    from collections.abc import Sequence

_TIERS = {"g2": "host memory", "g3": "the disk tier", "g4": "the remote tier"}
_EQUAL = 0.01
"""Relative difference, or difference of ratios, that counts as none."""
_MEASURES = (
    ("goodput", "ratio", "SLO attainment", True),
    ("ttft_ms", "mean", "mean TTFT", False),
    ("throughput", "output_tokens_per_s", "output throughput", True),
    ("itl_ms", "mean", "mean ITL", False),
)
"""Group and name in a report, words, and whether more is better; the first that differs decides."""


def conclude(names: Sequence[str], reports: Sequence[dict[str, Any]]) -> str:
    """Return the conclusion: equal runs, tiers that nothing was read from, or the best run and by how much."""
    digests = {report["run"].get("digest") for report in reports}
    if len(digests) == 1 and None not in digests:
        return "The runs are equal, request by request."
    if unused := _find_unused_tiers(reports):
        return unused
    for group, name, words, more in _MEASURES:
        values = [(report.get(group) or {}).get(name) for report in reports]
        known = [value for value in values if isinstance(value, int | float)]
        if len(known) < len(reports) or _are_equal(known, group):
            continue
        best = (max if more else min)(range(len(known)), key=known.__getitem__)
        rest = (min if more else max)(range(len(known)), key=known.__getitem__) if best == 0 else 0
        change = _format_change(known[rest], known[best], group)
        return f"{names[best]} is best: {words} {change}, against {names[rest]}."
    return "The runs do not differ by more than 1 % in attainment, TTFT, throughput and ITL."


def _find_unused_tiers(reports: Sequence[dict[str, Any]]) -> str:
    """Return a sentence on tiers that only some runs have and that no request read from; else an empty text."""
    tiers = [
        [tier for tier in (report.get("tiers") or {}).get("tiers", ()) if _level(tier) in _TIERS]
        for report in reports
    ]
    every = [tier for levels in tiers for tier in levels]
    if not every or all(tiers) or any(tier.get("hit_tokens_total") for tier in every):
        return ""
    what = " and ".join(dict.fromkeys(_TIERS[_level(tier)] for tier in every))
    return f"{what[0].upper()}{what[1:]} bought nothing: no block was read back."


def _level(tier: dict[str, Any]) -> str:
    return str(tier.get("tier", "")).rpartition(" ")[2].lower()


def _are_equal(values: list[float], group: str) -> bool:
    spread = max(values) - min(values)
    return spread < (_EQUAL if group == "goodput" else _EQUAL * max(map(abs, values)))


def _format_change(before: float, after: float, group: str) -> str:
    if group == "goodput":
        return f"{quantity(before, 'ratio')} → {quantity(after, 'ratio')}"
    change = f" ({after / before - 1:+.0%})".replace("%", " %") if before else ""
    unit = "tokens/s" if group == "throughput" else "ms"
    return (
        f"{before:,.0f} → {after:,.0f} {unit}{change}"
        if max(before, after) >= 100
        else (f"{before:,.1f} → {after:,.1f} {unit}{change}")
    )
