"""The recorded inputs of a live prefill/decode pair, replayed without a wall clock, give the same schedules."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from server.client import Client
from server.handoff_pair import PREFILL, make_server, serving, until
from understudy.clock import ScriptedClock
from understudy.server.driver import Driver
from understudy.server.engines import SimulatedCore
from understudy.server.handoff.network import HandOffMember, HandOffNetwork
from understudy.server.live_request import LiveRequest, StepEffects

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.server.core import EngineCore
    from understudy.server.handoff.channel import Notice
    from understudy.server.server import Server

Input = tuple[int, str, Any]


@dataclass
class Log:
    """Steps, tokens, ends and events of an engine, with their times."""

    lines: list[object] = field(default_factory=list)
    next: Any = None

    def on_step(self, core: EngineCore, effects: StepEffects, now_ns: int) -> None:
        rows = [(request.name, first, count) for request, first, count in effects.tokens]
        ended = [(request.name, request.ended) for request in effects.finished]
        self.lines.append((now_ns, core.vllm.scheduled, core.vllm.pool, rows, ended, core.vllm.held))
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


def record(server: Server) -> tuple[Log, list[Input]]:
    """Record the steps of a live server, and every input of its engine."""
    core, member = server.worker.cores[0], server.worker.handoff
    assert member is not None
    log, inputs = Log(next=server.worker), list[Input]()
    server.runtime.driver.observe(core, log)
    submit, cancel = core.submit, core.cancel

    def on_submit(request: LiveRequest, now_ns: int) -> StepEffects:
        copy = LiveRequest(
            request.name,
            request.prompt_tokens,
            request.max_tokens,
            request.identities,
            log,
            priority=request.priority,
            eos_at=request.eos_at,
        )
        copy.leg, copy.peer, copy.peer_request = request.leg, request.peer, request.peer_request
        copy.arrival_ns = request.arrival_ns
        inputs.append((now_ns, "submit", copy))
        return submit(request, now_ns)

    def on_cancel(request: LiveRequest, now_ns: int) -> StepEffects:
        inputs.append((now_ns, "cancel", request.engine_id))
        return cancel(request, now_ns)

    core.submit, core.cancel = on_submit, on_cancel  # type: ignore[method-assign]
    deliver = member.deliver

    def on_notice(notice: Notice, now_ns: int) -> None:
        done = [member.handed[name] for name in notice.done if name in member.handed]
        kept = [member.handed[name] for name in notice.heartbeat if name in member.handed]
        inputs.append((now_ns, "notice", (done, kept)))
        deliver(notice, now_ns)

    member.deliver = on_notice  # type: ignore[method-assign]
    server.runtime.driver.inputs = []
    return log, inputs


class SilentPeer:
    """A far worker without a connection: the recorded inputs say when it was connected."""

    def __init__(self, network: HandOffNetwork) -> None:
        self.number = network.net.add_worker(produces=True, consumes=False, far=True)
        self._net = network.net

    def connect(self) -> None: ...

    def send_all(self) -> None:
        self._net.take_notes(self.number)
        self._net.take_heartbeats(self.number)


def replay(server: Server, inputs: list[Input], *, check: bool = True) -> Log:
    """Run an engine with the same settings on the recorded inputs."""
    settings = server.settings
    assert settings.handoff is not None
    driver, log = Driver(ScriptedClock()), Log()
    network = HandOffNetwork(driver, settings.handoff, settings.engine.block_size)
    member = HandOffMember(network, settings.handoff, settings.engine.block_size)
    live_peers = server.runtime.network.peers if server.runtime.network is not None else {}
    for _ in live_peers:
        peer = SilentPeer(network)
        network.peers[peer.number] = peer  # type: ignore[assignment]
    core = SimulatedCore(settings.engine, handoff=member, check=check)
    driver.observe(core, log)
    moves = [(time_ns, kind, name) for time_ns, kind, name in server.runtime.driver.inputs or ()]
    changes = {"connect": network.net.connect, "disconnect": network.net.disconnect}
    timeline = [*inputs, *((t, kind, name) for t, kind, name in moves if kind in (*changes, "fail_reads"))]
    order = sorted(range(len(timeline)), key=lambda i: timeline[i][0])

    def action(kind: str, value: Any) -> Callable[[int], object]:
        def act(now_ns: int) -> None:
            if kind == "submit":
                core.submit(value, now_ns).notify_listeners(now_ns)
            elif kind == "cancel":
                if value in core.live:
                    core.cancel(core.live[value], now_ns)
            elif kind == "notice":
                for engine_id in value[0]:
                    network.net.notify(member.number, engine_id, now_ns)
                if value[1]:
                    network.net.heartbeat(member.number, value[1], now_ns)
            elif kind == "fail_reads":
                network.net.fail_reads(member.number, int(value))
            else:
                changes[kind](min(network.peers), now_ns)

        return act

    for index in order:
        time_ns, kind, value = timeline[index]
        driver.enqueue(core, action(kind, value), time_ns)
    driver.run_until()
    return log


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_live_pair_replayed_from_its_inputs_gives_the_same_schedules(seed: int, asynchronous: bool) -> None:
    async def main() -> None:
        small = [
            "--num-gpu-blocks-override",
            "150",
            "--max-model-len",
            "1024",
            "--max-num-batched-tokens",
            "256",
        ]
        small += ["--async-scheduling" if asynchronous else "--no-async-scheduling", "--clock-speed", "4"]
        lease = {"kv_connector_extra_config": {"kv_lease_duration": 6}}
        first = make_server("kv_producer", *small, **lease)
        second = make_server(
            "kv_consumer",
            *small,
            *("--kv-link-gbps", "0.02", "--kv-bytes-per-token", "2000"),
            kv_load_failure_policy="recompute" if seed % 2 else "fail",
            **lease,
        )
        draw = random.Random(seed)
        async with serving(first, second):
            logs = [record(first), record(second)]

            async def ask(number: int) -> None:
                await asyncio.sleep(draw.uniform(0, 0.4))
                shared = "same words at the start " * draw.choice([0, 4, 8])
                prompt = shared + f"{number} " * draw.randrange(1, 150)
                body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": PREFILL}
                reply = await Client(first.port).post("/v1/completions", body)
                if draw.random() < 0.1 or reply.status != 200:
                    return  # the router drops it
                body |= {
                    "max_tokens": draw.randrange(1, 20),
                    "kv_transfer_params": reply.json["kv_transfer_params"],
                }
                asking = Client(second.port).post("/v1/completions", body)
                if draw.random() < 0.2:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(asking, draw.uniform(0.001, 0.05))
                else:
                    await asking

            asks = [asyncio.create_task(ask(number)) for number in range(30)]
            await asyncio.sleep(0.15)
            await Client(second.port).post("/admin/fault", {"kind": "fail_reads", "count": 2})
            await asyncio.gather(*asks)
            cores = [first.worker.cores[0], second.worker.cores[0]]
            await until(lambda: all(core.engine.snapshot().active_blocks == 0 for core in cores))
            for server, (log, inputs) in zip((first, second), logs, strict=True):
                assert len(log.lines) > 15
                again = replay(server, inputs)
                assert again.lines[: len(log.lines)] == log.lines

    asyncio.run(main())
