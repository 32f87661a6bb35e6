"""An hour of random scenarios: `python tests/soak.py --seconds 3600`, or `make soak`.

Every seed is a scenario of one kind, compared with the slow model or with itself played another way. A failure
names its kind and seed, and `--kind KIND --seed SEED --count 1` plays that one again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import secrets
import sys
import time
import traceback
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from engines.test_against_model import FIXED, assert_like_the_model, play_with_cancels
from engines.test_fast_forward import assert_fast_forward_changes_nothing, assert_same_run
from model.replay_gen import random_case
from model.scenario_gen import with_bursts, with_ends
from model.vllm_config import PROFILES, Profile
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 25  # scenarios that a process plays before it reports
LINE_EVERY_S = 5.0


def _turn(seed: int) -> int:
    """Kinds take seeds in turn: what else depends on a seed must not go round with them."""
    return seed // len(KINDS)


def _profile(seed: int) -> Profile:
    return [*PROFILES, FIXED][_turn(seed) % (len(PROFILES) + 1)]


def like_the_model(seed: int) -> None:
    """Every line of every step."""
    changes = ([with_bursts], [with_bursts], [with_ends], [with_ends], [])[_turn(seed) % 5]
    assert_like_the_model(seed, _profile(seed), *changes)


def with_cancels(seed: int) -> None:
    """Requests that are withdrawn anywhere."""
    play_with_cancels(seed, _profile(seed), bursts=_turn(seed) % 5 < 2)


def fast_forward(seed: int) -> None:
    """An engine that fast-forwards beside one that steps."""
    assert_fast_forward_changes_nothing(seed, PROFILES[_turn(seed) % len(PROFILES)])


def fleets(seed: int) -> None:
    """A replay: fast_forward or not, checked, in threads, recorded."""
    single_turns = _turn(seed) % 3 > 0
    case = random_case(seed, single_turns=single_turns)
    run = assert_same_run(case)
    if run is None:
        return
    ways: list[dict[str, object]] = [{"check": True}]
    if single_turns:
        ways.append({"threads": 3})
    with TemporaryDirectory() as folder:
        if _turn(seed) % 5 == 0:
            ways.append({"record_steps": Path(folder) / "steps.jsonl"})
        for way in ways:
            other = run_offline(RunPlan(case.workload, case.config, **case.how, **way))  # type: ignore[arg-type]
            assert other.facts == run.facts, way


KINDS: dict[str, Callable[[int], None]] = {
    "model": like_the_model,
    "cancels": with_cancels,
    "fast_forward": fast_forward,
    "fleets": fleets,
}


def play(kinds: list[str], seeds: range) -> str | None:
    """Play the seeds; what went wrong with the first that failed, None when none did."""
    for seed in seeds:
        kind = kinds[seed % len(kinds)]
        try:
            KINDS[kind](seed)
        except Exception:
            again = f"python tests/soak.py --kind {kind} --seed {seed} --count 1"
            return f"{traceback.format_exc()}\nFAILED: {kind}, seed {seed}; play it again with\n  {again}"
    return None


def soak(kinds: list[str], first: int, *, seconds: float, count: int | None, jobs: int) -> int:
    """Play until the time or the seeds are over, or one fails; the exit status."""
    deadline = time.monotonic() + seconds
    batches = (range(at, at + BATCH) for at in itertools.count(first, BATCH))
    if count is not None:
        end = first + count
        batches = (range(at, min(at + BATCH, end)) for at in range(first, end, BATCH))
    running: dict[Future[str | None], range] = {}
    played, told = 0, time.monotonic()
    with ProcessPoolExecutor(jobs) as pool:
        while True:
            while len(running) < 2 * jobs and time.monotonic() < deadline:
                seeds = next(batches, None)
                if seeds is None:
                    break
                running[pool.submit(play, kinds, seeds)] = seeds
            if not running:
                break
            done, _ = wait(running, timeout=LINE_EVERY_S, return_when=FIRST_COMPLETED)
            for future in done:
                played += len(running.pop(future))
                failure = future.result()
                if failure is not None:
                    pool.shutdown(wait=False, cancel_futures=True)
                    print(f"\n{failure}", file=sys.stderr)
                    return 1
            if time.monotonic() - told >= LINE_EVERY_S:
                told = time.monotonic()
                left = max(0.0, deadline - told)
                print(f"{played:,} scenarios, all well; {left:,.0f} s left", file=sys.stderr, flush=True)
    print(f"{played:,} scenarios from seed {first}, all well", file=sys.stderr)
    return 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long (default: 3600)")
    parser.add_argument("--seed", type=int, help="first seed (default: a random one, which is printed)")
    parser.add_argument("--count", type=int, help="at most so many scenarios")
    parser.add_argument("--kind", choices=KINDS, help="one kind only (default: all in turn)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)"
    )
    args = parser.parse_args()
    first = secrets.randbelow(10**9) if args.seed is None else args.seed
    kinds = [args.kind] if args.kind else list(KINDS)
    print(f"soak: {', '.join(kinds)} from seed {first}", file=sys.stderr, flush=True)
    return soak(kinds, first, seconds=args.seconds, count=args.count, jobs=args.jobs)


if __name__ == "__main__":
    sys.exit(main())
