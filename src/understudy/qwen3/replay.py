"""`understudy replay --engine qwen3`: replay a trace on the real engine's twin, on one worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.clock import ScriptedClock
from understudy.errors import ConfigError
from understudy.kv import KvLayout
from understudy.online import prompt_of
from understudy.qwen3.limits import SchedulerConfig
from understudy.qwen3.request import Request
from understudy.qwen3.runner import run_workload
from understudy.qwen3.twin import build_twin
from understudy.report import Report
from understudy.run.digest import digests
from understudy.run.facts import RunFacts, TimeFacts
from understudy.run.timeline import FinishReason, Status, Timeline
from understudy.timing.recorded.load import load_of_row
from understudy.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.qwen3.engine import Engine
    from understudy.qwen3.runner import RunRecord
    from understudy.report import Slo
    from understudy.timing.recorded.fit import FittedStepTime
    from understudy.timing.recorded.record import Record
    from understudy.workload import Workload


@dataclass(frozen=True, slots=True)
class TwinOptions:
    """Options of the twin; defaults are those of the recorded engine."""

    num_blocks: int | None = None
    block_size: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int = 40960
    prefix_caching: bool = True
    host_blocks: int | None = None
    arrival_rate_scale: float = 1.0

    def resolve_sizes(self, about: dict[str, Any]) -> dict[str, int]:
        """Return all sizes, given or recorded. ConfigError names one that is neither."""
        sizes = {}
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            value = about.get(name) if value is None else value
            if not isinstance(value, int):
                raise ConfigError(f"{name} is neither given nor in the record of steps; give it")
            sizes[name] = value
        return sizes


def replay_twin(
    workload: Workload,
    name: str,
    record: Record,
    options: TwinOptions | None = None,
    *,
    slo: Slo | None = None,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Replay open loop; a session's next turn follows the end of the previous. ConfigError names a wrong option."""
    options = TwinOptions() if options is None else options
    if not workload.has_arrivals:
        raise ConfigError(
            "--engine qwen3 needs timestamps, and the workload has none; give a trace with timestamps"
        )
    sizes = options.resolve_sizes(record.about)
    host = None
    if options.host_blocks is not None:
        if record.link is None:
            raise ConfigError("host_blocks: the record has no link times; record it with --host-blocks")
        host = (options.host_blocks, record.link)
    workload = workload.normalised().scale_arrival_rate(options.arrival_rate_scale)
    clock, time = ScriptedClock(), record.fit()
    config = SchedulerConfig(
        sizes["max_num_batched_tokens"],
        min(sizes["max_num_seqs"], sizes["max_num_batched_tokens"]),
        options.max_model_len,
    )
    engine = build_twin(
        config,
        sizes["num_blocks"] + 1,  # one is padding
        KvLayout(sizes["block_size"], 1, 1, 1),
        time,
        clock,
        prefix_caching=options.prefix_caching,
        host=host,
    )
    try:
        run = _run(engine, workload, clock, progress)
        timeline = _timeline(workload, run, engine, sizes)
    finally:
        engine.close()
    facts = RunFacts(
        understudy=__version__,
        **workload.describe(name),
        workers=1,
        engine={
            "kind": "qwen3 twin",
            "recorded": record.about,
            **sizes,
            "host_blocks": options.host_blocks,
        },
        times=TimeFacts(
            f"steps recorded of {record.about.get('model', 'the real engine')}", _outside(run, time)
        ),
        decisions=run.decisions,
        **digests(timeline),
    )
    return Report.build(timeline, facts, slo)


def _run(
    engine: Engine, workload: Workload, clock: ScriptedClock, progress: Callable[[int], None] | None
) -> RunRecord:
    def request(row: int) -> Request:
        priority = 0 if workload.priority is None else int(workload.priority[row])
        output = max(int(workload.cut_output_tokens[row]), 1)
        return Request(f"{row}", prompt_of(workload, row), output, priority=priority)  # type: ignore[arg-type]

    def follow(ended: str, now_ns: int) -> tuple[int, Request] | None:
        row = int(workload.next_turn[int(ended)])
        return None if row < 0 else (now_ns + int(workload.delay_ns[row]), request(row))

    def sample() -> tuple[int, int, int, int]:
        scheduler, metrics = engine.scheduler, engine.scheduler.manager.blocks.metrics()
        running = len(scheduler.prefilling) + len(scheduler.decoding)
        used = metrics.total_blocks - metrics.reset_blocks - metrics.inactive_blocks - 1
        return running, len(scheduler.live()) - running, used, metrics.inactive_blocks

    heads = np.flatnonzero(workload.turn == 0)
    heads = heads[np.argsort(workload.arrival_ns[heads], kind="stable")]
    arrivals = [(int(workload.arrival_ns[row]), request(int(row))) for row in heads]
    return run_workload(engine, arrivals, clock, progress, follow=follow, sample=sample)


def _outside(run: RunRecord, time: FittedStepTime) -> float:
    """Return the share of time in steps larger than the recorded ones."""
    whole = sum(step["ms"] or 0.0 for step in run.steps)
    beyond = sum(step["ms"] or 0.0 for step in run.steps if not time.covers(load_of_row(step)))
    return beyond / whole if whole else 0.0


def _timeline(workload: Workload, run: RunRecord, engine: Engine, sizes: dict[str, int]) -> Timeline:
    rows = len(workload)
    metrics = engine.scheduler.manager.blocks.metrics()

    def times(of: dict[str, float]) -> Any:
        column = np.full(rows, -1, np.int64)
        for row, ms in of.items():
            column[int(row)] = round(ms * 1e6)
        return column

    def counts(of: dict[str, int], kind: type) -> Any:
        column: Any = np.zeros(rows, kind)
        for row, value in of.items():
            column[int(row)] = value
        return column

    status = np.full(rows, Status.UNFINISHED, np.uint8)
    rejected = {}
    for row, (reason, why) in run.ended.items():
        status[int(row)] = Status.COMPLETED if reason == "length" else Status.REJECTED
        if reason != "length":
            rejected[int(row)] = why or ""
    arrived = times(run.arrival_ms)
    finish = np.where(status == Status.REJECTED, arrived, times(run.last_ms))
    cached = counts(run.cached, np.int32)
    looked = np.where(times(run.admitted_ms) >= 0, workload.prompt_tokens, 0).astype(np.int64)
    gaps = sorted(run.gaps_ns.items())
    samples = np.array(run.samples, np.int64).reshape(-1, 5)
    return Timeline(
        arrival_ns=arrived,
        queued_ns=np.where(status == Status.REJECTED, -1, times(run.queued_ms)),
        first_admit_ns=times(run.admitted_ms),
        first_token_ns=times(run.first_ms),
        second_token_ns=times(run.second_ms),
        last_token_ns=times(run.last_ms),
        finish_ns=finish,
        prompt_tokens=workload.prompt_tokens,
        requested_output_tokens=workload.cut_output_tokens,
        output_tokens=counts(run.tokens, np.int32),
        cached_tokens_first=cached,
        cached_tokens_total=cached.astype(np.int64),
        looked_up_tokens=looked,
        preemptions=np.zeros(rows, np.int32),
        worker=np.where(status == Status.REJECTED, -1, 0).astype(np.int32),
        status=status,
        finish_reason=np.where(status == Status.COMPLETED, FinishReason.LENGTH, 0).astype(np.uint8),
        session=workload.session,
        turn=workload.turn,
        itl_ns=np.array([gap for gap, _ in gaps], np.int64),
        itl_count=np.array([count for _, count in gaps], np.int64),
        sample_time_ns=samples[:, 0].copy(),
        sample_worker=np.zeros(len(samples), np.int32),
        sample_running=samples[:, 1].copy(),
        sample_waiting=samples[:, 2].copy(),
        sample_used_blocks=samples[:, 3].copy(),
        sample_cached_blocks=samples[:, 4].copy(),
        num_workers=1,
        blocks_per_worker=sizes["num_blocks"],
        block_size=sizes["block_size"],
        steps=len(run.steps),
        evictions=metrics.evictions,
        stored_blocks=metrics.registrations,
        request_ids=workload.request_ids,
        reject_reasons=rejected,
    )
