"""Events reach a router of one's own late, in batches, or not at all, as the settings of their delivery say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from replay.building import ONE_MS, crowd
from understudy.cli import main
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.router import DelayedEvents, Router
from understudy.router.dispatch import Dispatcher
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload import write_mooncake

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.router import FleetView, KvEventBatch, RouteRequest

ENGINE = VllmConfig(block_size=16, num_gpu_blocks=200, timing=ONE_MS)
WORKLOAD = crowd(80)
MS = 1_000_000
Batch = tuple[int, int | None, int]


class Listener(Router):
    """Chooses by load alone, so that every run is equal; keeps the batches that it has at each choice."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.at_choice: list[tuple[int, int]] = []

    def choose(self, request: RouteRequest, view: FleetView) -> int:  # noqa: ARG002
        self.at_choice.append((view.now_ns, len(self.batches)))
        return int(view.outstanding_tokens.argmin())

    def observe(self, batch: KvEventBatch) -> None:
        self.batches.append((batch.time_ns, batch.worker, len(batch.events)))


def listen(seed: int = 0, **delivery: float) -> tuple[Listener, OfflineRun]:
    router = Listener()
    routing: Any = DelayedEvents(router, **delivery) if delivery else router
    return router, run_offline(RunPlan(WORKLOAD, ENGINE, workers=3, routing=routing, seed=seed))


@pytest.mark.parametrize(("delay_ms", "period_ms"), [(7, 0), (0, 10), (3, 10)])
def test_a_choice_knows_the_batches_that_are_due_and_no_others(delay_ms: int, period_ms: int) -> None:
    prompt, _ = listen()
    late, run = listen(event_delay_ms=delay_ms, event_period_ms=period_ms)
    assert run.facts.event_delivery == {
        name: value for name, value in (("event_delay_ms", delay_ms), ("event_period_ms", period_ms)) if value
    }

    def due(batch: Batch) -> int:
        time = batch[0] + delay_ms * MS
        return -(-time // (period_ms * MS)) * period_ms * MS if period_ms else time

    last_ns, count = late.at_choice[-1]
    expected = sorted((batch for batch in prompt.batches if due(batch) <= last_ns), key=due)
    assert late.batches == expected  # in order of their times where they are due together
    assert count == len(expected)
    for now, count in late.at_choice:
        assert count == sum(due(batch) <= now for batch in prompt.batches)
    assert late.at_choice != prompt.at_choice


def test_lost_batches_depend_on_the_seed_alone_and_change_nothing_else() -> None:
    prompt, whole = listen()
    lossy, run = listen(event_loss=0.3)
    again, _ = listen(event_loss=0.3)
    other, _ = listen(seed=1, event_loss=0.3)
    assert lossy.batches == again.batches
    assert lossy.batches != other.batches
    sent = [batch for batch in prompt.batches if batch[0] <= lossy.at_choice[-1][0]]
    assert set(lossy.batches) < set(sent)
    assert 0.6 < len(lossy.batches) / len(sent) < 0.8
    assert run.facts.digest == whole.facts.digest


def test_a_lookahead_run_and_one_by_steps_deliver_the_same() -> None:
    kept = []
    for fast_forward in (True, False):
        router = Listener()
        routing = DelayedEvents(router, event_delay_ms=5, event_period_ms=4, event_loss=0.1)
        run_offline(RunPlan(WORKLOAD, ENGINE, workers=3, routing=routing, fast_forward=fast_forward))
        kept.append((router.batches, router.at_choice))
    assert kept[0] == kept[1]


class Deaf(Router):
    def choose(self, request: RouteRequest, view: FleetView) -> int:  # noqa: ARG002
        return 0


def test_what_has_no_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"event_loss: Deaf receives no events; give it observe"):
        DelayedEvents(Deaf(), event_loss=0.5)
    with pytest.raises(ConfigError, match="event_delay_ms must be a finite number from 0"):
        DelayedEvents(Listener(), event_delay_ms=-1)
    with pytest.raises(ConfigError, match="event_loss"):
        DelayedEvents(Listener(), event_loss=1.0)
    with pytest.raises(ConfigError, match="event_delay_ms is for offline runs"):
        Dispatcher(DelayedEvents(Listener(), event_delay_ms=1))


ROUTER = """
from understudy.router import PrefixIndex, Router

class Mine(Router):
    def __init__(self):
        self.index = PrefixIndex()

    def observe(self, batch):
        self.index.apply(worker=batch.worker, events=batch.events)

    def choose(self, request, view):
        costs = view.outstanding_tokens.tolist()
        found = self.index.find(request.prompt_blocks.sequence_hashes)
        for (worker, _), tiers in zip(found.workers, found.blocks.tolist()):
            costs[worker] -= tiers[0] * request.block_size
        return min(view.ready.tolist(), key=lambda worker: costs[worker])
"""


def test_the_flags_take_a_router_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, router = tmp_path / "trace.jsonl", tmp_path / "mine.py"
    write_mooncake(WORKLOAD, trace)
    router.write_text(ROUTER)
    base = [
        "replay",
        str(trace),
        "--workers",
        "3",
        "--num-gpu-blocks",
        "200",
        "--block-size",
        "16",
        "--quiet",
    ]
    reports = []
    for flags in ([], ["--event-delay-ms", "400", "--event-loss", "0.1", "--seed", "3"]):
        assert main([*base, "--routing", f"{router}:Mine", *flags, "--json", "-"]) == 0
        reports.append(json.loads(capsys.readouterr().out)["run"])
    assert "event_delivery" not in reports[0]
    assert reports[1]["event_delivery"] == {"event_delay_ms": 400, "event_loss": 0.1}
    assert reports[0]["router"]["actual_hit"] != reports[1]["router"]["actual_hit"]
    assert main([*base, "--routing", f"{router}:Mine", "--event-delay-ms", "4", "--predict-ttl-ms", "5"]) == 2
    assert "--predict-ttl-ms is for routing kv" in capsys.readouterr().err
    assert main([*base, "--routing", "least_loaded", "--event-delay-ms", "4"]) == 2
    assert "--event-delay-ms is for routing kv" in capsys.readouterr().err
