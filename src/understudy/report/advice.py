"""Try the remedies of verdicts: replay each, keep those that help, and print what they give."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError
from understudy.report.engine_terms import SGLANG_TERMS, VLLM_TERMS, terms_of
from understudy.report.remedies import ENOUGH, Setup, list_changes, list_smaller_fleets
from understudy.report.text import quantity
from understudy.report.verdict import Verdict
from understudy.report.verdicts import find_verdicts

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.report.report import Report

LIMIT_S = 10.0
"""Default limit of the time for replays of remedies, in s."""
_MIN_GAIN = 0.01
"""Least relative gain (ratios: least difference) of a remedy that helps."""
_CACHE_RULES = ("cache_too_small", "scattered_prefixes")


@dataclass(frozen=True, slots=True)
class Trial:
    """A replayed change of settings and its effect on one measure."""

    change: str
    """Flag with its value, such as --routing kv."""
    measure: str
    before: float
    after: float
    helps: bool


@dataclass(frozen=True, slots=True)
class Advice:
    """Replays of remedies, the time they took, and the verdicts that follow."""

    verdicts: tuple[Verdict, ...]
    trials: tuple[Trial, ...]
    seconds: float
    limit_s: float
    untried: int
    """Remedies that were not replayed, because the limit would have been exceeded."""

    def __str__(self) -> str:
        """Return the number of replays and their time in one sentence."""
        count = len(self.trials)
        text = f"{count} {'remedy' if count == 1 else 'remedies'} replayed in {self.seconds:.1f} s"
        return f"{text}; {self.untried} not tried (limit {self.limit_s:g} s)" if self.untried else text


def advise(
    report: Report,
    setup: Setup,
    replay_with: Callable[[dict[str, Any]], Report],
    *,
    limit_s: float = LIMIT_S,
) -> Report:
    """Replay the remedies of a report's verdicts within `limit_s` seconds; return the report with the advice.

    `replay_with` replays the workload with changed settings: workers, pools, routing, load, or engine settings by name.
    """
    started = time.perf_counter()
    found = find_verdicts(report)
    by_rule = {verdict.rule: list(list_changes(verdict.rule, report, setup)) for verdict in found}
    changes = {change.flag: change for many in by_rule.values() for change in many}
    fewer = list_smaller_fleets(report, setup) if not found else []
    expected_s = report.run.wall_time_s or 0.0
    reports: dict[str, Report] = {}
    untried = 0
    for change in (*changes.values(), *fewer):
        if time.perf_counter() - started + expected_s > limit_s:
            untried += 1
            continue
        before = time.perf_counter()
        try:
            reports[change.flag] = replay_with(change.settings)
        except ConfigError:  # the change contradicts other settings, so it is no remedy for this run
            for many in by_rule.values():
                if change in many:
                    many.remove(change)
            continue
        expected_s = max(expected_s, time.perf_counter() - before)
    trials: dict[tuple[str, str], Trial] = {}
    verdicts = []
    for verdict in found:
        own = [
            _compare(change.flag, verdict.rule, report, reports[change.flag])
            for change in by_rule[verdict.rule]
            if change.flag in reports
        ]
        trials |= {(one.change, one.measure): one for one in own}
        verdicts.append(_advise_on(verdict, own, missing=len(by_rule[verdict.rule]) - len(own)))
    for change in fewer:
        if (one := reports.get(change.flag)) is None:
            continue
        trial = _compare(change.flag, "oversized", report, one)
        trials[trial.change, trial.measure] = trial
        if _is_enough(report, one):
            verdicts.append(_describe_oversized(report, one, trial))
            break
    if not found and not trials and not untried:
        return report
    seconds = time.perf_counter() - started
    advice = Advice(tuple(verdicts), tuple(trials.values()), seconds, limit_s, untried)
    return replace(report, advice=advice)


def _advise_on(verdict: Verdict, trials: list[Trial], missing: int) -> Verdict:
    """Return the verdict with the remedies that help, the best first; as it is if none was replayed."""
    if not trials:
        return verdict
    helpful = sorted((one for one in trials if one.helps), key=_gain, reverse=True)
    remedy = " ".join(f"{_format_trial(one)} (replayed)." for one in helpful)
    if not helpful:
        remedy = "None of the replayed remedies helps."
    if missing:
        remedy += f" {missing} were not replayed."
    return replace(verdict, remedy=remedy)


def _is_enough(report: Report, smaller: Report) -> bool:
    if report.goodput is not None and smaller.goodput is not None:
        return smaller.goodput.ratio >= ENOUGH
    return smaller.requests.completed == report.requests.completed and all(
        ours <= 1.05 * theirs
        for ours, theirs in (
            (smaller.e2e_ms.mean, report.e2e_ms.mean),
            (smaller.ttft_ms.p99, report.ttft_ms.p99),
        )
    )


def _describe_oversized(report: Report, smaller: Report, trial: Trial) -> Verdict:
    workers, enough = report.columns.num_workers, smaller.columns.num_workers
    would = "one worker would do" if enough == 1 else f"{enough:,} workers would do"
    return Verdict(
        "oversized", f"Oversized: {would} instead of {workers:,}.", f"{_format_trial(trial)} (replayed)."
    )


def _compare(flag: str, rule: str, report: Report, other: Report) -> Trial:
    """Compare two reports by the measure of a rule: SLO attainment with goals, else hits, preemptions or TTFT."""
    if report.goodput is not None and other.goodput is not None:
        name, before, after = "attainment", report.goodput.ratio, other.goodput.ratio
    elif rule in _CACHE_RULES or (rule == "group_tail_gone" and report.tiers is None):
        name = "prefix hits"
        before, after = report.prefix_hit_ratio.first_admission, other.prefix_hit_ratio.first_admission
    elif rule == "preemption_storm":
        name, before, after = (
            terms_of(report).requeued,
            float(report.preemptions),
            float(other.preemptions),
        )
    else:
        name, before, after = "mean TTFT", report.ttft_ms.mean, other.ttft_ms.mean
    lost = other.requests.completed < report.requests.completed
    trial = Trial(flag, name, before, after, helps=False)
    return replace(trial, helps=not lost and _gain(trial) >= _MIN_GAIN)


def _gain(trial: Trial) -> float:
    if trial.measure in ("attainment", "prefix hits"):
        return trial.after - trial.before
    return (trial.before - trial.after) / trial.before if trial.before else 0.0


def _format_trial(trial: Trial) -> str:
    if trial.measure in ("attainment", "prefix hits"):
        values = f"{quantity(trial.before, 'ratio')} → {quantity(trial.after, 'ratio')}"
    elif trial.measure in (VLLM_TERMS.requeued, SGLANG_TERMS.requeued):
        values = f"{trial.before:,.0f} → {trial.after:,.0f}"
    else:
        values = f"{trial.before:,.0f} → {trial.after:,.0f} ms"
    return f"{trial.change}: {trial.measure} {values}"
