"""Recordings of Dynamo's planner."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from understudy.scaling.metrics import PassSnapshot

GOLDEN = Path(__file__).parents[1] / "golden" / "planner"


def read_recording(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the settings and the ticks of a recording."""
    header, *ticks = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    return header, ticks


def snapshot(worker: int = 0, **values: float) -> Any:
    """Return the latest pass of a worker; zeros except for what is given."""
    names = PassSnapshot.__annotations__.keys() - {"worker_id", "dp_rank"}
    unknown = set(values) - set(names)
    assert not unknown, unknown
    return dict.fromkeys(names, 0) | {"worker_id": worker, "dp_rank": 0} | values


def metrics_of(
    now_ms: float,
    decode: list[Any],
    *,
    starting: int = 0,
    traffic: Any = None,
    prefill: list[Any] | None = None,
) -> Any:
    """Return a tick's metrics of a fleet whose workers all have a snapshot."""
    made: dict[str, Any] = {"tick_ordinal": 0, "now_ms": now_ms, "traffic": traffic}
    for role, seen, starts in (("prefill", prefill or [], 0), ("decode", decode, starting)):
        made[f"{role}_fpm_snapshots"] = seen
        made[f"active_{role}_count"] = len(seen)
        made[f"active_{role}_ids"] = [one["worker_id"] for one in seen]
        made[f"starting_{role}_count"] = starts
        made[f"starting_{role}_ids"] = list(range(100, 100 + starts))
        made[f"draining_{role}_count"] = 0
        made[f"draining_{role}_ids"] = []
        made[f"non_draining_{role}_count"] = made[f"total_{role}_count"] = len(seen) + starts
    return made


def traffic_of(
    duration_s: float, requests: float, *, ended: float = 0, isl: float = 0, osl: float = 0
) -> Any:
    """Return the traffic of a window."""
    return {
        "duration_s": duration_s,
        "num_req": requests,
        "avg_isl": isl,
        "avg_osl": osl,
        "avg_ttft_ms": 0.0,
        "avg_itl_ms": 0.0,
        "shape_count": ended,
        "ttft_count": ended,
        "itl_count": ended,
        "avg_accept_length": None,
        "avg_kv_hit_rate": 0.0,
        "hit_rate_count": 0,
        "accept_length_forward_count": 0,
    }
