"""Audit random deployments: `python tests/answers/campaign.py --first 1000 --count 2000`, or `make soak`.

Every seed is one audit: a random trace and fleet, replayed by the command, whose answers small independent programs
recompute; every third seed checks a metamorphic rule instead. A difference names its seed, and is shrunk.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from answers import (
    cache_audit,
    hand_offs_audit,
    models_audit,
    outputs_audit,
    predict_audit,
    report_audit,
    requests_audit,
    steps_audit,
    tiers_audit,
    usage_audit,
)
from answers.definitions import compare
from answers.evidence import CommandFailed, replay
from answers.random_cases import KINDS, Case, random_case
from answers.rules import RULES, rule_of
from answers.shrinking import shrink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from answers.definitions import Difference
    from answers.evidence import Evidence

    Audit = Callable[[Evidence], Iterator[Difference]]

AUDITS: dict[str, Audit] = {
    audit.__name__: audit
    for audit in (
        requests_audit.every_request_ends_once,
        requests_audit.arrivals_follow_the_trace,
        requests_audit.a_closed_loop_keeps_its_limit,
        requests_audit.hits_have_a_cause,
        report_audit.distributions,
        report_audit.counts_and_rates,
        report_audit.attainment,
        report_audit.latencies_of_lines,
        steps_audit.steps_keep_the_limits,
        steps_audit.tokens_are_computed_once,
        steps_audit.times_are_those_of_steps,
        steps_audit.waterfalls_add_up,
        tiers_audit.hits_by_tier_add_up,
        tiers_audit.bytes_of_tiers_are_blocks,
        tiers_audit.waits_for_tiers,
        hand_offs_audit.every_hand_off_is_counted_once,
        hand_offs_audit.pools_are_busy_as_their_steps,
        usage_audit.usage_is_a_share,
        usage_audit.stored_and_evicted_blocks_are_those_of_events,
        models_audit.no_step_beats_the_hardware,
        models_audit.weights_and_blocks_fit,
        report_audit.sums_of_groups,
        report_audit.no_run_beats_the_unlimited_cache,
        outputs_audit.the_table_says_the_same,
        outputs_audit.the_page_says_the_same,
        outputs_audit.a_saved_run_says_the_same,
        outputs_audit.a_comparison_with_itself_has_no_winner,
        outputs_audit.a_sweep_of_one_says_the_same,
        cache_audit.curves_are_plain_caches,
        cache_audit.curves_of_a_fleet_are_plain_caches,
        predict_audit.a_prediction_of_equal_lengths_is_a_closed_loop,
        predict_audit.a_prediction_of_a_trace_is_its_replay,
    )
}
RARE = {
    "stored_and_evicted_blocks_are_those_of_events": 2,
    "a_saved_run_says_the_same": 3,
    "a_comparison_with_itself_has_no_winner": 3,
    "a_sweep_of_one_says_the_same": 12,
    "curves_are_plain_caches": 2,
}
"""Audits that take long, and how many cases have one of them."""
RULE_EVERY = 3
Found = dict[str, list["Difference"]]
"""Differences by audit."""


@dataclass(frozen=True)
class Result:
    """One seed: what it audited, and what differed."""

    seed: int
    case: Case
    checks: tuple[str, ...]
    found: Found


def audit(seed: int, folder: Path) -> Result:
    """Audit the case of a seed, or the rule that it stands for."""
    turn, rest = divmod(seed, RULE_EVERY)
    if rest == 0:
        rule, case = rule_of(turn)
        return Result(seed, case, (rule,), examine(case, folder, (rule,)))
    number = turn * (RULE_EVERY - 1) + rest - 1
    case = random_case(number)
    turn_of_kind = number // len(KINDS)
    names = tuple(name for name in AUDITS if turn_of_kind % RARE.get(name, 1) == 0)
    return Result(seed, case, names, examine(case, folder, names))


def examine(case: Case, folder: Path, names: tuple[str, ...]) -> Found:
    """Apply audits, or one rule, to a case; the differences of those that object."""
    found: Found = {}
    try:
        if names[0] in RULES:
            differences = {names[0]: list(compare(RULES[names[0]](case, folder)))}
        else:
            evidence = replay(case, folder, every_output=True)
            differences = {name: list(compare(AUDITS[name](evidence))) for name in names}
    except TypeError as error:  # an answer is missing where its definition has one
        return {f"an audit ended: {error}": [("failed", traceback.format_exc()[-800:], "a figure")]}
    except CommandFailed as error:
        return {f"the command ended: {str(error)[:60]}": [("failed", str(error), "exit code 0")]}
    found |= {name: list_ for name, list_ in differences.items() if list_}
    return found


def describe(result: Result, folder: Path) -> str:
    """Return the command that reproduces a difference, on the smallest case that still differs."""
    name = next(iter(result.found))
    checked = result.checks if " ended: " in name else (name,)

    def fails(case: Case) -> bool:
        with suppress(KeyError):  # an audit that needs a flag of this kind
            return name in examine(case, folder, checked)
        return False

    small = shrink(result.case, fails)
    first = examine(small, folder, checked).get(name, result.found[name])[0]
    rows = "".join(f"    {json.dumps(row)}\n" for row in small.rows)
    return (
        f"seed {result.seed}: {name}: {first[0]}: printed {str(first[1])[:400]}, expected {str(first[2])[:400]}\n"
        f"  understudy replay trace.jsonl {' '.join(small.arguments())}\n{rows}"
        f"  again: python tests/answers/campaign.py --first {result.seed} --count 1\n"
    )


def campaign(first: int, count: int, folder: Path, *, quiet: bool = False) -> tuple[int, list[str]]:
    """Audit the seeds; the number of checks, and a description of each difference."""
    checks, differences, told = 0, [], time.monotonic()
    for seed in range(first, first + count):
        result = audit(seed, folder)
        checks += len(result.checks)
        if result.found:
            differences.append(describe(result, folder))
            print(differences[-1], flush=True)
        if not quiet and time.monotonic() - told > 10:
            told = time.monotonic()
            line = f"{seed + 1 - first:,} of {count:,} audits, {len(differences)} differences"
            print(line, file=sys.stderr, flush=True)
    return checks, differences


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="first seed (default: 0)")
    parser.add_argument("--count", type=int, default=2000, help="audits (default: 2000)")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        checks, differences = campaign(args.first, args.count, Path(folder))
    print(f"{args.count:,} audits from seed {args.first}, {checks:,} checks, {len(differences)} differences")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
