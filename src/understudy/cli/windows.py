"""Read lengths of time windows, such as 1h or 30min."""

from __future__ import annotations

import re

from understudy.errors import ConfigError

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}
_FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|min|h|d)", re.ASCII)


def read_window(text: str | None, flag: str = "--goal-window") -> float | None:
    """Return the length of a window in s; None without one. ConfigError for anything but 1 s to 365 d."""
    if text is None:
        return None
    found = _FORM.fullmatch(text.strip())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not 1.0 <= seconds <= 365 * 86_400.0:
        raise ConfigError(f"{flag}: must be a time of 1s to 365d, such as 1h or 30min, got {text!r}")
    return seconds
