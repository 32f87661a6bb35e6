"""Try the remedies of verdicts: replay each, keep those that help, and print what they give."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from understudy.defaults import GOAL
from understudy.report.advice import Advice
from understudy.report.remedies import Setup, list_changes, list_smaller_fleets
from understudy.report.replay_budget import LIMIT_S, ReplayBudget
from understudy.report.smaller_fleet import estimate_oversized
from understudy.report.trial import Trial, compare, compare_attainment, format_failure, format_remedy
from understudy.report.verdict import Verdict
from understudy.report.verdicts import find_verdicts
from understudy.run.fleet_size import describe_engines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from understudy.report.data import ReportData
    from understudy.report.judged import JudgedReport

Judged = TypeVar("Judged", bound="JudgedReport")
_LACKS_CAPACITY = {"nothing_completed", "rejected", "overloaded", "goal_missed"}
"""Rules whose finding excludes a smaller fleet."""


def advise(
    report: Judged,
    setup: Setup,
    replay_with: Callable[[dict[str, Any]], ReportData],
    *,
    limit_s: float = LIMIT_S,
) -> Judged:
    """Replay the remedies of a report's verdicts within a limit of work; return the report with the advice.

    `limit_s` limits the sum of estimated times, so that verdicts do not depend on the machine. `replay_with` replays
    the workload with changed settings: workers, pools, routing, load, or engine settings by name.
    """
    started = time.perf_counter()
    found = find_verdicts(report)
    by_rule = {verdict.rule: list(list_changes(verdict.rule, report, setup)) for verdict in found}
    changes = {change.flag: change for many in by_rule.values() for change in many}
    fewer = [] if lacks_capacity(found, report) else list_smaller_fleets(report, setup)
    budget = ReplayBudget(report, limit_s)
    reports: dict[str, ReportData] = {}
    untried = 0
    skipped: set[str] = set()
    for change in (*changes.values(), *fewer):
        if not budget.take():
            untried += 1
            skipped.add(change.flag)
            continue
        try:
            reports[change.flag] = replay_with(change.settings)
        except Exception:  # no remedy: it contradicts other settings, or a user's class fails with it
            for many in by_rule.values():
                if change in many:
                    many.remove(change)
    compared = {
        rule: [
            compare(change.flag, rule, report, reports[change.flag])
            for change in many
            if change.flag in reports
        ]
        for rule, many in by_rule.items()
    }
    trials = {(one.change, one.measure): one for many in compared.values() for one in many}
    helpful = {one.change for many in compared.values() for one in many if one.helps}
    verdicts = [
        _advise_on(
            verdict,
            report,
            compared[verdict.rule],
            reports,
            helpful,
            missing=len(by_rule[verdict.rule]) - len(compared[verdict.rule]),
        )
        for verdict in found
    ]
    for change in fewer:
        if (one := reports.get(change.flag)) is None:
            continue
        trial = replace(compare(change.flag, "oversized", report, one), helps=is_enough(report, one))
        trials.setdefault((trial.change, trial.measure), trial)
        if trial.helps:  # queues of a fleet that is too large need no remedy
            verdicts = [verdict for verdict in verdicts if verdict.rule != "overloaded"]
            verdicts.insert(0, describe_oversized(report, one, trial))
            break
    smaller_untried = tuple(change.flag for change in fewer if change.flag in skipped)
    if not {"oversized", "overloaded"} & {verdict.rule for verdict in verdicts}:
        estimated = estimate_oversized(report, smaller_untried, budget)
        verdicts = verdicts if estimated is None else [estimated, *verdicts]
    if not found and not trials and not untried:
        return report
    seconds = time.perf_counter() - started
    advice = Advice(
        tuple(verdicts), tuple(trials.values()), seconds, budget.replay_s, limit_s, untried, smaller_untried
    )
    return replace(report, advice=advice)


def lacks_capacity(found: Iterable[Verdict], report: ReportData | None = None) -> bool:
    """Whether a finding excludes a smaller fleet; queues of a run that meets its goals do not."""
    rules = {verdict.rule for verdict in found} & _LACKS_CAPACITY
    if report is not None and report.goodput is not None and report.goodput.ratio >= GOAL:
        rules -= {"overloaded"}
    return bool(rules)


def _advise_on(
    verdict: Verdict,
    report: ReportData,
    trials: list[Trial],
    reports: dict[str, ReportData],
    helpful: set[str],
    missing: int,
) -> Verdict:
    """Return the verdict with the remedies that help, the best first; as it is without replays.

    If none helps, changes that help with another verdict (`helpful`) are named only if there is no other.
    """
    if not trials:
        return verdict
    best = sorted((one for one in trials if one.helps), key=lambda one: one.gain, reverse=True)
    parts = [
        format_remedy(one, compare_attainment(one.change, report, reports[one.change])) for one in best
    ] or [format_failure([one for one in trials if one.change not in helpful] or trials)]
    if missing:
        parts.append(f"{missing} {'was' if missing == 1 else 'were'} not replayed.")
    return replace(verdict, remedy=" ".join(parts))


def is_enough(report: ReportData, smaller: ReportData) -> bool:
    """Whether a smaller fleet meets the goals, or without goals is about as fast."""
    if report.goodput is not None and smaller.goodput is not None:
        return smaller.goodput.ratio >= GOAL and _holds_in_worst_hour(report, smaller)
    return smaller.requests.completed == report.requests.completed and all(
        ours <= 1.05 * theirs
        for ours, theirs in (
            (smaller.e2e_ms.mean, report.e2e_ms.mean),
            (smaller.ttft_ms.p99, report.ttft_ms.p99),
        )
    )


def _holds_in_worst_hour(report: ReportData, smaller: ReportData) -> bool:
    """Whether a smaller fleet meets the goals in its worst hour too, if the present one does in its own."""
    if report.worst_hour is None or smaller.worst_hour is None or report.worst_hour.attainment < GOAL:
        return True
    return smaller.worst_hour.attainment >= GOAL


def describe_oversized(report: ReportData, smaller: ReportData, trial: Trial) -> Verdict:
    """Build the verdict that a smaller fleet would do."""
    workers, enough = report.columns.num_workers, smaller.columns.num_workers
    would, now = "one worker" if enough == 1 else f"{enough:,} workers", f"{workers:,}"
    if ranks := report.run.data_parallel_size:
        would, now = (describe_engines(count // ranks, ranks) for count in (enough, workers))
    remedy = format_remedy(trial, None)
    if (hour := smaller.worst_hour) is not None:
        remedy += f" Its worst hour, {hour.describe(smaller.throughput.requests_per_s)}."
    return Verdict("oversized", f"Oversized: {would} would do instead of {now}.", remedy)
