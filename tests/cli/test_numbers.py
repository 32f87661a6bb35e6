"""A number that a flag cannot take is refused with what to write instead: units, shares, valid values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from understudy.cli import build_parser, main
from understudy.cli.verbs import list_verbs

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

TRACE = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"
REPLAY = f"replay {TRACE}"
SWEEP = f"sweep {TRACE} --vary workers=1 --slo-ttft-ms 500"
PREDICT = "predict --isl 9 --osl 9 --concurrency 1 --model Llama-3.1-8B --gpu H100"


def refuse(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must be refused; return its one line, without the program's name."""
    try:
        code = main(line.split())
    except SystemExit as stopped:
        code = int(str(stopped.code))
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    return err.partition(": ")[2].rstrip("\n")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            f"{REPLAY} --users 0",
            "--users must be a finite number above 0, got 0; 1 is the trace as it is, 2 twice its users, "
            "0.5 half of them",
        ),
        (
            f"{REPLAY} --users -1",
            "--users must be a finite number above 0, got -1; 1 is the trace as it is, 2 twice its users, "
            "0.5 half of them",
        ),
        (
            f"{REPLAY} --slo-ttft-ms 2s",
            "--slo-ttft-ms must be a number of milliseconds, got '2s'; write 2000",
        ),
        (
            f"{REPLAY} --slo-e2e-ms 1.5min",
            "--slo-e2e-ms must be a number of milliseconds, got '1.5min'; write 90000",
        ),
        (
            f"{REPLAY} --slo-itl-ms 50ms",
            "--slo-itl-ms must be a number of milliseconds, got '50ms'; write 50",
        ),
        (
            f"{REPLAY} --slo-ttft-ms 0",
            "--slo-ttft-ms must be a positive number of milliseconds, at most 1e+12, got 0; 2000 is two seconds",
        ),
        (f"{SWEEP} --goal 95", "--goal must be a share above 0 and at most 1, got 95; for 95 % write 0.95"),
        (f"{SWEEP} --goal 95%", "--goal must be a number, got '95%'; write 0.95"),
        (f"{SWEEP} --goal 0", "--goal must be a share above 0 and at most 1, got 0; for 5 % write 0.05"),
        (f"{SWEEP} --max-tokens 0", "--max-tokens must be at least 1, got 0"),
        (f"{REPLAY} --workers 1,000", "--workers must be a whole number, got '1,000'; write 1000"),
        (
            f"{REPLAY} --workers 1.5",
            "--workers must be a whole number, got '1.5'; write digits without a unit, such as 2",
        ),
        (
            f"{REPLAY} --model Llama-3.1-8B --gpu H100 --gpu-memory-utilization 90",
            "--gpu-memory-utilization must be a share above 0 and at most 1, got 90; for 90 % write 0.9",
        ),
        (
            f"{REPLAY} --model Llama-3.1-8B --gpu H100 --gpu-memory-utilization 90%",
            "--gpu-memory-utilization must be a number, got '90%'; write 0.9",
        ),
        (
            f"{REPLAY} --front-end-ms 1s",
            "--front-end-ms must be a number of milliseconds, got '1s'; write 1000",
        ),
        (
            f"{REPLAY} --g2-latency-ms 2us",
            "--g2-latency-ms must be a number of milliseconds, got '2us'; write 0.002",
        ),
        (
            f"{REPLAY} --max-num-batched-tokens 8k",
            "--max-num-batched-tokens must be a whole number, got '8k'; write digits without a unit, such as 2",
        ),
        (
            f"{REPLAY} --slo-ttft-ms 1,5",
            "--slo-ttft-ms must be a number of milliseconds, got '1,5'; write digits without a unit, such as 500",
        ),
        (
            f"{REPLAY} --slo-ttft-ms 10%",
            "--slo-ttft-ms must be a number of milliseconds, got '10%'; write digits without a unit, such as 500",
        ),
        (
            f"{SWEEP} --goal 0,95",
            "--goal must be a number, got '0,95'; write digits without a unit, such as 2",
        ),
        (
            "router --stall-timeout-s 5min",
            "--stall-timeout-s must be a number of seconds, got '5min'; write 300",
        ),
        (
            f"{REPLAY} --watermark 1",
            "--watermark must be a share from 0 and below 1, got 1; for 5 % write 0.05",
        ),
        (
            f"{REPLAY} --online --clock-speed 0",
            "--clock-speed must be a finite number above 0, got 0; 2 runs",
        ),
        (
            f"{PREDICT} --least-length 80",
            "--least-length must be a share above 0 and at most 1, got 80; for 80 % write 0.8",
        ),
    ],
)
def test_the_remedy_of_a_number_is_the_one_that_was_meant(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refuse(line, capsys).startswith(said)


def list_numeric_flags() -> Iterator[tuple[str, argparse.Action]]:
    """Every flag of a number, with the verb it belongs to."""
    for verb, parser in list_verbs(build_parser()).items():
        for action in parser._actions:
            if action.option_strings and action.type in (int, float) and action.nargs is None:
                yield verb, action


@pytest.mark.parametrize(
    ("verb", "action"), [pytest.param(*each, id=f"{each[0]} {each[1].dest}") for each in list_numeric_flags()]
)
def test_a_number_with_a_unit_is_refused_with_the_number_alone(
    verb: str, action: argparse.Action, capsys: pytest.CaptureFixture[str]
) -> None:
    flag, named = action.option_strings[0], "/".join(map(re.escape, action.option_strings))
    said = refuse(f"{verb} {flag} 2x", capsys)
    unit = " of milliseconds" if action.metavar == "MS" else r"(?: of \w+)?"
    kind = "a whole number" if action.type is int else "a number"
    assert re.fullmatch(rf"{named} must be {kind}{unit}, got '2x'; write 2", said), said
