"""A whole engine around the manager, small enough to read: admission by blocks, steps of four beats, failures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kv.request_building import Memory, output
from understudy.errors import UnderstudyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.kv import KvCacheManager, RequestKv


class Injected(Exception):
    """A failure that a test asked for."""


@dataclass
class Job:
    """What a client sees of its request."""

    name: str
    prompt: list[int]
    max_output: int
    events: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    gone: bool = False  # the client went away


@dataclass
class Executor:
    """Schedule, view, run, apply. A failure names its request: that one is closed, the others go on."""

    manager: KvCacheManager
    memory: Memory = field(default_factory=Memory)
    requests: dict[str, RequestKv] = field(default_factory=dict)
    fail: Callable[[str, int], object] = lambda _beat, _index: None
    log: list[str] = field(default_factory=list)

    def add(self, job: Job) -> None:
        self.requests[job.name] = self.manager.request(job.prompt, job.max_output)
        self.requests[job.name].match_prefix()
        self.log.append(f"add {job.name}")

    def drop(self, name: str) -> None:
        self.requests.pop(name).close()
        self.log.append(f"drop {name}")

    def step(self, chunks: dict[str, int]) -> tuple[list[str], dict[str, str]]:
        """Compute `chunks` (prompt tokens, 0 for a decode); who moved on, and who failed and why."""
        batch = [(name, self.requests[name], chunk) for name, chunk in chunks.items()]
        begun: list[RequestKv] = []
        culprit = ""
        try:
            for index, (name, kv, chunk) in enumerate(batch):
                culprit = name
                self.fail("schedule", index)
                if chunk:
                    kv.schedule_prefill(chunk)
                else:
                    kv.schedule_decode()
                begun.append(kv)
            views = []
            for index, (name, kv, _) in enumerate(batch):
                culprit = name
                self.fail("view", index)
                views.append(kv.view())
            sampled = []
            for index, ((name, kv, _), view) in enumerate(zip(batch, views, strict=True)):
                culprit = name
                self.fail("run", index)
                sampled.append(self.memory.run(view, kv.scheduled_tokens, kv.tokens.tolist())[-1])
        except (UnderstudyError, Injected) as error:
            for kv in begun:
                kv.revert()
            self.drop(culprit)
            return [], {culprit: str(error)}

        done, failed = [], {}
        for index, ((name, kv, chunk), token) in enumerate(zip(batch, sampled, strict=True)):
            try:
                self.fail("apply", index)
                if not chunk:
                    kv.apply_decode(token)
                elif kv.view().seq_len == kv.prefill_target and kv.generated_tokens < kv.max_output_tokens:
                    kv.apply_prefill(token)
                else:
                    kv.apply_prefill()
                done.append(name)
            except (UnderstudyError, Injected) as error:
                self.drop(name)
                failed[name] = str(error)
        return done, failed


@dataclass
class Scheduler:
    """Admits what can run to its end, runs everything that is admitted, and lets small requests pass big ones."""

    executor: Executor
    context_window: int = 10_000
    chunk: int = 10_000
    stop_token: int | None = None
    waiting: list[Job] = field(default_factory=list)
    active: list[Job] = field(default_factory=list)

    def submit(self, *jobs: Job) -> None:
        self.waiting += jobs

    def turn(self) -> None:
        self.waiting = [job for job in self.waiting if not self.settle(job)]
        for job in [job for job in self.active if job.gone]:
            self.finish(job, "gone")
        chunks = {}
        for job in self.active:
            kv = self.executor.requests[job.name]
            chunks[job.name] = (
                min(self.chunk, kv.prefill_target - kv.computed_tokens) if self.prefills(kv) else 0
            )
        if chunks:
            done, failed = self.executor.step(chunks)
            for job in [job for job in self.active if job.name in failed]:
                job.events.append(f"error after {len(job.tokens)}: {failed[job.name]}")
                self.active.remove(job)
            for job in [job for job in self.active if job.name in done]:
                self.resolve(job)

    def settle(self, job: Job) -> bool:
        """Whether the job has left the queue: admitted, rejected or gone."""
        manager = self.executor.manager
        if job.gone:
            return True
        if len(job.prompt) + job.max_output > self.context_window:
            job.events.append(
                f"rejected: {len(job.prompt)} + {job.max_output} tokens pass the context window"
            )
            return True
        if not manager.can_ever_fit(len(job.prompt), job.max_output):
            job.events.append(
                f"rejected: {len(job.prompt)} prompt tokens, {len(job.tokens)} said, never fits"
            )
            return True
        if not manager.can_admit(len(job.prompt), job.max_output, self.executor.requests.values()):
            return False
        self.executor.add(job)
        self.active.append(job)
        return True

    def prefills(self, kv: RequestKv) -> bool:
        return kv.computed_tokens < kv.prefill_target

    def resolve(self, job: Job) -> None:
        kv = self.executor.requests[job.name]
        job.tokens = output(kv)
        if job.tokens and job.tokens[-1] == self.stop_token:
            self.finish(job, "stop")
        elif kv.finished:
            self.finish(job, "length")

    def finish(self, job: Job, reason: str) -> None:
        self.executor.drop(job.name)
        self.active.remove(job)
        job.events.append(f"{reason} after {len(job.tokens)}")

    def run(self, turns: int = 10_000) -> None:
        for _ in range(turns):
            if not self.waiting and not self.active:
                return
            self.turn()
        raise AssertionError(f"still {self.waiting} and {self.active} after {turns} turns")
