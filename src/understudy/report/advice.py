"""Try the remedies of verdicts: replay each, keep those that help, and print what they give."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from understudy.engines.sglang_config import SglangConfig
from understudy.errors import ConfigError
from understudy.report.engine_terms import SGLANG_TERMS, VLLM_TERMS, terms_of
from understudy.report.text import quantity
from understudy.report.verdict import Verdict
from understudy.report.verdicts import find_verdicts
from understudy.router.kv import KvRouting
from understudy.workload.arrivals import ClosedLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from understudy.report.report import Report

LIMIT_S = 10.0
"""Default limit of the time for replays of remedies, in s."""
_MIN_GAIN = 0.01
"""Least relative gain (ratios: least difference) of a remedy that helps."""
_ENOUGH = 0.99
"""SLO attainment with which a fleet may be oversized."""
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


class Setup(NamedTuple):
    """Settings of the run that a remedy may change; None where it may not."""

    workers: int
    routing: Any
    load: Any
    engine: Any
    can_add_blocks: bool
    has_sessions: bool


class _Change(NamedTuple):
    flag: str
    settings: dict[str, Any]


def advise(
    report: Report,
    setup: Setup,
    replay_with: Callable[[dict[str, Any]], Report],
    *,
    limit_s: float = LIMIT_S,
) -> Report:
    """Replay the remedies of a report's verdicts within `limit_s` seconds; return the report with the advice.

    `replay_with` replays the workload with changed settings: workers, routing, load, or engine settings by name.
    """
    started = time.perf_counter()
    found = find_verdicts(report)
    by_rule = {verdict.rule: list(_list_changes(verdict.rule, report, setup)) for verdict in found}
    changes = {change.flag: change for many in by_rule.values() for change in many}
    fewer = _list_smaller_fleets(report, setup) if not found else []
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


def _list_changes(rule: str, report: Report, setup: Setup) -> Iterator[_Change]:
    """Yield the changes that may help with a rule's finding; none that the run already has."""
    if rule in ("overloaded", "goal_missed", "cache_too_small", "scattered_prefixes", "hot_worker"):
        yield from _list_routings(rule, setup)
    if rule in ("overloaded", "goal_missed", "cache_too_small", "preemption_storm"):
        blocks = getattr(setup.engine, "num_gpu_blocks", None)
        if setup.can_add_blocks and blocks and report.kv.usage_max >= 0.95:
            flag = f"--num-gpu-blocks {2 * blocks}"
            if isinstance(setup.engine, SglangConfig):
                flag = f"--max-total-tokens {2 * blocks * setup.engine.block_size}"
            yield _Change(flag, {"num_gpu_blocks": 2 * blocks})
    if rule in ("overloaded", "goal_missed"):
        for size in (2 * setup.workers, 4 * setup.workers):
            yield _Change(f"--workers {size}", {"workers": size})
        if isinstance(setup.load, ClosedLoop) and setup.load.concurrency > 1:
            fewer = setup.load.concurrency // 2
            load = {"load": _with(setup.load, concurrency=fewer)}
            yield _Change(f"--concurrency {fewer}", load)
    if rule in ("goal_missed", "preemption_storm"):
        yield from _list_halves(setup, "max_num_seqs")
    if rule == "preemption_storm" and isinstance(setup.engine, SglangConfig):
        factor = round(1.5 * setup.engine.schedule_conservativeness, 2)
        yield _Change(f"--schedule-conservativeness {factor:g}", {"schedule_conservativeness": factor})
    if rule in ("goal_missed", "steps_too_long"):
        is_sglang = isinstance(setup.engine, SglangConfig)
        yield from _list_halves(setup, "chunked_prefill_size" if is_sglang else "max_num_batched_tokens")


def _list_routings(rule: str, setup: Setup) -> Iterator[_Change]:
    if setup.workers < 2:
        return
    names = ["kv", "least_loaded"] if rule in ("overloaded", "goal_missed", "hot_worker") else ["kv"]
    if setup.has_sessions and rule != "hot_worker":
        names.append("session_affinity")
    now = "kv" if isinstance(setup.routing, KvRouting) else setup.routing
    for name in names:
        if name != now:
            yield _Change(f"--routing {name}", {"routing": name})


def _list_halves(setup: Setup, name: str) -> Iterator[_Change]:
    engine = setup.engine
    value = getattr(engine, name, None)
    if not value or value <= 1:
        return
    half, flag = value // 2, name
    if name == "max_num_batched_tokens" and half < (engine.max_num_seqs or 0):
        return
    if name == "chunked_prefill_size":
        half = max(half // engine.block_size, 1) * engine.block_size
    elif isinstance(engine, SglangConfig):
        flag = "max_running_requests"
    if half < value:
        yield _Change(f"--{flag.replace('_', '-')} {half}", {name: half})


def _list_smaller_fleets(report: Report, setup: Setup) -> list[_Change]:
    """List smaller fleets that may do: with goals that nearly all requests meet, or nearly idle workers."""
    workers = setup.workers
    if workers < 2 or not report.requests.completed or isinstance(setup.load, ClosedLoop):
        return []
    if report.goodput is not None:
        may_do = report.goodput.ratio >= _ENOUGH
    else:
        may_do = report.kv.usage_mean * workers <= 0.5 and report.queue_ms.mean <= 0.01 * report.e2e_ms.mean
    sizes = dict.fromkeys((1, workers // 2)) if may_do else ()
    return [_Change(f"--workers {size}", {"workers": size}) for size in sizes]


def _is_enough(report: Report, smaller: Report) -> bool:
    if report.goodput is not None and smaller.goodput is not None:
        return smaller.goodput.ratio >= _ENOUGH
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
    elif rule in _CACHE_RULES:
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


def _with(struct: Any, **changes: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(struct, **changes)
