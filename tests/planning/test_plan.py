"""A plan names the cheapest fleet of its space, and says what surrounds it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import understudy as us
from planning.exhaustive import find_cheapest
from planning.spaces import SPACES, Space, ask, compare
from understudy.cli import main
from understudy.errors import ConfigError, InvalidArgument
from understudy.planning.find import find_plan
from understudy.planning.levers import list_shapes
from understudy.planning.price_list import ASSUMED, PriceList
from understudy.planning.search import Premise
from understudy.planning.shape import Shape, Size
from understudy.planning.space import Reuse, list_base_shapes
from understudy.report import Slo
from understudy.sweep.commands import make_commands
from understudy.text import plural
from understudy.timing.gpus import GPUS
from understudy.workload import Workload, read_trace

if TYPE_CHECKING:
    from understudy.planning.question import Question
    from understudy.planning.result import Plan

TRACE = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"
WORKLOAD = read_trace(TRACE).head(160)


def plan_of(workload: Workload, question: Question, **more: Any) -> Plan:
    return find_plan(workload, question, name="log", jobs=1, most_cpu_s=None, **more)


@pytest.mark.parametrize("space", SPACES)
def test_a_plan_names_the_fleet_of_an_exhaustive_search(space: Space) -> None:
    mine, cheapest, _, _ = compare(WORKLOAD, space)
    assert mine == (None if cheapest is None else pytest.approx(cheapest))


def test_a_part_of_the_log_rules_out_hopeless_fleets_and_not_the_answer() -> None:
    workload = us.read_trace(TRACE).head(1000).scale_arrival_rate(60)
    question = ask(slo=Slo(ttft_ms=200, itl_ms=14), goal=0.95, splits=False)
    found = plan_of(workload, question)
    cheapest, _ = find_cheapest(question, workload)
    assert (None if found.best is None else found.best.cost) == cheapest


def test_a_lone_request_rules_out_a_shape_without_a_replay() -> None:
    found = plan_of(WORKLOAD, ask(slo=Slo(itl_ms=12), splits=False))
    assert any("L40S (vLLM, TP 1)" in shape for shape in found.slow)
    assert all(share < 0.9 for share in found.slow.values())
    _, everything = find_cheapest(ask(slo=Slo(itl_ms=12), splits=False), WORKLOAD)
    assert found.ran < len(everything)


def test_twice_the_users_cost_no_less_and_the_range_contains_the_answer() -> None:
    workload = WORKLOAD.scale_arrival_rate(20)
    found = plan_of(workload, ask(slo=Slo(ttft_ms=400, itl_ms=20), splits=False))
    assert found.best is not None
    assert found.sure is not None
    twice = next(each for each in found.levers if each.change == "twice the users")
    assert twice.cost is None or twice.cost >= found.best.cost
    assert found.sure.least_cost is not None
    assert found.sure.least_cost <= found.best.cost
    assert found.sure.most_cost is None or found.sure.most_cost >= found.best.cost
    assert found.sure.shortest is not None
    assert found.sure.longest is not None
    assert found.sure.shortest.judged >= found.sure.longest.judged


def test_the_runner_up_is_of_another_kind_and_no_cheaper() -> None:
    found = plan_of(WORKLOAD.scale_arrival_rate(8), ask(slo=Slo(ttft_ms=2000, itl_ms=60), splits=False))
    assert found.best is not None
    assert found.runner_up is not None
    assert found.runner_up.shape.kind != found.best.shape.kind
    assert found.runner_up.cost >= found.best.cost
    assert found.runner_up.meets(0.9)


def test_experts_are_tried_whole_on_data_parallel_ranks() -> None:
    question = replace(ask(splits=False), model="Qwen3-30B-A3B", gpus=("H100",))
    shapes, _ = list_base_shapes(question, Reuse.of(WORKLOAD))
    (ranked,) = [shape for shape in shapes if shape.ranks > 1]
    candidate = ranked.build(question, Size(engines=1))
    assert candidate.gpus == 2
    (command,) = make_commands(candidate).lines()
    assert "--data-parallel-size 2" in command
    assert "--enable-expert-parallel" in command


def test_an_engine_is_tried_where_its_times_were_measured() -> None:
    question = replace(
        ask(),
        model="DeepSeek-R1",
        gpus=("H200", "B200"),
        node_gpus=8,
        prices=PriceList({"H200": 1.0, "B200": 1.0}),
    )
    shapes, notes = list_base_shapes(question, Reuse.of(WORKLOAD))
    assert {shape.gpu for shape in shapes if shape.engine == "sglang"} == {"B200"}
    assert any(note.startswith("not tried on H200: SGLang") for note in notes)


def test_a_stopped_plan_continues_from_its_store(tmp_path: Path) -> None:
    workload, question = WORKLOAD.scale_arrival_rate(8), ask(splits=False)
    store = tmp_path / "replays.jsonl"
    first = plan_of(workload, question, store=store)
    lines = store.read_bytes().splitlines(keepends=True)
    store.write_bytes(b"".join(lines[: len(lines) // 2]))
    again = plan_of(workload, question, store=store)
    assert (again.found, again.ran) == (len(lines) // 2, len(lines) - len(lines) // 2)
    assert again.best is not None
    assert first.best is not None
    assert again.best.summary == first.best.summary
    assert plan_of(workload, question, store=store).ran == 0


def test_a_plan_without_time_left_says_what_it_did_not_try() -> None:
    found = find_plan(WORKLOAD.scale_arrival_rate(8), ask(), name="log", jobs=1, most_cpu_s=0.0)
    assert found.fleets <= 3  # one, and the range of its step times
    assert any(note.startswith("not tried within 0 CPU s: ") for note in found.notes)


def test_a_plan_stops_in_time_although_no_fleet_meets_the_goal() -> None:
    question = ask(slo=Slo(ttft_ms=40), goal=1.0)
    everything = find_plan(WORKLOAD.scale_arrival_rate(40), question, name="log", jobs=1, most_cpu_s=None)
    assert everything.best is None
    assert everything.stopped_at_cpu_s is None
    found = find_plan(WORKLOAD.scale_arrival_rate(40), question, name="log", jobs=1, most_cpu_s=0.0)
    assert found.best is None
    # One fleet, then the nearest; no part of so short a log is replayed first.
    assert found.ran <= 2 < everything.ran
    assert found.nearest is not None
    lines = str(found).splitlines()
    assert lines[0] == f"None of {plural(found.fleets, 'fleet')} tried in 0 CPU s meets the goal; others may."
    assert lines[1].startswith("Nearest ")
    assert (
        "  try more of them: --most-cpu-s 60, with --store or --out to keep the replays that are done"
        in lines
    )


def test_a_goal_that_no_fleet_meets_has_a_nearest_fleet_and_remedies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(
        ["plan", str(TRACE), "--model", "Llama-3.1-8B", "--gpu", "H100", "--slo-ttft-ms", "1", "--most-gpus", "2",
         "--jobs", "1", "--no-splits"]
    )  # fmt: skip
    said = capsys.readouterr().out
    assert code == 0
    assert said.startswith("No fleet of up to 2 GPUs meets the goal.\nNearest ")
    assert "relax the goal, such as --slo-ttft-ms " in said
    assert "--most-gpus 4" in said


def test_the_command_leads_with_four_lines_and_writes_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("H100: 2.5\nL40S: 1.1\n")
    out = tmp_path / "plan"
    words = ["plan", str(TRACE), "--model", "Llama-3.1-8B", "--gpu", "H100,L40S", "--slo-ttft-ms", "500"]
    words += ["--slo-tpot-ms", "25", "--price", str(prices), "--most-gpus", "2", "--no-splits", "--jobs", "1"]
    assert main([*words, "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines[:4]] == ["Fleet", "Bill", "Tokens", "Margin"]
    assert "per month (730 h)" in lines[1]
    assert "per million output tokens" in lines[2]
    assert "% if steps take ± " in lines[3]
    assert "What changes the bill:" in lines
    assert {path.name for path in out.iterdir()} == {
        *("commands.sh", "fleet.yaml", "plan.html", "plan.json", "replays.jsonl")
    }
    plan = json.loads((out / "plan.json").read_text())
    assert plan["prices"] == {"H100": 2.5, "L40S": 1.1}
    assert plan["assumed_prices"] == []
    page = (out / "plan.html").read_text()
    assert f"${plan['answer']['cost_per_hour']:,.2f}/h" in page
    assert main([*words, "--out", str(out)]) == 0
    assert ", 0 CPU s" in capsys.readouterr().out


def test_python_has_the_same_plan_as_the_command(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = ["--model", "Llama-3.1-8B", "--gpu", "H100", "--slo-ttft-ms", "500", "--slo-tpot-ms", "25"]
    words += ["--most-gpus", "2", "--no-splits", "--jobs", "1", "--quiet", "--json", str(path)]
    assert main(["plan", str(TRACE), *words]) == 0
    told = json.loads(path.read_bytes())
    found = us.plan(
        TRACE,
        model="Llama-3.1-8B",
        gpu="H100",
        slo={"ttft_ms": 500, "tpot_ms": 25},
        most_gpus=2,
        splits=False,
        jobs=1,
    )
    mine = msgspec.json.decode(found.to_json())
    for plan in (told, mine):
        for name in ("cpu_s", "wall_s"):
            del plan[name]
    assert mine == told
    assert str(found).startswith("Fleet   ")


def test_prices_come_from_flags_then_the_file_then_are_assumed(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("h100: 3\nH200: 4\n")
    assert PriceList.read(("H100", "H200"), path, ["H200=5"]).by_name == {"H100": 3.0, "H200": 5.0}
    assumed = PriceList.read(("H100",), None, ())
    assert assumed.assumed == ("H100",)
    assert "--price FILE" in assumed.describe_assumed()
    with pytest.raises(ConfigError, match=r"no price of B200; give it"):
        PriceList.read(("B200",), path, ())
    path.write_text("H100: cheap\n")
    with pytest.raises(ConfigError, match=r"H100: no positive price, got 'cheap'"):
        PriceList.read(("H100",), path, ())
    assert set(ASSUMED) <= set(GPUS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpu": "X9"}, "gpu 'X9' is not known"),
        ({"gpu": ","}, "--gpu: no GPU to choose from"),
        ({"model": "Nobody-1B"}, "Nobody-1B"),
        ({"slo": {"speed": 3}}, "slo: 'speed' is not an objective; known are"),
        ({"goal": 2}, "--goal"),
        ({"settings": ["gpu.memory_gb=4"]}, "no fleet can be built; the first: "),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, Any], message: str) -> None:
    defaults: dict[str, Any] = {"model": "Llama-3.1-8B", "gpu": "H100", "slo": {"ttft_ms": 500}, "jobs": 1}
    with pytest.raises(ConfigError, match=message):
        us.plan(WORKLOAD, **{**defaults, **given})


def test_a_log_without_times_is_refused_with_its_remedy(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"input_length": 10, "output_length": 2, "hash_ids": [1]}\n')
    with pytest.raises(InvalidArgument, match=r"requests have no times.*--time KEY"):
        us.plan(path, model="Llama-3.1-8B", gpu="H100", slo={"ttft_ms": 500})


def test_smaller_weights_are_tried_on_engines_of_fewer_gpus() -> None:
    shapes = list_shapes([Shape(gpu="H100", tensor=4)], Premise(weights="fp8"))
    assert [shape.tensor for shape in shapes] == [4, 2, 1]
    assert [shape.tensor for shape in list_shapes([Shape(gpu="H100", tensor=4)], Premise(users=2.0))] == [4]
