"""Results of benchmarks are typed files, and docs/benchmarks.md is what tools/write_benchmarks.py writes from them."""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
sys.path.append(str(ROOT / "tools"))

import write_benchmarks  # noqa: E402
from harness.cells import format_cell, format_number, round_number  # noqa: E402
from harness.publish import fill_form, write_result  # noqa: E402
from harness.result import (  # noqa: E402
    FOLDER,
    BenchmarkResult,
    Column,
    Goal,
    Machine,
    ResultRow,
    encode_result,
    read_result,
    read_results,
)

WITHOUT_RESULTS = {
    "accuracy.py": "its tables are docs/accuracy.md",
    "fit_presets.py": "it writes src/understudy/timing/fitted_factors.json",
    "leave_one_out.py": "its table is in docs/accuracy.md",
    "fleet_page_pictures.py": "it takes pictures",
    "qwen3_twin_plot.py": "it draws the result of qwen3_twin.py",
    "vllm_front.py": "the peer's server, which live_load.py starts",
}
PATHS = sorted(FOLDER.glob("*.json"))


def result_of(**changes: object) -> BenchmarkResult:
    result = BenchmarkResult(
        name="speed",
        group="Speed of a replay",
        question="How fast?",
        method="One run.",
        date=datetime.date(2026, 11, 19),
        commit="abc",
        machine=Machine(system="Linux aarch64", processor="Neoverse-N1"),
        commands=("python benchmarks/floors.py --trace PATH",),
        peers=(),
        origin="measured here",
        rows_are="run",
        columns=(Column("time", "s", 2),),
        rows=(ResultRow("one", {"time": 1.5}, goals={"time": Goal(at_most=1.0)}),),
    )
    return msgspec.structs.replace(result, **changes)


@pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])
def test_a_result_has_the_fields_and_types_of_the_schema(path: Path) -> None:
    result = read_result(path)
    assert path.read_text() == encode_result(result), "one row a line, as encode_result writes it"
    assert result.rows, "a result has numbers"


def test_the_page_is_the_one_that_the_script_writes() -> None:
    page = write_benchmarks.render(read_results().values())
    assert write_benchmarks.PAGE.read_text() == page, "run python tools/write_benchmarks.py"


def test_no_two_results_answer_one_question() -> None:
    questions = [result.question for result in read_results().values()]
    assert sorted(set(questions)) == sorted(questions)


def test_commands_name_scripts_that_exist() -> None:
    for result in read_results().values():
        for script in re.findall(r"benchmarks/\w+\.py", " ".join(result.commands)):
            assert (ROOT / script).exists(), f"{result.name}: {script}"


@pytest.mark.parametrize("script", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda script: script.stem)
def test_a_benchmark_publishes_results_that_have_files(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    if script.name in WITHOUT_RESULTS:
        assert "publish(" not in text
        return
    assert "publish(" in text, "publish the numbers as a result (benchmarks/harness/publish.py)"
    names = re.findall(r"""publish\(\s*"(\w+)\"""", text)
    assert {name for name in names if not (FOLDER / f"{name}.json").exists()} == set()


def test_results_are_files_and_not_a_log() -> None:
    assert not (ROOT / "benchmarks" / "RESULTS.md").exists(), "write benchmarks/results/NAME.json instead"


def test_a_number_that_is_a_string_is_rejected() -> None:
    text = encode_result(result_of()).replace("1.5", '"1.5"')
    with pytest.raises(msgspec.ValidationError, match=r"rows\[0\].numbers"):
        msgspec.json.decode(text, type=BenchmarkResult)


def test_a_number_without_a_column_is_rejected() -> None:
    with pytest.raises(ValueError, match="numbers of no column"):
        result_of(columns=(Column("speed"),))


def test_a_goal_has_one_bound() -> None:
    with pytest.raises(ValueError, match="at_least or at_most"):
        Goal(at_least=1.0, at_most=2.0)


@pytest.mark.parametrize(
    ("number", "goal", "cell"),
    [
        (1.5, Goal(at_most=1.0), "**1.50** (≤ 1)"),
        (1.0, Goal(at_most=1.0), "1.00 (≤ 1)"),
        ((0.9, 1.1), Goal(at_most=1.0), "**0.90 to 1.10** (≤ 1)"),
        ((2.9, 3.1), Goal(at_least=3.0), "**2.90 to 3.10** (≥ 3)"),
        (1200, Goal(at_least=1200), "1,200 (≥ 1,200)"),
    ],
)
def test_a_missed_goal_is_bold(number: float | tuple[float, float], goal: Goal, cell: str) -> None:
    row = ResultRow("one", {"time": number}, goals={"time": goal})
    assert format_cell(row, Column("time", "s", 2)) == cell


def test_numbers_keep_the_digits_that_they_have() -> None:
    numbers = (0.0034, 9800, 1173776.5, -0.8, 2.0)
    assert [format_number(number, None) for number in numbers] == [
        "0.0034",
        "9,800",
        "1,173,776.5",
        "−0.8",
        "2",
    ]


def test_measured_numbers_are_rounded_to_the_digits_of_the_column() -> None:
    assert round_number(0.123456, None) == 0.1235
    assert round_number(123456.7, 0) == 123457.0
    assert round_number(123456, None) == 123456


def test_a_benchmark_says_which_measurement_it_replaces(tmp_path: Path) -> None:
    first = result_of(explanation=("It waits for memory.",), notes=("A busy minute.",))
    assert "replaces" not in write_result(first, tmp_path)
    again = write_result(fill_form(first, {"two": {"time": 0.9}}), tmp_path)
    assert "it replaces the numbers of 2026-11-19, Neoverse-N1, abc" in again
    assert "gone, not measured in this run: one" in again
    assert "gone, a note about that run: A busy minute." in again
    assert "kept, check that it still holds: It waits for memory." in again
    written = read_result(tmp_path / "speed.json")
    assert (written.notes, written.explanation) == ((), ("It waits for memory.",))


@pytest.mark.parametrize(
    ("processor", "said"), [("neoverse-n1", "the same machine"), ("Xeon", "ANOTHER MACHINE")]
)
def test_a_benchmark_says_whether_it_replaces_another_machine(
    processor: str, said: str, tmp_path: Path
) -> None:
    write_result(result_of(), tmp_path)
    assert said in write_result(result_of(machine=Machine(processor=processor)), tmp_path)


def test_a_run_fills_the_form_of_its_file() -> None:
    result = fill_form(result_of(), {"one": {"time": 0.98765}}, peers=["vLLM 0.34"])
    assert result.rows == (ResultRow("one", {"time": 0.99}, goals={"time": Goal(at_most=1.0)}),)
    assert (result.question, result.peers) == ("How fast?", ("vLLM 0.34",))
    assert result.machine is not None
    assert result.machine.processor
    with pytest.raises(ValueError, match="numbers of no column"):
        fill_form(result_of(), {"one": {"speed": 1.0}})


def test_the_page_names_what_was_recorded_elsewhere() -> None:
    section = write_benchmarks.describe(result_of(columns=(Column("time", "s", recorded_elsewhere=True),)))
    assert "| run | time, s (recorded elsewhere) |" in section
