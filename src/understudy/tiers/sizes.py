"""Parse sizes in bytes, such as 512GiB."""

from __future__ import annotations

import re
from fractions import Fraction

from understudy.errors import ConfigError

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", 1)},
}


def parse_bytes(name: str, value: int | str) -> int:
    """Return the exact number of bytes of an int or of text such as "512GiB" (2^30) or "64GB" (10^9).

    ConfigError names the setting `name`.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None:
            raise ConfigError(f"{name} must be a size such as 512GiB or 64GB, got {value!r}")
        number, unit = match.groups()
        if unit not in _UNITS:
            known = ", ".join(unit for unit in _UNITS if unit)
            raise ConfigError(f"{name}: {value!r} has an unknown unit; known are {known}")
        size = Fraction(number) * _UNITS[unit]
        if size.denominator != 1:
            raise ConfigError(f"{name}: {value!r} is not a whole number of bytes; round it")
        value = int(size)
    if isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be at least one byte, got {value}")
    return value
