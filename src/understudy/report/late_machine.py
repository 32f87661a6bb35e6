"""Verdict on the machine of a live run: it fell so far behind that the numbers are not the fleet's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from understudy.report.verdict import Verdict

if TYPE_CHECKING:
    from understudy.report.report import Report

LATE_SHARE = 0.1
"""Lateness, as a share of the mean TTFT, from which a live run's numbers are not the fleet's."""
LEAST_LATE_MS = 5.0
"""Less is not reported."""


def machine_late(report: Report) -> Verdict | None:
    """Report a live run whose tokens or steps were late (p99, simulated time) by a tenth of the mean TTFT."""
    late = report.run.lateness_ms
    real_ms = max(late.get("token_p99", 0.0), late.get("step_end_p99", 0.0))
    speed = report.run.speedup or 1.0
    late_ms = real_ms * speed
    mean_ms = report.ttft_ms.mean
    if late_ms <= max(LEAST_LATE_MS, 0.0 if math.isnan(mean_ms) else LATE_SHARE * mean_ms):
        return None
    slower = f"Lower --clock-speed (now {speed:g}), give" if speed > 1 else "Give"
    return Verdict(
        "machine_late",
        f"This machine was late: the numbers are not the fleet's. Tokens or steps were {late_ms:,.0f} ms of simulated "
        f"time late (p99; {real_ms:,.0f} ms of real time), and the mean TTFT is {mean_ms:,.0f} ms.",
        f"{slower} the machine less other work or a smaller fleet, or replay without --online, which is never late.",
    )
