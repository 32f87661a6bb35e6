"""Advice of `understudy replay` on prefill and decode workers: other splits, rules and links, replayed."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from understudy.defaults import GOAL
from understudy.report.advice import Advice
from understudy.report.advise import describe_oversized, is_enough, lacks_capacity
from understudy.report.engine_terms import kind_of_run
from understudy.report.handoff_verdicts import busiest_link, find_bottleneck_side, name_flag
from understudy.report.remedies import list_failure_changes, may_be_oversized
from understudy.report.replay_budget import LIMIT_S, ReplayBudget
from understudy.report.trial import Trial, compare, compare_attainment, format_failure, format_remedy
from understudy.report.verdict import Verdict
from understudy.report.verdicts import find_verdicts
from understudy.text import quantity

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from understudy.report import Report
    from understudy.run.disaggregation import Disaggregation
    from understudy.run.settings import ReplaySettings
    from understudy.workload import Workload

GAIN, ATTAINMENT_GAIN = 0.05, 0.01
"""Least gain of a change that helps: share of the mean E2E, or attainment."""
RULES = ("uncached:2048", "uncached:512", "uncached:8192")
OTHERS_FASTER = Verdict("handoff_split", "Other settings of the same workers are faster.", "")
LACKING = ("overloaded", "goal_missed")
OWN_KINDS = {"link": ("handoff_link",), "more": LACKING}
"""Rules whose verdicts a kind of change belongs to; the others belong to the first verdict on hand-offs."""
FINDINGS = {
    "handoff_bottleneck": "the bottleneck",
    "handoff_link": "the link",
    "overloaded": "the overload",
    "goal_missed": "the missed objective",
}
"""Findings of the rules that may have remedies here, in words."""


class Change(NamedTuple):
    """A change of a fleet's settings; None instead of `settings`: workers without roles."""

    kind: str
    """link, rule, roles, split, more, fewer or failure; of each kind, a verdict names the best."""
    flag: str
    name: str
    settings: Disaggregation | None


class Tried(NamedTuple):
    """A replayed change, its effect, and how it reads."""

    change: Change
    trial: Trial
    gain: float
    text: str


def try_splits(
    report: Report, settings: ReplaySettings, workload: Workload, args: argparse.Namespace
) -> Report:
    """Replay other settings of prefill and decode workers; nothing is written by those replays."""
    from understudy.api import replay
    from understudy.cli.slo import read_slo
    from understudy.run.options import Execution

    given = settings.disaggregation
    assert given is not None

    def replay_with(split: Disaggregation | None) -> Report:
        return replay(
            workload,
            settings.engine,
            workers=settings.workers if split is not None else _count_workers(given),
            routing=settings.policy,
            tiers=settings.tiers,
            ranks=settings.ranks,
            seed=settings.seed,
            load=settings.load,
            max_tokens=args.max_tokens,
            slo=read_slo(args),
            disaggregation=split,
            execution=Execution(threads=args.threads, fast_forward=not args.no_fast_forward),
        )

    return replace(report, advice=advise_on_split(report, given, replay_with))


def advise_on_split(
    report: Report,
    given: Disaggregation,
    replay_with: Callable[[Disaggregation | None], Report],
    *,
    limit_s: float = LIMIT_S,
) -> Advice | None:
    """Replay changes of a split; return verdicts with those that help, the best first.

    None if the numbers of workers are not given. `limit_s` limits the sum of estimated times. If a split helps, the
    next one in its direction is replayed too.
    """
    if given.prefill_workers is None or given.decode_workers is None:
        return None
    started = time.perf_counter()
    found = find_verdicts(report)
    changes = list(_list_changes(report, given, found))
    tried: list[Tried] = []
    failures: list[Tried] = []
    untried = 0
    budget = ReplayBudget(report, limit_s)

    def try_change(change: Change) -> Report | None:
        """Replay a change; None if it contradicts other settings, or a user's class fails with it."""
        try:
            return replay_with(change.settings)
        except Exception:  # no remedy for this run, whose report is complete
            return None

    while changes:
        change = changes.pop(0)
        if not budget.take():
            untried += 1
            continue
        if (other := try_change(change)) is None:
            continue
        if change.kind == "failure":
            trial = compare(change.flag, "handoff_failures", report, other)
            effect = format_remedy(trial, compare_attainment(change.flag, report, other))
            failures.append(Tried(change, trial, trial.gain, effect))
            continue
        tried.append(_compare(change, report, other))
        is_best = all(tried[-1].gain > one.gain for one in tried[:-1] if one.change.kind == "split")
        if change.kind == "split" and tried[-1].trial.helps and is_best:
            changes[:0] = _go_further(change, given)
    verdicts = [_advise_on_failures(one, failures) for one in _write_verdicts(found, tried)]
    trials = [one.trial for one in (*failures, *tried)]
    smaller = _list_smaller(report, given) if not lacks_capacity(found) else []
    while smaller and budget.take():
        change = smaller.pop(0)
        if (other := try_change(change)) is None:
            continue
        trial = replace(compare(change.flag, "oversized", report, other), helps=is_enough(report, other))
        trials.append(trial)
        if trial.helps:
            verdicts.insert(0, describe_oversized(report, other, trial))
            smaller = []
    untried += len(smaller)
    seconds = time.perf_counter() - started
    return Advice(tuple(verdicts), tuple(trials), seconds, budget.replay_s, limit_s, untried)


def _list_changes(report: Report, given: Disaggregation, found: tuple[Verdict, ...]) -> Iterator[Change]:
    """Yield changes, the likeliest remedies first."""
    handoff = report.handoff
    assert handoff is not None
    assert given.prefill_workers is not None
    assert given.decode_workers is not None
    rules = {verdict.rule for verdict in found}
    link = busiest_link(handoff)
    if "handoff_link" in rules and link is not None:
        field = "backend_gbps" if link.name == "backend" else "link_gbps"
        flag = f"{name_flag(link)} {2 * link.bandwidth_gbps:g}"
        yield Change("link", flag, flag, structs.replace(given, **{field: 2 * link.bandwidth_gbps}))
    if "handoff_failures" in rules:
        for one in list_failure_changes(report, given):
            yield Change("failure", one.flag, one.flag, one.settings["disaggregation"])
    has_rules = isinstance(given.rule, str) and kind_of_run(report).pulls_blocks
    others = [rule for rule in RULES if rule != given.rule] if has_rules else []
    yield from (_set_rule(given, rule) for rule in others[:1])
    total = _count_workers(given)
    yield Change("roles", f"--workers {total}", f"{total} workers without roles", None)
    waits = handoff.ttft_parts_ms
    direction = 1 if waits["prefill queue"] > waits["decode queue"] + waits["polls"] else -1
    side = find_bottleneck_side(report)
    if side is not None:  # fewer workers on the side of the bottleneck are no remedy
        direction = 1 if side == "prefill" else -1
    splits = (_move(given, direction), _move(given, -direction) if side is None else None)
    yield from (split for split in splits if split is not None)
    if lacks_capacity(found):
        prefill, decode = (2, 1) if direction == 1 else (1, 2)
        yield _resize(given, "more", prefill * given.prefill_workers, decode * given.decode_workers)
    yield from (_set_rule(given, rule) for rule in others[1:])


def _list_smaller(report: Report, given: Disaggregation) -> list[Change]:
    """List fleets with fewer workers of both roles that may do, the smallest first."""
    prefill, decode = given.prefill_workers or 0, given.decode_workers or 0
    if not may_be_oversized(report, prefill + decode, report.run.load):
        return []
    sizes = {(1, 1), (-(-prefill // 2), -(-decode // 2))} - {(prefill, decode)}
    return [_resize(given, "fewer", *size) for size in sorted(sizes)]


def _move(given: Disaggregation, by: int) -> Change | None:
    """Make `by` decode workers prefill workers; None if a pool would be empty."""
    assert given.prefill_workers is not None
    assert given.decode_workers is not None
    prefill, decode = given.prefill_workers + by, given.decode_workers - by
    if min(prefill, decode) < 1:
        return None
    return _resize(given, "split", prefill, decode)


def _resize(given: Disaggregation, kind: str, prefill: int, decode: int) -> Change:
    return Change(
        kind,
        f"--prefill-workers {prefill} --decode-workers {decode}",
        f"{given.prefill_workers}P+{given.decode_workers}D → {prefill}P+{decode}D",
        structs.replace(given, prefill_workers=prefill, decode_workers=decode),
    )


def _set_rule(given: Disaggregation, rule: str) -> Change:
    flag = f"--disaggregation {rule}"
    return Change("rule", flag, flag, structs.replace(given, rule=rule))


def _go_further(change: Change, given: Disaggregation) -> list[Change]:
    """Move one worker more in the direction of a split; empty if a pool would be empty."""
    assert change.settings is not None
    by = (change.settings.prefill_workers or 0) - (given.prefill_workers or 0)
    further = _move(given, by + (1 if by > 0 else -1))
    return [] if further is None else [further]


def _compare(change: Change, report: Report, other: Report) -> Tried:
    """Compare two reports: by attainment if there are goals that requests miss, else by the mean E2E."""
    is_lossless = other.requests.completed >= report.requests.completed
    ours, theirs = report.goodput, other.goodput
    if ours is not None and theirs is not None:
        is_lossless &= theirs.ratio >= ours.ratio - ATTAINMENT_GAIN
    if ours is not None and theirs is not None and ours.ratio < GOAL:
        measure, before, after = "attainment", ours.ratio, theirs.ratio
        gain, least = after - before, ATTAINMENT_GAIN
        values = f"{quantity(before, 'ratio')} → {quantity(after, 'ratio')}"
    else:
        measure, before, after = "mean E2E", report.e2e_ms.mean, other.e2e_ms.mean
        gain, least = (before - after) / before if before else 0.0, GAIN
        values = f"{before:,.0f} → {after:,.0f} ms"
    # A rule that hands nothing off makes prefill workers idle: a fleet without roles is better.
    is_used = other.handoff is None or other.handoff.remote > 0
    trial = Trial(change.flag, measure, before, after, helps=is_lossless and is_used and gain >= least)
    text = (
        f"{change.name}: {measure} {values}, TTFT p99 {report.ttft_ms.p99:,.0f} → {other.ttft_ms.p99:,.0f} ms, "
        f"mean ITL {report.itl_ms.mean:,.1f} → {other.itl_ms.mean:,.1f} ms (replayed)."
    )
    return Tried(change, trial, gain, text)


def _write_verdicts(found: tuple[Verdict, ...], tried: list[Tried]) -> tuple[Verdict, ...]:
    """Give each verdict the best remedy of each kind that belongs to it, by effect; those on hand-offs come first."""
    best: dict[str, Tried] = {}
    for one in sorted((one for one in tried if one.trial.helps), key=lambda one: -one.gain):
        best.setdefault(one.change.kind, one)
    ours = [verdict for verdict in found if verdict.rule in ("handoff_bottleneck", "handoff_link")]
    ours += [verdict for verdict in found if verdict.rule in LACKING]
    others = [verdict for verdict in found if verdict not in ours]
    if not ours and best:
        ours = [OTHERS_FASTER]
    own: dict[str, list[Tried]] = {verdict.rule: [] for verdict in ours}
    for one in best.values():
        claims = [rule for rule in OWN_KINDS.get(one.change.kind, ()) if rule in own]
        own[claims[0] if claims else ours[0].rule].append(one)
    handoffs = [rule for rule in own if rule.startswith("handoff")]
    if len(handoffs) > 1 and _find_gain(own[handoffs[1]]) > _find_gain(own[handoffs[0]]):
        ours[:2] = reversed(ours[:2])
    return (*(_write_remedies(verdict, own, tried) for verdict in ours), *others)


def _advise_on_failures(verdict: Verdict, failures: list[Tried]) -> Verdict:
    """Replace the remedy for failed hand-offs by the best replayed one that helps."""
    helpful = [one for one in failures if one.trial.helps]
    if verdict.rule != "handoff_failures" or not helpful:
        return verdict
    return replace(verdict, remedy=max(helpful, key=lambda one: one.gain).text)


def _find_gain(remedies: list[Tried]) -> float:
    return max((one.gain for one in remedies), default=0.0)


def _write_remedies(verdict: Verdict, own: dict[str, list[Tried]], tried: list[Tried]) -> Verdict:
    """Write the remedies of a verdict; without any, name the verdicts that have some, else what was replayed."""
    if remedies := own[verdict.rule]:
        return replace(verdict, remedy=" ".join(one.text for one in remedies))
    if not tried:
        return verdict
    if helpful := [FINDINGS[rule] for rule, remedies in own.items() if remedies]:
        names = " and ".join(filter(None, (", ".join(helpful[:-1]), helpful[-1])))
        return replace(verdict, remedy=f"The remedies for {names} help with it too.")
    trials = [one.trial for one in tried]
    least = ATTAINMENT_GAIN if trials[0].measure == "attainment" else GAIN
    return replace(verdict, remedy=format_failure(trials, least))


def _count_workers(given: Disaggregation) -> int:
    return (given.prefill_workers or 0) + (given.decode_workers or 0)
