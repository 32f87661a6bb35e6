"""The recorded inputs of a live prefill and decode server, replayed without a wall clock, give the same batches."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from server.handoff_pair import serving, until
from server.push_pair import ask, is_empty, make_side, meet
from understudy.clock import ScriptedClock
from understudy.run.disaggregation import Disaggregation
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.server.driver import Driver
from understudy.server.engines import SimulatedCore
from understudy.server.live_request import LiveRequest
from understudy.server.push.network import PushNetwork
from understudy.server.tokenizer import open_tokenizer
from understudy.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.server.core import EngineCore
    from understudy.server.live_request import StepEffects
    from understudy.server.push.settings import Bootstrap
    from understudy.server.server import Server

Input = tuple[int, str, Any]


@dataclass
class Log:
    """Steps, tokens and ends of an engine, with their times."""

    lines: list[object] = field(default_factory=list)
    next: Any = None

    def on_step(self, core: EngineCore, effects: StepEffects, now_ns: int) -> None:
        rows = [(request.name, first, count) for request, first, count in effects.tokens]
        ended = [(request.name, request.ended, request.cached_tokens) for request in effects.finished]
        state = core.engine.snapshot()
        self.lines.append((now_ns, rows, ended, effects.batch_tokens, state.running, state.active_blocks))
        if self.next is not None:
            self.next.on_step(core, effects, now_ns)

    def on_landed(self, core: EngineCore) -> None:
        if self.next is not None:
            self.next.on_landed(core)

    def on_idle(self, core: EngineCore) -> None:
        if self.next is not None:
            self.next.on_idle(core)

    def on_admitted(self, request: LiveRequest, now_ns: int) -> None: ...
    def on_tokens(self, request: LiveRequest, first: int, count: int, now_ns: int) -> None: ...
    def on_end(self, request: LiveRequest, now_ns: int) -> None: ...
    def on_error(self, request: LiveRequest) -> None: ...


def copy_of(request: LiveRequest, log: Log) -> LiveRequest:
    """Copy a request before an engine has it."""
    copy = LiveRequest(
        request.name,
        request.prompt_tokens,
        request.max_tokens,
        request.identities,
        log,
        priority=request.priority,
        eos_at=request.eos_at,
    )
    copy.leg, copy.bootstrap, copy.arrival_ns = request.leg, request.bootstrap, request.arrival_ns
    return copy


def record(server: Server) -> tuple[Log, list[Input]]:
    """Record the steps of a live server, and the requests that its engine gets and loses."""
    core = server.worker.cores[0]
    log, inputs = Log(next=server.worker), list[Input]()
    server.runtime.driver.observe(core, log)
    submit, cancel = core.submit, core.cancel

    def on_submit(request: LiveRequest, now_ns: int) -> StepEffects:
        inputs.append((now_ns, "submit", copy_of(request, log)))
        return submit(request, now_ns)

    def on_cancel(request: LiveRequest, now_ns: int) -> StepEffects:
        inputs.append((now_ns, "cancel", request.engine_id))
        return cancel(request, now_ns)

    core.submit, core.cancel = on_submit, on_cancel  # type: ignore[method-assign]
    server.runtime.driver.inputs = []
    return log, inputs


class SilentPeers:
    """The other side's place: the recorded inputs have its messages."""

    def __init__(self, network: PushNetwork) -> None:
        self._network = network
        self._known = False
        self._prefills = network.settings.prefills

    def meet(self, number: int) -> None:
        """Number the far worker as the live server did."""
        while (
            self._network.net.add_worker(produces=not self._prefills, consumes=self._prefills, far=True)
            < number
        ):
            pass
        self._network.pushes.set_far(number)

    def find(self, bootstrap: Bootstrap, engine_id: int) -> tuple[int, bool]:  # noqa: ARG002
        """Return the only peer, which the recorded input connects."""
        return 1, self._known

    def know(self) -> None:
        """Let later requests find it at once."""
        self._known = True

    def send(self, worker: int, news: object) -> None: ...
    def deliver_early(self, room: int, now_ns: int) -> None: ...


def replay(server: Server, inputs: list[Input]) -> Log:
    """Run an engine with the same settings on the recorded inputs."""
    settings = server.settings
    assert settings.push is not None
    driver, log = Driver(ScriptedClock()), Log()
    network = PushNetwork(driver, settings.push, settings.engine.block_size)
    peers = SilentPeers(network)
    peers.meet(1)
    if settings.push.prefills:
        network.prefill_side = peers  # type: ignore[assignment]
    else:
        network.decode_side = peers  # type: ignore[assignment]
    core = SimulatedCore(settings.engine, push=network, check=True)
    driver.observe(core, log)
    moves = [
        (time_ns, kind, name)
        for time_ns, kind, name in server.runtime.driver.inputs or ()
        if kind not in ("submit", "cancel")
    ]

    def action(kind: str, value: Any) -> Callable[[int], object]:
        def act(now_ns: int) -> None:
            if kind == "submit":
                core.submit(value, now_ns).notify_listeners(now_ns)
            elif kind == "cancel":
                if value in core.live:
                    core.cancel(core.live[value], now_ns)
            elif kind == "connect":
                peers.know()
                network.pushes.connect(int(value), now_ns)
            else:
                engine_id, worker, tokens = map(int, value.split(":"))
                if kind == "done" and engine_id in core.live:
                    live = core.live[engine_id]
                    live.cached_tokens = max(live.cached_tokens, tokens)
                network.pushes.receive(engine_id, kind, worker, tokens, now_ns)

        return act

    timeline = sorted(
        [(time_ns, place, kind, value) for place, (time_ns, kind, value) in enumerate([*inputs, *moves])],
        key=lambda one: one[:2],
    )
    for time_ns, _, kind, value in timeline:
        driver.enqueue(core, action(kind, value), time_ns)
    driver.run_until()
    return log


@pytest.mark.parametrize("seed", range(2))
def test_each_side_of_a_live_pair_replayed_from_its_inputs_gives_the_same_batches(seed: int) -> None:
    async def main() -> None:
        overlap = ["--disable-overlap-schedule"] if seed else []
        link = ["--kv-link-gbps", "0.02", "--kv-bytes-per-token", "2000"]
        first = make_side("prefill", *overlap, *link, "--chunked-prefill-size", "64")
        second = make_side("decode", *overlap, "--num-reserved-decode-tokens", "16")
        draw = random.Random(seed)
        async with serving(first, second):
            logs = [record(first), record(second)]

            async def send(number: int) -> None:
                await asyncio.sleep(draw.uniform(0, 0.4))
                shared = "same words at the start " * draw.choice([0, 4, 8])
                text, fields = shared + f"{number} " * draw.randrange(1, 150), meet(first)
                prefilling = asyncio.create_task(ask(first, fields, text))
                decoding = asyncio.create_task(ask(second, fields, text, tokens=draw.randrange(1, 20)))
                if draw.random() < 0.2:
                    leaving = draw.choice([prefilling, decoding])
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(leaving, draw.uniform(0.001, 0.05))
                await asyncio.gather(prefilling, decoding, return_exceptions=True)

            await asyncio.gather(*(send(number) for number in range(24)))
            await until(lambda: is_empty(first) and is_empty(second))
            for server, (log, inputs) in zip((first, second), logs, strict=True):
                assert len(log.lines) > 15
                again = replay(server, inputs)
                assert again.lines[: len(log.lines)] == log.lines

    asyncio.run(main())


def test_requests_one_at_a_time_end_with_the_counts_of_an_offline_replay() -> None:
    texts = [f"{'same words ' * 20}{number} " * (1 + number % 3) for number in range(6)]
    cached: list[int] = []
    outputs: list[int] = []
    lengths: list[int] = []

    async def main() -> None:
        first, second = make_side("prefill"), make_side("decode")
        async with serving(first, second):
            for number, text in enumerate(texts):
                fields = meet(first)
                one, other = await asyncio.gather(
                    ask(first, fields, text), ask(second, fields, text, tokens=3 + number)
                )
                assert one.json["meta_info"]["cached_tokens"] == other.json["meta_info"]["cached_tokens"]
                cached.append(other.json["meta_info"]["cached_tokens"])
                outputs.append(other.json["meta_info"]["completion_tokens"])
                lengths.append(other.json["meta_info"]["prompt_tokens"])

    asyncio.run(main())
    found = replay_offline(texts, lengths)
    assert found == (cached, outputs)


def replay_offline(texts: list[str], lengths: list[int]) -> tuple[list[int], list[int]]:
    """Replay the same prompts, one after another, on one worker of each side; return cached and output tokens."""
    tokenizer, engine = open_tokenizer(None), make_side("prefill").settings.engine
    prompts = [list(tokenizer.encode(text)) for text in texts]
    assert [len(prompt) for prompt in prompts] == lengths
    rows = len(texts)
    ids = [token for prompt in prompts for token in prompt]
    workload = Workload(
        arrival_ns=np.arange(rows) * 10_000_000_000,
        prompt_tokens=np.array(lengths, np.int32),
        output_tokens=np.array([3 + number for number in range(rows)], np.int32),
        hash_offsets=np.cumsum([0, *lengths]),
        hash_ids=np.array(ids, np.uint32),
        trace_block_size=1,
    )
    split = Disaggregation(prefill_workers=1, decode_workers=1)
    timeline = run_offline(RunPlan(workload, engine, disaggregation=split)).timeline
    return timeline.cached_tokens_first.tolist(), timeline.output_tokens.tolist()
