"""`check` verifies the code that a plain run uses, and changes no result; "deep" compares it with single steps."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from model.replay_gen import Case, random_case
from replay.building import ONE_MS, crowd, single_turns
from understudy import _core
from understudy.cli import main
from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, InvariantViolated, UnderstudyError
from understudy.router import FleetView, KvRouting, Router, RouteRequest
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers.settings import TiersConfig
from understudy.workload import ClosedLoop, OpenLoop

if TYPE_CHECKING:
    from pathlib import Path

ENGINE = VllmConfig(block_size=16, num_gpu_blocks=60, timing=ONE_MS)


def random_run(seed: int) -> tuple[Case, dict[str, Any]]:
    """Return a random engine and workload, and how to run them: routers, loads and tiers of all kinds."""
    rng = Random(f"check {seed}")
    changes: dict[str, Any] = {}
    if rng.random() < 0.3:
        plain = MockerSettings()  # no drafts: they go with synchronous scheduling
        changes |= {"async_scheduling": True, "aic_mtp_seed": plain.aic_mtp_seed}
        changes |= {"aic_nextn": None, "aic_nextn_accept_rates": None}
    if rng.random() < 0.3:
        changes |= {"kv_manager": "kvbm", "eviction_policy": rng.choice(["lineage", "lru", "multi_lru"])}
    if rng.random() < 0.2:
        changes |= {"charge_first_token": False}
    case = random_case(seed, **changes)
    how = {**case.how, "workers": rng.choice([1, 2, 3, 4]), "events": rng.random() < 0.3}
    how["load"] = rng.choice([ClosedLoop(rng.choice([2, 5, 20]), rng.choice([0.0, 3.0])), OpenLoop()])
    kv = [
        KvRouting(),
        KvRouting(event_loss=0.1),
        KvRouting(event_delay_ms=3.0),
        KvRouting(queue_threshold=0.5),
    ]
    how["routing"] = rng.choice(["round_robin", "least_loaded", "random", *kv])
    if rng.random() < 0.4:
        link = {"down_gbps": rng.choice([0.05, 0.5, 5]), "up_gbps": rng.choice([0.05, 1, "inf"])}
        below: list[dict[str, Any]] = [{"tier": "g2", "blocks": rng.choice([4, 20, 200]), "link": link}]
        if rng.random() < 0.4:
            backend = {"backend_down_gbps": 1, "backend_up_gbps": 1}
            below.append({"tier": "g3", "blocks": rng.choice([10, 300]), "link": backend})
        how["tiers"] = TiersConfig.from_dict({"kv_bytes_per_token": 1 << 14, "tiers": below})
    return case, how


def compared(run: OfflineRun) -> int:
    """Return how many fast-forwards a deep check has compared."""
    note = run.notes[-1]
    return int(note.split()[2].replace(",", "")) if "equal the same steps" in note else 0


@pytest.mark.parametrize("part", range(4))
def test_checks_change_no_result_and_compare_every_kind_of_run(part: int) -> None:
    found: Counter[str] = Counter()
    for seed in range(60 * part, 60 * part + 60):
        case, how = random_run(seed)
        results: list[Any] = []
        for check in (False, True, "deep"):
            try:
                run = run_offline(RunPlan(case.workload, case.config, check=check, **how))
            except InvariantViolated:
                raise
            except (UnderstudyError, ValueError) as error:
                results.append(str(error))
            else:
                results.append([run.facts, run.timeline.queued_ns.tolist()])
                if check == "deep":
                    kinds = {
                        "tiers": "tiers" in how,
                        "asynchronous": case.config.async_scheduling,
                        "kv": isinstance(how["routing"], KvRouting),
                        "closed loop": isinstance(how["load"], ClosedLoop),
                        "plain": True,
                    }
                    found += Counter({kind: compared(run) for kind, is_it in kinds.items() if is_it})
        assert results[0] == results[1] == results[2], seed
    assert min(found[kind] for kind in ("tiers", "asynchronous", "kv", "closed loop", "plain")) > 0


@pytest.mark.parametrize(
    "routing", ["round_robin", "least_loaded", KvRouting(), KvRouting(event_delay_ms=1.0)]
)
def test_a_checked_run_fast_forwards_as_often_as_a_plain_one(routing: Any) -> None:
    counts = []
    for check in (False, True):
        checkpoints = _core.Checkpoints()
        pool = _core.Pool(engine=ENGINE.native(), timing=ENGINE.native_timing(None), workers=3)
        settings = _core.FleetSettings(
            pools=[pool],
            routing=routing.build() if isinstance(routing, KvRouting) else routing,
            concurrency=9,
            check=check,
            checkpoints=checkpoints,
        )
        _core.run_fleet(crowd(60), settings)
        counts.append(checkpoints.recorded)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"timing": Constant(1.0, 1.5)}, "clock"),
        ({"num_gpu_blocks": 61}, "block counts"),
        ({"block_size": 8, "num_gpu_blocks": 120}, "running requests"),
    ],
)
def test_a_deep_check_names_the_first_difference(changed: dict[str, Any], field: str) -> None:
    workload = single_turns([40, 50, 60], 30, [0, 0, 15])  # the third interrupts a fast-forward
    checkpoints = _core.Checkpoints()

    def play(engine: VllmConfig, *, fast_forward: bool) -> None:
        pool = _core.Pool(engine=engine.native(), timing=engine.native_timing(None))
        settings = _core.FleetSettings(
            pools=[pool], routing="round_robin", fast_forward=fast_forward, checkpoints=checkpoints
        )
        _core.run_fleet(workload, settings)

    play(ENGINE, fast_forward=True)
    play(ENGINE, fast_forward=False)
    assert checkpoints.compared == checkpoints.recorded > 0
    play(ENGINE, fast_forward=True)
    values = {name: getattr(ENGINE, name) for name in ("block_size", "num_gpu_blocks", "timing")}
    with pytest.raises(InvariantViolated, match=rf"worker 0, step \d+, \d+ ns: different {field} with"):
        play(VllmConfig(**{**values, **changed}), fast_forward=False)


class Slow:
    """Takes 2 ms for every step."""

    def step_ms(self, _step: _core.StepLoad) -> float:
        return 2.0


class Turns(Router):
    """Sends requests to workers in turns."""

    def __init__(self) -> None:
        self.sent = 0

    def choose(self, request: RouteRequest, view: FleetView) -> int:
        self.sent += 1
        return (self.sent + request.row) % len(view.outstanding_requests)


class Uncopied(Turns):
    def __deepcopy__(self, memo: object) -> Uncopied:
        raise TypeError("one of a kind")


def test_a_user_defined_router_is_copied_for_the_second_run() -> None:
    router = Turns()
    run = run_offline(RunPlan(crowd(31), ENGINE, workers=2, routing=router, check="deep"))
    assert compared(run) > 0
    assert router.sent == 31
    with pytest.raises(ConfigError, match="one of a kind; give the object a __deepcopy__, or use check=True"):
        run_offline(RunPlan(crowd(31), ENGINE, workers=2, routing=Uncopied(), check="deep"))


def test_a_deep_check_says_that_nothing_was_fast_forwarded() -> None:
    run = run_offline(RunPlan(crowd(10), ENGINE, timing=Slow(), check="deep"))
    assert run.notes == (
        "check deep: no step was fast-forwarded (timing Slow is user-defined); each was checked when it ended",
    )
    with pytest.raises(
        ConfigError, match="fast_forward=False, record_steps, keep_steps and on_step_end turn them off"
    ):
        run_offline(RunPlan(crowd(10), ENGINE, fast_forward=False, check="deep"))


def test_the_flag_takes_deep_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 100, "output_length": 50, "hash_ids": [1]}\n')
    digests = []
    for flags in ([], ["--check"], ["--check", "deep"]):
        assert main(["replay", str(trace), "--digest", *flags]) == 0
        digests.append(capsys.readouterr().out)
    assert digests[0] == digests[1] == digests[2]
    assert main(["replay", str(trace), "--check", "deep"]) == 0
    assert "1 fast-forwards equal the same steps one by one" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit):
        main(["replay", "--check", str(trace)])
    assert "is not deep; write TRACE before --check" in capsys.readouterr().err
