"""Format numbers for tables and pages."""

from __future__ import annotations

import math

NONE = "–"
UNLIMITED = "unlimited"
_COUNT_UNITS = (
    *("requests", "tokens", "blocks", "preemptions", "steps", "loads", "waits", "transfers", "links"),
    *("lookups", "stores", "copies", "workers"),
)


def fixed(value: float, decimals: int = 2) -> str:
    """Format with thousands separators: 1,234.50; a dash for NaN."""
    return NONE if math.isnan(value) else f"{value:,.{decimals}f}"


def quantity(value: float, unit: str) -> str:
    """Format a metric of `unit`: ratios as percent, counts whole, everything else with two decimals."""
    if math.isnan(value):
        return NONE
    if unit == "ratio":
        return f"{value:.1%}".replace("%", " %")
    if unit in _COUNT_UNITS and value == int(value):
        return f"{value:,.0f}"
    return fixed(value)


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: 1 worker, 1,200 workers."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def compact(value: float) -> str:
    """Format with three significant digits and a suffix: 0.05, 12.3, 4.57k, 1.2M."""
    if math.isnan(value):
        return NONE
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scale = 1e3 if suffix == "k" else limit
            return significant(value / scale) + suffix
    return significant(value)


def size(count: float) -> str:
    """Format a number of bytes: 512 B, 1.5 GB, 12 TB (powers of 1000)."""
    for power, unit in ((5, "PB"), (4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if count >= 1000**power:
            return f"{significant(count / 1000**power)} {unit}"
    return f"{count:.0f} B"


def significant(value: float, digits: int = 3) -> str:
    """Format with `digits` significant digits, without scientific notation and trailing zeros."""
    if value == 0 or math.isnan(value):
        return "0" if value == 0 else NONE
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def duration(seconds: float) -> str:
    """Format a duration in a suitable unit: 850 µs, 12.3 ms, 4.5 s, 12 min 5 s, 3 h 20 min."""
    if math.isnan(seconds):
        return NONE
    if seconds < 1e-3:
        return f"{significant(seconds * 1e6)} µs"
    if seconds < 1:
        return f"{significant(seconds * 1e3)} ms"
    if seconds < 120:
        return f"{significant(seconds)} s"
    whole = round(seconds)
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def visible(text: str) -> str:
    r"""Show control characters of names as their escapes (`\x1b`): on a terminal they would act."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\t\n\xa0\u202f" else _escape(one) for one in text)


def _escape(one: str) -> str:
    code = ord(one)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
