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
    yield f"{name}: windows", link["window_s"] * len(windows), seconds
    bandwidth = link["bandwidth_gbps"]
    if not seconds or bandwidth is None:  # no share of nothing, nor of a link without a limit
        yield f"{name}: no utilisation", (link["utilisation_mean"], link["utilisation_max"]), (None, None)
        yield f"{name}: none over time", set(link["window_utilisation"]), {None}
        yield f"{name}: no peak", link.get("peak"), None
    if not seconds:
        yield f"{name}: bytes without duration", within, 0.0
        yield f"{name}: no busy share", link.get("busy"), None
    if bandwidth is None:
        return
    per_second = bandwidth * 1e9 * link["links"]
    yield (
        f"{name}: busy for its bytes",
        link["busy_s"] * (1 + 1e-9) + 1e-6 >= link["bytes"] / per_second,
        True,
    )
    if not seconds:
        return
    yield f"{name}: utilisation", link["utilisation_mean"], ratio(within, per_second * seconds)
    yield f"{name}: busiest link", link["utilisation_max"] >= link["utilisation_mean"] - 1e-9, True
    for at, (moved, used) in enumerate(zip(windows, link["window_utilisation"], strict=True)):
        yield f"{name}: window {at}", used, ratio(moved, per_second * link["window_s"])
    if "busy" in link:  # of hand-offs
        yield f"{name}: busy share", link["busy"], ratio(link["busy_s"], seconds * link["links"])
        yield f"{name}: peak", link["peak"], max(link["window_utilisation"])
