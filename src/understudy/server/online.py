"""Online replay: a workload against live workers over HTTP, into the same timeline as offline."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from understudy._core import Tier
from understudy.engines.config import scheduling_in_words
from understudy.errors import ConfigError, WrongState
from understudy.run.tier_columns import BELOW
from understudy.run.timeline import FinishReason, Status, Timeline
from understudy.run.times import outside_share
from understudy.server.fleet.fleet import Fleet, FleetSettings, name_of
from understudy.server.lateness import Lateness
from understudy.server.loop import run
from understudy.server.outputs import Answer, Outputs
from understudy.server.settings import ServerSettings
from understudy.tiers.settings import TiersConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from understudy._core import EventBatch
    from understudy.engines.config import VllmConfig
    from understudy.report import Report, Slo
    from understudy.router.kv import KvRouting
    from understudy.router.router import Router
    from understudy.server.core import EngineCore, LiveRequest
    from understudy.workload import Workload

_VOCABULARY = 200_000
_MIX = np.uint64(0x9E3779B97F4A7C15)


class OnlineRun(msgspec.Struct, frozen=True):
    """What a run left: its columns, and facts with how late the machine was."""

    timeline: Timeline
    facts: dict[str, Any]


class _Diary:
    """Keeps what the engines did."""

    def __init__(self, rows: int) -> None:
        self.worker = np.full(rows, -1, dtype=np.int32)
        self.requests: dict[int, LiveRequest] = {}
        self.gaps: Counter[int] = Counter()
        self.samples: list[tuple[int, int, int, int, int, int]] = []
        self.steps = 0
        self.stored = self.removed = 0

    def on_events(self, batch: EventBatch) -> None:
        device = batch.tiers == int(Tier.G1)
        self.stored += int((device & (batch.kinds == 0)).sum())
        self.removed += int((device & (batch.kinds == 1)).sum())

    def on_tokens(self, request: LiveRequest, count: int, now_ns: int) -> None:
        if request.last_token_ns >= 0:
            self.gaps[now_ns - request.last_token_ns] += 1
            count -= 1
        else:
            count -= 1
        if count:
            self.gaps[0] += count

    def on_end(self, worker: int, request: LiveRequest) -> None:
        row = int(request.name.rpartition("-")[2])
        self.requests[row] = request
        self.worker[row] = worker

    def on_step(self, worker: int, core: EngineCore, now_ns: int) -> None:
        self.steps += 1
        _, used, cached = core.engine.pool
        self.samples.append((now_ns, worker, core.num_running, core.num_waiting, used, cached))


def run_online(
    workload: Workload,
    engine: VllmConfig,
    *,
    workers: int = 1,
    routing: str | KvRouting | Router = "round_robin",
    seed: int = 0,
    speed_up: float = 1.0,
    speedup: float = 1.0,
    tiers: TiersConfig | None = None,
    progress: Callable[[int], None] | None = None,
) -> OnlineRun:
    """Play an open-loop workload in real time, simulated time passing `speedup` times as fast as outside.

    `speed_up` plays the workload's own timestamps faster, as offline. Sessions go on when the turn before has ended.
    """
    if not workload.has_arrivals:
        raise ConfigError("--online needs a workload with timestamps")
    if workload.adapter is not None:
        raise ConfigError("--online does not send adapters yet: replay the workload offline")
    if engine.data_parallel_size > 1:
        raise ConfigError(
            "--online plays workers of one rank: leave data_parallel_size at 1, give more workers"
        )
    workload = workload.normalised().speed_up(speed_up)
    longest = int((workload.prompt_tokens.astype(np.int64) + workload.output_tokens).max(initial=1)) + 1
    length = max(engine.max_model_len or 0, longest)
    most = engine.num_gpu_blocks * engine.block_size
    settings = ServerSettings(
        model="online",
        max_model_len=min(length, most),
        engine=msgspec.structs.replace(engine, max_model_len=min(length, most)),
        tiers=TiersConfig() if tiers is None else tiers,
        speedup=speedup,
        seed=seed,
    )
    fleet = FleetSettings(pools=((workers, settings),), base_port=0, port=0, routing=routing, seed=seed)
    return run(_Player(workload, fleet, engine, progress).play())


def replay_online(
    workload: Workload, name: str, engine: VllmConfig, *, slo: Slo | None = None, **how: Any
) -> Report:
    """Play it as `run_online` does, and report on it as a replay does."""
    from understudy.report import Report
    from understudy.run.digest import digests

    started_s = time.perf_counter()
    run = run_online(workload, engine, **how)
    facts = {
        "workload": name,
        "workload_digest": workload.digest,
        "trace_block_size": workload.trace_block_size,
        **run.facts,
        **digests(run.timeline),
    }
    return Report.build(run.timeline, facts, slo).with_run(wall_time_s=time.perf_counter() - started_s)


class _Player:
    """Sends requests when they are due, and reads their streams."""

    def __init__(
        self,
        workload: Workload,
        settings: FleetSettings,
        engine: VllmConfig,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._workload = workload
        self._settings = settings
        self._engine = engine
        self._progress = progress
        self._diary = _Diary(len(workload))
        self._status = np.full(len(workload), Status.UNFINISHED, dtype=np.uint8)
        self._rejected: dict[int, str] = {}
        self._rejected_ns: dict[int, int] = {}
        self._first_byte = Lateness()
        self._ended = 0

    async def play(self) -> OnlineRun:
        fleet = Fleet(self._settings, events=True)
        for server in fleet.servers:
            server.worker.diary = self._diary
            server.worker.outputs = _TrueLengths(server.worker.outputs, self._workload)
            server.worker.on_events = self._listen(server.worker.on_events)
        await fleet.start()
        clock = fleet.stage.clock
        base_ns = clock.now_ns() + int(2e7 * clock.speedup)
        began_s = time.perf_counter()
        try:
            heads = np.flatnonzero(self._workload.turn == 0)
            await asyncio.gather(*(self._session(int(row), fleet, base_ns) for row in heads))
        finally:
            await fleet.stop()
            fleet.stage.driver.stop()
        stage = fleet.stage
        late = {
            "token_p50": stage.token_lateness.quantile(0.5) * 1e3,
            "token_p99": stage.token_lateness.quantile(0.99) * 1e3,
            "step_end_p99": stage.driver.step_lateness.quantile(0.99) * 1e3,
            "client_first_token_p50": self._first_byte.quantile(0.5) * 1e3,
            "client_first_token_p99": self._first_byte.quantile(0.99) * 1e3,
        }
        facts = {
            "online": True,
            "workers": len(fleet.servers),
            "routing": name_of(self._settings.routing),
            "seed": self._settings.seed,
            "speedup": clock.speedup,
            "scheduling": scheduling_in_words([self._engine]),
            "engine": self._engine.described(),
            "times": {
                "from": self._engine.timing.described_origin(),
                "outside_domain_share": outside_share(
                    core.engine for server in fleet.servers for core in server.worker.cores
                ),
                "front_end_ms": 0.0,
            },
            "lateness_ms": {name: round(value, 3) for name, value in late.items()},
            "played_s": round(time.perf_counter() - began_s, 3),
        }
        if fleet.servers[0].worker.cores[0].has_tiers:
            facts["tier_use"] = self._tier_use(fleet)
        return OnlineRun(self._timeline(fleet, base_ns), facts)

    def _tier_use(self, fleet: Fleet) -> dict[str, Any]:
        """What the tiers below the device gave, and what went down to them and came up."""
        records = [request.record for request in self._diary.requests.values() if request.record is not None]
        prompts = int(self._workload.prompt_tokens.sum())
        below = [sum(record.below_first[place] for record in records) for place in range(len(BELOW))]
        totals = [core.engine.tier_totals for server in fleet.servers for core in server.worker.cores]
        return {
            **{
                tier.name.lower(): {
                    "hit_tokens_first": tokens,
                    "hit_ratio_first": round(tokens / prompts, 6) if prompts else 0.0,
                }
                for tier, tokens in zip(BELOW, below, strict=True)
            },
            "parked_ms": round(sum(record.parked_ns for record in records) / 1e6, 3),
            **{
                name: sum(getattr(one, name) for one in totals)
                for name in ("offloaded_blocks", "onboards", "onboarded_blocks")
            },
        }

    def _listen(
        self, other: Callable[[int, int, EventBatch], None] | None
    ) -> Callable[[int, int, EventBatch], None]:
        def on_events(worker: int, rank: int, batch: EventBatch) -> None:
            self._diary.on_events(batch)
            if other is not None:
                other(worker, rank, batch)

        return on_events

    async def _session(self, row: int, fleet: Fleet, base_ns: int) -> None:
        due_ns = base_ns + int(self._workload.arrival_ns[row])
        while row >= 0:
            await self._until(fleet, due_ns)
            await self._request(row, fleet)
            self._ended += 1
            if self._progress is not None:
                self._progress(self._ended)
            row = int(self._workload.next_turn[row])
            if row >= 0:
                due_ns = fleet.stage.clock.now_ns() + int(self._workload.delay_ns[row])

    async def _until(self, fleet: Fleet, due_ns: int) -> None:
        clock = fleet.stage.clock
        wait_s = (due_ns - clock.now_ns()) / clock.speedup / 1e9
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    async def _request(self, row: int, fleet: Fleet) -> None:
        workload, clock = self._workload, fleet.stage.clock
        limit = _limit_of(workload, row)
        most = self._settings.pools[0][1].max_model_len - int(workload.prompt_tokens[row])
        length = int(workload.cut_output_tokens[row]) if limit is None else min(limit, max(most, 1))
        body = msgspec.json.encode(
            {
                "prompt": prompt_of(workload, row).tolist(),
                "max_tokens": max(length, 1),
                "ignore_eos": limit is None,
                "seed": row,
                "stream": True,
                "priority": int(workload.priority[row]) if workload.priority is not None else 0,
            }
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", fleet.port)
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: online\r\nconnection: close\r\nx-request-id: row-%d\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (row, len(body), body)
            )
            data = await reader.read(1 << 16)
            seen_ns = clock.now_ns()
            answer = data
            while data:
                data = await reader.read(1 << 16)
                answer += data
        finally:
            writer.close()
        if not answer.startswith(b"HTTP/1.1 200"):
            self._status[row] = Status.REJECTED
            self._rejected[row] = answer.partition(b"\r\n\r\n")[2].decode("utf-8", "replace")[:300]
            self._rejected_ns[row] = clock.now_ns()
            return
        if b"[DONE]" not in answer:
            raise WrongState(f"row {row}: the stream ended before its answer did")
        self._status[row] = Status.COMPLETED
        request = self._diary.requests[row]
        self._first_byte.record((seen_ns - request.first_token_ns) / clock.speedup / 1e9)

    def _finish_reasons(self) -> npt.NDArray[np.uint8]:
        """Where a row has no limit of its own, its length is the limit."""
        reasons = np.where(self._status == Status.COMPLETED, FinishReason.LENGTH, FinishReason.NONE)
        limits = self._workload.max_tokens
        if limits is not None:
            stopped = (reasons == FinishReason.LENGTH) & (limits >= self._workload.output_tokens)
            reasons[stopped] = FinishReason.STOP
        return reasons.astype(np.uint8)

    def _timeline(self, fleet: Fleet, base_ns: int) -> Timeline:
        rows = len(self._workload)
        names = ("arrival", "queued", "first_admit", "first_token", "second_token", "last_token", "finish")
        times = {name: np.full(rows, -1, dtype=np.int64) for name in names}
        counts = {
            name: np.zeros(rows, dtype=np.int64)
            for name in ("output", "first", "total", "looked", "preempted")
        }
        for row, request in self._diary.requests.items():
            record = request.record
            assert record is not None
            times["arrival"][row] = request.arrival_ns - base_ns
            for name in names[1:]:
                value = getattr(record, f"{name}_ns")
                times[name][row] = value - base_ns if value >= 0 else -1
            counts["output"][row] = record.output_tokens
            counts["first"][row] = record.cached_first
            counts["total"][row] = record.cached_total
            counts["looked"][row] = record.looked_up
            counts["preempted"][row] = record.preemptions
        for row, at_ns in self._rejected_ns.items():
            times["arrival"][row] = times["finish"][row] = at_ns - base_ns
        gaps = sorted(self._diary.gaps.items())
        samples = np.array(self._diary.samples, dtype=np.int64).reshape(-1, 6)
        samples = samples[np.lexsort((samples[:, 1], samples[:, 0]))]
        workload = self._workload
        return Timeline(
            arrival_ns=times["arrival"],
            queued_ns=times["queued"],
            first_admit_ns=times["first_admit"],
            first_token_ns=times["first_token"],
            second_token_ns=times["second_token"],
            last_token_ns=times["last_token"],
            finish_ns=times["finish"],
            prompt_tokens=workload.prompt_tokens,
            requested_output_tokens=workload.cut_output_tokens,
            output_tokens=counts["output"].astype(np.int32),
            cached_tokens_first=counts["first"].astype(np.int32),
            cached_tokens_total=counts["total"],
            looked_up_tokens=counts["looked"],
            preemptions=counts["preempted"].astype(np.int32),
            worker=self._diary.worker,
            status=self._status,
            finish_reason=self._finish_reasons(),
            session=workload.session,
            turn=workload.turn,
            itl_ns=np.array([gap for gap, _ in gaps], dtype=np.int64),
            itl_count=np.array([count for _, count in gaps], dtype=np.int64),
            sample_time_ns=np.maximum(samples[:, 0] - base_ns, 0),
            sample_worker=samples[:, 1].astype(np.int32),
            sample_running=samples[:, 2],
            sample_waiting=samples[:, 3],
            sample_used_blocks=samples[:, 4],
            sample_cached_blocks=samples[:, 5],
            num_workers=len(fleet.servers),
            blocks_per_worker=self._engine.num_gpu_blocks,
            block_size=self._engine.block_size,
            steps=self._diary.steps,
            evictions=self._diary.removed,
            stored_blocks=self._diary.stored,
            request_ids=workload.request_ids,
            reject_reasons=self._rejected,
        )


class _TrueLengths(Outputs):
    """Answers that end by themselves where the workload says: the seed of a request is its row."""

    def __init__(self, outputs: Outputs, workload: Workload) -> None:
        self.__dict__.update(outputs.__dict__)
        self._workload = workload

    def answer(
        self, prompt: npt.NDArray[np.uint32], limit: int, *, seed: int | None = None, **how: Any
    ) -> Answer:
        """See `Outputs`."""
        whole = super().answer(prompt, limit, seed=seed, **how)
        if seed is None or _limit_of(self._workload, seed) is None:
            return whole
        length = max(int(self._workload.output_tokens[seed]), 1)
        return Answer(whole.tokens[:length], length <= limit, limit)


def _limit_of(workload: Workload, row: int) -> int | None:
    """The limit of a row that has one of its own."""
    limit = -1 if workload.max_tokens is None else int(workload.max_tokens[row])
    return None if limit < 0 or workload.output_tokens[row] == 0 else limit


def prompt_of(workload: Workload, row: int) -> npt.NDArray[np.int64]:
    """Token ids of a prompt: equal content hashes are equal tokens, others are not."""
    first, last = int(workload.hash_offsets[row]), int(workload.hash_offsets[row + 1])
    size = workload.trace_block_size
    hashes = workload.hash_ids[first:last].astype(np.uint64)
    count = int(workload.prompt_tokens[row])
    keys = (hashes[:, None] << np.uint64(20)) + np.arange(size, dtype=np.uint64)[None, :]
    flat = keys.reshape(-1)[:count]
    if len(flat) < count:  # the trace names fewer blocks: what follows is the request's own
        own = (np.uint64(1) << np.uint64(60)) + (np.uint64(row) << np.uint64(24))
        flat = np.concatenate([flat, own + np.arange(count - len(flat), dtype=np.uint64)])
    with np.errstate(over="ignore"):
        mixed = (flat + np.uint64(1)) * _MIX
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(32)
    return (mixed % np.uint64(_VOCABULARY)).astype(np.int64)
