"""KV events over ZMQ, publisher to consumer, on this machine: how many blocks a second, and how old they are.

    python benchmarks/events_live.py                  a publisher and a consumer, 200,000 blocks/s for ten seconds
    python benchmarks/events_live.py --rate 0         as fast as the consumer keeps up

One process publishes batches of 16 blocks (a store and, later, the removal of the same blocks) at a steady pace, with
token ids, in the newest dialect; this one reads them as columns, names them by content, and applies them to a prefix
index. A batch's age is the time from its timestamp to the moment that the index knows of it. Nothing may be lost.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from typing import TYPE_CHECKING

import numpy as np

from harness.publish import add_json_flag, publish
from understudy.events import Consolidator
from understudy.events.publisher import Publisher
from understudy.events.subscriber import Subscriber
from understudy.events.wire import BlockRemoved, BlockStored
from understudy.router import PrefixIndex

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Event

BLOCKS = 16
LIVE_BATCHES = 2000  # stored and not yet removed


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rate", type=int, default=200_000, metavar="N", help="blocks a second; 0: no pace")
    options.add_argument("--seconds", type=float, default=10.0, metavar="S")
    options.add_argument(
        "--block-size", type=int, default=16, metavar="N", help="tokens of a block (default: 16)"
    )
    options.add_argument("--dialect", default="vllm", metavar="NAME")
    add_json_flag(options)
    args = options.parse_args()
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    go = context.Event()
    worker = context.Process(
        target=produce, args=(theirs, go, args.rate, args.seconds, args.block_size, args.dialect)
    )
    worker.start()
    endpoint, replay = mine.recv()
    with Subscriber(endpoint, replay=replay) as subscriber:
        measured = consume(subscriber, mine, go)
    worker.join()
    publish("events_live", measured, args.json)


def produce(pipe: Connection, go: Event, rate: int, seconds: float, block_size: int, dialect: str) -> None:
    """Batches of a store of 16 blocks, or of 16 blocks' removal, in turn once enough are live."""
    tokens = np.random.default_rng(1).integers(0, 150_000, BLOCKS * block_size + 4096).tolist()
    with Publisher("tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*", dialect=dialect) as source:
        pipe.send((source.endpoint, source.replay))
        while not go.is_set():
            source.publish([])
            time.sleep(0.01)
        time.sleep(0.2)
        hashes = iter(np.random.default_rng(0).integers(1, 1 << 63, (1 << 20, BLOCKS), np.uint64).tolist())
        live: list[list[int]] = []
        interval = BLOCKS / rate if rate else 0.0
        cpu, began = time.process_time(), time.perf_counter()
        batches = 0
        while (now := time.perf_counter() - began) < seconds:
            if batches * interval > now:
                time.sleep(max(0.0, batches * interval - now))
                continue
            if len(live) > LIVE_BATCHES and batches % 2:
                source.publish([BlockRemoved(live.pop(0), "GPU")])  # type: ignore[arg-type]
            else:
                blocks = next(hashes)
                live.append(blocks)
                said = tokens[batches % 4096 :][: BLOCKS * block_size]
                source.publish([BlockStored(blocks, None, said, block_size, medium="GPU")])
            batches += 1
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        pipe.send((source.next_sequence, batches, wall, cpu))
        pipe.recv()


def consume(subscriber: Subscriber, pipe: Connection, go: Event) -> dict[str, dict[str, float]]:
    truth = Consolidator(by_content=True)
    index = PrefixIndex()
    while subscriber.poll(100) is None:
        pass
    go.set()
    ages: list[np.ndarray] = []
    cpu, last, blocks = time.process_time(), None, 0
    while last is None or (subscriber._next or 0) < last[0]:
        update = subscriber.poll(5, gather_ms=1.0)
        if pipe.poll():
            last = pipe.recv()
        if update is None:
            continue
        if len(update.columns):
            index.apply(0, truth.apply(update.columns))
            ages.append(time.time() - update.ts)
            blocks += update.columns.num_blocks
    cpu = time.process_time() - cpu
    pipe.send(None)
    messages, batches, wall, publisher_cpu = last
    age = np.concatenate(ages) * 1000
    counters = subscriber.counters
    print(f"{messages:,} messages; gaps {counters.gaps}; {len(truth):,} blocks live")
    return {
        f"{batches:,} batches in {wall:.2f} s": {
            "published": round(batches * BLOCKS / wall),
            "consumed": blocks,
            "lost": batches * BLOCKS - blocks,
            "age, p50": float(np.percentile(age, 50)),
            "age, p99": float(np.percentile(age, 99)),
            "age, most": float(age.max()),
            "publisher": round(100 * publisher_cpu / wall),
            "consumer": round(100 * cpu / wall),
            "consumer's memory": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        }
    }


if __name__ == "__main__":
    main()
