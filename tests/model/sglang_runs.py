"""Runs the model of SGLang's scheduler over a scenario, and gives the lines of a recording."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from model.sglang_base import Log, OutOfMemoryError
from model.sglang_hybrid import StateScheduler, WindowScheduler
from model.sglang_parts import PartTree
from model.sglang_scheduler import Scheduler
from model.sglang_sides import DecodeSide, PrefillSide, Side, SideLog

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model.sglang_requests import Batch, Request
    from understudy.conformance.sglang_recording import SglangScenario, SglangScenarioConfig


def make_scheduler(config: SglangScenarioConfig) -> Scheduler:
    if config.role is not None:
        return (PrefillSide if config.role == "prefill" else DecodeSide)(config)
    if config.swa_window is not None:
        return WindowScheduler(config)
    return Scheduler(config) if config.mamba_slots is None else StateScheduler(config)


def run_model(scenario: SglangScenario) -> Iterator[dict[str, Any]]:
    """Yield a line per step; ends early where SGLang runs out of memory."""
    scheduler = make_scheduler(scenario.config)
    overlap = scenario.config.overlap
    to_come = list(enumerate(scenario.requests))
    aborts = list(scenario.aborts)
    ended: set[str] = set()
    outstanding: Batch | None = None
    for step in range(scenario.max_steps):
        if len(ended) == len(scenario.requests):
            return
        scheduler.log = Log()
        if isinstance(scheduler, Side):
            scheduler.step, scheduler.side_log = step, SideLog()
        for index, request in [one for one in to_come if one[1].arrival_step <= step]:
            scheduler.receive(index, request)
            to_come.remove((index, request))
        for abort in [one for one in aborts if one.step <= step]:
            scheduler.abort(lambda one, named=abort.id: named == "*" or one.name.startswith(named))  # type: ignore[misc]
            aborts.remove(abort)
        scheduler.outstanding = outstanding if overlap else None
        try:
            batch = scheduler.schedule()
        except OutOfMemoryError:
            return
        before = scheduler.free()
        chunked = scheduler.chunked.name if scheduler.chunked is not None else None
        due = outstanding if overlap else batch
        outstanding = batch if overlap else None
        scheduler.outstanding = None
        if due is not None:
            scheduler.process(due)
        scheduler.end_iteration(idle=due is None and outstanding is None)
        ended.update(scheduler.log.finished, scheduler.log.aborted)
        describe = describe_side if isinstance(scheduler, Side) else describe_step
        yield {"step": step, **describe(scheduler, batch, before, chunked)}  # type: ignore[arg-type]


def names(requests: list[Request]) -> list[str]:
    return [request.name for request in requests]


def scheduled(batch: Batch | None) -> dict[str, Any]:
    rows = batch.rows if batch is not None else []
    return {"mode": batch and batch.mode, "scheduled": {row.request.name: row.tokens for row in rows}}


def heads(scheduler: Scheduler) -> dict[str, Any]:
    tree = scheduler.tree
    first = [tree.place(node) for node in tree.leaves()[:4]] if scheduler.cache else []
    return {"nodes": len(tree.nodes()), "evict_head": first}


def describe_step(
    scheduler: Scheduler, batch: Batch | None, before: int, chunked: str | None
) -> dict[str, Any]:
    log = scheduler.log
    prefills = batch is not None and batch.mode != "decode"
    line = {
        **scheduled(batch),
        "new": log.new,
        "resumed": log.resumed,
        "cached": log.cached,
        "chunked": chunked if prefills else None,
        "avail_after_schedule": before,
        "retracted": log.retracted,
        "finished": log.finished,
        "aborted": log.aborted,
        "running": names(scheduler.running),
        "batch_is_full": scheduler.full,
        "waiting": len(scheduler.waiting),
        "waiting_head": names(scheduler.waiting)[:4],
        "new_token_ratio": scheduler.ratio,
        **describe_pools(scheduler),
        "kv_events": scheduler.tree.take_events(),
    }
    if scheduler.c.enable_priority_scheduling:
        line["preempted"] = log.preempted
    return line


def describe_pools(scheduler: Scheduler) -> dict[str, Any]:
    tree = scheduler.tree
    if not isinstance(tree, PartTree):
        sums = {"avail": tree.avail, "evictable": tree.evictable, "protected": tree.protected}
        return {**sums, **heads(scheduler)}
    evictable, locked = tree.sums()
    if isinstance(scheduler, StateScheduler):
        return {
            "avail": tree.avail,
            "mamba_free": tree.free,
            "mamba_evictable": evictable,
            "mamba_protected": locked,
            "full_evictable": tree.evictable,
            "full_protected": tree.protected,
            **heads(scheduler),
            "mamba_evict_head": tree.head(),
        }
    return {
        "avail": scheduler.free(),
        "avail_full": tree.avail,
        "avail_swa": tree.free,
        "full_evictable": tree.evictable,
        "swa_evictable": evictable,
        "full_protected": tree.protected,
        "swa_protected": locked,
        "swa_evicted": {one.name: one.window_begin for one in scheduler.running if one.has_slot},
        **heads(scheduler),
        "swa_evict_head": tree.head(),
    }


def describe_side(side: Side, batch: Batch | None, before: int, chunked: str | None) -> dict[str, Any]:
    log, moves = side.log, side.side_log
    line = scheduled(batch)
    if isinstance(side, PrefillSide):
        line |= {
            "new": log.new,
            "cached": log.cached,
            "chunked": chunked if batch else None,
            "sent": moves.sent,
        }
    else:
        line |= {"resumed": moves.resumed, "allocated": moves.allocated, "arrived": moves.arrived}
        line |= {"joined": moves.joined, "retracted": log.retracted}
    line |= {
        "avail_after_schedule": before,
        "finished": log.finished,
        "aborted": log.aborted,
        "queue": names(side.queue),
        "waiting": names(side.waiting),
        "moving": names(side.moving),
    }
    if isinstance(side, PrefillSide):
        line["batch_is_full"] = side.full
    else:
        line |= {"held": names(side.held), "retracted_queue": names(side.retracted)}
        line |= {"running": names(side.running), "new_token_ratio": side.ratio}
    if isinstance(side, DecodeSide) and side.host is not None:
        line["host_avail"] = side.host
    line |= {"slots": side.slots, "buffers": side.buffers}
    return {**line, **describe_pools(side), "kv_events": side.tree.take_events()}
