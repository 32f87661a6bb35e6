"""A live fleet under load: `python tests/live_soak.py --seconds 600 --workers 100`, or `make live-soak`.

After a warm-up, clients load the fleet for half of the time, all requests end, and objects are counted; then the same
again. Both counts must be equal, type by type, and no request is lost. The warm-up fills what is bounded: the blocks of
each worker, tokens behind blocks that events may name (`kept`), the decisions on the page. Its samples are full from
the start.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import multiprocessing
import random
import sys
import time
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import zmq
import zmq.asyncio

from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.fleets.fleet import Fleet, FleetSettings
from understudy.fleets.history import KEPT_MARKS, KEPT_ROWS
from understudy.run.chaos import draw_faults, list_kinds
from understudy.run.faults import FaultPlan
from understudy.server.settings import ServerSettings

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from understudy.server.api.endpoints import Endpoints
    from understudy.server.api.generation import Generation

LEAST_REQUESTS = 5
"""Requests of a client in each stretch, however short that is."""


class Count(msgspec.Struct, gc=False):
    """What a fleet holds while no request is under way. No garbage collection: it must not count itself."""

    objects: dict[str, int]
    """Python objects, by type."""
    sizes: dict[str, int]
    """Sizes in the core and in queues, which no stretch of load may change."""
    kept: int
    """Blocks whose tokens are kept for events; no more than `kept_bound`."""
    kept_bound: int
    python_blocks: int
    heap_mb: float
    resident_mb: float


@dataclass
class Soak:
    """What a soak saw: counts after each stretch of load, and how requests ended."""

    counts: list[Count] = field(default_factory=list)
    clients: Counter[str] = field(default_factory=Counter)
    servers: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    mistakes: list[str] = field(default_factory=list)
    tokens: float = 0.0
    late_ms: tuple[float, float] = (0.0, 0.0)

    def growth(self, stretch: int = -1) -> dict[str, int]:
        """Return the types and sizes of which the count after a stretch has more or fewer than the one before."""
        before, after = self.counts[stretch - 1], self.counts[stretch]
        changed: dict[str, int] = {}
        for now, then in ((after.objects, before.objects), (after.sizes, before.sizes)):
            changed |= {name: now.get(name, 0) - then.get(name, 0) for name in now | then}
        return {name: more for name, more in changed.items() if more}


def run_soak(
    *,
    workers: int,
    stretches_s: list[float],
    tokens_per_s: float,
    routing: str = "kv",
    publish: bool = True,
    faults_per_hour: float = 0.0,
) -> Soak:
    """Load a fleet for one stretch after the other; count its objects after each, with no request under way.

    With faults, each stretch has the same random ones, and requests that lose their worker go on elsewhere.
    """
    streams = 2 * workers
    # A stream also waits for its step and its first token: steps are shorter by as much as that takes.
    engine = VllmConfig(
        block_size=16,
        num_gpu_blocks=400,
        max_num_seqs=8,
        max_model_len=1024,
        timing=Constant(prefill_ms=5.0, decode_ms=0.92e3 * streams / tokens_per_s),
    )
    events = {
        "enable_kv_cache_events": publish,
        "endpoint": "tcp://*:0",
    }
    pool = ServerSettings(model="soak", engine=engine, max_model_len=1024, kv_events_config=events)
    faults = None
    if faults_per_hour:
        kinds = list_kinds(
            reads_events=routing == "kv",
            has_host_tier=False,
            has_limited_host_link=False,
            loses_requests=True,
        )
        end_s = max(min(stretches_s) - 10, 1.0)
        drawn = draw_faults(
            1, per_hour=faults_per_hour, end_s=end_s, workers=workers, kinds=kinds, mean_duration_s=1.0
        )
        faults = FaultPlan(faults=drawn, on_loss="migrate")
    settings = FleetSettings(pools=((workers, pool),), base_port=0, port=0, routing=routing, faults=faults)

    async def main() -> Soak:
        soak, fleet = Soak(), Fleet(settings)
        await fleet.start()
        fleet.front.elastic.close()  # faults begin with the load
        fill_history(fleet)
        for server in fleet.servers:
            count_ends(server.app.endpoints, soak.servers)
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        endpoints = [sender.endpoint for server in fleet.servers for sender in server.worker.senders]
        process = spawn.Process(target=load, args=(fleet.port, fleet.ports, endpoints, streams, there))
        process.start()
        try:
            while not here.poll():  # the workers have met each kind of request
                assert process.is_alive()
                await asyncio.sleep(0.05)
            here.recv()
            for stretch_s in stretches_s:
                fleet.front.elastic.start()
                here.send(stretch_s)
                while not here.poll() or has_faults(fleet):
                    assert process.is_alive()
                    await asyncio.sleep(0.2)
                soak.clients, soak.events = here.recv()
                soak.counts.append(await count(fleet))
        finally:
            here.send(None)
            process.join()
        soak.mistakes = fleet.front.elastic.checks.mistakes
        if fleet.front.elastic.lost is not None:
            soak.losses = fleet.front.elastic.lost.outcomes
        late = fleet.runtime.token_lateness
        soak.late_ms = (late.quantile(0.5) * 1e3, late.quantile(0.99) * 1e3)
        soak.tokens = sum(server.worker.metrics[0].generation_tokens.value for server in fleet.servers)
        await fleet.stop()
        fleet.runtime.driver.stop()
        return soak

    return asyncio.run(main())


def has_faults(fleet: Fleet) -> bool:
    """Return whether faults of the plan last, or will begin."""
    faults = fleet.front.elastic.faults
    return faults is not None and faults.num_pending > 0


# ── Counting ──


def fill_history(fleet: Fleet) -> None:
    """Fill the samples of the page, which are bounded."""
    front = fleet.front
    for _ in range(KEPT_ROWS):
        front.monitor.sample(front.report())
    mark = {"t": 0.0, "kind": "kill", "ended": False}
    front.monitor.history.marks.extend({**mark, "workers": [0]} for _ in range(KEPT_MARKS))
    counts = front._token_counts
    counts.extend(list(fleet.runtime.token_lateness.counts) for _ in range(counts.maxlen or 0))


async def count(fleet: Fleet) -> Count:
    """Count what the fleet holds, after the last request has ended."""
    busy = True
    while busy:  # a client that went away is noticed a little later
        await asyncio.sleep(0.2)
        busy = any(server.app.endpoints.in_flight for server in fleet.servers) or bool(
            fleet.runtime.outbox.open
        )
    # asyncio keeps cancelled timers behind a timer that is due before them, and the page's sampler always has one.
    fleet.front.close()
    await asyncio.sleep(0.5)
    senders = [sender for server in fleet.servers for sender in server.worker.senders]
    gc.collect()
    for sender in senders:
        sender.trim()  # the next step would
    gc.collect()
    names = (sys.intern(f"{type(one).__module__}.{type(one).__qualname__}") for one in gc.get_objects())
    objects = dict(Counter(names))
    fleet.front.start()
    kept = sum(len(sender._tokens) for sender in senders)
    bound = sum(sender._keep_blocks + 400 for sender in senders)
    return Count(objects, core_sizes(fleet), kept, bound, sys.getallocatedblocks(), heap_mb(), resident_mb())


def core_sizes(fleet: Fleet) -> dict[str, int]:
    """Return sizes that garbage collection does not see, summed over the workers."""
    sizes: Counter[str] = Counter()
    for server in fleet.servers:
        worker = server.worker
        sizes["requests of endpoints"] += len(server.app.endpoints.in_flight)
        sizes["requests of workers"] += len(worker.live())
        for core in worker.cores:
            engine = core.vllm
            sizes["blocks in use"] += engine.pool[1]
            sizes["blocks"] += sum(engine.pool)
            sizes["requests waiting"] += engine.num_waiting
            sizes["requests running"] += len(engine.running)
            sizes["live requests"] += len(core.live)
    dispatcher = fleet.routing.dispatcher
    sizes["requests routed"] = len(dispatcher._sent)
    sizes["requests waiting for a worker"] = len(dispatcher._waiting)
    sizes["connections"] = len(fleet.runtime.outbox.open)
    return dict(sizes)


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
        )
    ]


def heap_mb() -> float:
    """Return the megabytes that malloc has given out; 0 where the C library does not say."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return 0.0
    libc.mallinfo2.restype = _Mallinfo2
    info = libc.mallinfo2()
    return float(info.uordblks + info.hblkhd) / 1e6


def resident_mb() -> float:
    """Return the resident memory of this process in megabytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096 / 1e6


def count_ends(endpoints: Endpoints, told: Counter[str]) -> None:
    """Count how each request ends, as its server has it."""
    usual = endpoints._done
    ended: weakref.WeakSet[Generation] = weakref.WeakSet()

    def done(generation: Generation, how: str) -> None:
        told["twice" if generation in ended else how] += 1
        ended.add(generation)
        usual(generation, how)

    endpoints._done = done  # type: ignore[method-assign]


# ── The load, in a process of its own ──


def load(port: int, workers: list[int], endpoints: list[str], streams: int, orders: Connection) -> None:
    """Run clients for as long as each order says, and readers of events all the time; report what they saw."""
    # Workers count answers by status, each with a first time: every worker meets each kind before it is counted.
    kinds = ("refused", "cancelled", "completed")

    async def main() -> None:
        context = zmq.asyncio.Context()
        ends: Counter[str] = Counter()
        events: Counter[str] = Counter()
        readers = [asyncio.create_task(watch(endpoint, context, events)) for endpoint in endpoints]
        await asyncio.sleep(1)  # let them all be connected before the first event
        draws = [random.Random(number) for number in range(streams)]
        for kind in kinds:
            await asyncio.gather(*(ask(worker, draws[0], kind, ends) for worker in workers))
        orders.send(None)
        while (stretch_s := await asyncio.to_thread(orders.recv)) is not None:
            until_s = time.monotonic() + stretch_s
            await asyncio.gather(*(client(port, until_s, draw, ends) for draw in draws))
            await asyncio.sleep(0.3)
            orders.send((ends, events))
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        context.term()

    asyncio.run(main())


async def client(port: int, until_s: float, draw: random.Random, ends: Counter[str]) -> None:
    """Ask for one stream after the other; some are wrong requests, and some are left in the middle.

    A client of a busy machine asks for a few streams even if the time is up.
    """
    asked = 0
    while time.monotonic() < until_s or asked < LEAST_REQUESTS:
        asked += 1
        chance = draw.random()
        await ask(
            port, draw, "refused" if chance < 0.05 else "cancelled" if chance < 0.1 else "completed", ends
        )


async def ask(port: int, draw: random.Random, kind: str, ends: Counter[str]) -> None:
    """Send a request that ends as `kind` says, and count how it ends."""
    family = draw.randrange(40)
    prompt = [family * 50 + place for place in range(200)] + draw.choices(range(5000), k=60)
    asked = {"prompt": prompt, "max_tokens": draw.randrange(20, 120), "stream": True}
    body = msgspec.json.encode({**asked, "n": 0 if kind == "refused" else 1})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    ends["asked"] += kind != "refused"
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: s\r\nconnection: close\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    first = answer = await reader.read(1 << 16)
    while kind != "cancelled" and (data := await reader.read(1 << 16)):
        answer = answer[-64:] + data
    writer.close()
    if not first.startswith(b"HTTP/1.1 400" if kind == "refused" else b"HTTP/1.1 200"):
        kind = "rejected"
    elif kind == "completed" and (b"[DONE]" not in answer or b'"error"' in answer):
        kind = "failed"
    ends[kind] += 1


async def watch(endpoint: str, context: zmq.asyncio.Context, events: Counter[str]) -> None:
    """Count the batches of one worker, and the gaps between their sequence numbers."""
    socket = context.socket(zmq.SUB)
    socket.linger = 0
    socket.rcvhwm = 0  # a reader that is late loses nothing
    socket.connect(endpoint.replace("0.0.0.0", "127.0.0.1"))
    socket.subscribe(b"")
    last = -1
    try:
        while True:
            _, sequence, _ = await socket.recv_multipart()
            number = int.from_bytes(sequence, "big")
            events["batches"] += 1
            events["gaps"] += last >= 0 and number != last + 1
            last = number
    finally:
        socket.close()


def main() -> int:
    """Run the soak and print what it saw; 0 when both counts are equal and no request was lost."""
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--seconds", type=float, default=600.0, help="under load, after the warm-up")
    reader.add_argument("--warm-up", type=float, default=60.0, help="seconds before the first count")
    reader.add_argument("--workers", type=int, default=100)
    reader.add_argument("--tokens-per-s", type=float, default=8000.0)
    reader.add_argument("--routing", default="kv")
    reader.add_argument("--no-events", action="store_true", help="publish no KV events")
    reader.add_argument(
        "--faults-per-hour",
        type=float,
        default=0.0,
        metavar="X",
        help="random faults, equal in every stretch; KV events of workers that crash begin anew, so none are published",
    )
    args = reader.parse_args()
    halves = [args.warm_up, args.seconds / 2, args.seconds / 2]
    soak = run_soak(
        workers=args.workers,
        stretches_s=halves,
        tokens_per_s=args.tokens_per_s,
        routing=args.routing,
        publish=not args.no_events and not args.faults_per_hour,
        faults_per_hour=args.faults_per_hour,
    )
    if args.faults_per_hour:
        print(f"losses {dict(soak.losses)}, failed checks {soak.mistakes}")
    print(f"clients {dict(soak.clients)}, servers {dict(soak.servers)}, events {dict(soak.events)}")
    print(
        f"{soak.tokens / sum(halves):,.0f} tokens/s, late p50 {soak.late_ms[0]:.1f}, p99 {soak.late_ms[1]:.1f} ms"
    )
    for counted in soak.counts:
        print(
            f"{sum(counted.objects.values()):,} objects, {counted.kept:,} of {counted.kept_bound:,} blocks kept, "
            f"{counted.python_blocks:,} blocks of Python, heap "
            f"{counted.heap_mb:.1f} MB, resident {counted.resident_mb:.1f} MB"
        )
    print("grown in the second half:", soak.growth() or "nothing")
    return 0 if not soak.growth() and not lost(soak) else 1


def lost(soak: Soak) -> str:
    """Return what is wrong with how requests ended; empty when each ended once, and no event is missing."""
    clients, servers = soak.clients, soak.servers
    if soak.mistakes:
        return f"checks: {soak.mistakes}"
    ended = clients["completed"] + clients["cancelled"]
    if clients["failed"] or clients["rejected"] or not clients["completed"] or ended != clients["asked"]:
        return f"clients: {dict(clients)}"
    if set(servers) > {"completed", "cancelled"} or servers["completed"] + servers["cancelled"] != ended:
        return f"servers: {dict(servers)}, clients: {dict(clients)}"
    if any(counted.kept > counted.kept_bound for counted in soak.counts):
        return f"{[counted.kept for counted in soak.counts]} blocks are kept for events, too many"
    if soak.events["gaps"]:
        return f"events: {dict(soak.events)}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
