"""vLLM's metrics of its NixlConnector."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from understudy.server.handoff.network import HandOffMember
    from understudy.server.metrics.families import Registry

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_BYTES = tuple(float(2 ** (10 + i)) for i in range(1, 25, 2))
_DESCRIPTORS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)


def add_handoff(registry: Registry, member: HandOffMember, **labels: str) -> None:
    """Add the metrics of one engine's hand-offs."""
    time_s = registry.histogram(
        "vllm:nixl_xfer_time_seconds", "Duration of a transfer of KV blocks.", _SECONDS, **labels
    )
    registry.histogram(
        "vllm:nixl_post_time_seconds",
        "Time to post a transfer (not simulated).",
        (0.001, *_SECONDS),
        **labels,
    )
    size = registry.histogram("vllm:nixl_bytes_transferred", "Bytes of a transfer.", _BYTES, **labels)
    registry.histogram(
        "vllm:nixl_num_descriptors",
        "Descriptors of a transfer (not simulated).",
        _DESCRIPTORS,
        **labels,
    )
    failed = registry.counter("vllm:nixl_num_failed_transfers", "Transfers that failed.", **labels)
    registry.counter(
        "vllm:nixl_num_failed_notifications", "Notifications that failed (not simulated).", **labels
    )
    expired = registry.counter(
        "vllm:nixl_num_kv_expired_reqs", "Leases of kept blocks that ended before a read.", **labels
    )
    late = registry.counter(
        "vllm:nixl_num_notifications_after_expiry",
        "Notifications about blocks that were no longer kept.",
        **labels,
    )

    def on_read(moved: int, posted_ns: int, landed_ns: int, has_failed: bool) -> None:
        if has_failed:
            failed.add()
        else:
            time_s.observe((landed_ns - posted_ns) / 1e9)
            size.observe(float(moved))

    def refresh() -> None:
        expired.value = float(member.core.vllm.expired_leases)
        late.value = float(member.late_notices + member.network.net.late_notifications(member.number))

    member.on_read = on_read
    member.on_polled = refresh
