"""Parse numbers on command lines, which Python reads too leniently. Imports nothing, so that the parser starts fast."""

from __future__ import annotations

_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3, "min": 6e4, "m": 6e4, "h": 36e5}
"""Milliseconds of the units that a time is written with."""
_SECONDS = {unit: ms / 1e3 for unit, ms in _MS.items()}
_SCALES = {
    "MS": _MS,
    "S": _SECONDS,
    "SECONDS": _SECONDS,
    "GIB": {
        "mib": 2**-10,
        "gib": 1.0,
        "tib": 2.0**10,
        "mb": 1e6 / 2**30,
        "gb": 1e9 / 2**30,
        "tb": 1e12 / 2**30,
    },
}
"""Factors of units that users write, by the unit of the flag."""
_WITHOUT_MEANING = ("", "x", "/s")
"""Suffixes that change nothing: 2x the users, 10/s."""
_UNITS = {"MS": "milliseconds", "S": "seconds", "SECONDS": "seconds", "GIB": "GiB"}
"""Units by the name of a flag's value in its help."""


def parse_whole_number(text: str) -> int:
    """Parse a whole number in ASCII digits. ValueError for other digits, underscores and other text."""
    return int(_plain(text))


def parse_number(text: str) -> float:
    """Parse a number in ASCII digits. ValueError for other digits, underscores and other text."""
    return float(_plain(text))


def refuse_number(text: str, *, whole: bool = False, unit: str | None = None) -> str:
    """Return what is wrong with a text that is not a number, and what to write instead.

    `unit` is the name of the value in a flag's help, such as MS.
    """
    kind = "a whole number" if whole else "a number"
    if unit in _UNITS:
        kind += f" of {_UNITS[unit]}"
    meant = _guess_number(text.strip().lower(), whole=whole, unit=unit)
    if meant is not None:
        return f"must be {kind}, got {text!r}; write {meant}"
    return f"must be {kind}, got {text!r}; write digits without a unit, such as {500 if unit == 'MS' else 2}"


def _guess_number(text: str, *, whole: bool, unit: str | None) -> str | None:
    """Return the number that a text with a unit, a percent sign or separators most likely means."""
    end = len(text.rstrip("abcdefghijklmnopqrstuvwxyz/% "))
    number, suffix = text[:end].replace("_", ""), text[end:].strip()
    if "," in number and not _has_thousands(number):
        return None  # 1,5 may be one and a half
    try:
        value = float(number.replace(",", "")) if number.isascii() else float("nan")
    except ValueError:
        return None
    scales = _SCALES.get(unit or "", {"%": 0.01})
    if suffix not in _WITHOUT_MEANING:
        if suffix not in scales:
            return None
        value *= scales[suffix]
    if not -1e15 < value < 1e15 or (whole and value != int(value)):  # NaN too
        return None
    return f"{value:.12g}"


def _has_thousands(number: str) -> bool:
    """Whether the commas of a number separate groups of three digits."""
    whole, _, fraction = number.lstrip("-").partition(".")
    first, *groups = whole.split(",")
    return len(first) in (1, 2, 3) and all(len(group) == 3 for group in groups) and "," not in fraction


def _plain(text: str) -> str:
    if "_" in text or not text.isascii():  # Python's int() takes 1_0 and full-width digits
        raise ValueError(text)
    return text
