"""CPU time that the fleet page costs the server each second, and the bytes that it sends.

    python benchmarks/fleet_page.py [WORKERS ...]

Half of the workers change between two samples, as in a busy fleet.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from typing import TYPE_CHECKING, Any, cast

import msgspec

from harness.publish import add_json_flag, publish
from understudy.engines.vllm_config import VllmConfig
from understudy.fleets.fleet import Fleet, FleetSettings
from understudy.server.metrics.merged import merge
from understudy.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.http import Connection

SAMPLES = 30


class Watcher:
    """A page that counts the bytes that it gets."""

    closed = False
    on_close: Any = None

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def start_stream(self, headers: bytes) -> None:
        """Begin."""

    def send_event(self, data: bytes) -> None:
        """Count an event."""
        self.sizes.append(len(data))

    def flush(self) -> None:
        """Do nothing."""


def cpu_ms(work: Callable[[], object], times: int) -> float:
    """Return the CPU time of one call in ms."""
    began_s = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began_s) / times * 1e3


async def measure(workers: int) -> dict[str, float]:
    """Return the cost for a number of workers."""
    pool = ServerSettings(model="stub", engine=VllmConfig(num_gpu_blocks=1024, max_model_len=4096))
    fleet = Fleet(
        FleetSettings(pools=((workers, msgspec.structs.replace(pool, max_model_len=4096)),), port=0)
    )
    front, watcher = fleet.front, Watcher()
    gc.collect()
    gc.freeze()
    front.monitor.watch(cast("Connection", watcher), front.report())

    def second() -> None:
        for server in fleet.servers[::2]:
            metrics = server.worker.metrics[0]
            metrics.generation_tokens.add(50)
            metrics.first_token.observe(0.1)
            metrics.gap.observe(0.02, 49)
        front.monitor.sample(front.report())

    second()
    page_ms = cpu_ms(second, SAMPLES)
    scrape_ms = cpu_ms(lambda: merge(one.worker.registry for one in fleet.servers).render(), 5)
    print(
        f"{workers:5} workers: {watcher.sizes[0]:,} bytes at first, then {watcher.sizes[-1]:,} bytes a second; "
        f"/metrics {scrape_ms:.1f} ms"
    )
    return {"CPU per second": page_ms, "share of a core": page_ms / 10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workers", type=int, nargs="*", default=[8, 200, 1000])
    add_json_flag(parser)
    args = parser.parse_args()
    measured = {f"{workers} workers": asyncio.run(measure(workers)) for workers in args.workers}
    publish("fleet_page", measured, args.json)


if __name__ == "__main__":
    main()
