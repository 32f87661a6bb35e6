"""A whole trace through Dynamo's own tree, by hand: fed with our events, it finds what our index finds.

    DYN_LOG=error .venv-interop/bin/python tests/interop/whole_trace.py TRACE [--workers 4] [--blocks 16384]

The trace is replayed round robin on blocks of 64; before each request both are told of what had happened by then, and
asked for its prompt.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from typing import TYPE_CHECKING

from dynamo._core import RadixTree

from understudy.engines.vllm_config import VllmConfig
from understudy.events import Stored
from understudy.events.dynamo import encode_dynamo_event
from understudy.router import PrefixIndex
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload import read_trace
from understudy.workload.identities import row_identities

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.events import Removed
    from understudy.run.kv_log import KvLog


def main() -> int:
    """Play, feed both, compare every answer; 1 if one differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", help="Mooncake JSONL")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=16384, help="of 64 tokens, on every worker")
    args = parser.parse_args()
    workload = read_trace(args.trace)
    engine = VllmConfig(block_size=64, num_gpu_blocks=args.blocks, async_scheduling=False)
    run = run_offline(RunPlan(workload, engine, workers=args.workers, events=True))
    assert run.kv is not None
    told = heapq.merge(*(said_by(run.kv, worker) for worker in range(args.workers)), key=lambda each: each[0])
    tree, index = RadixTree(), PrefixIndex()
    asked = matched = differ = events = 0
    waiting = next(told, None)
    for row in range(len(workload)):
        while waiting is not None and waiting[0] <= workload.arrival_ns[row]:
            _, worker, event = waiting
            tree.apply_event(worker, encode_dynamo_event(event))
            change = index.store if isinstance(event, Stored) else index.remove
            change(worker, [block.sequence_hash for block in event.blocks])
            events += 1
            waiting = next(told, None)
        prompt = row_identities(workload, row, 64, int(workload.prompt_tokens[row]) // 64)
        scores = tree.find_matches(prompt.local_hashes.tolist()).scores
        ours = index.find(prompt.sequence_hashes)
        found = [scores.get((worker, 0), 0) for worker in range(args.workers)]
        differ += found != [ours.of(worker)[0] for worker in range(args.workers)]
        matched += sum(found)
        asked += 1
    print(f"{asked:,} prompts, {events:,} events; {matched:,} blocks matched; {differ:,} answers differ")
    return 1 if differ else 0


def said_by(log: KvLog, worker: int) -> Iterator[tuple[int, int, Stored | Removed]]:
    """Of one worker: when, who, what."""
    return ((time_ns, worker, event) for time_ns, event in log.events(worker, "consolidated"))


if __name__ == "__main__":
    sys.exit(main())
