"""Changes of settings that may help with a verdict's finding, for a fleet of equal workers or of pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from understudy.defaults import GOAL
from understudy.engines.kinds.registry import kind_of
from understudy.report.engine_terms import kind_of_run
from understudy.report.handoff_verdicts import find_bottleneck_side
from understudy.report.thresholds import KV_FULL
from understudy.router.kv import KvRouting
from understudy.run.pools import WorkerPool, name_pools
from understudy.workload.arrivals import ClosedLoop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.report.data import ReportData
    from understudy.run.disaggregation import Disaggregation


class Change(NamedTuple):
    """A changed setting: how a reader gives it, and the settings to replay."""

    flag: str
    settings: dict[str, Any]


class Setup(NamedTuple):
    """Settings of the run that a remedy may change."""

    workers: int
    routing: Any
    load: Any
    engine: Any
    """Settings of equal workers; unused with pools."""
    can_add_blocks: bool
    """Whether the number of blocks is given, not derived from a GPU's memory."""
    has_sessions: bool
    pools: tuple[WorkerPool, ...] = ()
    """Pools instead of equal workers."""
    disaggregation: Disaggregation | None = None
    """Hand-offs between the pools."""
    host: Change | None = None
    """Host memory to add; None if the run has tiers or would refuse them."""


def list_changes(rule: str, report: ReportData, setup: Setup) -> Iterator[Change]:
    """Yield the changes that may help with a rule's finding; none that the run already has."""
    is_late = rule in ("overloaded", "goal_missed")
    if rule in ("cache_too_small", "scattered_prefixes", "hot_worker"):
        yield from _list_routings(rule, setup)
    if rule == "cache_too_small" and setup.host is not None:
        yield setup.host
    for part in _list_parts(setup):
        yield from part.list_changes(
            rule, blocks_run_out=setup.can_add_blocks and report.kv.usage_max >= KV_FULL
        )
        if rule == "group_tail_gone":
            yield from part.list_group_changes(can_add_blocks=setup.can_add_blocks)
    if rule == "group_tail_gone" and setup.host is not None:
        yield setup.host
    if is_late:  # more workers before, since they help most, and time may end
        yield from _list_routings(rule, setup)
    if is_late and isinstance(setup.load, ClosedLoop) and setup.load.concurrency > 1:
        fewer = setup.load.concurrency // 2
        yield Change(
            f"--concurrency {fewer}", {"load": msgspec.structs.replace(setup.load, concurrency=fewer)}
        )
    if is_late or rule == "handoff_bottleneck":
        yield from _list_other_splits(setup.pools, find_bottleneck_side(report))
    if rule == "handoff_failures" and setup.disaggregation is not None:
        yield from list_failure_changes(report, setup.disaggregation)


def list_failure_changes(report: ReportData, given: Disaggregation) -> list[Change]:
    """List the changes that may help with failed hand-offs, or with reads after the end of a lease."""
    handoff = report.handoff
    assert handoff is not None
    changes: list[tuple[str, str, Any]] = []
    if not kind_of_run(report).pulls_blocks:
        return []
    if handoff.failed and given.kv_load_failure_policy == "fail":
        changes.append(("--kv-load-failure-policy", "kv_load_failure_policy", "recompute"))
    elif handoff.late_notifications:
        changes += [("--kv-lease-duration", "lease_s", factor * given.lease_s) for factor in (2, 8)]
    return [
        Change(f"{flag} {value}", {"disaggregation": msgspec.structs.replace(given, **{name: value})})
        for flag, name, value in changes
    ]


def list_smaller_fleets(report: ReportData, setup: Setup) -> list[Change]:
    """List smaller fleets that may do: with goals that nearly all requests meet, or nearly idle workers."""
    if not may_be_oversized(report, _count_workers(setup), setup.load):
        return []
    removed = [
        Change(f"without pool {name}", {"pools": (*setup.pools[:i], *setup.pools[i + 1 :])})
        for i, name in enumerate(_name(setup.pools))
        if any(other.role == setup.pools[i].role for other in (*setup.pools[:i], *setup.pools[i + 1 :]))
    ]
    sizes = [
        part.change("workers", size)
        for part in _list_parts(setup)
        for size in dict.fromkeys((1, part.workers // 2))
        if 0 < size < part.workers
    ]
    return [*removed, *sizes]


def may_be_oversized(report: ReportData, workers: int, load: Any) -> bool:
    """Whether nearly all requests meet the goals, or without goals the workers are nearly idle."""
    if workers < 2 or not report.requests.completed or isinstance(load, ClosedLoop):
        return False
    if report.goodput is not None:
        return report.goodput.ratio >= GOAL
    return report.kv.usage_mean * workers <= 0.5 and report.queue_ms.mean <= 0.01 * report.e2e_ms.mean


class _Part(NamedTuple):
    """Equal workers: the whole fleet, or one of its pools."""

    workers: int
    engine: Any
    pools: tuple[WorkerPool, ...]
    number: int

    def change(self, name: str, value: Any, flag: str = "", shown: Any = None) -> Change:
        """Set `workers` or a setting of the engine; `flag` and `shown` are its name and value for the reader."""
        flag, shown = flag or name, value if shown is None else shown
        if not self.pools:
            return Change(_spell(flag, shown), {name: value})
        pool = self.pools[self.number]
        if name == "workers":
            pool = msgspec.structs.replace(pool, workers=value)
        else:
            pool = msgspec.structs.replace(pool, engine=msgspec.structs.replace(pool.engine, **{name: value}))
        pools = (*self.pools[: self.number], pool, *self.pools[self.number + 1 :])
        return Change(f"{flag} {shown} in pool {_name(self.pools)[self.number]}", {"pools": pools})

    def list_changes(self, rule: str, *, blocks_run_out: bool) -> Iterator[Change]:
        """Yield changes of these workers."""
        engine, kind = self.engine, kind_of(self.engine)
        terms = kind.terms
        if rule in ("overloaded", "goal_missed", "cache_too_small", "preemption_storm"):
            blocks = getattr(engine, "num_gpu_blocks", None)
            if blocks_run_out and blocks:
                unit = engine.block_size if kind.sizes_pool_in_tokens else 1
                yield self.change("num_gpu_blocks", 2 * blocks, terms.pool_setting, 2 * blocks * unit)
        if rule in ("overloaded", "goal_missed"):
            for size in (2 * self.workers, 4 * self.workers):
                yield self.change("workers", size)
        if rule in ("goal_missed", "preemption_storm"):
            yield from self._list_fractions(terms.requests_setting, 2)
        if rule == "preemption_storm" and (caution := terms.caution_setting) is not None:
            yield self.change(caution, round(1.5 * getattr(engine, caution), 2))
        if rule in ("goal_missed", "steps_too_long"):
            for part in (2, 4, 16):
                yield from self._list_fractions(terms.step_setting, part)
        if rule == "steps_too_long":
            yield self.change("workers", 2 * self.workers)

    def list_group_changes(self, *, can_add_blocks: bool) -> Iterator[Change]:
        """Yield changes that keep more blocks of windows and states; cached ones are evicted at any usage."""
        if not self.engine.kv_cache_groups:
            return
        if self.engine.prefix_cache_retention_interval is not None:
            yield self.change("prefix_cache_retention_interval", None, shown="none")
        if can_add_blocks:
            for factor in (2, 4):
                yield self.change("num_gpu_blocks", factor * self.engine.num_gpu_blocks)

    def _list_fractions(self, name: str, part: int) -> Iterator[Change]:
        engine = self.engine
        value = getattr(engine, name, None)
        if not value or value < part:
            return
        terms = kind_of(engine).terms
        less, flag = value // part, terms.requests if name == terms.requests_setting else terms.step
        if name == terms.step_setting:
            if terms.step_has_whole_blocks:
                less = max(less // engine.block_size, 1) * engine.block_size
            elif less < (engine.max_num_seqs or 0):
                return
        if less < value:
            yield self.change(name, less, flag.removeprefix("--").replace("-", "_"))


def _spell(flag: str, value: object) -> str:
    """Return the words of a command line; a setting without a flag of its own is given by `--set engine.NAME`."""
    if flag.startswith("set "):
        return f"--{flag}={value}"
    return f"--{flag.replace('_', '-')} {value}"


def _list_parts(setup: Setup) -> list[_Part]:
    if not setup.pools:
        return [_Part(setup.workers, setup.engine, (), 0)]
    return [_Part(pool.workers, pool.engine, setup.pools, i) for i, pool in enumerate(setup.pools)]


def _list_routings(rule: str, setup: Setup) -> Iterator[Change]:
    if _count_workers(setup) < 2:
        return
    names = ["kv", "least_loaded"] if rule in ("overloaded", "goal_missed", "hot_worker") else ["kv"]
    if setup.has_sessions and rule != "hot_worker":
        names.append("session_affinity")
    now = "kv" if isinstance(setup.routing, KvRouting) else setup.routing
    for name in names:
        if name != now:
            yield Change(f"--routing {name}", {"routing": name})


def _list_other_splits(pools: tuple[WorkerPool, ...], side: str | None) -> Iterator[Change]:
    """Yield fleets in which one worker moves between a prefill and a decode pool, to `side` if it is given."""
    names = _name(pools)
    for source, giver in enumerate(pools):
        for target, taker in enumerate(pools):
            if giver.workers < 2 or {giver.role, taker.role} != {"prefill", "decode"}:
                continue
            if side not in (None, taker.role):  # fewer workers on the side of the bottleneck are no remedy
                continue
            moved = list(pools)
            moved[source] = msgspec.structs.replace(giver, workers=giver.workers - 1)
            moved[target] = msgspec.structs.replace(taker, workers=taker.workers + 1)
            flag = (
                f"workers {giver.workers - 1} in pool {names[source]}, {taker.workers + 1} in {names[target]}"
            )
            yield Change(flag, {"pools": tuple(moved)})


def _name(pools: tuple[WorkerPool, ...]) -> list[str]:
    return [name or pool.name for name, pool in zip(name_pools(pools), pools, strict=True)] if pools else []


def _count_workers(setup: Setup) -> int:
    """Return the workers of a run; every data-parallel rank is one."""
    return sum(part.workers * part.engine.data_parallel_size for part in _list_parts(setup))
