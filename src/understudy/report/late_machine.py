"""Verdict on the machine of a live run: it fell so far behind that the numbers are not the fleet's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from understudy.report.verdict import Verdict

if TYPE_CHECKING:
    from understudy.report.data import ReportData

LATE_SHARE = 0.1
"""Lateness, as a share of the mean TTFT, from which a live run's numbers are not the fleet's."""
LEAST_LATE_MS = 5.0
"""Less is not reported."""


def machine_late(report: ReportData) -> Verdict | None:
    """Report a live run whose tokens or steps were late (p99, simulated time) by a tenth of the mean TTFT."""
    late = report.run.lateness_ms
    real_ms = max(late.get("token_p99", 0.0), late.get("step_end_p99", 0.0))
    punctual = "replay without --online, which is never late"
    return judge_machine(real_ms, report.run.speedup or 1.0, report.ttft_ms.mean, punctual)


def judge_machine(real_ms: float, speed: float, ttft_mean_ms: float, punctual: str) -> Verdict | None:
    """Return the verdict on lateness of `real_ms` (p99, real time) at this clock speed; None if it is small.

    `punctual`: what is never late, for the remedy.
    """
    late_ms = real_ms * speed
    share_ms = 0.0 if math.isnan(ttft_mean_ms) else LATE_SHARE * ttft_mean_ms
    if late_ms <= max(LEAST_LATE_MS, share_ms):
        return None
    slower = f"Lower --clock-speed (now {speed:g}), give" if speed > 1 else "Give"
    return Verdict(
        "machine_late",
        f"This machine was late: the numbers are not the fleet's. Tokens or steps were {late_ms:,.0f} ms of simulated "
        f"time late (p99; {real_ms:,.0f} ms of real time), and the mean TTFT is {ttft_mean_ms:,.0f} ms.",
        f"{slower} the machine less other work or a smaller fleet, or {punctual}.",
    )
