"""The result of a benchmark: one question, one table of numbers, and what a reader must know to judge them."""

from __future__ import annotations

import datetime  # noqa: TC003 msgspec reads the annotations
from pathlib import Path
from typing import Annotated, Literal

import msgspec

FOLDER = Path(__file__).resolve().parents[1] / "results"
"""Where committed results lie, one file `NAME.json` each."""

Origin = Literal["measured here", "recorded elsewhere"]
Group = Literal[
    "Exactness and accuracy",
    "Speed of a replay",
    "Caches and blocks",
    "Routing",
    "Elastic fleets",
    "Live servers",
    "Sweeps",
    "Qwen3 in PyTorch",
    "Build",
]
"""Parts of docs/benchmarks.md, in its order."""
Number = int | float | tuple[int | float, int | float]
"""A number, or the least and the most of several runs."""
Name = Annotated[str, msgspec.Meta(pattern="^[a-z0-9][a-z0-9_]*$")]
Text = Annotated[str, msgspec.Meta(min_length=1)]


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a benchmark ran; None: not recorded."""

    system: str | None = None
    """Kernel and architecture: Linux aarch64."""
    processor: str | None = None
    cores: int | None = None
    gpu: str | None = None
    python: str | None = None
    state: Literal["idle", "shared", "busy"] | None = None
    """Whether other programs used the cores; for a run on one of several machines, that of the numbers."""
    load_average: float | tuple[float, float] | None = None


class Goal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a number has to reach."""

    at_least: int | float | None = None
    at_most: int | float | None = None
    stretch: bool = False
    """The goal is what a part was meant to approach, not what it had to reach."""

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("goal: give either at_least or at_most")

    @property
    def limit(self) -> float:
        """The bound."""
        limit = self.at_most if self.at_least is None else self.at_least
        assert limit is not None
        return limit

    def is_met(self, number: Number) -> bool:
        """Return whether the number, or the worse end of a range, reaches the goal."""
        if self.at_least is None:
            return (max(number) if isinstance(number, tuple) else number) <= self.limit
        return (min(number) if isinstance(number, tuple) else number) >= self.limit


class Column(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A column of numbers."""

    name: Text
    unit: str = ""
    """Empty: the unit of each row, or a plain count or share."""
    decimals: int | None = None
    """Digits behind the point, on the page and in what a benchmark writes; None: as many as the number has."""
    recorded_elsewhere: bool = False
    """The numbers of this column were not measured in the run."""


class ResultRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A line of the table: what was measured, and its numbers by column. A column that is absent stays empty."""

    name: Text
    numbers: dict[str, Number]
    unit: str = ""
    goals: dict[str, Goal] = {}

    def __post_init__(self) -> None:
        if not self.goals.keys() <= self.numbers.keys():
            raise ValueError(f"goals: row {self.name!r} has a goal for a number that it lacks")


class BenchmarkResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer of one benchmark to one question."""

    name: Name
    group: Group
    question: Annotated[str, msgspec.Meta(pattern=r".\?$")]
    method: Text
    """What was run and how it was counted: workload, settings, clock, runs."""
    date: datetime.date | None
    commit: str | None
    machine: Machine | None
    commands: tuple[Text, ...]
    peers: tuple[Text, ...]
    origin: Origin
    rows_are: Text
    """Head of the column with the names of the rows."""
    columns: tuple[Column, ...]
    rows: tuple[ResultRow, ...]
    explanation: tuple[Text, ...] = ()
    """Paragraphs that hold for every run, kept when a benchmark writes the file again."""
    notes: tuple[Text, ...] = ()
    """Remarks about this run, dropped when a benchmark writes the file again."""

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        rows = [row.name for row in self.rows]
        if len(set(names)) != len(names) or len(set(rows)) != len(rows):
            raise ValueError(f"{self.name}: two columns or two rows have one name")
        for row in self.rows:
            if unknown := row.numbers.keys() - set(names):
                raise ValueError(f"{self.name}: row {row.name!r} has numbers of no column: {sorted(unknown)}")

    def number(self, row: str, column: str) -> Number:
        """Return one number; KeyError names what the result lacks."""
        for one in self.rows:
            if one.name == row:
                return one.numbers[column]
        raise KeyError(f"{self.name}: no row {row!r}")

    @property
    def missed(self) -> list[tuple[str, str]]:
        """Row and column of each number that misses its goal."""
        return [
            (row.name, column)
            for row in self.rows
            for column, goal in row.goals.items()
            if not goal.is_met(row.numbers[column])
        ]


def read_result(path: Path) -> BenchmarkResult:
    """Read a file; ValidationError names the field that does not fit, ValueError a name that is not the file's."""
    result = msgspec.json.decode(path.read_bytes(), type=BenchmarkResult)
    if result.name != path.stem:
        raise ValueError(f"{path.name}: name: {result.name!r} is not that of the file")
    return result


def read_results(folder: Path = FOLDER) -> dict[str, BenchmarkResult]:
    """Read all files of the folder, by name."""
    return {path.stem: read_result(path) for path in sorted(folder.glob("*.json"))}


def encode_result(result: BenchmarkResult) -> str:
    """Return the text of the file: one row of the table per line."""
    plain = msgspec.to_builtins(result)
    lines = []
    for key, value in plain.items():
        if key in ("columns", "rows", "explanation", "notes") and value:
            body = ",\n".join(f"    {msgspec.json.encode(one).decode()}" for one in value)
            lines.append(f'  "{key}": [\n{body}\n  ]')
        else:
            lines.append(f'  "{key}": {msgspec.json.encode(value).decode()}')
    return "{\n" + ",\n".join(lines) + "\n}\n"
