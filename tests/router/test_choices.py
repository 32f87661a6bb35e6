"""Choices of user-defined routers: recorded with the caches as they were, without a change of the run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import understudy as us
from understudy.cli import main
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import InvalidArgument, PolicyError
from understudy.router import Choice, KvRouting, Router
from understudy.run.disaggregation import Disaggregation
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers import TiersConfig
from understudy.workload import read_trace

TRACE = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"
ENGINE = VllmConfig(block_size=64, num_gpu_blocks=400)
WORKLOAD = read_trace(TRACE)


class RoundRobin(Router):
    """Chooses the next worker, as the built-in policy does."""

    def __init__(self) -> None:
        self.calls = -1

    def choose(self, request: Any, view: Any) -> int:  # noqa: ARG002
        self.calls += 1
        return int(view.ready[self.calls % len(view.ready)])


class Observing(RoundRobin):
    """Receives everything, and chooses by the number of outstanding requests."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.tokens = 0

    def choose(self, request: Any, view: Any) -> int:  # noqa: ARG002
        self.calls += 1
        return int(view.ready[(view.outstanding_requests + view.running)[view.ready].argmin()])

    def observe(self, batch: Any) -> None:
        self.blocks += len(batch.events.kinds)

    def first_token(self, row: int) -> None:  # noqa: ARG002
        self.tokens += 1


GROUPS = (
    us.KvCacheGroup(kind="sliding_window", block_size=16, window=512),
    us.KvCacheGroup(kind="full", block_size=16),
)
FLEETS: dict[str, dict[str, Any]] = {
    "plain": {"engine": ENGINE, "workers": 4},
    "kvbm": {"engine": VllmConfig(block_size=64, num_gpu_blocks=400, kv_manager="kvbm"), "workers": 3},
    "host tier": {
        "engine": ENGINE,
        "workers": 3,
        "tiers": msgspec.convert(
            {"tiers": [{"tier": "g2", "blocks": 512}], "kv_bytes_per_token": 1024}, TiersConfig
        ),
    },
    "groups with an offload": {
        "engine": VllmConfig(num_gpu_blocks=2000, kv_cache_groups=GROUPS),
        "workers": 2,
        "tiers": msgspec.convert(
            {
                "tiers": [{"tier": "g2", "blocks": 512}],
                "offload": {"mode": "vllm"},
                "kv_bytes_per_token": 1024,
            },
            TiersConfig,
        ),
    },
    "groups": {"engine": VllmConfig(num_gpu_blocks=3000, kv_cache_groups=GROUPS), "workers": 3},
    "groups on a host": {
        "engine": VllmConfig(num_gpu_blocks=3000, kv_cache_groups=GROUPS),
        "workers": 3,
        "tiers": msgspec.convert(
            {
                "tiers": [{"tier": "g2", "blocks": 8192}],
                "offload": {"mode": "vllm"},
                "kv_bytes_per_token": 1024,
            },
            TiersConfig,
        ),
    },
    "stages": {"engine": ENGINE, "disaggregation": Disaggregation(prefill_workers=3, decode_workers=2)},
    "stages with kv": {
        "engine": ENGINE,
        "disaggregation": Disaggregation(prefill_workers=3, decode_workers=2, decode_routing=KvRouting()),
    },
    "closed loop": {"engine": ENGINE, "workers": 3, "load": us.workload.ClosedLoop(8)},
}


@pytest.mark.parametrize("router", [RoundRobin, Observing])
@pytest.mark.parametrize("name", FLEETS)
def test_recorded_caches_and_runs_equal_those_of_kv_routing_with_the_same_choices(
    name: str, router: type[RoundRobin]
) -> None:
    if name == "stages with kv" and router is Observing:
        pytest.skip("two routers of one fleet receive events in the same way")
    fleet = dict(FLEETS[name])
    run = run_offline(RunPlan(WORKLOAD, fleet.pop("engine"), routing=router(), keep_candidates=True, **fleet))
    choices = run.choices
    assert choices is not None
    assert len(choices) == len(WORKLOAD)
    imposed = np.empty(len(WORKLOAD), np.int32)
    imposed[choices.rows] = choices.worker
    order = WORKLOAD.arrival_order()
    is_sorted = "load" not in fleet and order is not None
    kv = KvRouting().build(imposed=imposed[order] if is_sorted else imposed)
    peer = run_offline(RunPlan(WORKLOAD, FLEETS[name]["engine"], routing=kv, **fleet))
    assert peer.facts.digest == run.facts.digest
    assert peer.decisions is not None
    assert choices.rows.tolist() == peer.decisions.rows.tolist()
    assert choices.time_ns.tolist() == peer.decisions.time_ns.tolist()
    assert choices.true_overlap_blocks.tolist() == peer.decisions.true_overlap_blocks.tolist()
    assert choices.true_overlap_blocks.sum() > 0
    if "disaggregation" not in fleet:  # kv also counts the workers of the other stage
        assert choices.best_true_overlap_blocks.tolist() == peer.decisions.best_true_overlap_blocks.tolist()
        assert {**peer.facts.router, **run.facts.router} == peer.facts.router
    candidates = choices.candidates
    assert candidates is not None
    described = candidates.describe(run.timeline.block_size)
    for at, listed in enumerate(described):
        chosen = next(one for one in listed if one["worker"] == choices.worker[at])
        assert chosen["cached_tokens"] == choices.true_overlap_blocks[at] * run.timeline.block_size
        best = max(one["cached_tokens"] for one in listed)
        assert best == choices.best_true_overlap_blocks[at] * run.timeline.block_size


def test_recording_keeps_what_a_router_receives() -> None:
    router = Observing()
    run = run_offline(RunPlan(WORKLOAD, ENGINE, workers=2, routing=router))
    assert router.blocks > 1000
    assert router.tokens == router.calls + 1 == len(WORKLOAD)
    assert run.choices is not None
    assert run.choices.candidates is None


def test_a_deep_check_replays_an_unrecorded_router() -> None:
    run = run_offline(RunPlan(WORKLOAD, ENGINE, workers=3, routing=RoundRobin(), check="deep"))
    assert "fast-forwards equal" in run.notes[0]


def test_a_router_without_recording_has_the_same_run() -> None:
    recorded = run_offline(RunPlan(WORKLOAD, ENGINE, workers=3, routing="least_loaded", keep_candidates=True))
    plain = run_offline(RunPlan(WORKLOAD, ENGINE, workers=3, routing="least_loaded"))
    assert recorded.facts.digest == plain.facts.digest
    assert plain.choices is None
    assert recorded.choices is not None
    assert recorded.choices.candidates is not None
    tokens = recorded.choices.candidates.outstanding_tokens.reshape(len(WORKLOAD), 3)
    assert (tokens.argmin(axis=1) == recorded.choices.worker).all()


def test_a_wrong_choice_is_an_error_as_before() -> None:
    class Wrong(Router):
        def choose(self, request: Any, view: Any) -> int:  # noqa: ARG002
            return 7

    with pytest.raises(PolicyError, match="chose worker 7 for row 0, which is not ready"):
        run_offline(RunPlan(WORKLOAD, ENGINE, workers=2, routing=Wrong()))


def test_decisions_of_a_user_defined_router_have_the_form_of_kv(tmp_path: Path) -> None:
    lines = {}
    routers: dict[str, Any] = {"mine": RoundRobin(), "kv": "kv", "random": "random"}
    for name, routing in routers.items():
        file = tmp_path / f"{name}.jsonl"
        us.replay(WORKLOAD, ENGINE, workers=4, routing=routing, outputs=us.Outputs(decisions=file))
        lines[name] = [json.loads(line) for line in file.read_text().splitlines()]
    mine, kv = lines["mine"], lines["kv"]
    assert len(mine) == len(kv) == len(lines["random"]) == len(WORKLOAD)
    assert list(mine[0]) == list(kv[0])
    unknown = {"cost", "cost_regret", "overlap_blocks", "lower_overlap_blocks", "best_overlap_blocks", "ties"}
    own = {"score", "reason"}
    assert {name for name, value in mine[0].items() if value is None} == unknown | own
    assert {name for name, value in kv[0].items() if value is None} == own
    for line in mine:
        cached = {one["worker"]: one["cached_tokens"] for one in line["candidates"]}
        assert line["cache_regret_tokens"] == max(cached.values()) - cached[line["worker"]]
    assert sum(line["cache_regret_tokens"] for line in mine) > 0


def test_the_report_shows_the_regret_of_a_user_defined_router(tmp_path: Path) -> None:
    report = us.replay(WORKLOAD, ENGINE, workers=4, routing=RoundRobin())
    assert report.run.router["mean_cache_regret_blocks"] > 0
    assert "mean_cost_regret_blocks" not in report.run.router
    report.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Choices with the largest cache regret" in page
    assert "Routing: cached at decision and actual hits" in page


def test_the_terminal_and_explain_say_what_was_cached_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, run = tmp_path / "mine.py", tmp_path / "run.npz"
    file.write_text(
        "class Last:\n    def choose(self, request, view):\n        return int(view.ready[-1 - request.row % 2])\n"
    )
    flags = ["--workers", "2", "--routing", f"{file}:Last", "--no-advice", "--save-run", str(run)]
    assert main(["replay", str(TRACE), *flags]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Routing prompt tokens cached at the choice:" in said
    assert "% on the best; cache regret" in said
    assert main(["explain", str(run), "--slowest", "1"]) == 0
    assert "blocks were cached on the chosen worker, " in capsys.readouterr().out


def test_the_command_line_writes_decisions_of_a_routers_file(tmp_path: Path) -> None:
    file, out = tmp_path / "mine.py", tmp_path / "decisions.jsonl"
    file.write_text("class First:\n    def choose(self, request, view):\n        return int(view.ready[0])\n")
    flags = ["--workers", "2", "--routing", f"{file}:First", "--decisions", str(out)]
    assert main(["replay", str(TRACE), *flags, "--no-advice", "--quiet"]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["worker"] for line in lines} == {0}
    assert lines[-1]["candidates"][1]["outstanding_requests"] == 0


def test_a_router_of_ones_own_gives_score_and_reason(tmp_path: Path) -> None:
    class Says(Router):
        def choose(self, request: Any, view: Any) -> int:
            best = int(view.outstanding_tokens.argmin())
            if request.row % 2:
                return best
            load = int(view.outstanding_tokens[best])
            return Choice(best, score=load / 2, reason=f"least loaded:\n{load} tokens")

    file = tmp_path / "decisions.jsonl"
    report = us.replay(WORKLOAD, ENGINE, workers=4, routing=Says(), outputs=us.Outputs(decisions=file))
    plain = us.replay(WORKLOAD, ENGINE, workers=4, routing="least_loaded")
    assert report.run.digest == plain.run.digest
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    said = [line for line in lines if line["reason"] is not None]
    assert 0 < len(said) < len(lines)
    for line in said:
        load = next(
            one["outstanding_tokens"] for one in line["candidates"] if one["worker"] == line["worker"]
        )
        assert (line["score"], line["reason"]) == (load / 2, f"least loaded: {load} tokens")


def test_a_score_or_reason_of_another_type_is_refused() -> None:
    assert Choice(3) == 3
    for wrong in ({"score": math.inf}, {"reason": 5}):
        with pytest.raises(InvalidArgument, match=r"score must be a finite number|reason must be text"):
            Choice(3, **wrong)


def test_every_candidate_of_kv_has_the_terms_of_its_cost(tmp_path: Path) -> None:
    """Costs computed once more from the terms, and terms from the cost function of docs/routing.md."""
    file = tmp_path / "decisions.jsonl"
    routing = KvRouting(decode_active_request_weight=0.5, overlap_score_credit=0.8)
    us.replay(WORKLOAD, ENGINE, workers=4, routing=routing, outputs=us.Outputs(decisions=file))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == len(WORKLOAD)
    for line in lines:
        ours = {one["worker"]: one for one in line["candidates"]}
        assert sorted(ours) == [0, 1, 2, 3]
        chosen = ours[line["worker"]]
        assert chosen["cost"] == line["cost"] == min(one["cost"] for one in ours.values())
        assert chosen["overlap_blocks"] == line["overlap_blocks"]
        assert max(one["overlap_blocks"] for one in ours.values()) == line["best_overlap_blocks"]
        assert line["ties"] == sum(one["cost"] == line["cost"] for one in ours.values())
        costs = [one["cost"] for one in line["candidates"]]
        assert costs == sorted(costs)
        for one in ours.values():
            assert one["prefill"] + one["active"] + one["added"] + one["requests"] == one["cost"]
            assert one["credit"] == pytest.approx(0.8 * one["overlap_blocks"])
            assert (one["requests"] / 0.5).is_integer()
    assert any(len({one["cost"] for one in line["candidates"]}) > 1 for line in lines)


def test_candidates_of_kv_change_nothing_else(tmp_path: Path) -> None:
    plan = RunPlan(WORKLOAD, ENGINE, workers=3, routing="kv")
    plain, kept = run_offline(plan), run_offline(replace(plan, keep_candidates=True))
    assert plain.facts.digest == kept.facts.digest
    assert plain.decisions is not None
    assert kept.decisions is not None
    assert plain.decisions.candidates is None
    assert plain.decisions.cost.tolist() == kept.decisions.cost.tolist()
    assert kept.decisions.candidates is not None
    assert kept.decisions.candidates.ends.tolist() == [3 * (at + 1) for at in range(len(WORKLOAD))]
