"""Print the result of a benchmark, and write it to its file.

The committed file of a benchmark is also its form: a run replaces the numbers, the date, the machine and the command.
"""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from harness.cells import format_heads, format_row, round_number
from harness.result import (
    FOLDER,
    BenchmarkResult,
    Machine,
    ResultRow,
    encode_result,
    read_result,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from harness.result import Number

    Measured = Mapping[str, Mapping[str, Number]]
    """Numbers by row and column."""


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--json [FOLDER]`."""
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=FOLDER,
        metavar="FOLDER",
        help="write NAME.json into this folder (default: benchmarks/results), from which "
        "tools/write_benchmarks.py makes docs/benchmarks.md",
    )


def publish(
    name: str, measured: Measured, folder: Path | None, *, gpu: str | None = None, peers: Sequence[str] = ()
) -> None:
    """Print the table of what was measured; with a folder, write the file and say which measurement it replaces."""
    result = fill_form(read_result(FOLDER / f"{name}.json"), measured, gpu=gpu, peers=peers)
    table = Table(title=result.question, title_justify="left", box=box.SIMPLE_HEAD)
    for place, head in enumerate(format_heads(result)):
        table.add_column(head, justify="right" if place else "left")
    for row in result.rows:
        table.add_row(*(cell.replace("**", "") for cell in format_row(result, row)))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    console.print(table)
    for row_name, column in result.missed:
        print(f"missed: {row_name}: {column}")
    if folder is not None:
        print(write_result(result, folder))


def fill_form(
    form: BenchmarkResult, measured: Measured, *, gpu: str | None = None, peers: Sequence[str] = ()
) -> BenchmarkResult:
    """Return the result of the run that ends now, with question, method, columns, units and goals of the form.

    A goal and a unit belong to the row of their name; a row that the form lacks has neither.
    """
    decimals = {column.name: column.decimals for column in form.columns}
    known = {row.name: row for row in form.rows}
    rows = []
    for name, numbers in measured.items():
        old = known.get(name, ResultRow(name, {}))
        rounded = {key: round_number(number, decimals.get(key)) for key, number in numbers.items()}
        goals = {key: goal for key, goal in old.goals.items() if key in rounded}
        rows.append(ResultRow(name, rounded, old.unit, goals))
    return msgspec.structs.replace(
        form,
        date=datetime.datetime.now(datetime.UTC).date(),
        commit=find_commit(),
        machine=describe_machine(gpu),
        commands=(find_command(),),
        peers=tuple(peers) or form.peers,
        origin="measured here",
        rows=tuple(rows),
        notes=(),
    )


def write_result(result: BenchmarkResult, folder: Path) -> str:
    """Write the file; return what was written and what it replaces."""
    path = folder / f"{result.name}.json"
    said = [f"wrote {path}"]
    if path.exists():
        old = read_result(path)
        other = "the same machine" if is_same_machine(old.machine, result.machine) else "ANOTHER MACHINE"
        said.append(f"it replaces the numbers of {describe_origin(old)} ({other})")
        lost = {row.name for row in old.rows} - {row.name for row in result.rows}
        said += [f"gone, not measured in this run: {name}" for name in sorted(lost)]
        said += [f"gone, a note about that run: {note}" for note in old.notes]
        said += [f"kept, check that it still holds: {text}" for text in (result.method, *result.explanation)]
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(encode_result(result), encoding="utf-8")
    return "\n".join(said)


def is_same_machine(one: Machine | None, other: Machine | None) -> bool:
    """Return whether both ran on processors of one kind; False where that was not recorded."""
    if one is None or other is None or one.processor is None:
        return False
    return one.processor.casefold() == (other.processor or "").casefold() and one.gpu == other.gpu


def describe_origin(result: BenchmarkResult) -> str:
    """Return date, processor and commit of a result."""
    machine = result.machine or Machine()
    parts = (result.date, machine.gpu, machine.processor or "a machine not recorded", result.commit)
    return ", ".join(str(part) for part in parts if part is not None)


def describe_machine(gpu: str | None = None) -> Machine:
    """Describe this machine and how busy it is."""
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        processor=find_processor(),
        cores=os.cpu_count(),
        gpu=gpu,
        python=platform.python_version(),
        load_average=round(os.getloadavg()[0], 1),
    )


def find_processor() -> str:
    """Return the model of the processor, as far as the system says it."""
    try:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        lines = []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    model = facts.get("Model name") or platform.processor() or platform.machine()
    return f"Arm {model}" if facts.get("Vendor ID") == "ARM" else model


def find_commit() -> str | None:
    """Return the commit of the working tree, with a plus if files differ from it; None outside a repository."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")


def find_command() -> str:
    """Return the command of this process, without folders of traces and environments."""
    words = sys.argv[1:]
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + (2 if at + 1 < len(words) and not words[at + 1].startswith("-") else 1)]
    shown = [Path(word).name if word.startswith("/") else word for word in words]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *shown])
