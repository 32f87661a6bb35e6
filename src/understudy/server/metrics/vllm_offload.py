"""vLLM's metrics of its native host offload (0.32 and 0.33)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.tiers.plan import PAGE_BYTES, TierPlan

if TYPE_CHECKING:
    from understudy.server.core import EngineCore
    from understudy.server.metrics.families import Counter, Histogram, Registry
    from understudy.server.settings import ServerSettings

TRANSFER_BYTES = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
LOOKUP_S = (1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1.0)
DEFERRED_S = (1e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)
ALLOCATED_CHUNKS = tuple(4**power for power in range(10))
USED = {"usage": "hold", "write_usage": "write", "read_usage": "read"}


def describe_offload(settings: ServerSettings) -> dict[str, str] | None:
    """Return the labels of kv_offload_config_info; None without vLLM's offload."""
    plan = TierPlan.of(settings.tiers, settings.engine.block_size)
    if plan is None or plan.offload.mode != "vllm":
        return None
    blocks = plan.offload.blocks_per_chunk
    chunks = plan.host_blocks(settings.most_blocks) // blocks
    per_request = -(-settings.max_model_len // (blocks * settings.engine.block_size))
    return {
        "cpu_num_chunks": str(chunks),
        "cpu_blocks_per_chunk": str(blocks),
        "cpu_kv_cache_size_bytes": str(chunks * -(-blocks * plan.block_bytes // PAGE_BYTES) * PAGE_BYTES),
        "cpu_kv_cache_size_tokens": str(chunks * settings.max_model_len // per_request),
    }


class OffloadMetrics:
    """Metrics of one rank's connector and its host. `refresh` updates them, also before a page."""

    def __init__(self, registry: Registry, core: EngineCore, labels: dict[str, str]) -> None:
        self._core = core
        for index, (name, what) in enumerate(USED.items()):
            registry.gauge(
                f"vllm:kv_offload_cpu_cache_{name}_perc",
                f"Share of the host that transfers {what}.",
                lambda index=index: core.vllm.offload_usage[index],  # type: ignore[misc]
                **labels,
            )
        self._asked = registry.histogram(
            "vllm:kv_offload_cpu_allocation_size",
            "Chunks that a store needs room for.",
            ALLOCATED_CHUNKS,
            **labels,
        )
        self._loads = _Transfers(registry, "load", "CPU_to_GPU", labels)
        self._stores = _Transfers(registry, "store", "GPU_to_CPU", labels)
        self._lookups = registry.histogram(
            "vllm:kv_offload_lookup_sync_delay_seconds",
            "Lookups; one takes no simulated time.",
            LOOKUP_S,
            **labels,
        )
        self._deferred = registry.histogram(
            "vllm:kv_offload_lookup_async_delay_seconds",
            "From a request's first deferred lookup to its answer, or its end.",
            DEFERRED_S,
            **labels,
        )
        self._refused = registry.counter(
            "vllm:kv_offload_allocation_failure", "Stores that the host had no room for.", **labels
        )
        registry.before_page(self.refresh)

    def refresh(self) -> None:
        """Count the transfers since the last call."""
        samples = self._core.vllm.take_offload_samples()
        self._loads.count(samples.loads)
        self._stores.count(samples.stores)
        self._lookups.observe(0.0, samples.lookups)
        for waited_ns in samples.deferred_ns:
            self._deferred.observe(waited_ns / 1e9)
        for chunks in samples.asked_chunks:
            self._asked.observe(chunks)
        self._refused.add(samples.refused_stores)


class _Transfers:
    """Metrics of one direction, under its name and under older names with a direction label."""

    def __init__(self, registry: Registry, name: str, direction: str, labels: dict[str, str]) -> None:
        both = ((name, labels), ("total", {**labels, "transfer_type": direction}))
        self._bytes: list[Counter] = [
            registry.counter(f"vllm:kv_offload_{prefix}_bytes", "Bytes transferred.", **with_labels)
            for prefix, with_labels in both
        ]
        self._time: list[Counter] = [
            registry.counter(f"vllm:kv_offload_{prefix}_time", "Seconds of transfers.", **with_labels)
            for prefix, with_labels in both
        ]
        self._sizes: list[Histogram] = [
            registry.histogram(
                f"vllm:kv_offload_{size}", "Bytes of a transfer.", TRANSFER_BYTES, **with_labels
            )
            for size, (_, with_labels) in zip((f"{name}_size", "size"), both, strict=True)
        ]

    def count(self, transfers: list[tuple[int, int]]) -> None:
        """Count finished transfers, given as (bytes, ns)."""
        for moved, took_ns in transfers:
            for moved_bytes, seconds, sizes in zip(self._bytes, self._time, self._sizes, strict=True):
                moved_bytes.add(moved)
                seconds.add(took_ns / 1e9)
                sizes.observe(moved)
