"""Audit the use of a link: its bytes fit its bandwidth, and its windows those of the whole run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from answers.definitions import ratio

if TYPE_CHECKING:
    from collections.abc import Iterator

    from answers.definitions import Difference


def use_of_link(name: str, link: dict[str, Any], seconds: float) -> Iterator[Difference]:
    """A link of a report, in a run of so many seconds."""
    windows = link["window_bytes"]
    within = math.fsum(windows)
    yield f"{name}: bytes within the run", within <= link["bytes"] * (1 + 1e-9) + 1, True
    if not seconds:
        return
    yield f"{name}: windows", link["window_s"] * len(windows), seconds
    bandwidth = link["bandwidth_gbps"]
    if bandwidth is None:
        return
    per_second = bandwidth * 1e9 * link["links"]
    yield (
        f"{name}: busy for its bytes",
        link["busy_s"] * (1 + 1e-9) + 1e-6 >= link["bytes"] / per_second,
        True,
    )
    yield f"{name}: utilisation", link["utilisation_mean"], ratio(within, per_second * seconds)
    yield f"{name}: busiest link", link["utilisation_max"] >= link["utilisation_mean"] - 1e-9, True
    for at, (moved, used) in enumerate(zip(windows, link["window_utilisation"], strict=True)):
        yield f"{name}: window {at}", used, ratio(moved, per_second * link["window_s"])
