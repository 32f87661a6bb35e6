"""Random fault plans by the thousand: `python tests/elastic/campaign.py --count 10000 --live 200 --jobs 16`.

Offline, each plan of a random small fleet runs twice with all checks: both digests are equal, and every request ends
once, for a reason. Live, all requests complete under retry and migrate, blocks are conserved, and the router's index
equals the engines. A seed that fails is printed; `--seed N --count 1` plays it again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from elastic.live_cases import play_live_case, random_live_case
from elastic.random_faults import check_case, random_case
from understudy.run.digest import digests


def play_offline(seed: int) -> str | None:
    """Play a plan twice; return what did not hold, or None."""
    try:
        case = random_case(seed)
        both = [digests(check_case(case).timeline) for _ in range(2)]
        assert both[0] == both[1], "two runs differ"
    except Exception:
        return f"offline, seed {seed}:\n{traceback.format_exc()}"
    return None


def play_live(seed: int) -> str | Counter[str]:
    """Play a plan live; return what did not hold, or the losses by outcome."""
    try:
        return Counter(asyncio.run(play_live_case(random_live_case(seed))))
    except Exception:
        return f"live, seed {seed}:\n{traceback.format_exc()}"


def main() -> int:
    """Play all plans; 0 when everything held."""
    reader = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    reader.add_argument("--count", type=int, default=10_000, help="plans offline")
    reader.add_argument("--live", type=int, default=200, help="plans live")
    reader.add_argument("--seed", type=int, default=0, help="of the first plan")
    reader.add_argument("--jobs", type=int, default=1, help="processes; live plans run in half as many")
    args = reader.parse_args()
    began_s = time.monotonic()
    failures: list[str] = []
    losses: Counter[str] = Counter()
    with ProcessPoolExecutor(args.jobs) as pool:
        seeds = range(args.seed, args.seed + args.count)
        for found in pool.map(play_offline, seeds, chunksize=8):
            failures += () if found is None else (found,)
    print(
        f"offline: {args.count} plans, {len(failures)} failed, {time.monotonic() - began_s:.0f} s", flush=True
    )
    offline = len(failures)
    began_s = time.monotonic()
    with ProcessPoolExecutor(max(1, args.jobs // 2)) as pool:
        for told in pool.map(play_live, range(args.seed, args.seed + args.live)):
            if isinstance(told, str):
                failures.append(told)
            else:
                losses += told
    print(
        f"live: {args.live} plans, {len(failures) - offline} failed, {time.monotonic() - began_s:.0f} s; "
        f"losses: {dict(losses)}"
    )
    for failure in failures[:20]:
        print(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
