"""Random lives of an engine with host memory: whatever happens, a request answers as it would alone."""

from __future__ import annotations

from functools import cache

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from qwen3.building import CPU, TINY, executor_of, generate, prompt_of
from understudy.kv import KvCacheManager
from understudy.qwen3.engine import Engine
from understudy.qwen3.executor import Computed, Step, TorchExecutor
from understudy.qwen3.host import HostTier
from understudy.qwen3.limits import SchedulerConfig
from understudy.qwen3.pages import PinnedPages
from understudy.qwen3.request import Request
from understudy.qwen3.scheduler import Scheduler
from understudy.qwen3.weights import random_weights

WEIGHTS = random_weights(TINY, 7, CPU)
BLOCKS = 22
PROMPTS = [prompt_of(1, 30)[: 3 + 5 * n] + prompt_of(20 + n, n % 4) for n in range(6)]


class Failing(TorchExecutor):
    """Fails the next so many steps, in either beat."""

    failures = 0
    at_begin = False

    def begin(self, step: Step) -> None:
        if self.at_begin:
            self._fail()
        super().begin(step)

    def finish(self) -> Computed:
        if not self.at_begin:
            self._fail()
        return super().finish()

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            self._running = None
            raise RuntimeError("on purpose")


@cache
def answer(number: int) -> tuple[int, ...]:
    """Of a prompt in an engine of its own, the longest that anybody asks for."""
    with KvCacheManager(64, TINY.layout(4)) as manager:
        engine = Engine(Scheduler(manager, SchedulerConfig(256, 4, 512)), executor_of(TINY, manager, WEIGHTS))
        return tuple(generate(engine, PROMPTS[number], max_tokens=10)[0])


class Lives(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.manager = KvCacheManager(BLOCKS, TINY.layout(4))
        plain = executor_of(TINY, self.manager, WEIGHTS)
        self.executor = Failing(plain.weights, plain.buffer, plain.backend)
        self.host = HostTier(self.manager, PinnedPages(30, self.executor.buffer))
        scheduler = Scheduler(self.manager, SchedulerConfig(13, 5, 512), host=self.host)
        self.engine = Engine(scheduler, self.executor)
        self.asked: dict[str, tuple[int, int]] = {}
        self.heard: dict[str, list[int]] = {}
        self.submitted = 0

    @rule(number=st.integers(0, len(PROMPTS) - 1), tokens=st.integers(1, 10), priority=st.integers(0, 2))
    def submit(self, number: int, tokens: int, priority: int) -> None:
        name = f"{self.submitted}"
        self.submitted += 1
        self.asked[name] = (number, tokens)
        self.heard[name] = []
        self.engine.submit(Request(name, PROMPTS[number], tokens, priority=priority))

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            for output in self.engine.step():
                number, tokens = self.asked[output.request_id]
                if output.token is not None:
                    self.heard[output.request_id].append(output.token)
                heard = tuple(self.heard[output.request_id])
                assert heard == answer(number)[: len(heard)]
                if output.finish_reason == "length":
                    assert len(heard) == tokens

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if live := [request.id for request in self.engine.scheduler.live()]:
            assert self.engine.cancel(data.draw(st.sampled_from(live)))

    @rule(failures=st.integers(1, 3), at_begin=st.booleans())
    def fail(self, failures: int, at_begin: bool) -> None:
        self.executor.failures, self.executor.at_begin = failures, at_begin

    @rule()
    def evict(self) -> None:
        self.manager.blocks.clear_inactive()

    @invariant()
    def blocks_are_all_somewhere(self) -> None:
        metrics = self.manager.blocks.metrics()
        held = metrics.total_blocks - metrics.reset_blocks - metrics.inactive_blocks
        assert self.manager.available_blocks + held == BLOCKS

    def teardown(self) -> None:
        self.executor.failures = 0
        self.step(1)
        self.engine.run()
        self.host.collect_ended()
        assert self.manager.available_blocks == BLOCKS - 1
        self.engine.close()


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
