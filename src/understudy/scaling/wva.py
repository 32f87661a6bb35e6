"""llm-d's Workload Variant Autoscaler (version 2 of its rule): KV tokens that a fleet can hold and those it needs."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

from understudy.scaling.hpa import HpaRule, HpaSettings
from understudy.scaling.worker_metrics import kv_tokens, queued_tokens, roles_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from understudy.scaling.capabilities import WorkerCapabilities
    from understudy.scaling.metrics import Decision, PassSnapshot, Role, TickMetrics

KV_LIMIT = 0.80
"""Share of its KV tokens that a worker may use."""
SCALE_UP_SHARE = 0.85
"""Share of the supply that demand may take before more is required."""
SCALE_DOWN_SHARE = 0.70
"""Share of the supply below which the rest is spare."""


class WvaScaler:
    """Keep the supply of KV tokens above demand; the HPA applies the number, with its limits of change."""

    def __init__(
        self,
        capabilities: Mapping[str, WorkerCapabilities],
        *,
        least: int = 1,
        most: int = 8,
        interval_s: float = 15.0,
    ) -> None:
        settings = HpaSettings(least=least, most=most, interval_s=interval_s)
        self._interval_s = interval_s
        self._capabilities = capabilities
        self._rules: dict[Role, HpaRule] = {role: HpaRule(settings) for role in roles_of(capabilities)}

    def initial_tick_ms(self) -> float:
        """Return the first interval in ms."""
        return self._interval_s * 1000.0

    def on_tick(self, metrics: TickMetrics) -> Decision:
        """Return the number of workers of each role whose supply fits the demand."""
        decision: Decision = {
            "target_prefill": None,
            "target_decode": None,
            "next_tick_ms": metrics["now_ms"] + self._interval_s * 1000.0,
        }
        if "prefill" in self._rules:
            standing = metrics["non_draining_prefill_count"]
            wanted = self._wanted("prefill", metrics["prefill_fpm_snapshots"], standing, metrics["now_ms"])
            decision["target_prefill"] = wanted if wanted != standing else None
        standing = metrics["non_draining_decode_count"]
        wanted = self._wanted("decode", metrics["decode_fpm_snapshots"], standing, metrics["now_ms"])
        decision["target_decode"] = wanted if wanted != standing else None
        return decision

    def _wanted(self, role: Role, seen: Sequence[PassSnapshot], standing: int, now_ms: float) -> int:
        asked = standing
        if seen:
            limit = self._capabilities[role].max_kv_tokens * KV_LIMIT
            # A worker that queues shows what it can hold in fact.
            capacity = median(min(limit, kv_tokens(one)) if queued_tokens(one) else limit for one in seen)
            demand = sum(kv_tokens(one) + queued_tokens(one) for one in seen)
            capacity = max(capacity, 1.0)
            required = demand / SCALE_UP_SHARE - capacity * standing
            spare = capacity * len(seen) - demand / SCALE_DOWN_SHARE
            if required > 0:
                asked = standing + math.ceil(required / capacity)
            elif spare > 0:
                asked = standing - math.floor(spare / capacity)
        return self._rules[role].decide(now_ms / 1000.0, standing, asked)
