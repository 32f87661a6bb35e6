"""Service-level objectives of a command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from understudy.report import Slo


def read_slo(args: argparse.Namespace) -> Slo | None:
    """Return the service-level objectives that were given; None without any."""
    from understudy.report import Slo

    goals = {"ttft_ms": args.slo_ttft_ms, "itl_ms": args.slo_itl_ms, "e2e_ms": args.slo_e2e_ms}
    return Slo(**goals) if any(value is not None for value in goals.values()) else None
