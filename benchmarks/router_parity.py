"""The KV-aware router beside Dynamo 1.6.1's: every cost and overlap, with its choices imposed.

    python benchmarks/router_parity.py --traces PATH --choices PATH

PATH holds the Mooncake traces (`mooncake_conversation.jsonl`, `mooncake_synthetic.jsonl`), and what the peer chose: a
line a request in arrival order, `worker cost overlap`, in `dec_NAME.txt.gz`. Engines schedule synchronously, as the
peer's do.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from pathlib import Path

import numpy as np

from understudy.engines.config import VllmConfig
from understudy.router import KvRouting
from understudy.run.offline import run_offline
from understudy.workload import read_trace

CASES = {
    "dec_conversation_4_16384": ("mooncake_conversation", 0.0),
    "dec_synthetic_4_16384": ("mooncake_synthetic", 0.0),
    "dec_syn_lag50": ("mooncake_synthetic", 50.0),
    "dec_syn_lag5000": ("mooncake_synthetic", 5000.0),
}
ENGINE = VllmConfig(block_size=64, num_gpu_blocks=16384, charge_first_token=False, async_scheduling=False)
WORKERS = 4
TOLERANCE = 1e-6


def compare(name: str, trace: Path, choices: Path, delay_ms: float) -> bool:
    """Print one line; True when every decision agrees."""
    with gzip.open(choices, "rt") as file:
        peer = np.loadtxt(file)
    workload = read_trace(trace)
    router = KvRouting(event_delay_ms=delay_ms).build(imposed=peer[:, 0].astype(np.int32))
    timeline = run_offline(workload, ENGINE, workers=WORKERS, routing=router, route_rejected=True).timeline
    ours = router.decisions
    assert len(ours) == len(peer), f"{len(ours)} decisions, the peer made {len(peer)}"
    costs = np.abs(ours.cost - peer[:, 1]) > TOLERANCE
    overlaps = ours.overlap_blocks != peer[:, 2]
    done = timeline.completed
    ttft_ms = (timeline.first_token_ns - timeline.arrival_ns)[done].mean() / 1e6
    hit = timeline.cached_tokens_first.sum() / timeline.prompt_tokens.sum()
    print(
        f"{name:28} {len(peer):7,} decisions  {costs.sum():6,} costs and {overlaps.sum():6,} overlaps differ"
        f"   TTFT {ttft_ms:9.2f} ms  hit {hit:7.2%}"
    )
    return not (costs.any() or overlaps.any())


def main() -> int:
    """Compare every recording that is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True, metavar="PATH")
    parser.add_argument("--choices", type=Path, required=True, metavar="PATH")
    args = parser.parse_args()
    agree = [
        compare(name, args.traces / f"{trace}.jsonl", args.choices / f"{name}.txt.gz", delay_ms)
        for name, (trace, delay_ms) in CASES.items()
        if (args.choices / f"{name}.txt.gz").exists()
    ]
    if not agree:
        print(f"no recordings in {args.choices}", file=sys.stderr)
    return 0 if agree and all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
