"""Make the senders of a worker's KV events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.engines.group_layouts import group_labels
from understudy.server.kv_events import KvEventsConfig, KvEventSender

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.server.core import EngineCore
    from understudy.server.settings import ServerSettings


def make_senders(settings: ServerSettings, cores: Sequence[EngineCore]) -> list[KvEventSender]:
    """Make a sender per rank; none if the settings publish no events."""
    engine = settings.engine
    kind = settings.kind
    is_own = kind.event_producer == kind.name
    producer = f"{kind.event_producer}-{kind.version_of(engine) if is_own else settings.release.version}"
    config = KvEventsConfig.read(settings.kv_events_config)
    config = config.at(settings.host, settings.port, settings.names[0], producer)
    if not config.publishes:
        return []
    # The event of a copy to a tier may follow the removal of its block on the device.
    keep = 512 + (4 * engine.num_gpu_blocks if settings.tiers.tiers else 0)
    groups = group_labels(engine)
    return [
        KvEventSender(
            config,
            engine.block_size,
            rank,
            keep_blocks=keep,
            native_offload=core.offload is not None or bool(groups),
            groups=groups,
        )
        for rank, core in enumerate(cores)
    ]
