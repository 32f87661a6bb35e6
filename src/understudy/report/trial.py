"""`Trial`: a replayed change of settings, and its effect on the measure that a rule judges by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from understudy.defaults import GOAL
from understudy.engines.kinds.registry import list_kinds
from understudy.report.engine_terms import terms_of
from understudy.report.latency_verdicts import compute_late_gaps
from understudy.report.noise import ATTAINMENT, TTFT, is_above_noise
from understudy.report.verdicts import compute_balance
from understudy.text import quantity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.report.data import ReportData

_MIN_GAIN = 0.01
"""Least relative gain (ratios: least difference) of a remedy that helps."""
_MAX_SLOWDOWN = 1.05
"""Mean E2E up to which a remedy is no loss, without goals."""
_HIT_RULES = ("cache_too_small", "scattered_prefixes", "group_tail_gone")
_SHARES = ("attainment", "prefix hits", "late gaps")
_MORE_IS_BETTER = ("attainment", "prefix hits")
_BAD_HANDOFFS = "failed or late hand-offs"


@dataclass(frozen=True, slots=True)
class Trial:
    """A replayed change of settings and its effect on one measure."""

    change: str
    """Flag with its value, such as --routing kv."""
    measure: str
    before: float
    after: float
    helps: bool

    @property
    def gain(self) -> float:
        """Relative gain; for shares the difference."""
        if self.measure in _SHARES:
            gain = self.after - self.before
            return gain if self.measure in _MORE_IS_BETTER else -gain
        return (self.before - self.after) / self.before if self.before else 0.0

    def __str__(self) -> str:
        """Return the change, the measure, and its values before and after."""
        return f"{self.change}: {self._format_effect()}"

    def _format_effect(self) -> str:
        if self.measure in _SHARES:
            values = f"{quantity(self.before, 'ratio')} → {quantity(self.after, 'ratio')}"
        elif self.measure in {_BAD_HANDOFFS, *(kind.terms.requeued for kind in list_kinds())}:
            values = f"{self.before:,.0f} → {self.after:,.0f}"
        elif self.measure == BUSIEST:
            values = f"{self.before:.1f}× → {self.after:.1f}× of the mean tokens"
        else:
            values = f"{self.before:,.0f} → {self.after:,.0f} ms"
        return f"{self.measure} {values}"


BUSIEST = "busiest worker"


def compare(flag: str, rule: str, report: ReportData, other: ReportData) -> Trial:
    """Compare two reports by the measure of a rule; a change that loses requests, goals or time does not help."""
    can_attain_more = rule == "oversized" or (report.goodput is not None and report.goodput.ratio < GOAL)
    if rule == "overloaded" and report.goodput is not None and other.goodput is not None:
        # A goal may be out of reach of any change.
        can_attain_more &= report.goodput.ratio != other.goodput.ratio
    name, before = _measure(rule, report, by_goals=can_attain_more)
    trial = Trial(flag, name, before, _measure(rule, other, by_goals=can_attain_more)[1], helps=False)
    is_clear = trial.gain >= _MIN_GAIN and _is_above_noise(name, report, other)
    return replace(trial, helps=is_clear and not _is_worse(rule, report, other))


def _is_above_noise(name: str, report: ReportData, other: ReportData) -> bool:
    """Whether a measure of requests differs by more than its noise; others are sums of a whole run."""
    measure = {"attainment": ATTAINMENT, "mean TTFT": TTFT}.get(name)
    return measure is None or is_above_noise(report.groups, other.groups, measure)


def compare_attainment(flag: str, report: ReportData, other: ReportData) -> Trial | None:
    """Compare two reports by their SLO attainment; None without goals."""
    if report.goodput is None or other.goodput is None:
        return None
    return Trial(flag, "attainment", report.goodput.ratio, other.goodput.ratio, helps=False)


def format_remedy(trial: Trial, attainment: Trial | None) -> str:
    """Return a sentence on a change with its effect, and its effect on the goals if there are any."""
    more = (
        ""
        if attainment is None or attainment.measure == trial.measure
        else f", {attainment._format_effect()}"
    )
    return f"{trial}{more} (replayed)."


def format_failure(trials: Sequence[Trial], least: float = _MIN_GAIN) -> str:
    """Return a sentence that names the measure of trials and the changes that did not gain `least` in it."""
    values: dict[str, list[str]] = {}  # of each flag
    for trial in trials:
        flag, _, value = trial.change.partition(" ")
        is_one = flag.startswith("--") and " " not in value
        values.setdefault(flag if is_one else trial.change, []).extend([value] * is_one)
    replayed = (f"{flag} {' or '.join(many)}".rstrip() for flag, many in values.items())
    measure = trials[0].measure
    aim = f"{'raises' if measure in _MORE_IS_BETTER else 'lowers'} {measure}"
    if measure == BUSIEST:
        aim = "lowers the load of the busiest worker"
    amount = f"{100 * least:g} {'point' if measure in _SHARES else '%'}"
    losses = (
        " above the noise and without losses elsewhere"
        if any(trial.gain >= least for trial in trials)
        else ""
    )
    return f"No replayed change {aim} by {amount} or more{losses}: {', '.join(replayed)}."


def _measure(rule: str, report: ReportData, *, by_goals: bool) -> tuple[str, float]:
    """Return name and value of what a rule judges by: its own measure if it has one, else goals or TTFT."""
    if rule in _HIT_RULES:
        return "prefix hits", report.prefix_hit_ratio.first_admission
    if rule == "hot_worker":
        return BUSIEST, compute_balance(report.columns)[1]
    if rule == "steps_too_long" and report.goodput is not None and report.goodput.slo.itl_ms is not None:
        return "late gaps", compute_late_gaps(report.columns, report.goodput.slo.itl_ms)
    if rule == "handoff_failures" and report.handoff is not None:
        return _BAD_HANDOFFS, float(report.handoff.failed + report.handoff.late_notifications)
    if rule == "preemption_storm":
        return terms_of(report).requeued, float(report.preemptions)
    if by_goals and report.goodput is not None:
        return "attainment", report.goodput.ratio
    return "mean TTFT", report.ttft_ms.mean


def _is_worse(rule: str, report: ReportData, other: ReportData) -> bool:
    """Whether the other run completes fewer requests, or attains less; without goals: is slower by 5 %.

    A request that failed has no latency: without failures the mean is that of more requests.
    """
    if other.requests.completed < report.requests.completed:
        return True
    if report.goodput is not None and other.goodput is not None:
        return other.goodput.ratio < report.goodput.ratio - _MIN_GAIN
    return rule != "handoff_failures" and other.e2e_ms.mean > _MAX_SLOWDOWN * report.e2e_ms.mean
