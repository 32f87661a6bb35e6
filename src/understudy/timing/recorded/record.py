"""Read and write recorded steps as JSON lines: a header, then each step's composition and milliseconds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError, InvalidArgument
from understudy.outputs import create
from understudy.timing.recorded.fit import FittedStepTime
from understudy.timing.recorded.load import LinkTimes, load_of_row

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.timing.recorded.load import StepLoad

KIND = "understudy qwen3 steps"


@dataclass(frozen=True, slots=True)
class Record:
    """Steps of one run, the link's times if they were measured, and the other facts of the header."""

    steps: list[dict[str, Any]]
    link: LinkTimes | None
    about: dict[str, Any]

    def write(self, path: Path) -> None:
        """Write a header and one line per step."""
        header = {"kind": KIND, **self.about, "link": None if self.link is None else self.link._asdict()}
        with create(path) as file:
            for row in (header, *self.steps):
                file.write(json.dumps(row).encode() + b"\n")

    @classmethod
    def of(cls, steps: list[dict[str, Any]], link: LinkTimes | None = None, **about: Any) -> Record:
        """Create a record of measured steps."""
        return cls(steps, link, about)

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a file. ConfigError names the invalid line."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from error
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                if number > 1:
                    load_of_row(row)
                    float(row["ms"]), float(row["launch_ms"])
            except KeyError as error:
                raise ConfigError(
                    f"{path}:{number}: the step lacks {error}; record it again with `understudy qwen3 bench --record`"
                ) from error
            except (ValueError, TypeError, RecursionError) as error:
                raise ConfigError(f"{path}:{number}: not a recorded step ({error})") from error
            rows.append(row)
        if not rows or not isinstance(rows[0], dict) or rows[0].get("kind") != KIND:
            raise ConfigError(
                f"{path}: not a record of steps; write one with `understudy qwen3 bench --record`"
            )
        header = rows[0]
        link = header.get("link")
        about = {name: value for name, value in header.items() if name not in ("kind", "link")}
        return cls(rows[1:], None if link is None else LinkTimes(**link), about)

    def fit(self) -> FittedStepTime:
        """Fit a timing model to the steps."""
        if not self.steps:
            raise InvalidArgument("the record contains no steps; record a longer run")
        launches = [(load_of_row(step), step["launch_ms"]) for step in self.steps if step["launch_ms"]]
        return FittedStepTime.fit(self.loads(), launches)

    def loads(self) -> list[tuple[StepLoad, float]]:
        """Return the step loads with their milliseconds."""
        return [(load_of_row(step), step["ms"]) for step in self.steps]
